"""Tests that float32 products are true float32, also on hardware with a lower default."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import equations, in_float64, policy

import mpx_pde as mpx


MODEL = eqx.nn.MLP(2, "scalar", 64, 2, jnp.tanh, key=jax.random.key(0))
POINTS = jax.random.uniform(jax.random.key(1), (64, 2))
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def regression(model, points):
    return jnp.mean((jax.vmap(model)(points) - 1) ** 2)


def pde(model, points):
    d = jax.vmap(mpx.partials(model, ["u_xx", "u_y"], coords="xy", outputs="u"))(points)
    return jnp.mean((d["u_xx"] + d["u_y"]) ** 2)


def precisions(fun, *args):
    jaxpr = eqx.filter_make_jaxpr(fun)(*args)[0]
    return {e.params["precision"] for e in equations(jaxpr) if e.primitive.name == "dot_general"}


def lowered(fun, *args):
    """Returns the precisions that all products of a program ask a compiler for."""
    arrays, static = eqx.partition(args, eqx.is_array)
    run = lambda arrays: eqx.filter(fun(*eqx.combine(arrays, static)), eqx.is_array)
    text = jax.jit(run).lower(arrays).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    asked = [re.search(r"precision = \[(\w+), (\w+)]", line) for line in products]
    return {precision for found in asked for precision in found.groups()}


def full(loss):
    return lambda *args: mpx.filter_grad(loss, None, use_mixed_precision=False)(*args)[2]


def test_the_float32_baseline_asks_for_float32():
    assert lowered(eqx.filter_grad(regression), MODEL, POINTS) == {"DEFAULT"}  # TF32 on a GPU
    for loss in (regression, pde):
        assert lowered(full(loss), MODEL, POINTS) == {"HIGHEST"}
        accumulated = mpx.filter_accumulated_value_and_grad(loss, None, 2, False, False)
        assert lowered(accumulated, MODEL, POINTS) == {"HIGHEST"}


times = jax.custom_vjp(lambda x, y: x @ y)
times.defvjp(lambda x, y: (x @ y, (x, y)), lambda kept, c: (c @ kept[1].T, kept[0].T @ c))

SQUARE = jax.random.normal(jax.random.key(2), (4, 4))
OF_PARAMETERS = {
    "product": lambda w: w @ w,
    "loop": lambda w: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), w, length=2)[0],
    "rule of its own": lambda w: times(w, w),
    "solve": lambda w: jax.scipy.sparse.linalg.cg(lambda v: w.T @ (w @ v) + v, w[0])[0][None],
}


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_what_is_computed_of_parameters_alone_is_no_tf32(name):
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ OF_PARAMETERS[name](w).T) ** 2)
    options = {"forward": "float32", "policy": policy("bfloat16")}
    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)

    def asked(lines):
        return [line for line in lines if "dot_general" in line and "bf16" not in line]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpx.PrecisionWarning)  # almost nothing is half
        text = jax.jit(lambda w, x: gradient(w, x)[2]).lower(SQUARE, SQUARE).as_text()
    products = asked(text.splitlines())
    assert products
    assert all("HIGHEST, HIGHEST" in line for line in products)


def test_a_precision_that_the_user_sets_stays():
    with jax.default_matmul_precision("tensorfloat32"):
        assert precisions(full(regression), MODEL, POINTS) == {(jax.lax.Precision.HIGH,) * 2}


WAYS = {"cast": {}, "autocast": {"autocast": True}, "forward": {"forward": "float32"}}


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "setting"), [(regression, "highest"), (pde, "tensorfloat32")])
@pytest.mark.parametrize("way", WAYS)
def test_a_default_for_float32_is_no_wish_of_half_precision(way, loss, setting):
    """A float32 script may use `jax.config.update("jax_default_matmul_precision", "highest")`."""
    options = {"policy": policy("bfloat16"), "keep_full": (False, loss is pde), **WAYS[way]}
    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)

    def shares():
        report = mpx.precision_report(gradient)(MODEL, POINTS)
        return report.by_dtype()

    plain = shares()
    with jax.default_matmul_precision(setting):
        assert shares() == plain
    assert "bfloat16" in plain


def test_what_stays_float32_takes_the_default_that_was_set():
    readout = jax.named_scope("readout")(lambda w, x: x @ w)
    fun = mpx.autocast(lambda w, x: readout(w, jnp.tanh(x @ w)), "bfloat16", full="readout")
    square = jnp.ones((4, 4))
    assert precisions(fun, square, square) == {None}
    with jax.default_matmul_precision("highest"):
        assert precisions(fun, square, square) == {HIGHEST}


def test_a_precision_inside_of_the_program_is_its_wish():
    def careful(model, points):
        with jax.default_matmul_precision("highest"):
            return regression(model, points)

    for around in ("highest", "tensorfloat32"):
        for kept in (careful, mpx.force_full_precision(regression)):
            with jax.default_matmul_precision(around):
                report = mpx.precision_report(mpx.autocast(kept, "bfloat16"))(MODEL, POINTS)
            assert report.by_dtype().keys() == {"float32"}


def test_it_is_no_wish_of_the_program():
    """`autocast` and the engine do not cast products for which a program asks more precision."""
    cast = mpx.autocast(regression, "bfloat16")
    assert mpx.precision_report(full(cast))(MODEL, POINTS).by_dtype().keys() == {"bfloat16"}
    kept = mpx.autocast(mpx.force_full_precision(regression), "bfloat16")
    assert mpx.precision_report(full(kept))(MODEL, POINTS).by_dtype().keys() == {"float32"}


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize("setting", ["tensorfloat32", "TF32_TF32_F32"])
def test_tf32_in_derivative_terms_is_told(on_a_gpu, setting):
    def loss(model):
        return pde(model, POINTS)

    jax.eval_shape(lambda: loss(MODEL))  # by default the engine takes the highest precision
    told = pytest.warns(mpx.PrecisionWarning, match=r"`partials`: derivative terms .*TF32")
    with jax.default_matmul_precision(setting), told:
        jax.eval_shape(lambda: loss(MODEL))
    with jax.default_matmul_precision("highest"):
        jax.eval_shape(lambda: loss(MODEL))


def test_forward_in_tf32_tells_of_derivative_terms():
    step = mpx.filter_grad(pde, mpx.NoOpLossScaling(), forward="tensorfloat32")
    with pytest.warns(mpx.PrecisionWarning, match="derivative terms"):
        eqx.filter_eval_shape(step, MODEL, POINTS)
    with jax.enable_x64(True):  # float64 stays float64
        eqx.filter_eval_shape(step, *in_float64((MODEL, POINTS)))


def test_tf32_under_a_line_search_is_told(on_a_gpu):
    params = jnp.ones(3)
    optimizer = optax.lbfgs()
    value_fn = lambda p: jnp.sum(p**2)

    def update():
        state = optimizer.init(params)
        extra = {"value": value_fn(params), "grad": 2 * params, "value_fn": value_fn}
        return mpx.optimizer_update(params, optimizer, state, 2 * params, True, **extra)

    with pytest.warns(mpx.PrecisionWarning, match=r"`optimizer_update`: a line search .*TF32"):
        jax.eval_shape(update)
    with jax.default_matmul_precision("highest"):
        jax.eval_shape(update)
    adam = optax.adam(0.1)
    mpx.optimizer_update(params, adam, adam.init(params), params, True)


def test_terms_of_a_floor_are_in_true_float32():
    seen = []

    def loss(model, points):
        seen.append(jax.config.jax_default_matmul_precision)
        return regression(model, points)

    floor = mpx.precision_floor(loss, mpx.StaticLossScaling(1.0), forward="float32")
    floor(MODEL, POINTS)
    # The gradients of the batch and of its parts are traced with what the user has set.
    assert seen.count(None) == 2
