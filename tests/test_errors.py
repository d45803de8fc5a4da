"""Misuse raises while it is traced, with a message that names the call and the mend.

Each case is a name, a call, the exception, and what its message must say.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("unchecked_annotations")

W, X = jnp.ones(2), jnp.ones((4, 2))
KEY = jax.random.key(0)
SGD = optax.sgd(0.1)

TRANSFORMATIONS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "calculate_scaled_grad": mpx.calculate_scaled_grad,
    "filter_accumulated_value_and_grad": lambda func, scaling, *args, **kwargs: (
        mpx.filter_accumulated_value_and_grad(func, scaling, 2, *args, **kwargs)
    ),
}


def kind(x) -> str:
    """An id that is the same in every process."""
    return str(x)[:20] if isinstance(x, int | float | str) else type(x).__name__


def scaler(**kwargs):
    return mpx.DynamicLossScaling(2.0, **kwargs)


def total(w, *rest, **kwargs):
    return jnp.sum(w)


class Case(NamedTuple):
    name: str
    call: Any
    error: type[Exception]
    says: tuple[str, ...]


def raises(case: Case, call) -> None:
    with pytest.raises(case.error) as caught:
        call()
    # Not a subclass, which JAX would have raised somewhere below.
    assert type(caught.value) is case.error
    message = str(caught.value)
    for part in case.says:
        assert part in message, message


def parametrize(*cases):
    cases = [Case(*case) for case in cases]
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


# --- Losses --------------------------------------------------------------------------------------


LOSSES = parametrize(
    ("a vector", lambda w: w, TypeError, ("real floating-point scalar", "(2,)", "mean")),
    ("a list", lambda w: [jnp.sum(w)], TypeError, ("scalar loss", "list")),
    ("nothing", lambda w: None, TypeError, ("scalar loss", "NoneType")),
    ("text", lambda w: "text", TypeError, ("scalar loss", "str")),
    ("an integer array", lambda w: jnp.array(3), TypeError, ("real floating-point", "int32")),
    ("a bool", lambda w: jnp.any(w > 0), TypeError, ("real floating-point", "bool")),
    ("a Python integer", lambda w: 3, TypeError, ("scalar loss", "int")),
    (
        "a complex number",
        lambda w: jnp.sum(jax.lax.complex(*[w.astype(jnp.float32)] * 2)),
        TypeError,
        ("real floating-point", "complex64"),
    ),
    (
        "a tuple",
        lambda w: (jnp.sum(w), w),
        TypeError,
        ("scalar loss", "tuple", "pass `has_aux=True`"),
    ),
)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "full"])
@pytest.mark.parametrize("transform", list(TRANSFORMATIONS))
@LOSSES
def test_losses(case, transform, mixed):
    case = case._replace(says=(f"`{transform}`", *case.says))
    call = TRANSFORMATIONS[transform](case.call, scaler(), use_mixed_precision=mixed)
    raises(case, lambda: call(W))
    raises(case, lambda: eqx.filter_jit(call)(W))


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "full"])
@pytest.mark.parametrize("transform", [*TRANSFORMATIONS, "scaled"])
@parametrize(
    ("no aux", jnp.sum, TypeError, ("returns `(loss, aux)`", "Array", "leave `has_aux` out")),
    ("a list", lambda w: [jnp.sum(w), w], TypeError, ("returns `(loss, aux)`", "list")),
    ("three", lambda w: (jnp.sum(w), w, w), TypeError, ("returns `(loss, aux)`", "tuple")),
)
def test_has_aux_without_aux(case, transform, mixed):
    if transform == "scaled":
        call = mpx.scaled(case.call, scaler(), has_aux=True)
    else:
        options = {"has_aux": True, "use_mixed_precision": mixed}
        call = TRANSFORMATIONS[transform](case.call, scaler(), **options)
    says = tuple(part for part in case.says if part != "Array")
    case = case._replace(says=(f"`{transform}`", *says))
    raises(case, lambda: call(W))
    raises(case, lambda: eqx.filter_jit(call)(W))


@pytest.mark.parametrize("transform", list(TRANSFORMATIONS))
def test_a_vector_loss_with_aux(transform):
    call = TRANSFORMATIONS[transform](lambda w: (w, None), scaler(), has_aux=True)
    with pytest.raises(TypeError, match=rf"`{transform}` needs .* real floating-point scalar"):
        call(W)


# --- Arguments of the transformations ------------------------------------------------------------


@pytest.mark.parametrize("transform", list(TRANSFORMATIONS))
@parametrize(
    (
        "a number as scaling",
        lambda t: t(total, 2.0**15),
        TypeError,
        ("`scaling`", "DynamicLossScaling()", "float"),
    ),
    (
        "None as scaling",
        lambda t: t(total, None),
        TypeError,
        ("`scaling`", "NoOpLossScaling()", "NoneType"),
    ),
    (
        "a class as scaling",
        lambda t: t(total, mpx.DynamicLossScaling),
        TypeError,
        ("`scaling`", "DynamicLossScaling()"),
    ),
    ("no function", lambda t: t(3, scaler()), TypeError, ("loss function first", "3")),
    (
        "what it takes in another order",
        lambda t: t(scaler(), total),
        TypeError,
        ("loss function first", "but got a `DynamicLossScaling`."),
    ),
    (
        "an unknown policy",
        lambda t: t(total, scaler(), policy="compute=float17"),
        ValueError,
        ("policy 'compute=float17'", '"params=float32,compute=bfloat16,output=float32"'),
    ),
    (
        "an empty policy",
        lambda t: t(total, scaler(), policy=""),
        ValueError,
        ("policy ''", "params=float32"),
    ),
    (
        "a dtype as policy",
        lambda t: t(total, scaler(), policy=jnp.float16),
        TypeError,
        ("`policy`", "jmp.Policy", "float16"),
    ),
    ("no model", lambda t: t(total, scaler())(), TypeError, ("first positional", "model first")),
    (
        "the model by name",
        lambda t: t(total, scaler())(w=W),
        TypeError,
        ("first positional", "model first"),
    ),
)
def test_transformations(case, transform):
    case = case._replace(says=(f"`{transform}`", *case.says))
    make = TRANSFORMATIONS[transform]
    raises(case, lambda: case.call(make))
    raises(case, lambda: jax.jit(lambda: case.call(make))())


@pytest.mark.parametrize("transform", list(TRANSFORMATIONS))
@pytest.mark.parametrize(
    ("keep_full", "error", "says"),
    [
        ((False, True, True), ValueError, "prefix of its 2 positional"),
        ((False,), ValueError, "prefix of its 2 positional"),
        ([False, True], ValueError, "such as (False, True)"),
        (None, ValueError, "one bool for all"),
        ((False, {"x": True}), ValueError, "prefix"),
        ("points", TypeError, "takes bools"),
        (1, TypeError, "takes bools"),
        ((False, jnp.bool_), TypeError, "takes bools"),
    ],
    ids=str,
)
def test_keep_full(transform, keep_full, error, says):
    call = TRANSFORMATIONS[transform](total, scaler(), keep_full=keep_full)
    case = Case("", None, error, (f"`{transform}`", "`keep_full`", says))
    raises(case, lambda: call(W, X))
    raises(case, lambda: eqx.filter_jit(call)(W, X))


def test_an_error_in_the_loss_is_not_taken_for_a_bad_keep_full():
    def loss(w):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine"):
        mpx.filter_grad(loss, scaler())(W)


def accumulate(*args, in_axes: Any = 0, n: Any = 2):
    func = mpx.filter_accumulated_value_and_grad(total, scaler(), n, in_axes=in_axes)
    return func(W, *args)


@parametrize(
    ("no micro-batch", lambda: accumulate(X, n=0), ValueError, ("`micro_batches`", "0")),
    ("a float", lambda: accumulate(X, n=2.0), ValueError, ("positive integer", "2.0")),
    (
        "micro-batches left out",
        lambda: mpx.filter_accumulated_value_and_grad(total, scaler(), None),
        ValueError,
        ("positive integer", "`micro_batches`", "None"),
    ),
    (
        "a batch that does not divide",
        lambda: accumulate({"x": X}, n=3),
        ValueError,
        ("[0]['x']", "3 micro-batches", "4 entries along axis 0", "multiple", "`in_axes`"),
    ),
    (
        "a raw key",
        lambda: accumulate(X, jax.random.PRNGKey(0), n=4),
        ValueError,
        ("[1]", "2 entries", "`None` in `in_axes`"),
    ),
    (
        "an axis that is not there",
        lambda: accumulate(X, in_axes=2),
        ValueError,
        ("`in_axes`", "axis 2", "(4, 2)"),
    ),
    (
        "an axis that is no integer",
        lambda: accumulate(X, in_axes="x"),
        ValueError,
        ("`in_axes`", "axis 'x'", "(4, 2)"),
    ),
    (
        "axes that do not fit",
        lambda: accumulate(X, X, in_axes=(0, 0, None)),
        ValueError,
        ("`in_axes`", "prefix of the 2 positional", "(0, 0, None)"),
    ),
)
def test_accumulation(case):
    case = case._replace(says=("`filter_accumulated_value_and_grad`", *case.says))
    raises(case, case.call)
    raises(case, lambda: jax.jit(case.call)())


# --- Scalers -------------------------------------------------------------------------------------


NO_SCALES = [0, 0.0, -1.0, np.nan, np.inf, -np.inf, 1e39, 10**400, 1e-39, None, "2", 1j]
NO_SCALES += [
    jnp.zeros(()),
    jnp.ones(2),
    np.ones(1),
    [1.0],
    jnp.float16(np.inf),
    np.complex64(1),
    KEY,
]


@pytest.mark.parametrize("wrong", NO_SCALES, ids=kind)
@pytest.mark.parametrize(
    ("call", "names"),
    [
        (mpx.DynamicLossScaling, ["loss_scaling", "min_loss_scaling", "factor", "period"]),
        (mpx.DynamicLossScaling, ["max_loss_scaling"]),
        (mpx.StaticLossScaling, ["loss_scaling"]),
    ],
    ids=["DynamicLossScaling", "maximum", "StaticLossScaling"],
)
def test_scales(call, names, wrong):
    if names == ["max_loss_scaling"] and wrong is None:
        return  # its default
    for name in names:
        check_scale(call, name, wrong)


def check_scale(call, name, wrong):
    with pytest.raises(ValueError, match=rf"`{call.__name__}` needs .* `{name}`, but got"):
        call(**{name: wrong})


@parametrize(
    ("2.5 as period", {"period": 2.5}, ValueError, ("integer", "`period`", "2.5")),
    ("1/2 as period", {"period": 0.5}, ValueError, ("integer", "`period`", "0.5")),
    ("a period beyond int32", {"period": 2**31}, ValueError, ("integer", "`period`")),
    ("1 as factor", {"factor": 1}, ValueError, ("power of two above 1", "`factor`", "Use 2")),
    ("1/2 as factor", {"factor": 0.5}, ValueError, ("power of two above 1", "0.5")),
    ("3 as factor", {"factor": 3}, ValueError, ("power of two above 1", "3")),
    ("1.5 as factor", {"factor": 1.5}, ValueError, ("power of two above 1", "1.5")),
    (
        "a scale below its minimum",
        {"loss_scaling": 0.25, "min_loss_scaling": 1},
        ValueError,
        ("between `min_loss_scaling`", "0.25"),
    ),
    (
        "a scale above its maximum",
        {"loss_scaling": 8, "max_loss_scaling": 4},
        ValueError,
        ("`max_loss_scaling` (4", "8"),
    ),
    ("a vector as counter", {"counter": np.zeros(2)}, ValueError, ("scalar", "`counter`")),
)
def test_dynamic_scalers(case):
    case = case._replace(says=("`DynamicLossScaling`", *case.says))
    raises(case, lambda: mpx.DynamicLossScaling(**case.call))
    raises(case, lambda: jax.jit(lambda: mpx.DynamicLossScaling(**case.call))())


@pytest.mark.parametrize("name", ["min_loss_scaling", "max_loss_scaling", "factor", "period"])
def test_traced_static_fields(name):
    with pytest.raises(ValueError, match=rf"`DynamicLossScaling` .*`{name}`.* outside of `jit`"):
        jax.jit(lambda x: mpx.DynamicLossScaling(**{name: x}))(2.0)


@pytest.mark.parametrize(
    "wrong", [W, 1j, True, jnp.array(KEY)], ids=["vector", "complex", "bool", "key"]
)
@pytest.mark.parametrize("call", [mpx.DynamicLossScaling, mpx.StaticLossScaling])
def test_traced_scales(call, wrong):
    with pytest.raises(ValueError, match=rf"`{call.__name__}` needs .* `loss_scaling`"):
        jax.jit(call)(wrong)


NO_FLAGS = [None, 1, 1.0, "yes", jnp.ones(()), jnp.array([True]), np.array([True, False]), W]


@pytest.mark.parametrize("wrong", NO_FLAGS, ids=kind)
@parametrize(
    ("DynamicLossScaling.adjust", lambda f: scaler().adjust(f), TypeError, ("`grads_finite`",)),
    (
        "StaticLossScaling.adjust",
        lambda f: mpx.StaticLossScaling(2.0).adjust(f),
        TypeError,
        ("`grads_finite`",),
    ),
    (
        "NoOpLossScaling.adjust",
        lambda f: mpx.NoOpLossScaling().adjust(f),
        TypeError,
        ("`grads_finite`",),
    ),
    (
        "optimizer_update",
        lambda f: mpx.optimizer_update(W, SGD, SGD.init(W), W, f),
        TypeError,
        ("`grads_finite`",),
    ),
    ("select_tree", lambda f: mpx.select_tree(f, W, W), TypeError, ("`pred`",)),
)
def test_flags(case, wrong):
    case = case._replace(says=(f"`{case.name}`", "scalar bool", "all_finite", *case.says))
    raises(case, lambda: case.call(wrong))
    raises(case, lambda: eqx.filter_jit(case.call)(wrong))


@pytest.mark.parametrize("wrong", [None, 2.0**15, mpx.DynamicLossScaling], ids=kind)
def test_scaled_without_a_scaler(wrong):
    with pytest.raises(TypeError, match=r"`scaled` needs a loss scaling as `scaling`"):
        mpx.scaled(jnp.sum, wrong)


# --- Casts ---------------------------------------------------------------------------------------


NO_DTYPES = ["float17", "int32", jnp.complex64, bool, "key<fry>", object(), KEY.dtype, W]


@pytest.mark.parametrize("wrong", NO_DTYPES, ids=kind)
@parametrize(
    ("cast_tree", lambda d: mpx.cast_tree(W, d), ValueError, ()),
    ("cast_function", lambda d: mpx.cast_function(jnp.sin, d), ValueError, ()),
    ("cast_function", lambda d: mpx.cast_function(jnp.sin, "float16", d), ValueError, ()),
    ("force_full_precision", lambda d: mpx.force_full_precision(jnp.sin, d), ValueError, ()),
)
def test_dtypes(case, wrong):
    case = case._replace(says=(f"`{case.name}`", "floating-point dtype such as jnp.float16"))
    raises(case, lambda: case.call(wrong))
    raises(case, lambda: jax.jit(lambda: case.call(wrong))())


@pytest.mark.parametrize("call", [mpx.cast_tree, mpx.cast_function])
def test_no_dtype(call):
    """NumPy takes `None` for float64."""
    with pytest.raises(ValueError, match=rf"`{call.__name__}` needs a floating-point dtype"):
        call(jnp.tanh, None)


@parametrize(
    ("cast_function", lambda: mpx.cast_function(W, "float16"), TypeError, ("a function",)),
    ("force_full_precision", lambda: mpx.force_full_precision(3), TypeError, ("a function", "3")),
    ("FullPrecision", lambda: mpx.FullPrecision(None), TypeError, ("callable layer", "None")),
)
def test_what_cannot_be_called(case):
    case = case._replace(says=(f"`{case.name}`", *case.says))
    raises(case, case.call)


# --- Trees and optimizer steps -------------------------------------------------------------------


MODEL = {"w": W, "b": jnp.ones(3), "n": jnp.arange(2), "f": jnp.tanh}
PARAMS = eqx.filter(MODEL, eqx.is_inexact_array)
STATE = SGD.init(PARAMS)


def update(grads, model=MODEL, optimizer=SGD):
    return mpx.optimizer_update(model, optimizer, STATE, grads, jnp.array(True))


@parametrize(
    (
        "a leaf is missing",
        lambda: update({**PARAMS, "b": None}),
        ValueError,
        ("`grads`", "`model`", "same structure", "['b']"),
    ),
    (
        "a leaf too many",
        lambda: update({**PARAMS, "n": jnp.ones(2)}),
        ValueError,
        ("same structure", "['n']"),
    ),
    (
        "another container",
        lambda: update(list(PARAMS.values())),
        ValueError,
        ("same structure", "['w']"),
    ),
    (
        "the same paths in other classes",
        lambda: mpx.optimizer_update((W,), SGD, SGD.init((W,)), [W], True),
        ValueError,
        ("same structure", "PyTreeDef((*,))", "PyTreeDef([*])"),
    ),
    (
        "all of the tuple that `filter_grad` returns",
        lambda: update((scaler(), True, PARAMS)),
        ValueError,
        ("same structure",),
    ),
    (
        "another shape",
        lambda: update({**PARAMS, "b": jnp.ones((3, 1))}),
        ValueError,
        ("['b']", "(3, 1)", "(3,)", "gradients of this model"),
    ),
    (
        "the model as optimizer",
        lambda: mpx.optimizer_update(
            SGD, eqx.nn.MLP(2, 2, 2, 2, key=jax.random.key(0)), W, W, True
        ),
        TypeError,
        ("`optimizer`", "but got a `MLP`."),
    ),
    (
        "no optimizer",
        lambda: update(PARAMS, optimizer=None),
        TypeError,
        ("optax.adam(1e-3)", "`optimizer`", "None"),
    ),
    (
        "the maker of an optimizer",
        lambda: update(PARAMS, optimizer=optax.adam),
        TypeError,
        ("optax.adam(1e-3)", "`optimizer`", "function adam"),
    ),
)
def test_optimizer_updates(case):
    case = case._replace(says=("`optimizer_update`", *case.says))
    raises(case, case.call)
    raises(case, lambda: jax.jit(lambda: [x for x in [case.call()] if x is None])())


@parametrize(
    (
        "structures",
        lambda: mpx.select_tree(True, {"a": W}, {"b": W}),
        ValueError,
        ("same structure", "['a'], ['b']"),
    ),
    (
        "shapes",
        lambda: mpx.select_tree(True, {"a": W}, {"a": X}),
        ValueError,
        ("['a']", "same shape", "float32[2]", "float32[4,2]"),
    ),
    (
        "dtypes",
        lambda: mpx.select_tree(True, [W], [W.astype(jnp.float16)]),
        ValueError,
        ("[0]", "dtype", "float32[2]", "float16[2]"),
    ),
    (
        "a single leaf",
        lambda: mpx.select_tree(True, W, X),
        ValueError,
        ("the root", "float32[2]", "float32[4,2]"),
    ),
)
def test_selections(case):
    case = case._replace(says=("`select_tree`", *case.says))
    raises(case, case.call)
    raises(case, lambda: jax.jit(case.call)())
