"""Compares the mixed product with products in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, assert_close, in_float64, normal
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx
from mpx_pde.products._bilinear import Origin
from mpx_pde.products._dot import _dot


# Relative to the largest entry. One product rounds its operands (two roundings) and its result
# (one). Contractions here have at most 12 terms of either sign, so a correct implementation errs by
# a few units of roundoff. float32 leaves room for the summation order.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

# Shapes and ((contracting), (batch)) axes: none, one or two of each, in and out of order.
PATTERNS = [
    ((3, 4), (4, 5), ((1,), (0,)), ((), ())),
    ((3,), (5,), ((), ()), ((), ())),
    ((2, 3, 4), (2, 4, 5), ((2,), (1,)), ((0,), (0,))),
    ((3, 4, 2), (5, 2, 4), ((1,), (2,)), ((2,), (1,))),
    ((2, 3, 4), (4, 3, 5), ((2, 1), (0, 1)), ((), ())),
    ((2, 6, 3, 4), (4, 3, 6, 2), ((3, 2), (0, 1)), ((1, 0), (2, 3))),
    ((2, 3), (2, 3), ((), ()), ((0, 1), (0, 1))),
    ((0, 4), (4, 5), ((1,), (0,)), ((), ())),
]


def _operands(pattern, x_dtype="float32", y_dtype="float32"):
    x_shape, y_shape, contract, batch = pattern
    return normal(0, x_shape, dtype=x_dtype), normal(1, y_shape, dtype=y_dtype), (contract, batch)


def _close(got, want, dtype, factor=8.0):
    assert_close(got, want, factor * ROUNDOFF[dtype])


def _subscripts(pattern):
    """Returns a pattern's operands and result in the notation of einsum."""
    x_shape, y_shape, (x_contract, y_contract), (x_batch, y_batch) = pattern
    x, y = list("abcd"[: len(x_shape)]), list("efgh"[: len(y_shape)])
    for i, j in zip((*x_contract, *x_batch), (*y_contract, *y_batch), strict=True):
        y[j] = x[i]
    batch = [x[i] for i in x_batch]
    shared = {x[i] for i in (*x_contract, *x_batch)}
    out = [*batch, *(c for c in x if c not in shared), *(c for c in y if c not in shared)]
    return "".join(x), "".join(y), "".join(out)


def _exact(subscripts, *arrays):
    """Returns the oracle: products and sums of the given operands in float64."""
    return np.einsum(subscripts, *(np.asarray(a).astype(np.float64) for a in arrays))


@pytest.mark.slow
def test_forward():
    cases = [("float16", None), ("bfloat16", "float32"), ("float32", "bfloat16")]
    operands = [_operands(pattern) for pattern in PATTERNS]

    @jax.jit
    def products(arrays):
        return [
            [mpx.mixed_dot_general(x, y, dims, dtype=d, out_dtype=o) for d, o in cases]
            for (x, y), (*_, dims) in zip(arrays, operands, strict=True)
        ]

    results = products([(x, y) for x, y, _ in operands])
    for pattern, (x, y, _), result in zip(PATTERNS, operands, results, strict=True):
        want = _exact("{},{}->{}".format(*_subscripts(pattern)), x, y)
        for (dtype, out_dtype), got in zip(cases, result, strict=True):
            assert got.dtype == (out_dtype or dtype)
            _close(got, want, max(dtype, str(got.dtype), key=ROUNDOFF.__getitem__))


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("bfloat16", "float32")], ids=str)
def test_gradients_have_the_operands_dtypes_and_the_oracles_values(dtypes):
    dtype = dtypes[1] if dtypes[1] in HALVES else dtypes[0]
    operands = [_operands(pattern, *dtypes) for pattern in PATTERNS]
    letters = [_subscripts(pattern) for pattern in PATTERNS]
    shape = lambda axes, given: _exact("{},{}->{}".format(*axes), *given[:2]).shape
    seeds = [normal(2, shape) for shape in map(shape, letters, operands)]

    def value(arrays, seeds):
        total = jnp.zeros(())
        for (x, y), (*_, dims), seed in zip(arrays, operands, seeds, strict=True):
            out = mpx.mixed_dot_general(x, y, dims, dtype=dtype, out_dtype="float32")
            total += jnp.sum(out * seed)
        return total

    gradients = jax.jit(jax.grad(value))([(x, y) for x, y, _ in operands], seeds)
    cases = zip(operands, letters, seeds, gradients, strict=True)
    for (x, y, _), (x_axes, y_axes, out_axes), seed, got in cases:
        assert [g.dtype for g in got] == [x.dtype, y.dtype]
        _close(got[0], _exact(f"{out_axes},{y_axes}->{x_axes}", seed, y), dtype)
        _close(got[1], _exact(f"{out_axes},{x_axes}->{y_axes}", seed, x), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "dtype"),
    [((0, 0), "bfloat16"), ((0, None), "bfloat16"), ((1, -1), "float16"), ((None, 1), "float16")],
    ids=str,
)
def test_vmap_of_every_argument(axes, dtype):
    """All products are in one program, because jaxlib's CPU backend has no kernel for some."""

    def draw(i, shape):
        if axes[i] is not None:
            shape = tuple(np.insert(shape, axes[i] % (len(shape) + 1), 7))
        return normal(i, shape)

    pairs = [(draw(0, x_shape), draw(1, y_shape)) for x_shape, y_shape, *_ in PATTERNS]

    @jax.jit
    def products(pairs):
        out = []
        for (*_, contract, batch), pair in zip(PATTERNS, pairs, strict=True):
            dims = {"dimension_numbers": (contract, batch)}
            product = partial(mpx.mixed_dot_general, dtype=dtype, out_dtype="float32", **dims)
            out.append(jax.vmap(product, axes)(*pair))
        return out

    x, y = ("" if a is None else "z" for a in axes)
    for pattern, pair, got in zip(PATTERNS, pairs, products(pairs), strict=True):
        x_axes, y_axes, out_axes = _subscripts(pattern)
        moved = lambda z, a: z if a is None else np.moveaxis(np.asarray(z), a, 0)
        first = map(moved, pair, axes)
        _close(got, _exact(f"{x}{x_axes},{y}{y_axes}->z{out_axes}", *first), dtype)


def _chain(dot):
    """Builds a scalar function of a scalar with all products by `dot`. It is not polynomial, so
    derivatives of every order differ from zero."""
    rng = np.random.default_rng(0)
    w1, w2, v = (rng.normal(size=s).astype(np.float32) / 2 for s in ((2, 8), (8, 8), (8,)))

    def f(z):
        x = jnp.stack([z, jnp.sin(z)])
        h = jnp.tanh(dot(x, w1))
        h = jnp.tanh(dot(h, w2))
        return dot(h, v)

    return f


@pytest.mark.slow
@pytest.mark.parametrize("modes", ["ff", "fr", "rr", "rff", "frfr"])
def test_nestings_of_forward_and_reverse_mode(modes):
    mixed = partial(mpx.mixed_matmul, dtype="float16", out_dtype="float32")

    def derivative(f, modes):
        for mode in modes:
            f = jax.jacfwd(f) if mode == "f" else jax.grad(f)
        return f

    got = jax.jit(jax.vmap(derivative(_chain(mixed), modes)))(jnp.linspace(-1.0, 1.0, 5))
    with jax.enable_x64(True):
        exact = _chain(lambda x, y: jnp.matmul(x, y.astype(np.float64)))
        want = jax.vmap(derivative(exact, modes))(jnp.linspace(-1.0, 1.0, 5, dtype=jnp.float64))
    # Each order applies the chain rule to all products again, so the errors of its terms add up.
    _close(got, want, "float16", factor=4 * 2 ** len(modes))


# Matrix products and einsums


def test_matmul_is_numpys():
    shapes = [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((4,), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((6, 1, 3, 4), (2, 4, 5)),
        ((7, 2, 3, 4), (1, 1, 4, 5)),
    ]
    pairs = [(normal(0, x), normal(1, y)) for x, y in shapes]
    matmul = partial(mpx.mixed_matmul, dtype="float16", out_dtype="float32")
    products = jax.jit(lambda pairs: [matmul(*pair) for pair in pairs])(pairs)
    for (x, y), got in zip(pairs, products, strict=True):
        _close(got, np.matmul(np.asarray(x, np.float64), np.asarray(y, np.float64)), "float16")


EINSUMS = {
    "ij,jk": [(3, 4), (4, 5)],
    "bij,bjk->kib": [(2, 3, 4), (2, 4, 5)],
    "ij,k->": [(3, 4), (5,)],
    "...ij,...jk->...ik": [(1, 3, 4), (2, 4, 5)],
    "...ij,...jk->ik...": [(6, 1, 3, 4), (1, 2, 4, 5)],
    "i...,...->i...": [(3, 1), (5,)],
    "...i,...i,...->...i": [(1, 3), (2, 3), (1,)],
    "bi...,io->bo...": [(2, 3, 4, 4), (3, 5)],
    "iij,j->i": [(3, 3, 4), (4,)],
    "ij,jk,kl,l->i": [(3, 4), (4, 5), (5, 2), (2,)],
    "r,ir,or,xr->iox": [(2,), (3, 2), (4, 2), (5, 2)],
    "ii->i": [(3, 3)],
    "ij->": [(3, 4)],
}


@pytest.mark.slow
def test_einsum_is_that_of_jax():
    operands = {s: [normal(i, n) for i, n in enumerate(shapes)] for s, shapes in EINSUMS.items()}
    run = partial(mpx.mixed_einsum, dtype="float16", out_dtype="float32")
    results = jax.jit(lambda tree: {s: run(s, *arrays) for s, arrays in tree.items()})(operands)
    for subscripts, got in results.items():
        assert got.dtype == jnp.float32
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
            want = jnp.einsum(subscripts, *in_float64(operands[subscripts]))
        # Sums are longer and products are chained, so errors relative to the largest entry add up.
        _close(got, want, "float16", factor=32)


# Many devices


@pytest.mark.slow
@pytest.mark.parametrize(
    ("w_spec", "kind"),
    [
        (P(None, "model"), AxisType.Auto),
        (P(None, "model"), AxisType.Explicit),
        (P("data", None), AxisType.Explicit),
    ],
    ids=str,
)
def test_sharded_by_jit(w_spec, kind):
    w, x = normal(0, (8, 6)), normal(1, (16, 8), dtype="float16")

    def plain(w, x):
        y = mpx.mixed_matmul(x, w, dtype="float16")
        return jnp.sum(jnp.tanh(y.astype(jnp.float32)))

    def loss(w, x):
        # A fully sharded weight is gathered before it is used.
        gathered = kind == AxisType.Explicit and w_spec == P("data", None)
        return plain(jax.sharding.reshard(w, P()) if gathered else w, x)

    f = jax.value_and_grad(loss, argnums=(0, 1))
    want, (want_w, want_x) = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(w, x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        w, x = jax.device_put((w, x), tuple(NamedSharding(mesh, s) for s in (w_spec, P("data"))))
        got, (got_w, got_x) = jax.jit(f)(w, x)
        batched = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(w, jnp.stack([x, -x]))
    _close(got, want, "float32", factor=64)
    assert got_w.dtype == jnp.float32
    _close((got_w, got_x, batched[0]), (want_w, want_x, want_w), "float16")


def test_a_result_is_laid_out_as_its_caller_says():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    w, spec = jnp.ones((6, 8), jnp.float16), P(None, "d")
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((32, 8), jnp.float16), NamedSharding(mesh, P("d")))
        for asked in (spec, NamedSharding(mesh, spec), NamedSharding(mesh.abstract_mesh, spec)):
            product = partial(mpx.mixed_dot_general, out_sharding=asked)
            got = jax.jit(lambda w, x, f=product: f(w, x, (((1,), (1,)), ((), ()))))(w, x)
            assert jax.typeof(got).sharding.spec == spec


def test_a_nan_is_named():
    x = jnp.array([[jnp.inf, 1.0]], jnp.float16)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="mixed_dot_general"):
        mpx.mixed_matmul(x, jnp.zeros((2, 1), jnp.float16))


# Contraction in another order, a weight gradient, not a matrix product, and an outer product.
STREAMS = [
    ((9, 4, 5), (4, 5, 3), ((2, 1), (1, 0))),
    ((9, 4, 5), (9, 3), ((0,), (0,))),
    ((9, 4, 5), (5, 3, 4), ((1, 2), (2, 0))),
    ((9, 1), (1, 3), ((1,), (0,))),
]


@pytest.mark.parametrize(("x", "y", "axes"), STREAMS, ids=str)
def test_as_a_gpu_multiplies_streams(x, y, axes):
    # Products and sums of these small integers are exact in float16.
    x, y = (np.arange(np.prod(shape)).reshape(shape) % 5 for shape in (x, y))
    numbers, params = (axes, ((), ())), {"algorithm": None, "out_sharding": None}
    dtypes = {"dtype": jnp.dtype("float16"), "out_dtype": jnp.dtype("float32")}
    params |= {"origin": Origin(apart=True), "platform": "cuda", **dtypes}
    halves = (jnp.asarray(z, "float16") for z in (x, y))
    out = _dot(*halves, dimension_numbers=numbers, **params)
    np.testing.assert_array_equal(out, np.tensordot(x, y, axes))
