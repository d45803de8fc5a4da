"""Tests overrides of `autocast` on products that have a dtype of their own."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, tree_allclose
from jax import lax

import mpx_pde as mpx


DIMENSIONS = (((1,), (0,)), ((), ()))
POLICIES = ("float16", "bfloat16", "bfloat16_x3")


def dot(x, w, dtype, **options):
    return mpx.mixed_dot_general(x, w, DIMENSIONS, dtype=dtype, **options)


PRODUCTS = {
    "dot": dot,
    "wide result": lambda x, w, dtype: dot(x, w, dtype, out_dtype="float32"),
    "half operand": lambda x, w, dtype: dot(x.astype(dtype), w, dtype),
    "einsum": lambda x, w, dtype: mpx.mixed_einsum("ij,jk->ik", x, w, dtype=dtype),
    "matmul": lambda x, w, dtype: mpx.mixed_matmul(x, w, dtype=dtype),
    "conv": lambda x, w, dtype: mpx.mixed_conv_general_dilated(
        x[:, :, None], jnp.swapaxes(w, 0, 1)[:, :, None], (1,), "SAME", dtype=dtype
    )[:, :, 0],
    "plain": lambda x, w, dtype: lax.dot_general(
        x, w, DIMENSIONS, preferred_element_type=jnp.dtype(dtype)
    ),
}


def carried(product, x, w):
    start = jnp.zeros((x.shape[0], w.shape[1]), product(x, w).dtype)
    return lax.scan(lambda c, _: (product(x, w), None), start, length=2)[0]


# Programs around a product. Their results are cast to float32 or keep their dtype.
USES = {
    "cast": lambda product, x, w: product(x, w).astype(jnp.float32),
    "returned": lambda product, x, w: product(x, w),
    "moved": lambda product, x, w: product(x, w).T.astype(jnp.float32),
    "relu": lambda product, x, w: jax.nn.relu(product(x, w)).astype(jnp.float32),
    "times": lambda product, x, w: jnp.sum(product(x, w) * 2.0**-14).astype(jnp.float32),
    "relu, returned": lambda product, x, w: jax.nn.relu(product(x, w)),
    "summed, returned": lambda product, x, w: jnp.sum(product(x, w)),
    "jit": lambda product, x, w: jax.jit(product)(x, w).astype(jnp.float32),
    "cond": lambda product, x, w: lax.cond(x[0, 0] > 0, product, product, x, w).astype(jnp.float32),
    "stacked": lambda product, x, w: lax.map(lambda x: product(x[None], w), x).astype(jnp.float32),
    "carried": carried,
}

# Programs whose results are halves.
OF_HALVES = ("returned", "relu, returned", "summed, returned", "carried")

# Each product with `cast`, and `dot` with each use.
CASES = [(x, "cast") for x in PRODUCTS if x != "dot"] + [("dot", use) for use in USES]


def program(product, use, dtype):
    def fun(x, w):
        with jax.named_scope("here"):
            return USES[use](lambda x, w: PRODUCTS[product](x, w, dtype), x, w)

    return fun


def run(fun, *args):
    """Returns the result of a function, and whether it warns about rounding."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fun(*args)
    return out, any("so they are rounded" in str(w.message) for w in caught)


@pytest.mark.parametrize("full", [("mixed_*", "dot_general"), "here"], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("product", "use"), CASES)
def test_what_is_asked_for_in_full_is_in_full_or_told(product, use, policy, full):
    x, w = jnp.full((4, 64), 100.0), jnp.full((64, 8), 100.0)  # sums of 640,000
    fun = program(product, use, "float16")
    if isinstance(full, tuple):
        full = full[1] if product == "plain" else full[0]
    cast = mpx.autocast(fun, policy, full=full)
    got, told = run(cast, x, w)
    assert jax.typeof(got).dtype == jax.eval_shape(fun, x, w).dtype
    assert told == bool(cast.report(x, w).rounded)
    finite = bool(np.all(np.isfinite(got)))
    assert finite or told
    # The result is kept in full wherever that is possible.
    if policy == "float16" and use not in OF_HALVES:
        assert finite
        assert not told
        want = program(product, use, "float32")(x, w)
        computed_in = "float16" if use == "times" else "float32"
        assert tree_allclose(got.astype(want.dtype), want, computed_in)
    if told:
        assert use != "returned" or "test_autocast_overrides.py" in cast.report(x, w).rounded[0]
        assert f"rounded all the same: {cast.report(x, w).rounded[0]}" in str(cast.report(x, w))


def multiplied(fun, *args):
    """Returns the dtypes in which a function multiplies, each with the dtype of the result."""
    found = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name.startswith("mixed"):
            found.append((eqn.params["dtype"].name, eqn.outvars[0].aval.dtype.name))
        elif eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append(tuple(v.aval.dtype.name for v in (eqn.invars[0], eqn.outvars[0])))
    return sorted(set(found))


@pytest.mark.parametrize("override", ["half", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("policy", POLICIES[:2])
def test_reports_say_what_is_multiplied(policy, dtype, override):
    """An override that asks for at least float32 does not lower float64."""
    with jax.enable_x64(dtype == "float64"):
        x, w = (jnp.linspace(0, 1, 12, dtype="float32").reshape(s) for s in ((4, 3), (3, 4)))
        for product in PRODUCTS:
            name = "dot_general" if product == "plain" else "mixed_*"
            fun = program(product, "returned", dtype)
            cast = mpx.autocast(fun, policy, **{override: name})
            if product == "half operand" and dtype not in ("float32", policy):
                continue  # autocast does not change this operand
            rows = [x for x in cast.report(x, w).operations if x.multiplied]
            with warnings.catch_warnings(action="ignore"):
                got = cast(x, w)
                assert {row.multiplied for row in rows} == {m for m, _ in multiplied(cast, x, w)}
            assert got.dtype == fun(x, w).dtype
            plain = override == "half" and product == "plain"
            assert [row.rule for row in rows] == ["product" if plain else override]
            if override == "full" and dtype == "float64" and product != "plain":
                assert rows[0].multiplied == "float64"
            error = np.max(np.abs(np.asarray(got, np.float64) - np.asarray(x @ w, np.float64)))
            assert error < 2.0**-6  # the values are below 3, in bfloat16
