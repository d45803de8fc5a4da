"""Tests that networks leave the library: by `plain`, `pickle` and `jax.export`."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative, tree_allclose
from jax import export, lax

import mpx_pde as mpx
from mpx_pde._util._in_jax import IN_JAX


KEY = jax.random.key(0)
POINTS = jax.random.uniform(jax.random.key(1), (6, 2))
FIELDS = jax.random.normal(jax.random.key(2), (3, 1, 12, 12))


def mlp(**options):
    return mpx.nn.CoordinateMLP(2, 1, 16, 2, key=KEY, **options)


def fno(**options):
    return mpx.nn.FNO(1, 1, 8, 2, (4, 4), key=KEY, **options)


def of_derivatives(model):
    terms = mpx.partials(model, ["u", "u_x", "u_xx"], coords="tx", outputs="u")
    return lambda point: list(terms(point).values())


def looped(w, x):
    step = lambda c, _: (jnp.tanh(mpx.mixed_matmul(c, w, dtype="bfloat16")).astype(c.dtype), None)
    out = lax.scan(step, x, length=3)[0]
    return lax.cond(out[0, 0] > 0, lambda x: mpx.mixed_matmul(x, w), lambda x: x, out)


CASES = {
    "mlp": (mlp(), POINTS),
    "mlp, features": (mlp(fourier_features=(8, 1.0), periodic={0: 2.0}), POINTS),
    "mlp, bfloat16": (mpx.cast_to_bfloat16(mlp()), POINTS),
    "ansatz": (mpx.nn.Ansatz(mlp(), lambda x, u: x[0] * u), POINTS),
    "fno": (fno(), FIELDS),
    "fno, fft": (fno(method="fft"), FIELDS),
    "fno, float16": (mpx.cast_to_float16(fno()), FIELDS.astype("float16")),
    "autocast": (mpx.autocast(eqx.nn.MLP(2, 1, 16, 2, key=KEY), "float16"), POINTS),
    "partials": (of_derivatives(mlp()), POINTS),
    "loop": (lambda x: looped(jnp.eye(2), x[None])[0], POINTS),
}


def primitives(jaxpr, found):
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            primitives(inner, found)
    return found


@pytest.mark.parametrize("outside", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_plain_network_holds_primitives_of_jax_alone(name, outside):
    fun, x = CASES[name]
    plain = mpx.plain(jax.vmap(fun)) if outside else jax.vmap(mpx.plain(fun))
    assert primitives(jax.make_jaxpr(jax.vmap(fun))(x).jaxpr, set()) & IN_JAX.keys()
    found = primitives(jax.make_jaxpr(plain)(x).jaxpr, set())
    assert not found & IN_JAX.keys()
    assert all(type(p).__module__.startswith("jax") for p in found)
    assert not {p.name for p in found} & {"optimization_barrier", "name", "remat2"}
    half = "float16" in name or name in ("autocast", "loop")
    # The same roundings, and float32 sums in another order.
    tolerance = 2.0**-8 if half or "bfloat16" in name else 1e-5
    assert relative(jax.jit(plain)(x), jax.jit(jax.vmap(fun))(x)) < tolerance


def test_plain_wraps_as_others_do():
    class Model(eqx.Module):
        inner: mpx.nn.CoordinateMLP

        @mpx.plain
        def __call__(self, x, *, scale=1.0):
            "Scales."
            return scale * self.inner(x)

    model = Model(mlp())
    assert Model.__call__.__doc__ == "Scales."
    assert tree_allclose(model(POINTS[0], scale=2.0), 2 * mlp()(POINTS[0]))


ACTIVATIONS = [jnp.tanh, jax.nn.gelu, jnp.sin, jax.lax.erf, mpx.nn.exact_gelu, np.tanh]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_is_pickled(activation):
    model = mlp(activation=activation)
    loaded = pickle.loads(pickle.dumps(model))
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    assert loaded.activation == model.activation
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        assert np.array_equal(x, y)
    assert isinstance(pickle.loads(pickle.dumps(fno())), mpx.nn.FNO)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "mlp, bfloat16", "fno", "fno, float16", "autocast"])
def test_a_network_is_exported_for_any_batch_with_a_gradient(name):
    fun, x = CASES[name]
    batch = export.symbolic_shape(", ".join(["batch", *map(str, x.shape[1:])]))
    whole = jax.jit(jax.vmap(fun))
    loaded = export.export(whole)(jax.ShapeDtypeStruct(batch, x.dtype))
    for n in (len(x), len(x) - 1):
        assert relative(loaded.call(x[:n]), whole(x[:n])) < (1e-6 if x.dtype == "float32" else 1e-3)
    loss = lambda fun: jax.grad(lambda x: jnp.sum(fun(x).astype("float32") ** 2))(x)
    # Both round at the same places, and XLA sums in another order.
    assert relative(loss(loaded.call), loss(whole)) < (1e-5 if x.dtype == "float32" else 1e-2)
