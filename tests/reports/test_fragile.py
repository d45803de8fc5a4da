"""Tests that functions of JAX which fail in half precision are told, and that they do fail."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, line_here, relative
from jax import lax

import mpx_pde as mpx
from mpx_pde.reports._fragile import FRAGILE, fragile_calls
from mpx_pde.reports._survey import Survey


pytestmark = pytest.mark.usefixtures("standard_promotion")

LARGE = np.asarray([300.0, 416.0, 640.0, 1000.0], np.float32)  # exact in float16

# Functions of an array, with arguments where they fail, which half types hold exactly.
FAIL = {
    "asinh": (jnp.arcsinh, LARGE),
    "acosh": (jnp.arccosh, LARGE),
    "atan2": (lambda x: jnp.arctan2(x, 0.5 * x[::-1]), LARGE),
    "hypot": (lambda x: jnp.hypot(x, 0.5 * x[::-1]), LARGE),
    "geomspace": (lambda x: jnp.geomspace(x, x, 5), LARGE * np.float32(2.0**-124)),
    "sinc": (jnp.sinc, LARGE + np.float32(0.5)),
    "soft_sign": (jax.nn.soft_sign, LARGE),
    "betaln": (lambda x: jax.scipy.special.betaln(x, 0.5 * x[::-1]), LARGE),
    "standardize": (jax.nn.standardize, LARGE),
    "erfcx": (jax.scipy.special.erfcx, LARGE / 64),
    "bessel_i0e": (jax.scipy.special.i0e, LARGE / 16),
    "bessel_i1e": (jax.scipy.special.i1e, LARGE / 16),
    "rel_entr": (lambda x: jax.scipy.special.kl_div(x, 1.03125 * x), LARGE / 2**10),
    "igamma": (lambda x: jax.scipy.special.gammainc(lax.stop_gradient(x), x), LARGE / 4),
    "igammac": (lambda x: jax.scipy.special.gammaincc(lax.stop_gradient(x), x), LARGE / 4),
    "regularized_incomplete_beta": (
        lambda x: jax.scipy.special.betainc(*lax.stop_gradient((x, 1.25 * x)), x / 2048),
        LARGE,
    ),
    "hyp1f1": (lambda x: jax.scipy.special.hyp1f1(1.5, 2.5, x), -LARGE / 64),
}


# Functions that are in each other's derivative.
TOGETHER = {"bessel_i0e": ["bessel_i1e"], "bessel_i1e": ["bessel_i0e"]}


def told_of(run, *arguments):
    return fragile_calls(Survey(jax.make_jaxpr(run)(*arguments)))


def loss_of(f):
    return lambda x: jnp.sum(f(x).astype("float32") * jnp.arange(1.0, x.size + 1))


SLOW = {"betaln", "bessel_i0e", "bessel_i1e", "erfcx", "geomspace"}  # series
HALF = "float16"
SLOW |= {"igamma", "igammac", "regularized_incomplete_beta", "hyp1f1"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in FAIL]
)
def test_functions_that_fail_in_half_are_told_and_do_fail(name):
    f, x = FAIL[name]
    half = "bfloat16" if name == "geomspace" else "float16"
    run = jax.value_and_grad(loss_of(f))
    fails = name in FRAGILE  # in this version of JAX
    told = told_of(run, x.astype(half))
    assert {call.name for call in told} == ({name, *TOGETHER.get(name, ())} if fails else set())
    assert all("test_fragile.py:" in call.line for call in told)
    with jax.enable_x64(True):
        want = run(np.asarray(x, np.float64))
    errors = map(relative, run(jnp.asarray(x, half)), want)
    # 16 roundings are the tolerance of the sweep over JAX's functions.
    assert (max(errors) > 16 * float(jnp.finfo(half).eps) / 2) == fails
    assert told_of(run, x) == []


def test_a_gradient_warns_of_them_inside_of_loops_too():
    def loss(w, x):
        turned = lambda h, _: (jnp.arctan2(h, 1 + h * h), None)
        return jnp.mean((lax.scan(turned, x @ w, length=3)[0]).astype("float32") ** 2)

    given = jnp.ones((8, 8)), jnp.ones((4, 8))
    run = lambda **options: eqx.filter_jit(
        mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)
    )
    with pytest.warns(mpx.PrecisionWarning, match="`atan2`") as told:
        run()(*given)
    assert_tells(str(told[0].message), "float16", f"test_fragile.py:{line_here(-9)}", "256")
    assert_tells(str(told[0].message), "astype(jnp.float32)", "autocast=True", "forward='float32'")
    for mend in ({"autocast": True}, {"forward": "float32"}):
        run(**mend)(*given)  # warnings are errors


DRAW = {
    "normal": jax.random.normal,
    "truncated_normal": lambda key, *args: jax.random.truncated_normal(key, -5.0, 5.0, *args),
    "gumbel": jax.random.gumbel,
    "exponential": jax.random.exponential,
    "laplace": jax.random.laplace,
    "logistic": jax.random.logistic,
    "cauchy": jax.random.cauchy,
    "rayleigh": lambda key, shape, dtype: jax.random.rayleigh(
        key, jnp.ones((), dtype), shape, dtype
    ),
}


@pytest.mark.parametrize("name", DRAW)
def test_random_numbers_of_bfloat16_are_told_and_lack_the_rare_ones(name):
    key, draw = jax.random.key(0), lambda key, half: DRAW[name](key, (2**14,), half)
    assert [x.name for x in told_of(lambda key: draw(key, "bfloat16"), key)] == [name]
    tails = {
        dtype: np.quantile(
            np.asarray(draw(key, dtype)).astype(np.float64), [0.001, 0.999], method="nearest"
        )
        for dtype in ("float32", "bfloat16")
    }
    # 16 roundings, where different draws of float32 differ by a third of them.
    assert not relative(tails["bfloat16"], tails["float32"]) < 16 * 2.0**-8
    assert told_of(lambda key: draw(key, "float32").astype("bfloat16"), key) == []


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.normal(key, (8,), "float16"),
        lambda key: jax.random.uniform(key, (8,), "bfloat16"),
        lambda key: jax.random.bernoulli(key, jnp.full(8, 0.5, "bfloat16")),
        lambda key: jax.random.rademacher(key, (8,), "bfloat16"),
        lambda key: jax.nn.sigmoid(jnp.ones(8, "bfloat16")),  # its primitive is called `logistic`
        jax.jit(lambda key: jnp.ones(8, "bfloat16")),
    ],
)
def test_other_random_numbers_are_not_told(draw):
    assert told_of(draw, jax.random.key(0)) == []


@pytest.mark.parametrize(("half", "most"), [("float16", 2**10), ("bfloat16", 2**7)])
def test_a_choice_by_many_half_probabilities_is_told_and_draws_few(half, most):
    def chosen(key, p):
        return jax.random.choice(key, len(p), (2**15,), p=p / jnp.sum(p))

    key, p = jax.random.key(0), jnp.ones(3000)
    assert {x.name for x in told_of(chosen, key, p.astype(half))} == {"searchsorted"}
    assert len(np.unique(chosen(key, p.astype(half)))) <= most
    assert len(np.unique(chosen(key, p))) > 2900
    assert told_of(chosen, key, p) == told_of(chosen, key, p[:100].astype(half)) == []


def test_a_table_of_many_half_nodes_is_told_and_is_off():
    table = jnp.linspace(0, 1, 3000)
    f = lambda x, nodes: jnp.interp(x, nodes, jnp.sin(1000 * nodes))
    x = jnp.linspace(0.6, 0.9, 64)
    assert "searchsorted" in {t.name for t in told_of(f, x.astype(HALF), table.astype(HALF))}
    assert relative(f(x.astype(HALF), table.astype(HALF)), f(x, table)) > 0.1


def test_a_function_of_the_user_is_not_told_for_its_name():
    @jax.jit
    def normal(x):
        return x / 2

    assert told_of(normal, jnp.ones(8, "bfloat16")) == []


# Losses of rows of logits, with a long product of factors near 1.
SURVIVAL = {
    "cumprod": lambda h: jnp.mean(jnp.cumprod(1 - h, axis=1)),
    "its reverse": lambda h: jnp.mean(lax.cumprod(1 - h, 1, reverse=True)),
    "scan": lambda h: jnp.mean(lax.scan(lambda c, h: (c * (1 - h), c), 1 + 0 * h[:, 0], h.T)[1]),
    "known factors": lambda h: jnp.mean(h * jnp.cumprod(jnp.full(len(h.T), 0.994, h.dtype))),
    "known factors in a loop": lambda h: jnp.mean(
        lax.scan(lambda c, h: (c * jnp.asarray(0.994, c.dtype), c * h), 1 + 0 * h[:, 0], h.T)[1]
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if "known" in x else x for x in SURVIVAL]
)
def test_long_products_of_factors_are_told_and_fail(name):
    f = lambda x: SURVIVAL[name](jnp.full((1, 300), 0.0067, x.dtype) * x)
    run = jax.jit(jax.grad(lambda x: f(x).astype("float32")))
    x = jnp.ones((), "bfloat16")
    told = told_of(run, x)
    assert {call.name for call in told} == {"factors"}
    assert "test_fragile.py:" in told[0].line
    with jax.enable_x64(True):
        want = run(np.ones(()))
    # Numbers of bfloat16 below 1 are 2^-8 apart.
    assert relative(run(x), want) > 16 * 2.0**-8
    assert told_of(run, jnp.ones(())) == []


@pytest.mark.parametrize(
    "right",
    [
        lambda x: jnp.cumprod(1 - x[:128]),
        lambda x: x * jnp.cumprod((x > 0).astype(x.dtype)),
        lambda x: x * jnp.cumprod(1 - jnp.where(x > 0, 1.0, 0.0).astype(x.dtype)[::-1])[::-1],
        lambda x: x * jnp.cumprod(jnp.full(512, 0.75, x.dtype)),
        lambda x: lax.scan(lambda c, h: (c * h, c), x[0], (x > 0).astype(x.dtype))[1],
        lambda x: lax.scan(lambda c, h: (c / 2, c * h), x[0], x)[1],
        lambda x: lax.scan(lambda c, h: (jnp.tanh(c) * h, c), x[0], x)[1],
        lambda x: jnp.prod(1 - x),
    ],
)
def test_other_products_of_factors_are_not_told(right):
    run = jax.grad(lambda x: jnp.sum(right(x)).astype("float32"))
    assert told_of(run, jnp.ones(512, "bfloat16")) == []


def centered(x):
    return x - jnp.mean(x, -1, keepdims=True)


# Functions of rows with means of about 30 and deviations of about 0.3.
COVARIANCES = {
    "variance": lambda x: jnp.mean(x**2, -1) - jnp.mean(x, -1) ** 2,
    "variance of what is computed twice": lambda x: (
        jnp.mean(jnp.square(2 * x), -1) - jnp.mean(2 * x, -1) ** 2
    ),
    "covariance by sums": lambda x: (
        (x * x[::-1]).sum(-1) / x.shape[-1] - x.sum(-1) * x[::-1].sum(-1) / x.shape[-1] ** 2
    ),
    "standardize": lambda x: jax.nn.standardize(x, epsilon=1e-3),
}


@pytest.mark.parametrize("name", COVARIANCES)
def test_covariances_as_differences_of_means_are_told_and_fail(name):
    f, x = COVARIANCES[name], 30 + jax.random.uniform(jax.random.key(0), (4, 16))
    x = x.astype("bfloat16")  # exact from here on
    assert [call.name for call in told_of(f, x)] == ["covariance"]
    with jax.enable_x64(True):
        want = f(np.asarray(x, np.float64))
    # Squares of 30 have units of 4 in bfloat16, the variance is 1/12.
    assert relative(f(x), want) > 0.5
    assert told_of(f, x.astype("float32")) == []


def squares(x):
    return jnp.sum(x * x, -1)


# Squared distances of all pairs of rows.
DISTANCES = {
    "sums first": lambda x, y: squares(x)[:, None] + squares(y)[None] - 2 * (x @ y.T),
    "product first": lambda x, y: -2 * (x @ y.T) + squares(x)[:, None] + squares(y),
    "product between": lambda x, y: squares(x)[:, None] - x @ y.T * 2 + jnp.sum(y**2, -1),
    "of one array": lambda x, _: squares(x)[:, None] + squares(x) - 2 * jnp.matmul(x, x.T),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_as_differences_of_products_are_told_and_fail(name):
    f, x = DISTANCES[name], 3 + 0.1 * jax.random.uniform(jax.random.key(0), (4, 16))
    x, y = x.astype("float16"), x[::-1].astype("float16")  # exact from here on
    (told,) = told_of(f, x, y)
    assert_tells(str(told), "test_fragile.py:", "|x|² + |y|² - 2 x·y", "float16", "(x - y)**2")
    with jax.enable_x64(True):
        want = f(*(np.asarray(z, np.float64) for z in (x, y)))
    # Sums of squares are 150, with units of 1/8, and squared distances about 1/50.
    assert relative(f(x, y), want) > 0.5
    assert told_of(f, *(z.astype("float32") for z in (x, y))) == []


def test_autocast_warns_of_distances_unless_their_product_takes_what_is_half():
    kernel = lambda x: jnp.sum(jnp.exp(-50 * DISTANCES["of one array"](x, None)) * jnp.arange(4.0))
    losses = {
        "rounded for the product": lambda x, w: kernel(x * w),
        "rounded before": lambda x, w: kernel(x @ jnp.diag(w)),
    }
    x, w = 3 + 0.1 * jax.random.uniform(jax.random.key(0), (4, 16)), jnp.full(16, 0.9)
    for name, loss in losses.items():
        half = eqx.filter_jit(mpx.filter_grad(loss, mpx.NoOpLossScaling(), autocast=True))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            *_, got = half(x, w)
        found = [str(x.message) for x in told if "x·y" in str(x.message)]
        with jax.enable_x64(True):
            want = jax.grad(loss)(*(np.asarray(z, np.float64) for z in (x, w)))
        # Rounding x itself moves the gradient by 5 %, because a distance is a thirtieth of x.
        if name == "rounded before":
            assert not found
            assert relative(got, want) < 0.1
        else:
            assert_tells(found[0], "test_fragile.py:", "or pass `forward='float32'`.")
            assert relative(got, want) > 0.5


@pytest.mark.parametrize(
    "right",
    [
        lambda x: jnp.var(x, -1),
        lambda x: jnp.mean(centered(x) ** 2, -1),
        lambda x: jnp.mean(x**2, -1) - x[:, 0] ** 2,
        lambda x: jnp.mean(x**2, -1) - jnp.mean(x, -1),
        lambda x: jnp.mean(x**2) - jnp.mean(x[0]) * jnp.mean(x[1]),
        lambda x: jnp.sum((x[:, None] - x) ** 2, -1),
        lambda x: jnp.sum(x**2) + jnp.sum(x**4) - x @ x.T,
        lambda x: squares(x)[:, None] + x @ x.T,
    ],
)
def test_other_differences_are_not_told(right):
    assert told_of(right, jnp.ones((4, 16), "bfloat16")) == []


def batch_norm(x):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        x.shape[1], "batch", channelwise_affine=False, mode="batch", dtype=x.dtype
    )
    return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[0]


# Norms whose variance leaves the range of float16, or whose root does.
NORMS = {
    "by `jnp.var`": lambda x: centered(x) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-3),
    "by squares": lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)),
    "by a norm": lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-3),
    "BatchNorm": batch_norm,
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_float16_are_told_and_fail(name):
    f, x = NORMS[name], 500 * jax.random.normal(jax.random.key(0), (4, 16))
    x = x.astype("float16")
    assert {call.name for call in told_of(f, x)} == {"normalization"}
    with jax.enable_x64(True):
        want = np.asarray(f(np.asarray(x, np.float64)))
    assert np.count_nonzero(f(x)) < x.size / 4
    assert np.all(want != 0)
    assert told_of(f, x.astype("float32")) == told_of(f, x.astype("bfloat16")) == []


def test_norms_of_equinox_in_float32_are_not_told():
    x = jnp.ones((4, 16), "float16")
    norms = eqx.nn.LayerNorm(16), eqx.nn.RMSNorm(16), eqx.nn.GroupNorm(4, 16)
    for norm in norms:
        assert told_of(jax.vmap(mpx.cast_tree(norm, "float16")), x) == []


@pytest.mark.parametrize(
    ("solver", "half"),
    [
        pytest.param("cg", "float16", marks=pytest.mark.slow),
        pytest.param("cg", "bfloat16", marks=pytest.mark.slow),
        pytest.param("bicgstab", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_iterative_solvers_are_told_and_fail(solver, half):
    x = jax.random.normal(jax.random.key(5), (24, 30))

    def loss(factor, x):
        matrix = x @ x.T * factor + jnp.eye(24, dtype=x.dtype)
        solved, _ = getattr(jax.scipy.sparse.linalg, solver)(lambda v: matrix @ v, x[:, 0])
        return jnp.sum(solved.astype("float32") ** 2)

    run = jax.grad(loss)
    given = jnp.ones((), half), x.astype(half)
    told = told_of(run, *given)
    assert {call.name for call in told} == {"iterations"}
    assert "solves a linear system by iterations in " + half in str(told[0])
    with jax.enable_x64(True):
        want = run(*(np.asarray(x, np.float64) for x in given))
    # Rounding these arrays changes the gradient by at most 1.3e-3 and 1.2e-2. The solvers are
    # off by 2 % and more, in float16 by all of it.
    assert relative(run(*given), want) > 0.02
    assert told_of(run, jnp.ones(()), x) == []


@pytest.mark.parametrize("solver", ["CG", "Diagonal"])
def test_iterative_solvers_of_lineax_are_told(solver):
    lx = pytest.importorskip("lineax")
    tolerances = {"rtol": 1e-3, "atol": 1e-3} if solver == "CG" else {}

    def loss(d):
        matrix = lx.MatrixLinearOperator(
            jnp.diag(d), (lx.diagonal_tag, lx.positive_semidefinite_tag)
        )
        solved = lx.linear_solve(matrix, jnp.ones_like(d), getattr(lx, solver)(**tolerances))
        return jnp.sum(solved.value.astype("float32"))

    told = told_of(jax.grad(loss), jnp.arange(1.0, 5.0).astype("float16"))
    assert [x.name for x in told] == (["iterations"] if solver == "CG" else [])
