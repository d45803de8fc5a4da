"""Tests what a gradient in mixed precision does with the arguments of a loss, with its auxiliary
output and its name, and what it tells of arguments that do not fit."""

import contextlib
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np
import pytest
from gradients import TRANSFORMATIONS, batch, mlp, mse
from helpers import HALVES, assert_tells, avals, policy, relative, scaler, tree_equal_bits

import mpx_pde as mpx


# --- Arguments that the function receives --------------------------------------------------------


def seen_by(func=None):
    """Returns a loss that records the dtypes of its arguments, and the record."""
    seen = {}

    def loss(*args, **kwargs):
        for path, leaf in jtu.tree_leaves_with_path((args, kwargs)):
            seen[jtu.keystr(path)] = str(leaf.dtype) if eqx.is_array(leaf) else leaf
        floats = [x for x in jtu.tree_leaves((args, kwargs)) if eqx.is_inexact_array(x)]
        return sum(jnp.sum(x.astype(jnp.float32)) for x in floats)

    return loss, seen


def test_all_arguments_are_cast_but_full_precision_layers_and_states():
    loss, seen = seen_by()
    state, key = eqx.nn.State(eqx.nn.StateIndex(jnp.ones(2))), jax.random.key(0)
    layer = mpx.FullPrecision(eqx.nn.Linear(2, 2, key=key))
    model = {"w": jnp.ones(2), "n": jnp.arange(2), "l": layer, "state": state}
    given = {"c": jnp.ones(2, jnp.bfloat16), "extra": state}
    _, _, grads = mpx.filter_grad(loss, scaler(4))(model, [np.ones(2), 3, 1.5], key, **given)
    want = {"[0][0]['n']": "int32", "[0][1][1]": 3, "[0][1][2]": 1.5, "[0][2]": str(key.dtype)}
    want |= dict.fromkeys(("[0][0]['w']", "[0][1][0]", "[1]['c']"), "float16")
    assert seen == dict.fromkeys(seen, "float32") | want
    assert len(seen) == len(want) + 4  # two of the layer, and two states
    assert grads["l"].module.weight.dtype == jnp.float32


KEEP_FULL = {
    "everything": (True, ["w", "b", "x", "t", "points", "c"]),
    "an argument": ((False, False, True), ["points"]),
    "leaves": (({"w": True, "b": False}, {"x": False, "t": True}, False), ["w", "t"]),
    "a leaf": (({"w": False, "b": True}, False, False), ["b"]),
}


@pytest.mark.parametrize("case", list(KEEP_FULL))
def test_keep_full_is_a_prefix_of_the_arguments(case):
    keep_full, kept = KEEP_FULL[case]
    loss, seen = seen_by()
    model, batch = {"w": jnp.ones(2), "b": jnp.ones(2)}, {"x": jnp.ones(2), "t": jnp.ones(2)}
    gradient = mpx.filter_grad(loss, scaler(4), keep_full=keep_full)
    _, finite, grads = gradient(model, batch, jnp.array([1.0, 70000.0]), c=jnp.ones(2))
    names = {x: f"[0][{i}]['{x}']" for i, x in ((0, "w"), (0, "b"), (1, "x"), (1, "t"))}
    names |= {"points": "[0][2]", "c": "[1]['c']"}
    want = {path: "float32" if name in kept else "float16" for name, path in names.items()}
    assert seen == want
    assert finite == ("points" in kept)  # 70000 makes the loss infinite in half
    assert tree_equal_bits(grads, {"w": jnp.ones(2), "b": jnp.ones(2)})


@pytest.mark.parametrize(
    ("string", "top"), [("p=f32,c=bf16,o=f32", 16), ("params=full,compute=half,output=full", 15)]
)
def test_a_policy_and_its_string_are_the_same(string, top):
    x, loss = jnp.array([1.0 + 2.0**-9, 3.0]), lambda w: jnp.sum(w * w)

    @jax.jit
    def step(x):
        run = lambda p: mpx.filter_value_and_grad(loss, scaler(15, period=1), policy=p)(x)
        return run(string), run(jmp.get_policy(string)), run(policy("float32"))

    by_string, by_policy, full = step(x * 2.0**-10)
    assert tree_equal_bits(by_string, by_policy)
    assert not tree_equal_bits(by_string, full)
    # The cap of the scale is that of the policy.
    assert by_string[1].loss_scaling == 2.0**top


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_have_the_dtypes_of_the_masters(dtype):
    x = jnp.array([0.5, 2.0])
    model = {"w": jnp.ones(2, dtype), "np": np.ones(2, np.float32)}
    model |= {"n": jnp.arange(2), "f": jnp.tanh}

    loss = lambda model, x: jnp.sum((model["w"] + model["np"]) * x)
    _, finite, grads = mpx.filter_grad(loss, scaler(4))(model, x)
    assert finite
    want = {"w": x.astype(dtype), "np": x, "n": None, "f": None}
    assert tree_equal_bits(grads, want)


# --- Auxiliary output, methods, names ------------------------------------------------------------


@pytest.mark.parametrize("output", [None, "bfloat16"])
def test_aux_comes_back_in_the_output_dtype(output):
    state = eqx.nn.State(eqx.nn.StateIndex(jnp.ones(2)))
    layer = mpx.FullPrecision(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    others = {"n": jnp.arange(2), "z": jnp.array([1j]), "key": jax.random.key(0), "none": None}
    others |= {"state": state, "layer": layer, "static": (3, 1.5, "text", jnp.tanh)}

    def loss(w, x):
        aux = {"half": [w * x], "full": x.astype(jnp.float32), "flag": x[0] > 0, **others}
        return jnp.sum(w * x), aux

    given = output and policy("float16", output)
    run = mpx.filter_value_and_grad(loss, scaler(4), has_aux=True, policy=given)
    x = jnp.array([0.5, 2.0])
    (value, aux), _, _, grads = run(jnp.ones(2), x)
    assert tree_equal_bits((value, grads), (jnp.float32(2.5), x))
    dtype = jnp.dtype(output or "float32")
    assert tree_equal_bits(aux["half"], [x.astype(dtype)])
    assert tree_equal_bits(aux["full"], x.astype(dtype))
    dtypes = {"n": jnp.int32, "z": jnp.complex64, "flag": jnp.bool_, "key": jax.random.key(0).dtype}
    assert {name: aux[name].dtype for name in dtypes} == dtypes
    assert avals((aux["state"], aux["layer"])) == avals((state, layer))
    assert (aux["none"], aux["static"]) == (None, (3, 1.5, "text", jnp.tanh))


# New states computed from the old one and a batch, and results that only look like states.
STATES = {
    "average": (lambda s, x: {"mean": 0.999 * s["mean"] + 0.001 * jnp.mean(x, 0)}, True),
    "inside": (lambda s, x: [{"mean": s["mean"] + jnp.mean(x, 0)}, x], True),
    "as it came": (lambda s, x: s, False),
    "of the batch alone": (lambda s, x: {"mean": jnp.mean(x, 0)}, False),
    "of another shape": (lambda s, x: {"mean": s["mean"][None] * x}, False),
    "a number": (lambda s, x: {"mean": 1}, False),
    "of another name": (lambda s, x: {"sum": s["mean"] + 1}, False),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_rounded_at_each_step_is_told(name):
    new, told = STATES[name]
    given = jnp.ones(()), {"mean": jnp.full(3, 1.2)}, jnp.ones((4, 3))

    def loss(w, state, x):
        return jnp.sum(w * x.astype(w.dtype)), new(state, x.astype(state["mean"].dtype))

    def run(**options):
        return eqx.filter_jit(mpx.filter_grad(loss, scaler(4), has_aux=True, **options))(*given)

    message = r"argument 1 \(dict\).*`keep_full=\(False, True, True\)`"
    expected = pytest.warns(mpx.PrecisionWarning, match=message)
    with expected if told else contextlib.nullcontext():
        run(keep_full=(False, False, True))
    for options in ({"keep_full": (False, True, False)}, {"autocast": True}):
        run(**options)


def documented(model, /, x, *args, gain: float = 1.0, **kwargs):
    """A loss."""


CASTS = [lambda fun, _: mpx.cast_function(fun, "float16")]
CASTS += [lambda fun, _: mpx.force_full_precision(fun), lambda fun, _: mpx.autocast(fun)]


@pytest.mark.parametrize("wrap", TRANSFORMATIONS + CASTS)
def test_name_docstring_and_signature(wrap):
    out = wrap(documented, scaler(4))
    assert out.__name__ == out.__qualname__ == "documented"
    assert (out.__doc__, out.__module__) == ("A loss.", __name__)
    assert out.__wrapped__ is documented
    assert inspect.signature(out) == inspect.signature(documented)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMATIONS[1:])
def test_keywords_of_any_name_reach_the_function(transform, mixed):
    names = ("self", "model", "func", "args", "rest", "gradient", "tree", "x")

    def loss(w, /, **kwargs):
        assert set(kwargs) == set(names)
        return jnp.sum(w)

    call, other = (transform(loss, scaler(4), use_mixed_precision=mixed) for _ in range(2))
    assert call != other  # by identity, as functions: scalings hold arrays
    grads = call(jnp.ones(2), **{name: jnp.ones(2) for name in names})[-1]
    factor = 16 if transform is mpx.calculate_scaled_grad and mixed else 1
    assert tree_equal_bits(grads.astype(jnp.float32), jnp.full(2, 1.0 * factor))


# --- Arguments that do not fit ------------------------------------------------------------------


def test_a_model_that_is_passed_second_is_told():
    model, (x, y) = mlp(), batch()
    fit = lambda model, x, y: mse(model, (x, y))
    gradient = mpx.filter_value_and_grad(fit, mpx.DynamicLossScaling())
    with pytest.raises(TypeError) as caught:
        gradient(x, model, y)
    assert any("If the model is another one, pass it first" in n for n in caught.value.__notes__)
    # The gradient with respect to an input, of a function that fails on its own.
    with pytest.raises(TypeError) as caught:
        gradient(x, jnp.ones(3), y)
    assert not any("pass it first" in note for note in getattr(caught.value, "__notes__", ()))


ON_THIRD = """moved = lambda given, a, b, *rest: loss(a, b, given, *rest)
    mpx_pde.{}(moved, scaling, ...)(c, a, b, *rest)"""
ON_TWO = """moved = lambda given, b, *rest: loss(given[0], b, given[1], *rest)
    mpx_pde.{}(moved, scaling, ...)((a, c), b, *rest)"""


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad", "calculate_scaled_grad"])
@pytest.mark.parametrize(("argnums", "code"), [(2, ON_THIRD), ((0, 2), ON_TWO)])
def test_argnums_are_refused_with_the_code_to_write(name, argnums, code):
    def loss(a, b, c, d):
        return jnp.sum(a * b) + jnp.sum(c**2 * d)

    args = [jnp.array([1.0, 2.0]) * (i + 1) for i in range(4)]
    with pytest.raises(TypeError, match="takes no `argnums`") as caught:
        getattr(mpx, name)(loss, scaler(2), argnums=argnums)
    lines = str(caught.value).splitlines()[1:3]
    assert "\n".join(lines).strip() == code.format(name)
    # The code works.
    assigned, call = (line.strip() for line in lines)
    names = {"loss": loss, "mpx_pde": mpx, "scaling": scaler(2)}
    names |= dict(zip(("a", "b", "c"), args, strict=False)) | {"rest": args[3:]}
    exec(assigned, names)
    grads = eval(call.replace(", ...", ""), names)[-1]
    scale = 4 if name == "calculate_scaled_grad" else 1
    want = jax.grad(loss, argnums)(*args)
    assert tree_equal_bits(jtu.tree_map(lambda g: g.astype(jnp.float32) / scale, grads), want)
    # The first argument is what it differentiates anyway.
    assert relative(mpx.filter_grad(loss, scaler(2), argnums=0)(*args)[2], args[1]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*takes no derivative:mpx_pde.PrecisionWarning")
@pytest.mark.parametrize("kind", ["loss", "both"])
def test_the_scaling_of_an_ensemble_is_told(kind):
    scaling = scaler(4)
    if kind == "both":
        scaling = mpx.Scaling(scaling, mpx.DerivativeScaling.per_direction("x"))
    loss = lambda w, x, derivatives=None: jnp.sum(w * x)
    step = lambda w, scaling: mpx.filter_grad(loss, scaling)(w, jnp.ones(2))[0]
    scalings = jax.vmap(step, (0, None))(jnp.ones((3, 2)), scaling)
    with pytest.raises(ValueError, match=r"`(loss\.)?loss_scaling` has shape \(3,\).*vmap"):
        step(jnp.ones(2), scalings)
    # The suggestions work.
    jax.vmap(step)(jnp.ones((3, 2)), scalings)
    step(jnp.ones(2), jax.tree.map(lambda x: x[0], scalings))


def _gradient_step(residual, model, points):
    loss = lambda model, points: jnp.mean(jax.vmap(residual, (None, 0))(model, points) ** 2)
    mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling())(model, points)


def _second_order_step(residual, model, points):
    optimizer = mpx.LevenbergMarquardt(residual)
    optimizer.update(model, optimizer.init(model), points)


@pytest.mark.parametrize("step", [_gradient_step, _second_order_step])
def test_a_term_that_was_not_asked_for_is_told(step):
    def residual(model, point):
        d = mpx.partials(model, "u_xx", coords="xy", outputs="u")(point)
        return d["u_xx"] + d["u"]

    def notes(residual, key):
        with pytest.raises(KeyError, match=key) as caught:
            step(residual, model, jnp.ones((4, 2)))
        return [n for n in getattr(caught.value, "__notes__", ()) if "`mpx_pde.partials`" in n]

    model = eqx.nn.MLP(2, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
    [note] = notes(residual, "u")
    assert_tells(note, "If 'u' is a term, name it", '`partials(model, [..., "u"], ...)`')
    assert notes(lambda model, point: {"a b": model(point)}["no term"], "no term") == []
