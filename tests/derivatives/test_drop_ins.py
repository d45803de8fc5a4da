"""Tests that `grad`, `jacfwd`, `jacrev` and `hessian` match JAX's functions, with scaled seeds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import mpx_pde as mpx
from mpx_pde import derivatives as mpd


KEY = jax.random.key(0)
NETWORK = eqx.nn.MLP(2, "scalar", 8, 1, activation=jnp.tanh, key=KEY)
T, X = jnp.float32(0.3), jnp.float32(-0.6)


def u(t, x):
    return NETWORK(jnp.stack([t, x]))


# Two orders of float32 tanh networks, evaluated in another order of operations.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def assert_same(ours, theirs, *args, **tolerances):
    got, want = jax.jit(ours)(*args), jax.jit(theirs)(*args)
    assert jtu.tree_structure(got) == jtu.tree_structure(want)
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, **(tolerances or CLOSE))


@pytest.mark.parametrize("argnums", [0, (1, 0)])
def test_of_scalars(argnums):
    assert_same(mpd.grad(u, argnums), jax.grad(u, argnums), T, X)
    assert_same(mpd.hessian(u, argnums), jax.hessian(u, argnums), T, X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling",
    [
        mpx.DerivativeScaling.per_direction("tx", init_scale={"t": 2.0**-6, "x": 2.0**-8}),
        mpx.DerivativeScaling.per_term(["u_xx"], init_scale=2.0**-12),
    ],
    ids=lambda s: s.strategy.kind,
)
# The loss has only one product.
@pytest.mark.filterwarnings("ignore:.*was asked for float16:mpx_pde.PrecisionWarning")
def test_what_overflows_float16_does_not_with_a_scaling(scaling):
    """u_xx is 4e6, above float16's 65504, whatever is computed from it later."""

    def loss(model, point, *, derivatives=None):
        fun = lambda t, x: jnp.sin(2000.0 * jnp.sum(model(jnp.stack([t, x]))))
        taken = mpd.grad(mpd.grad(fun, 1), 1, scaling=derivatives, coords="x")
        return 1e-6 * taken(*point)

    if scaling.strategy.kind == "direction":
        scaling = mpx.DerivativeScaling.per_direction("x", init_scale=2.0**-8)
    model = eqx.nn.Linear(2, 1, use_bias=False, key=KEY)
    model = eqx.tree_at(lambda m: m.weight, model, jnp.array([[0.1, 1.0]]))
    point = jnp.float32(0.0), jnp.float32(2.0**-10)
    both = mpx.Scaling(mpx.StaticLossScaling(1.0), scaling)
    gradient = mpx.filter_value_and_grad(loss, both, keep_full=(False, True))
    # The network is not this library's and mixes its half weights with float32 points.
    with jax.numpy_dtype_promotion("standard"):
        value, after, _, _ = eqx.filter_jit(gradient)(model, point)
    want = loss(model, point)
    np.testing.assert_allclose(value, want, rtol=5e-3)
    assert float(jnp.sum(after.derivatives.counts)) > 0


def test_coordinates_are_named_in_the_order_of_argnums():
    fun, scaling = lambda t, x: 32 * x + t / 32, mpx.DerivativeScaling.per_direction("tx")
    slopes = lambda s: sum(mpd.grad(fun, (1, 0), scaling=s, coords="xt")(T, X))
    exponents = np.argmax(jax.grad(slopes, allow_int=True)(scaling).counts, axis=1)
    at = dict(zip(scaling.row_names, exponents, strict=True))
    assert at["_x"] == at["_t"] + 10


def test_numbers_of_python():
    """Plain arithmetic would return Python numbers, and JAX's functions accept them."""
    fun = lambda t, x: t**3 * x
    ours = mpx.derivatives
    assert ours.grad(fun)(2.0, 3.0) == jax.grad(fun)(2.0, 3.0)
    assert ours.grad(ours.grad(fun), 1)(2.0, 3.0) == 12.0


def test_auxiliary_results():
    both = lambda x: (jnp.stack([x[0] ** 2 * x[1], jnp.sin(x[1])]), {"twice": 2 * x})
    first = lambda x: (both(x)[0][0], both(x)[1])
    point = jnp.stack([T, X])
    for name, fun in (("grad", first), ("jacfwd", both), ("jacrev", both), ("hessian", both)):
        ours, theirs = (getattr(where, name)(fun, has_aux=True) for where in (mpd, jax))
        assert_same(ours, theirs, point)
    # Nested calls return one of them.
    cube = lambda x: (x**3, x)
    assert mpd.grad(mpd.grad(cube, has_aux=True), has_aux=True)(1.5) == (9.0, 1.5)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
def test_empty_outputs(name):
    ours, theirs = (
        getattr(where, name)(lambda x: jnp.zeros((0, 3)) * x[0]) for where in (mpd, jax)
    )
    got, want = ours(jnp.ones(2)), theirs(jnp.ones(2))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


def rows_of(taken):
    """Returns the derivatives that a scaling counts."""
    scaling = mpx.DerivativeScaling.per_direction("tx")
    counts = jax.grad(lambda s: jnp.sum(taken(s)), allow_int=True)(scaling).counts
    return {name for name, row in zip(scaling.row_names, counts, strict=True) if row.any()}


@pytest.mark.slow
def test_nested_calls_name_their_own_coordinates():
    g, (q, t, x) = mpd.grad, (1.5, 0.5, 0.7)
    fun = lambda q, t, x: q * jnp.sin(t * x**2)
    want = jax.grad(jax.grad(fun, 1), 2)(q, t, x)
    forms = (
        lambda s: g(g(fun, 1, scaling=s, coords="t"), 2, scaling=s, coords="x"),
        lambda s: g(g(fun, 2, scaling=s, coords="x"), 1, scaling=s, coords="t"),
        lambda s: g(g(fun, 1), 2, scaling=s, coords="tx"),
        lambda s: g(g(fun, 1), 2, scaling=s, coords="x"),
    )
    for form in forms:
        scaling = mpx.DerivativeScaling.per_direction("tx")
        np.testing.assert_allclose(form(scaling)(q, t, x), want, **CLOSE)
        assert rows_of(lambda s, form=form: form(s)(q, t, x)) == {"_tx"}


@pytest.mark.slow
def test_a_scaling_names_the_argument_that_is_differentiated():
    fun = lambda t, x: jnp.sin(t * x**2)
    # A model is no coordinate.
    of_model = lambda m, t, x: m["w"] * fun(t, x)
    given = {"w": jnp.ones(3)}, 0.5, 0.7
    for argnums, name in ((0, "_t"), (1, "_x")):
        ours = lambda s, i=argnums: mpd.grad(fun, i, scaling=s)
        np.testing.assert_allclose(ours(None)(0.5, 0.7), jax.grad(fun, argnums)(0.5, 0.7), **CLOSE)
        assert rows_of(lambda s, f=ours: f(s)(0.5, 0.7)) == {name}
        model = lambda s, i=argnums: mpd.jacfwd(of_model, i + 1, scaling=s)(*given)
        assert rows_of(model) == {name}
