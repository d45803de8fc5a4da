"""Saving and restoring: to the bit, all or nothing, on other meshes, into the same options."""

import functools
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

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
from mpx_pde.training._checkpoint_file import replaced


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


def test_a_path_that_no_file_can_have(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`save_checkpoint`: there is no folder .*missing"):
        mpx.save_checkpoint(tmp_path / "missing" / "run", {})
    with pytest.raises(IsADirectoryError, match=r"`save_checkpoint`.*Name a file"):
        mpx.save_checkpoint(tmp_path, {})
    assert os.listdir(tmp_path) == []


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

    monkeypatch.setattr(os, "fsync", fail)
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
    "content",
    [
        *(b"", b"{}\n", b"[1]\n", b'{"format": "else"}\n', b"\x80\x04.\n", pickle.dumps({})),
        *(b"mpx_pde checkpoint", b"mpx_pde checkpoint 2 a b c d\n", b"\x00" * 300),
    ],
)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="is no file of `save_checkpoint`"):
        mpx.restore_checkpoint(tmp_path / "file", state())


def test_a_file_of_an_earlier_version_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b'{"format": "mpx_pde checkpoint 1", "leaves": []}\n')
    with pytest.raises(ValueError, match="in the format of an earlier version"):
        mpx.restore_checkpoint(tmp_path / "file", state())


def test_nothing_is_pickled(tmp_path):
    """NumPy would write an array of objects as a pickle."""
    with pytest.raises(ValueError, match=r"`save_checkpoint`: the array at \['x'\] holds Python"):
        mpx.save_checkpoint(tmp_path / "run", {"x": np.array([print, None], object)})
    with pytest.raises(ValueError, match=r"`save_checkpoint`: at \['x'\] is the shape"):
        mpx.save_checkpoint(tmp_path / "run", jax.eval_shape(lambda: {"x": jnp.ones(2)}))
    assert os.listdir(tmp_path) == []


class Swapped(eqx.Module):
    b: jax.Array
    a: jax.Array


class Model(eqx.Module):
    a: jax.Array
    b: jax.Array


def test_leaves_are_found_by_their_paths(tmp_path):
    """The fields of a module moved, a mapping built in another order."""
    parts = {"w": jnp.ones((2, 2)), "v": jnp.zeros((2, 2))}
    saved = (Model(jnp.zeros(3), jnp.ones(3)), OrderedDict(parts))
    like = (Swapped(jnp.full(3, 5.0), jnp.full(3, 5.0)), OrderedDict(reversed(parts.items())))
    mpx.save_checkpoint(tmp_path / "run", saved)
    module, mapping = mpx.restore_checkpoint(tmp_path / "run", like)
    assert tree_equal_bits((module.a, module.b), (saved[0].a, saved[0].b))
    assert list(mapping) == ["v", "w"]
    assert tree_equal_bits(dict(mapping), parts)


@jax.tree_util.register_pytree_with_keys_class
class Ambiguous:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey("same"), part) for part in self.parts], None

    @classmethod
    def tree_unflatten(cls, aux, parts):
        return cls(*parts)


def test_leaves_that_cannot_be_told_apart_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`save_checkpoint`: two leaves have the path"):
        mpx.save_checkpoint(tmp_path / "run", Ambiguous(jnp.ones(2), jnp.zeros(2)))


DTYPES = [
    *("bool", "int8", "uint16", "int4", "uint4", "complex64", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"),
]


def test_every_dtype(tmp_path):
    numbers = jnp.array([[0.0, 1.0, 0.5], [1.5, -1.0, 4.0]])
    jaxs = {d: numbers.astype(d) for d in DTYPES}
    numpys = {d: np.asarray(x) for d, x in jaxs.items()}
    saved = {
        "jax": jaxs,
        "numpy": numpys | {"float64": np.array(1 / 3), "str": np.array("ab")},
        "scalars": [np.float64(1 / 3), np.int64(2**40), jnp.bfloat16(1.5), np.bool_(True)],
        "python": [1 / 3, 2**70, True, 1 / 3 + 2j, float("inf")],
        "weak": jnp.asarray(2.0),
        "empty": jnp.zeros((0, 3)),
    }

    def other(x):
        if isinstance(x, jax.Array):
            return jnp.zeros_like(x)
        return np.zeros_like(x) if isinstance(x, np.ndarray) else type(x)(0)

    like = jax.tree.map(other, saved) | {"weak": jnp.asarray(0.0)}
    mpx.save_checkpoint(tmp_path / "run", saved)
    restored = mpx.restore_checkpoint(tmp_path / "run", like)
    assert tree_equal_bits(restored, saved)
    assert restored["weak"].weak_type
    assert all(x.flags.writeable for x in restored["numpy"].values())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_into_their_shapes(tmp_path, impl):
    key = jax.random.key(3, impl=impl)
    saved = {"key": key, "keys": jax.random.split(key, 3)}
    mpx.save_checkpoint(tmp_path / "run", saved)
    like = jax.eval_shape(lambda: saved)
    assert tree_equal_bits(mpx.restore_checkpoint(tmp_path / "run", like), saved)
    other = {**like, "key": jax.random.key(0, impl="rbg" if impl != "rbg" else "threefry2x32")}
    with pytest.raises(ValueError, match=r"\['key'\]: was key<"):
        mpx.restore_checkpoint(tmp_path / "run", other)


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "run"
    saved = {"w": jnp.arange(5.0), "n": 3, "s": mpx.DynamicLossScaling()}
    mpx.save_checkpoint(file, saved)
    whole = file.read_bytes()

    def check(content, where):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"`restore_checkpoint`.*run") as error:
            mpx.restore_checkpoint(file, saved)
        assert "`like` is not what was saved" not in str(error.value), where

    for length in {*range(0, len(whole), 7), len(whole) - 1}:
        check(whole[:length], length)
    check(whole + b"\0", "longer")
    header = whole.index(b"\n")
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        if place < header and bytes(flipped[:header]).lower() == whole[:header]:
            continue  # a checksum in capitals
        check(bytes(flipped), place)


def test_writers_to_one_path_do_not_mix(tmp_path):
    """One writes while another does: the last one wins with all of its state."""
    like = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    first, second = ({k: jnp.full(4, v) for k in like} for v in (1.0, 2.0))
    path = tmp_path / "run"
    mpx.save_checkpoint(path, first)
    whole = path.read_bytes()
    with replaced(path) as file:
        file.write(whole[:-20])
        mpx.save_checkpoint(path, second)
        assert tree_equal_bits(mpx.restore_checkpoint(path, like), second)
        file.write(whole[-20:])
    assert tree_equal_bits(mpx.restore_checkpoint(path, like), first)
    assert os.listdir(tmp_path) == ["run"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".run.1-ab.partial").write_bytes(b"half of a state")
    (tmp_path / ".other.1-ab.partial").write_bytes(b"of another path")
    mpx.save_checkpoint(tmp_path / "run", jnp.ones(2))
    assert sorted(os.listdir(tmp_path)) == [".other.1-ab.partial", "run"]
    # As `open` makes them, not its owner's alone.
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "run").stat().st_mode == (tmp_path / "plain").stat().st_mode


class Custom(mpx.AbstractLossScaling):
    """A scaling of one's own, with all kinds of options, and another scaling inside."""

    inner: mpx.DynamicLossScaling
    rule: Any = eqx.field(static=True)

    def scale(self, tree):
        return self.inner.scale(tree)

    def unscale(self, tree):
        return self.inner.unscale(tree)

    def adjust(self, grads_finite):
        return Custom(self.inner.adjust(grads_finite), self.rule)


def custom(rule, period=2000):
    return Custom(mpx.DynamicLossScaling(period=period), rule)


class Rule:
    pass


def test_options_are_the_same_in_another_process():
    for rule in (
        *(lambda x: x, jnp.tanh, jax.jit(jnp.sin), functools.partial(max, 1, key=abs)),
        *(frozenset({"a", "b"}), Rule(), np.dtype("int8"), float("nan"), {"a": (1, Rule)}),
    ):
        options = mpx.scaling_options({"s": custom(rule)})
        text = json.dumps(options, allow_nan=False)
        assert "0x" not in text
        mpx.check_scaling_options(json.loads(text), {"s": custom(rule)})
    with pytest.raises(ValueError, match=r"rule was 'jax.*tanh' and is 'jax.*sin'"):
        mpx.check_scaling_options(mpx.scaling_options(custom(jnp.tanh)), custom(jnp.sin))


def test_scalings_inside_of_scalings_are_compared():
    with pytest.raises(ValueError, match=r"\.inner: period was 2000 and is 5"):
        mpx.check_scaling_options(mpx.scaling_options(custom(None)), custom(None, period=5))


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


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda new: new.per_direction("xt", order=2), ("direction", ["x", "t"], 2)),
        (lambda new: new.per_order(1, special=["u_x"]), ("order", ["order 1", "u_x"], 1)),
        (lambda new: new.per_term(["u_x"]), ("term", ["u_x"], None)),
    ],
    ids=lambda x: "" if callable(x) else x[0],
)
def test_derivative_scalings_have_the_options_that_files_of_earlier_versions_hold(make, want):
    scaling = make(mpx.DerivativeScaling)
    [options] = mpx.scaling_options(scaling).values()
    assert {name for name in options if "." not in name} == {"type", "kind", "names", "order"}
    assert (options["type"], options["rule.mode"]) == ("DerivativeScaling", "paper")
    assert (options["kind"], options["names"], options["order"]) == want
    copied = pickle.loads(pickle.dumps(scaling))
    assert eqx.tree_equal(copied, scaling)
    # Static parts are compared and hashed, so that a step is compiled once.
    assert jax.tree.structure(copied) == jax.tree.structure(make(mpx.DerivativeScaling))
    assert len({jax.tree.structure(x) for x in (copied, scaling)}) == 1


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
    assert not list(tmp_path.glob(".*.partial"))
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
