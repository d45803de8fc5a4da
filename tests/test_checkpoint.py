"""Saving and restoring: to the bit, all or nothing, on other meshes, into the same options."""

import json
import os
import pickle
import subprocess
import sys
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

import mpx_pde as mpx


def state(seed=0, width=8, period=2000, mode="paper"):
    """All that a run has, advanced a little so that nothing is at its default."""
    model = mpx.nn.CoordinateMLP(2, 1, width, 2, key=jax.random.key(seed))
    optimizer = optax.adam(1e-3)
    scaling = mpx.Scaling(
        mpx.DynamicLossScaling(period=period),
        mpx.DerivativeScaling.per_direction("xt", order=2, mode=mode),
    )
    for flag in (True, seed == 0):
        counts = jnp.zeros_like(scaling.derivatives.counts).at[0, 3].set(5.0)
        scaling = scaling.adjust(jnp.array(flag), counts)
    return {
        "model": model,
        "opt_state": optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
        "scaling": scaling,
        "key": jax.random.key(seed + 7),
        "step": seed + 3,
        "half": jnp.asarray([1.5, -0.0], jnp.bfloat16) * (seed + 1),
        "numpy": np.arange(3) + seed,
        "nothing": None,
        "function": jax.nn.relu,
    }


def test_everything_comes_back_to_the_bit(tmp_path):
    saved = state(seed=0)
    mpx.save_checkpoint(tmp_path / "run", saved)
    assert tree_equal_bits(mpx.restore_checkpoint(tmp_path / "run", state(seed=1)), saved)
    assert os.listdir(tmp_path) == ["run"]


def test_shapes_are_enough_to_restore_into(tmp_path):
    saved = eqx.filter(
        {k: v for k, v in state().items() if k not in ("key", "numpy")}, eqx.is_array
    )
    mpx.save_checkpoint(tmp_path / "run", saved)
    like = jax.eval_shape(lambda: saved)
    restored = mpx.restore_checkpoint(tmp_path / "run", like)
    assert tree_equal_bits(restored["model"], saved["model"])
    assert tree_equal_bits(restored["scaling"], saved["scaling"])


def test_a_failed_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    mpx.save_checkpoint(tmp_path / "run", state(seed=0))
    before = (tmp_path / "run").read_bytes()

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(eqx, "tree_serialise_leaves", fail)
    with pytest.raises(OSError, match="no space left"):
        mpx.save_checkpoint(tmp_path / "run", state(seed=1))
    assert (tmp_path / "run").read_bytes() == before
    assert os.listdir(tmp_path) == ["run"]


def test_other_options_of_a_scaling_are_named(tmp_path):
    mpx.save_checkpoint(tmp_path / "run", state())
    with pytest.raises(ValueError, match="`restore_checkpoint`") as error:
        mpx.restore_checkpoint(tmp_path / "run", state(period=100, mode="predictive"))
    assert "['scaling'].loss: period was 2000 and is 100" in str(error.value)
    assert "rule.mode was 'paper' and is 'predictive'" in str(error.value)


def test_another_model_is_named(tmp_path):
    mpx.save_checkpoint(tmp_path / "run", state())
    with pytest.raises(ValueError, match=r"hidden.*was float32\[8, 8\] and is float32\[16, 16\]"):
        mpx.restore_checkpoint(tmp_path / "run", state(width=16))
    less = state()
    del less["half"]
    with pytest.raises(ValueError, match=r"\['half'\]: was bfloat16\[2\] and is missing"):
        mpx.restore_checkpoint(tmp_path / "run", less)


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"[1]\n", b'{"format": "else"}\n', b"\x80\x04.\n", pickle.dumps({})]
)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="is no file of `save_checkpoint`"):
        mpx.restore_checkpoint(tmp_path / "file", state())


def test_nothing_is_unpickled(tmp_path):
    """An object array, which NumPy would write as a pickle, in the place of an array."""
    like = {"x": jnp.ones(2)}
    mpx.save_checkpoint(tmp_path / "run", like)
    header = (tmp_path / "run").read_bytes().split(b"\n", 1)[0] + b"\n"
    with open(tmp_path / "run", "wb") as file:
        file.write(header)
        np.save(file, np.array([print, None], object), allow_pickle=True)
    with pytest.raises(Exception, match=r"allow_pickle=False|leaf"):
        mpx.restore_checkpoint(tmp_path / "run", like)


def test_options_go_through_json():
    tree = state()
    options = json.loads(json.dumps(mpx.scaling_options(tree)))
    mpx.check_scaling_options(options, tree)
    assert options["['scaling'].loss"]["period"] == 2000
    with pytest.raises(ValueError, match=r"rule\.mode was 'paper' and is 'predictive'"):
        mpx.check_scaling_options(options, state(mode="predictive"))
    with pytest.raises(ValueError, match="is missing"):
        mpx.check_scaling_options(options, {})
    with pytest.raises(ValueError, match="only in `tree`"):
        mpx.check_scaling_options({}, tree)


def test_a_plain_scaling_is_found_at_the_root():
    mpx.check_scaling_options(
        mpx.scaling_options(mpx.DynamicLossScaling()), mpx.DynamicLossScaling(4.0)
    )
    with pytest.raises(ValueError, match=r"factor was 2\.0 and is 4\.0"):
        mpx.check_scaling_options(
            mpx.scaling_options(mpx.DynamicLossScaling()), mpx.DynamicLossScaling(factor=4)
        )


def mesh(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("i",), axis_types=(AxisType.Auto,))


def spread(tree, devices):
    """Arrays of some size split over the devices, the others copied."""

    def leaf(x):
        if not eqx.is_array(x):
            return x
        spec = P("i") if x.ndim and x.shape[0] % devices == 0 and x.shape[0] > 1 else P()
        return jax.device_put(x, NamedSharding(mesh(devices), spec))

    return jax.tree.map(leaf, tree)


def shardings(tree):
    return [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


@pytest.mark.parametrize("devices", [(8, 2), (1, 4)])
def test_a_sharded_state_is_restored_on_another_mesh(tmp_path, devices):
    before, after = devices
    saved = spread(eqx.filter(state(seed=0), eqx.is_array), before)
    like = spread(eqx.filter(state(seed=1), eqx.is_array), after)
    mpx.save_checkpoint(tmp_path / "run", saved)
    restored = mpx.restore_checkpoint(tmp_path / "run", like)
    assert tree_equal_bits(restored, saved)
    assert shardings(restored) == shardings(like)


def test_orbax_restores_on_another_mesh(tmp_path):
    saved = spread(eqx.filter(state(seed=0), eqx.is_array), 8)
    like = spread(eqx.filter(state(seed=1), eqx.is_array), 2)

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    with ocp.StandardCheckpointer() as checkpointer:
        leaves = {str(i): x for i, x in enumerate(jax.tree.leaves(saved))}
        checkpointer.save(tmp_path / "run", leaves)
        checkpointer.wait_until_finished()
        target = {str(i): abstract(x) for i, x in enumerate(jax.tree.leaves(like))}
        leaves = checkpointer.restore(tmp_path / "run", target)
    leaves = [leaves[str(i)] for i in range(len(leaves))]
    restored = jax.tree.unflatten(jax.tree.structure(saved), leaves)
    assert tree_equal_bits(restored, saved)
    assert shardings(restored) == shardings(like)


def test_a_run_that_is_killed_twenty_times_ends_as_if_it_had_not_been(tmp_path):
    script = Path(__file__).with_name("kill_and_resume.py")
    # One device, and JAX's forks are no accident here.
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = env.get("XLA_FLAGS", "").replace("device_count=8", "device_count=1")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20"],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "killed 20 times" in done.stdout
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
