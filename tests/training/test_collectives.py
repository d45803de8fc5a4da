"""Tests means over devices, in float32 by default and in half without overflow, and parameters that
are gathered in half."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, equations, tree_allclose
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


DEVICES = 8


def mesh():
    return Mesh(np.array(jax.devices()[:DEVICES]), ("i",), axis_types=(AxisType.Auto,))


def mean(tree, dtype):
    """Applies `all_reduce_mean` to a tree whose arrays have a leading axis of devices."""

    def local(tree):
        own = jax.tree.map(lambda x: x[0] if isinstance(x, jax.Array) else x, tree)
        return mpx.all_reduce_mean(own, "i", dtype=dtype)

    return jax.shard_map(local, mesh=mesh(), in_specs=P("i"), out_specs=P())(tree)


def gradients(size=1.0, dtype="float32"):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(size * rng.standard_normal((DEVICES, *shape)), dtype)
    return {"w": draw(16, 4), "b": draw(4), "none": None, "n": draw()}


# Sizes far outside of float16's range in both directions, and beyond it in a sum of eight entries.
SIZES = (1e-30, 1e-6, 1.0, 6e4, 1e30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_is_the_mean(dtype):
    """Complex numbers may have one part far smaller than the other. A common scale would flush it
    to zero."""
    rng = np.random.default_rng(1)
    draw = lambda size: size * rng.standard_normal((DEVICES, 6))
    sizes = [(1.0, 1.0), (1e-20, 1.0), (1.0, 1e-20), (1e30, 1e30)]
    wide = [draw(a) + 1j * draw(b) for a, b in sizes]
    trees = [*map(gradients, SIZES), [jnp.asarray(x, jnp.complex64) for x in wide]]
    # Rounding of the operands and of three levels of sums, relative to the largest entry.
    bound = 4 * float(jnp.finfo(dtype or "float32").eps)
    means = jax.jit(lambda t: mean(t, dtype))(trees)
    assert jax.tree.structure(means) == jax.tree.structure(trees)
    for got, x in zip(jax.tree.leaves(means), jax.tree.leaves(trees), strict=True):
        assert got.dtype == x.dtype
        for part in (np.real, np.imag):
            want = part(np.asarray(x, np.complex128))
            error = np.max(np.abs(part(np.asarray(got, np.complex128)) - want.mean(axis=0)))
            assert error <= bound * np.max(np.abs(want))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_that_jax_has_summed_are_no_gradients_of_one_device(own, check_vma):
    """JAX sums gradients of parameters that are the same on all devices: eight times the mean."""
    params, x = {"w": jnp.ones(4), "unused": jnp.ones(2)}, jnp.arange(32.0).reshape(DEVICES, 4)
    loss = lambda params, x: jnp.mean(x @ params["w"]) / 4

    def local(params, x):
        params = jax.lax.pcast(params, "i", to="varying") if own and check_vma else params
        grads = mpx.filter_grad(loss, mpx.NoOpLossScaling(), axis_name="i", policy="float32")
        return mpx.all_reduce_mean(grads(params, x)[-1], "i")

    specs = {"mesh": mesh(), "in_specs": (P(), P("i")), "out_specs": P(), "check_vma": check_vma}
    mapped = jax.jit(jax.shard_map(local, **specs))
    if check_vma and not own:
        match = r"`all_reduce_mean`.* \['unused'\] is the same .* along \['i'\].*pcast"
        with pytest.raises(ValueError, match=match):
            mapped(params, x)
        return
    means = mapped(params, x)
    np.testing.assert_allclose(means["w"], jax.grad(loss)(params, x)["w"], rtol=1e-6)
    np.testing.assert_array_equal(means["unused"], jnp.zeros(2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_zeros_the_largest_and_what_is_not_finite(dtype):
    largest = float(jnp.finfo("float32").max) / 2  # rounds up to 2^127, and 2^128 is infinite
    x = jnp.ones((DEVICES, 3))
    trees = {"zeros": 0 * x, "nan": x.at[2, 1].set(np.nan), "inf": (1e30 * x).at[2, 1].set(np.inf)}
    # The sum is beyond float32.
    trees["largest"] = largest * x if dtype else x
    means = jax.jit(lambda t: mean(t, dtype))(trees)
    np.testing.assert_array_equal(means["zeros"], jnp.zeros(3))
    for bad in ("nan", "inf"):
        np.testing.assert_array_equal(jnp.isfinite(means[bad]), [True, False, True])
    rtol = float(jnp.finfo(dtype or "float32").eps)
    # Other entries are unaffected.
    np.testing.assert_allclose(means["inf"][::2], 1e30, rtol=rtol)
    np.testing.assert_allclose(means["largest"], largest if dtype else 1.0, rtol=rtol)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_gradients_are_summed_in_float32_by_default(dtype):
    # In float16, 2048 + 1 is 2048.
    x = jnp.ones((DEVICES, 1), dtype).at[0].set(2048)
    out = mean(x, None)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), 2055 / 8, rtol=2.0**-8)
    [reduced] = [e for e in equations(jax.make_jaxpr(lambda t: mean(t, None))(x)) if summed(e)]
    assert reduced.invars[0].aval.dtype == jnp.float32


def summed(equation):
    return equation.primitive.name.startswith("psum")


@pytest.mark.parametrize("dtype", HALVES)
def test_only_exponents_travel_besides(dtype):
    jaxpr = jax.make_jaxpr(lambda t: mean(t, dtype))(gradients())
    sums = [e for e in equations(jaxpr) if summed(e)]
    assert {v.aval.dtype for e in sums for v in e.invars} == {jnp.dtype(dtype)}
    [largest] = [e for e in equations(jaxpr) if e.primitive.name == "pmax"]
    assert largest.invars[0].aval.shape == (3,)
    assert largest.invars[0].aval.dtype == jnp.int32


@pytest.mark.slow
class TestGatherParameters:
    everywhere = NamedSharding(mesh(), P())

    def model(self):
        model = mpx.nn.CoordinateMLP(2, 4, 16, 2, key=jax.random.key(0), dtype="float16")
        arrays, static = eqx.partition(model, eqx.is_array)

        def split(x):
            axes = [i for i, n in enumerate(x.shape) if n == 16][:1]
            spec = P(*["i" if i in axes else None for i in range(x.ndim)])
            return jax.device_put(x, NamedSharding(mesh(), spec))

        return eqx.combine(jax.tree.map(split, arrays), static)

    def loss(self, model, x, gather):
        if gather:
            model = mpx.gather_parameters(model, self.everywhere, dtype="float16")
        return jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)

    def gradients(self, gather):
        x = jax.random.normal(jax.random.key(1), (64, 2))
        x = jax.device_put(x, NamedSharding(mesh(), P("i")))
        grad_fn = eqx.filter_jit(eqx.filter_grad(lambda m, x: self.loss(m, x, gather)))
        return grad_fn, self.model(), x

    def test_matrices_are_rounded_before_they_are_sent(self):
        grad_fn, model, x = self.gradients(gather=True)
        text = grad_fn.lower(model, x).compile().compiled.as_text()
        sent = re.findall(r"= (\w+\[[\d,]*\])\S* all-gather", text)
        # Two matrices in half; the first layer, which is kept full, and vectors in float32.
        assert sorted(sent) == ["f16[16,16]", "f16[16,4]", "f32[16]", "f32[16]", "f32[2,16]"]

    def test_nothing_changes_but_the_order_of_sums(self):
        grad_fn, model, x = self.gradients(gather=True)
        grads = grad_fn(model, x)
        reference = self.gradients(gather=False)[0](model, x)
        # Summed over devices in float32: no rounding of a sum to float16.
        assert tree_allclose(grads, reference, "float32", bits=2)

    def test_on_explicit_axes(self):
        """`jax.make_mesh` makes explicit axes. A gradient is sharded like its parameter."""
        explicit = jax.make_mesh((DEVICES,), ("i",), (AxisType.Explicit,))
        everywhere, split = (NamedSharding(explicit, spec) for spec in (P(), P("i", None)))
        gather = lambda x: mpx.gather_parameters(x, everywhere, dtype="float16")
        x = jax.device_put(jnp.full((8, 2), 1 + 2.0**-20), split)
        gathered = jax.jit(gather)(x)
        assert gathered.is_fully_replicated
        np.testing.assert_array_equal(gathered, 1.0)
        grads = jax.jit(jax.grad(lambda x: jnp.sum(gather(x) ** 2)))(x)
        assert grads.sharding == split
        np.testing.assert_array_equal(grads, 2.0)

        mixed = jax.make_mesh((4, 2), ("i", "j"), (AxisType.Explicit, AxisType.Auto))
        with pytest.raises(ValueError, match="`gather_parameters` needs a mesh"):
            mpx.gather_parameters(jnp.ones((8, 2)), NamedSharding(mixed, P()))

    def test_forward_mode(self):
        gather = lambda x: mpx.gather_parameters(x, self.everywhere, dtype="float16")
        x = jnp.full((2, 2), 1 + 2.0**-20)
        value, tangent = jax.jvp(gather, (x,), (x,))
        np.testing.assert_array_equal(value, 1.0)
        np.testing.assert_array_equal(tangent, x)
