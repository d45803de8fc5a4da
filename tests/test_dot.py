"""The mixed product against JAX's own product in float64."""

import itertools
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, program_for_gpu
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx
from mpx_pde._bilinear import Given
from mpx_pde._dot import _dot


# Relative to the largest entry. One product rounds its operands (two roundings) and its result
# (one); contractions here have at most 12 terms of either sign, so a few units of roundoff is what
# an honest implementation shows. float32 leaves room for the summation order.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
HALVES = ("float16", "bfloat16")

# ((contracting), (batch)) for every mix of none, one or two of each, in and out of order.
PATTERNS = [
    ((3, 4), (4, 5), ((1,), (0,)), ((), ())),
    ((3, 4), (5, 4), ((1,), (1,)), ((), ())),
    ((4,), (4,), ((0,), (0,)), ((), ())),
    ((4,), (4, 5), ((0,), (0,)), ((), ())),
    ((3,), (5,), ((), ()), ((), ())),
    ((2, 3, 4), (2, 4, 5), ((2,), (1,)), ((0,), (0,))),
    ((3, 4, 2), (5, 2, 4), ((1,), (2,)), ((2,), (1,))),
    ((2, 3, 4), (4, 3, 5), ((2, 1), (0, 1)), ((), ())),
    ((2, 3, 4), (3, 4, 5), ((1, 2), (0, 1)), ((), ())),
    ((2, 6, 3, 4), (6, 2, 4, 5), ((3,), (2,)), ((0, 1), (1, 0))),
    ((2, 6, 3, 4), (4, 3, 6, 2), ((3, 2), (0, 1)), ((1, 0), (2, 3))),
    ((2, 3), (2, 3), ((), ()), ((0, 1), (0, 1))),
    ((2, 3), (2, 5), ((), ()), ((0,), (0,))),
    ((0, 4), (4, 5), ((1,), (0,)), ((), ())),
    ((3, 0), (0, 5), ((1,), (0,)), ((), ())),
]


def _normal(seed, shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _operands(pattern, x_dtype="float32", y_dtype="float32"):
    x_shape, y_shape, contract, batch = pattern
    return _normal(0, x_shape, x_dtype), _normal(1, y_shape, y_dtype), (contract, batch)


def _close(got, want, dtype, factor=8.0):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    scale = np.abs(want).max(initial=0.0)
    assert np.abs(got - want).max(initial=0.0) <= factor * ROUNDOFF[dtype] * scale + 1e-30


def _subscripts(pattern):
    """The product of a pattern in the notation of einsum."""
    x_shape, y_shape, (x_contract, y_contract), (x_batch, y_batch) = pattern
    x, y = list("abcd"[: len(x_shape)]), list("efgh"[: len(y_shape)])
    for i, j in zip((*x_contract, *x_batch), (*y_contract, *y_batch), strict=True):
        y[j] = x[i]
    batch = [x[i] for i in x_batch]
    shared = {x[i] for i in (*x_contract, *x_batch)}
    out = [*batch, *(c for c in x if c not in shared), *(c for c in y if c not in shared)]
    return "".join(x), "".join(y), "".join(out)


def _exact(subscripts, *arrays):
    """The oracle: operands as they come, products and sums in float64."""
    return np.einsum(subscripts, *(np.asarray(a).astype(np.float64) for a in arrays))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_forward(pattern):
    x, y, dims = _operands(pattern)
    want = _exact("{},{}->{}".format(*_subscripts(pattern)), x, y)
    cases = list(itertools.product([*HALVES, "float32"], [None, "float32", "bfloat16"]))

    @jax.jit
    def products(x, y):
        return [mpx.mixed_dot_general(x, y, dims, dtype=d, out_dtype=o) for d, o in cases]

    for (dtype, out_dtype), got in zip(cases, products(x, y), strict=True):
        assert got.dtype == (out_dtype or dtype)
        _close(got, want, max(dtype, str(got.dtype), key=ROUNDOFF.__getitem__))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("bfloat16", "float32")], ids=str)
def test_gradients_have_the_operands_dtypes_and_the_oracles_values(pattern, dtypes):
    x, y, dims = _operands(pattern, *dtypes)
    dtype = dtypes[1] if dtypes[1] in HALVES else dtypes[0]
    x_axes, y_axes, out_axes = _subscripts(pattern)
    seed = _normal(2, _exact(f"{x_axes},{y_axes}->{out_axes}", x, y).shape)

    def value(x, y):
        out = mpx.mixed_dot_general(x, y, dims, dtype=dtype, out_dtype="float32")
        return jnp.sum(out * seed)

    got = jax.jit(jax.grad(value, argnums=(0, 1)))(x, y)
    assert [g.dtype for g in got] == [x.dtype, y.dtype]
    _close(got[0], _exact(f"{out_axes},{y_axes}->{x_axes}", seed, y), dtype)
    _close(got[1], _exact(f"{out_axes},{x_axes}->{y_axes}", seed, x), dtype)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_vmap_of_every_argument(pattern):
    x_shape, y_shape, contract, batch = pattern
    dims = (contract, batch)
    all_axes = [(0, 0), (0, None), (None, 0), (1, -1), (-1, None), (None, 1)]

    def insert(shape, axis):
        if axis is None:
            return shape
        axis %= len(shape) + 1
        return (*shape[:axis], 7, *shape[axis:])

    def product(x, y):
        return mpx.mixed_dot_general(x, y, dims, dtype="float16", out_dtype="float32")

    pairs = [(_normal(0, insert(x_shape, a)), _normal(1, insert(y_shape, b))) for a, b in all_axes]

    @jax.jit
    def products(pairs):
        return [jax.vmap(product, a)(*pair) for a, pair in zip(all_axes, pairs, strict=True)]

    x_axes, y_axes, out_axes = _subscripts(pattern)
    for axes, pair, got in zip(all_axes, pairs, products(pairs), strict=True):
        first = [
            z if a is None else np.moveaxis(np.asarray(z), a, 0)
            for z, a in zip(pair, axes, strict=True)
        ]
        x, y = ("" if a is None else "z" for a in axes)
        _close(got, _exact(f"{x}{x_axes},{y}{y_axes}->z{out_axes}", *first), "float16")


def _chain(dot):
    """A scalar function of scalar inputs whose products all go through `dot`; not polynomial, so
    that derivatives of every order differ from zero."""
    rng = np.random.default_rng(0)
    w1, w2, v = (rng.normal(size=s).astype(np.float32) / 2 for s in ((2, 8), (8, 8), (8,)))

    def f(z):
        x = jnp.stack([z, jnp.sin(z)])
        h = jnp.tanh(dot(x, w1))
        h = jnp.tanh(dot(h, w2))
        return dot(h, v)

    return f


@pytest.mark.parametrize(
    "modes",
    ["f", "r", "ff", "fr", "rf", "rr", "fff", "ffr", "rff", "rrr", "ffff", "fffr", "frfr", "rrrr"],
)
def test_nestings_of_forward_and_reverse_mode(modes):
    def mixed(x, y):
        return mpx.mixed_matmul(x, y, dtype="float16", out_dtype="float32")

    def derivative(f, modes):
        for mode in modes:
            if mode == "f":
                f = lambda z, f=f: jax.jvp(f, (z,), (jnp.ones_like(z),))[1]
            else:
                f = jax.grad(f)
        return f

    got = jax.jit(jax.vmap(derivative(_chain(mixed), modes)))(jnp.linspace(-1.0, 1.0, 5))
    with jax.enable_x64(True):
        exact = _chain(lambda x, y: jnp.matmul(x, y.astype(np.float64)))
        want = jax.vmap(derivative(exact, modes))(jnp.linspace(-1.0, 1.0, 5, dtype=jnp.float64))
    # Each order applies the chain rule to all products once more: the errors of its terms add up.
    _close(got, want, "float16", factor=4 * 2 ** len(modes))


def test_every_product_is_half_times_half_in_both_passes():
    w, x = _normal(0, (16, 16)), _normal(1, (8, 16), "float16")

    def loss(w, x):
        h = jnp.tanh(mpx.mixed_matmul(x, w, dtype="float16"))
        h = jnp.tanh(mpx.mixed_matmul(h, w, dtype="float16"))
        return jnp.sum(h.astype(jnp.float32) ** 2)

    def second(w, x):  # forward over reverse, as in a Hessian-vector product
        return jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (w,))

    for f in (jax.value_and_grad(loss, argnums=(0, 1)), second):
        text = program_for_gpu(jax.jit(f), w, x)
        products = re.findall(r"stablehlo.dot_general.*: \((\S+), (\S+)\)", text)
        assert len(products) >= 4
        for operands in products:
            assert all("f16" in t and "bf16" not in t for t in operands), operands


def test_accumulates_in_float32():
    # 4096 + 1 is 4096 in float16, so an accumulator in half stops there; the sum is exact in
    # float32. As a float16 result it is representable too.
    x = jnp.concatenate([jnp.full(1, 4096.0), jnp.ones(4096)]).astype("float16")
    ones = jnp.ones_like(x)
    for out_dtype in ("float32", "float16"):
        out = mpx.mixed_matmul(x, ones, dtype="float16", out_dtype=out_dtype)
        assert float(out) == 8192.0


def test_operands_are_rounded_inside():
    x = jnp.array([1.0 + 2.0**-12, 70000.0])
    y = jnp.array([1.0, 0.0])
    one = mpx.mixed_matmul(x[:1], y[:1], dtype="float16", out_dtype="float32")
    assert float(one) == 1.0
    assert not np.isfinite(mpx.mixed_matmul(x, y, dtype="float16", out_dtype="float32"))
    assert float(mpx.mixed_matmul(x, y, dtype="float32")) == 1.0 + 2.0**-12


def test_a_weight_used_in_a_long_scan_sums_its_cotangent_in_float32():
    # Each of the 5000 uses contributes 1; in float16 the sum would stop at 2048.
    def loss(w, x):
        def body(total, _):
            return total + jnp.sum(
                mpx.mixed_matmul(x, w, dtype="float16", out_dtype="float32")
            ), None

        return lax.scan(body, jnp.zeros(()), length=5000)[0]

    grad = jax.jit(jax.grad(loss))(jnp.ones((1, 1)), jnp.ones((1, 1), "float16"))
    assert grad.dtype == jnp.float32
    assert float(grad[0, 0]) == 5000.0


def test_under_remat_cond_and_while():
    w, x = _normal(0, (6, 6)), _normal(1, (4, 6))

    def f(w):
        layer = jax.checkpoint(lambda h: jnp.tanh(mpx.mixed_matmul(h, w, dtype="bfloat16")))
        h = lax.cond(jnp.sum(x) > 0, layer, lambda h: -layer(h), x)
        h = lax.fori_loop(0, 3, lambda _, h: layer(h), h)
        return jnp.sum(h.astype(jnp.float32))

    value, grad = jax.jit(jax.value_and_grad(f))(w)
    assert jnp.isfinite(value)
    assert grad.dtype == jnp.float32
    assert float(jnp.abs(grad).max()) > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_two_batch_axes_are_one(dtype):
    """A weight's gradient sums over both; jaxlib's CPU backend does not take that in bfloat16."""
    w, x = _normal(0, (48, 48)), _normal(1, (8, 80, 48))

    def loss(w, x):
        f = lambda p: jnp.tanh(
            mpx.mixed_matmul(jnp.tanh(mpx.mixed_matmul(p, w, dtype=dtype)), w, dtype=dtype)
        )
        for _ in x.shape[:-1]:
            f = jax.vmap(f)
        return jnp.sum(f(x.astype(dtype)).astype(jnp.float32) ** 2)

    grad = jax.jit(jax.grad(loss))
    assert grad(w, x).dtype == jnp.float32
    # The same roundings, summed in another order.
    _close(grad(w, x), grad(w, x.reshape(-1, 48)), dtype)


def test_eager_equals_jit():
    x, y, dims = _operands(PATTERNS[5])
    f = lambda x, y: mpx.mixed_dot_general(x, y, dims, dtype="float16")
    assert f(x, y).tobytes() == jax.jit(f)(x, y).tobytes()


# Matrix products and einsums


@pytest.mark.parametrize(
    "shapes",
    [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 5)),
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((4,), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((2, 3, 4), (2, 4, 5)),
        ((6, 1, 3, 4), (2, 4, 5)),
        ((1, 3, 4), (2, 4, 5)),
        ((7, 2, 3, 4), (1, 1, 4, 5)),
    ],
    ids=str,
)
def test_matmul_is_numpys(shapes):
    x, y = _normal(0, shapes[0]), _normal(1, shapes[1])
    got = mpx.mixed_matmul(x, y, dtype="float16", out_dtype="float32")
    _close(got, np.matmul(np.asarray(x, np.float64), np.asarray(y, np.float64)), "float16")


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("ij,jk", [(3, 4), (4, 5)]),
        ("ij,kj->ki", [(3, 4), (5, 4)]),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("bij,bjk->kib", [(2, 3, 4), (2, 4, 5)]),
        ("bij,bjk->b", [(2, 3, 4), (2, 4, 5)]),
        ("ij,k->", [(3, 4), (5,)]),
        ("i,j->ij", [(3,), (5,)]),
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
        ("...i,ij", [(2, 3, 4), (4, 5)]),
        ("bi...,io->bo...", [(2, 3, 4, 4), (3, 5)]),
        ("iij,j->i", [(3, 3, 4), (4,)]),
        ("ij,ij->ij", [(3, 4), (3, 4)]),
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 2)]),
        ("ij,jk,kl,l->i", [(3, 4), (4, 5), (5, 2), (2,)]),
        ("r,ir,or,xr->iox", [(2,), (3, 2), (4, 2), (5, 2)]),
        ("ii->i", [(3, 3)]),
        ("ii", [(3, 3)]),
        ("ij->ji", [(3, 4)]),
        ("ij->", [(3, 4)]),
    ],
)
def test_einsum_is_numpys(subscripts, shapes):
    arrays = [_normal(i, s) for i, s in enumerate(shapes)]
    got = mpx.mixed_einsum(subscripts, *arrays, dtype="float16", out_dtype="float32")
    want = _exact(subscripts, *arrays)
    assert got.dtype == jnp.float32
    # Longer sums and chains of products: errors relative to the largest entry add up.
    _close(got, want, "float16", factor=32)


def test_einsum_never_multiplies_float32():
    x, w, v = _normal(0, (3, 4), "float16"), _normal(1, (4, 5)), _normal(2, (5, 6))
    f = jax.grad(
        lambda w: jnp.sum(
            mpx.mixed_einsum("ij,jk,kl->il", x, w, v, dtype="float16").astype("float32")
        )
    )
    text = program_for_gpu(jax.jit(f), w)
    products = re.findall(r"stablehlo.dot_general.*: \((\S+), (\S+)\)", text)
    assert products
    assert all("f32" not in t for pair in products for t in pair)


# Many devices


def _mesh(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("w_spec", [P(), P(None, "model"), P("data", None)], ids=str)
def test_sharded_by_jit(kind, w_spec):
    w, x = _normal(0, (8, 6)), _normal(1, (16, 8), "float16")

    def loss(w, x):
        if kind == AxisType.Explicit and w_spec == P("data", None):
            w = jax.sharding.reshard(w, P())  # fully sharded: gathered before it is used
        y = mpx.mixed_matmul(x, w, dtype="float16")
        return jnp.sum(jnp.tanh(y.astype(jnp.float32)))

    f = jax.value_and_grad(loss, argnums=(0, 1))
    want, (want_w, want_x) = (
        f(w, x)
        if kind == AxisType.Auto
        else jax.value_and_grad(
            lambda w, x: jnp.sum(
                jnp.tanh(mpx.mixed_matmul(x, w, dtype="float16").astype("float32"))
            ),
            argnums=(0, 1),
        )(w, x)
    )
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        w, x = (
            jax.device_put(w, NamedSharding(mesh, w_spec)),
            jax.device_put(x, NamedSharding(mesh, P("data", None))),
        )
        got, (got_w, got_x) = jax.jit(f)(w, x)
        batched = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(w, jnp.stack([x, -x]))
    _close(got, want, "float32", factor=64)
    assert got_w.dtype == jnp.float32
    _close(got_w, want_w, "float16")
    _close(got_x, want_x, "float16")
    _close(batched[0], want_w, "float16")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_the_weight_cotangent_in_float32(check_vma):
    # Two shards of 40000: the sum leaves float16's range, but not float32's.
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    w, x = jnp.ones((1, 1)), jnp.full((2, 1), 40000.0, "float16")

    def shard(w, x):
        def loss(w):
            return jnp.sum(mpx.mixed_matmul(x, w, dtype="float16", out_dtype="float32"))

        grad = jax.grad(loss)(w)
        # With `check_vma`, the transpose of the weight's broadcast is the sum over the devices.
        return grad if check_vma else lax.psum(grad, "i")

    f = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma)
    grad = jax.jit(f)(w, x)
    assert grad.dtype == jnp.float32
    assert float(grad[0, 0]) == 80000.0


def test_shard_map_of_jvp_and_vmap():
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    w, x = _normal(0, (5, 5)), _normal(1, (8, 5))

    def u(w, p):
        return jnp.sum(jnp.tanh(mpx.mixed_matmul(p, w, dtype="bfloat16", out_dtype="float32")))

    def second(w, p):
        return jax.jvp(lambda p: jax.jvp(lambda p: u(w, p), (p,), (p,))[1], (p,), (p,))[1]

    def loss(w, x):
        return jnp.mean(jax.vmap(second, in_axes=(None, 0))(w, x) ** 2)

    def shard(w, x):
        return lax.pmean(loss(w, x), "i")

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    got = jax.jit(jax.grad(sharded))(w, x)
    _close(got, jax.grad(loss)(w, x), "bfloat16")


# Wrong input


WRONG_AXES = [
    None,
    7,
    ((1,), (0,)),
    ((1, 0), ((), (0,))),  # a batch axis of one alone
    (((3,), (0,)), ((), ())),  # no such axis
    (((1, 1), (0, 0)), ((), ())),  # twice
    (((1,), (0,)), ((1,), (0,))),  # contracted and of the batch
    (((1,), (1,)), ((), ())),  # of sizes 3 and 2
]


def _with_axes(dimension_numbers, x):
    return mpx.mixed_dot_general(x, x[:, :2], dimension_numbers, dtype="float16")


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: mpx.mixed_matmul(x, x.astype(int), dtype="float16"), "real floating-point"),
        (lambda x: mpx.mixed_matmul(x, x.astype(jnp.complex64), dtype="float16"), "imaginary"),
        (lambda x: mpx.mixed_matmul(x, x, dtype="int32"), "mixed_matmul.*int32"),
        (lambda x: mpx.mixed_matmul(x, x, dtype="halve"), "no dtype"),
        (lambda x: mpx.mixed_matmul(x, x[:2], dtype="float16"), "mixed_matmul.*contracts"),
        (lambda x: mpx.mixed_matmul(x, x[0, 0], dtype="float16"), "mixed_matmul.*contracts"),
        (lambda x: mpx.mixed_matmul(jnp.ones((3, 3, 3)), jnp.ones((2, 3, 3))), "broadcasts"),
        *((partial(_with_axes, axes), "mixed_dot_general.*contracting") for axes in WRONG_AXES),
        (lambda x: mpx.mixed_einsum("ij,jk->ik", x, dtype="float16"), "2 terms"),
        (lambda x: mpx.mixed_einsum("ijk->i", x, dtype="float16"), "2 axes"),
        (lambda x: mpx.mixed_einsum("ij,jk->il", x, x, dtype="float16"), "unknown"),
        (lambda x: mpx.mixed_einsum(x, x, dtype="float16"), "string"),
    ],
)
def test_wrong_input(call, match):
    x = jnp.ones((3, 3))
    with pytest.raises((TypeError, ValueError), match=match):
        eqx.filter_eval_shape(call, x)


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        (((40, 16), (16, 3)), (1, 0)),
        (((40, 3), (16, 3)), (1, 1)),
        (((40, 16), (40, 3)), (0, 0)),
        (((9, 70), (70, 5)), (1, 0)),
        (((70, 9), (9, 70)), (1, 0)),
    ],
)
def test_products_with_narrow_axes_are_padded_on_a_gpu_and_are_the_same(shapes, axes):
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(k, s, jnp.float16) for k, s in zip(keys, shapes, strict=True))
    params = {
        "dimension_numbers": (((axes[0],), (axes[1],)), ((), ())),
        "dtype": jnp.dtype("float16"),
        "out_dtype": jnp.dtype("float32"),
        "out_sharding": None,
    }
    product = partial(_dot, x, y, given=Given(apart=True), **params)
    got, want = product(on_gpu=True), product()
    # Zeros add nothing, but sums of float32 numbers may be taken in another order.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    (dot,) = (
        e
        for e in equations(jax.make_jaxpr(lambda: product(on_gpu=True))())
        if e.primitive.name == "dot_general"
    )
    assert all(n % 8 == 0 for v in dot.invars for n in v.aval.shape if n < 64)
