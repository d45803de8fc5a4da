"""Tests the guide's functions that save and restore: killed runs, half-written files, other meshes
and other options."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import tree_equal_bits
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kill_and_resume import guide
from pages import ROOT

import mpx_pde as mpx


SCRIPT = Path(__file__).with_name("kill_and_resume.py")


def state(seed=0, **options):
    model = mpx.nn.CoordinateMLP(2, 1, 8, 2, key=jax.random.key(seed))
    directions = mpx.DerivativeScaling.per_direction("xt", order=2)
    scaling = mpx.Scaling(mpx.DynamicLossScaling(2.0**seed, **options), directions)
    opt_state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array))
    scaling, key = scaling.adjust(jnp.array(seed == 0)), jax.random.key_data(jax.random.key(seed))
    out = {"model": model, "opt_state": opt_state, "scaling": scaling, "key": key, "step": seed}
    half = jnp.asarray([1.5, -0.0], jnp.bfloat16) * (seed + 1)
    return out | {"half": half, "function": jax.nn.relu}


def round_trip(library, folder, saved, like):
    if library == "equinox":
        guide()["save"](folder / "run", saved)
        return guide()["restore"](folder / "run", like)
    with ocp.CheckpointManager(folder) as manager:
        guide()["save_with_orbax"](manager, 1, saved)
        manager.wait_until_finished()
        return guide()["restore_with_orbax"](manager, like)


@pytest.mark.parametrize("library", ["equinox", "orbax"])
def test_a_state_is_restored_to_the_bit(library, tmp_path):
    saved = state(seed=0)
    assert tree_equal_bits(round_trip(library, tmp_path, saved, state(seed=1)), saved)


@pytest.mark.parametrize("library", ["equinox", "orbax"])
def test_other_options_of_a_scaling_are_refused(library, tmp_path):
    with pytest.raises(ValueError, match=r"\['scaling'\].loss: period was 2000 and is 100"):
        round_trip(library, tmp_path, state(), state(period=100))


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "run"
    guide()["save"](path, state())
    before = path.read_bytes()
    with pytest.raises(RuntimeError):  # Equinox fails at the key, after it has written the model
        guide()["save"](path, {"model": state()["model"], "typed": jax.random.key(0)})
    assert path.read_bytes() == before
    assert tree_equal_bits(guide()["restore"](path, state(seed=1)), state())


def spread(tree, devices):
    """Splits arrays over the devices if their first axis allows it, and copies the others."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("i",), axis_types=(AxisType.Auto,))

    def leaf(x):
        split = x.ndim and x.shape[0] % devices == 0 and x.shape[0] > 1
        return jax.device_put(x, NamedSharding(mesh, P("i") if split else P()))

    return jax.tree.map(leaf, eqx.filter(tree, eqx.is_array))


@pytest.mark.slow
def test_orbax_restores_on_another_mesh(tmp_path):
    saved, like = spread(state(seed=0), 8), spread(state(seed=1), 2)
    restored = round_trip("orbax", tmp_path, saved, like)
    assert tree_equal_bits(restored, saved)
    shardings = [[x.sharding for x in jax.tree.leaves(tree)] for tree in (restored, like)]
    assert shardings[0] == shardings[1]


def life(folder, library, steps=None, pause=0.0):
    """Trains in a separate process, which is killed `pause` seconds after so many steps. Returns
    the step at which it started."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env["XLA_FLAGS"] = env["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    command = [sys.executable, str(SCRIPT), str(folder / library), library]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = itertools.islice(process.stdout, None if steps is None else steps + 1)
        started, *_ = map(int, lines)
        if steps is not None:
            time.sleep(pause)
            process.kill()
    assert process.returncode == (0 if steps is None else -signal.SIGKILL)
    return started


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder with the last state of a run that saves and restores nothing."""
    folder = tmp_path_factory.mktemp("runs")
    life(folder, "none")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("library", ["equinox", "orbax"])
def test_a_killed_run_ends_as_if_it_had_not_been(library, whole):
    draw = random.Random(0)
    # A pause ends within a step, or while a checkpoint is written.
    starts = [life(whole, library, 4, 0.01 * draw.random()) for _ in range(2)]
    starts.append(life(whole, library))
    assert starts[0] == 0
    assert starts == sorted(set(starts))  # each run continued from a checkpoint of the one before
    assert (whole / library / "end").read_bytes() == (whole / "none" / "end").read_bytes()
