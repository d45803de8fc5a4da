"""Entry points of the engine: a function with a plan, for derivatives at a point; a whole loss."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._util._notes import noting
from ..precision._cast import convert, widen
from ..precision._dtypes import asked_of_context, is_half, precision_of_user
from ..precision._forward import Forward, forward_in, in_full_forward, present_forward
from ..program import _tables as tables
from ..program._flat import Step, evaluated, flatten
from ..program._jaxpr import (
    aval_of,
    equations_in,
    is_container,
    own_bind,
    size_of,
    trace_arrays,
)
from ._backward import value_and_pullback
from ._custom import custom_in_compute_dtype, own_in_compute_dtype
from ._derivatives import Derivatives, Scaled
from ._facts import DATA, MASTER, Fact
from ._precisions import Precisions
from ._signs import Numbers
from ._storage import RAW, Staged, Storage, typed
from ._stream_products import Product
from .taylor._algebra import Algebra
from .taylor._jets import Jet, is_inexact
from .taylor._plan import Index, Plan
from .taylor._rules import Rules


class Equation(NamedTuple):
    """A record of how an equation that depends on the point was evaluated.

    **Attributes:**

    - `primitive`, `line`: its primitive and its source line.
    - `rule`: the rule for its derivatives; `"nested"` if there is none, `"nested_elementwise"` for
        a function of one variable without a closed form.
    - `precision`: the precision that a product was multiplied in.
    """

    primitive: str
    line: str
    rule: str
    precision: str


def half_of(closed: ClosedJaxpr) -> np.dtype | None:
    """Returns the half type of a program, judging by its arrays and its mixed products."""

    for eqn in equations_in(closed):
        own = [eqn.params["dtype"]] if eqn.primitive.name in tables.MIXED else []
        avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars) if is_inexact(v.aval)]
        for dtype in filter(is_half, (*own, *(x.dtype for x in avals))):
            return np.dtype(dtype)
    return None


def _evaluator(
    closed: ClosedJaxpr, rules: Rules, scales: Callable, note: list[Equation] | None
) -> Derivatives:
    """Builds the evaluator of a program: as the surrounding loss asks, else from its own arrays."""
    options: dict[str, Any] = {"caller": source_info_util.current()}
    if note is not None:
        options["note"] = lambda step, *how: note.append(Equation(step.name, *how))
    narrow = np.dtype(np.float32)
    forward, asked = present_forward(), asked_of_context()
    if forward is None and asked is not None and asked[0] == "autocast":
        forward = Forward("half", asked[1])
    if forward is not None and forward.full:
        # The loss around these derivatives decides about their products and what is kept.
        storage, product, along = Storage(narrow), Product(open=True), scales(forward.dtype)
        if along:
            options["scaled"] = Scaled(along, forward.dtype)
        return Derivatives(rules, storage, product, **options)
    dtype = half_of(closed) if forward is None else forward.dtype
    scaled = {} if dtype is None else scales(dtype)
    # Masters in float64 may be narrowed; a program that asks for float64 keeps it.
    storage = Storage(narrow, dtype, scaled, narrows=forward is not None)
    return Derivatives(rules, storage, Product(masters=forward is not None), **options)


def propagate(
    fun: Callable[[Array], Array],
    point: Array,
    plan: Plan,
    seeds: Sequence[Any],
    weights: Sequence[Sequence[Any]],
    scales: Callable[[np.dtype], Mapping[Index, tuple[Array, Array]]],
    note: list[Equation] | None = None,
) -> tuple[Array, dict[Index, Array], dict[Index, Array]]:
    """Evaluates a function at a point, together with the derivatives of a plan.

    The function is traced once. Its equations are then evaluated on the value and its streams
    together (see `taylor/_rules.py`).

    **Arguments:**

    - `fun`: a function of one array that returns one array.
    - `point`: the point, of any floating dtype.
    - `plan`: the derivatives to compute; see [`make_plan`][].
    - `seeds`: for each direction of the plan, a vector shaped like `point`, or a matrix of several.
        Pass known seeds as NumPy arrays, so that terms that vanish are left out.
    - `weights`: for each sum, the factors of its summands.
    - `scales`: a function from the half type to the scales of stored streams; see [`Storage`][].
    - `note`: a list to which every equation that depends on the point is added.

    **Returns:**

    The value; a dictionary of the requested streams by their keys, in float32 or wider, without
    those that vanish; and a dictionary that says, for every stream kept with a scale under a full
    forward pass, whether it overflowed in some layer.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with precision_of_user():
            closed = jax.make_jaxpr(fun)(point)
        algebra = Algebra(plan, weights)
        rules = Rules(algebra, custom_in_compute_dtype, summed=not in_full_forward())
        evaluator = _evaluator(closed, rules, scales, note)
        overflows: dict[Index, Array] = {}
        streams: dict[Index, Any] = {(i,): x for i, x in enumerate(seeds) if (i,) in plan.indices}
        if (scaled := evaluator.scaled) is not None:
            overflows, streams = scaled.overflows, scaled.seeds(streams)
            algebra = Algebra(plan, scaled.weights(plan, weights))
            rules = dataclasses.replace(rules, algebra=algebra)
            evaluator = dataclasses.replace(evaluator, rules=rules)
        for key in algebra.weights:
            first = algebra.gather(key, lambda i: [(1, seeds[i[0]])] if len(i) == 1 else ())
            if first is not None:
                streams[key] = first

        asked = {*plan.asked, *algebra.weights}
        (out,) = evaluator.program(closed, [Staged(Jet(point, streams), RAW)], asked)
        if not isinstance(out, Staged):
            return widen(jnp.asarray(out)), {}, overflows
        out = evaluator.storage.loaded(out.jet, closed.out_avals[0].dtype)
        if evaluator.scaled is not None:
            out = evaluator.scaled.leaving(out)
        shape = out.primal.shape
        full = {k: jnp.broadcast_to(x, plan.shape(k, shape)) for k, x in out.streams.items()}
    return jnp.asarray(out.primal), full, overflows


class InForward(eqx.Module):
    """A function that is traced in the precision of a forward pass. [`linearized`][] evaluates and
    differentiates it.

    **Attributes:**

    - `fun`: the loss.
    - `forward`: the two precisions.
    """

    fun: Any
    forward: Forward = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        program = self.fun, args, kwargs
        if self.forward.precision != "float64":
            with forward_in(self.forward):
                return self.fun(*args, **kwargs)
        # The program is traced in the dtype it is evaluated in, with its constants and callees.
        fun, args, kwargs = jtu.tree_map_with_path(_in_float64, program)
        noted = noting(_NAMES_FLOAT32, TypeError, ValueError, about="float64")
        with forward_in(self.forward), noted:
            closed, leaves, assemble = trace_arrays(fun, args, kwargs)
        flat = flatten(closed, forward_mode=False)
        out = evaluated(flat, [x for _, x in leaves], _bind_in_float64)
        return _states_as(program, assemble(out))


_FLOAT64 = Storage(np.dtype(np.float64))


def _bind_in_float64(step: Step, args: list[Any]) -> list:
    """Binds an equation to float64 operands. A cast to float32 leaves values as they are."""
    eqn = step.eqn
    cast = eqn.primitive.name in tables.CASTS
    if cast and (args[0].dtype, eqn.params["new_dtype"]) == (np.float64, np.float32):
        return args
    pairs = zip(args, eqn.invars, strict=True)
    alike = all(getattr(x, "dtype", None) == aval_of(v).dtype for x, v in pairs)
    if alike or is_container(eqn):
        return own_bind(eqn, typed(eqn, args))
    return own_in_compute_dtype(eqn, args, _FLOAT64)


def linearized(
    fun: Callable[..., Any],
    forward: Forward,
    model: Any,
    *others: Any,
    held: Collection[int] = (),
) -> tuple[Any, Callable[[Any], Any]]:
    """Evaluates `fun(model, *others)`, with products in the precision of `forward`, and returns
    what it returns and a pullback.

    `fun` returns an array or several, and auxiliary values. The pullback takes cotangents of the
    former, and returns the gradient of the floating-point arrays of `model`, with `None` in place
    of its other leaves. It multiplies in half. See `_backward.py` for what is kept in between.

    **Arguments:**

    - `held`: the arrays of `model` and `others`, by their `id`, that stay in full. What is made of
        such arrays alone is kept as it is, and products with them are in full in both passes.
    """
    moving, static = eqx.partition(model, eqx.is_inexact_array)
    fixed, rest = eqx.partition((static, others), eqx.is_array)
    plain: Any = None

    def run(moving, fixed):
        nonlocal plain
        static, others = eqx.combine(fixed, rest)
        arrays, plain = eqx.partition(fun(eqx.combine(moving, static), *others), eqx.is_array)
        return arrays

    width = lambda x: Numbers(width=size_of(jax.typeof(x)))
    fact = lambda level, x: Fact(level, full=id(x) in held, numbers=width(x))
    facts = [fact(MASTER, x) for x in jtu.tree_leaves(moving)]
    facts += [fact(DATA, x) for x in jtu.tree_leaves(fixed)]
    by = Precisions(forward.algorithm, forward.dtype)
    out, pullback, aux = value_and_pullback(run, moving, fixed, by, facts, precision_of_user())
    return eqx.combine((out, aux), plain), pullback


def _place(path: tuple) -> list:
    return [getattr(k, "idx", getattr(k, "key", None)) for k in path[:2]]


_NAMES_FLOAT32 = (
    "`forward='float64'` evaluates this function with float64 in place of float32 arrays. Where it "
    "names float32, name the dtype of an array in its place, such as `x.dtype`."
)


def _in_float64(path: tuple, x: Any) -> Any:
    """Casts a float32 or complex64 array to float64 or complex128, but not derivative scales."""
    single = eqx.is_inexact_array(x) and jnp.finfo(x.dtype).dtype == np.float32
    if not single or _place(path) == [2, "derivatives"]:
        return x
    return convert(x, np.promote_types(x.dtype, np.float64), getattr(x, "weak_type", False))


def _states_as(given: Any, out: Any) -> Any:
    """Returns the results with every `eqx.nn.State` cast back to the dtypes it had as an argument,
    so that the next step can take it."""
    is_state = lambda x: isinstance(x, eqx.nn.State)
    before = {
        jtu.tree_structure(x): x for x in jtu.tree_leaves(given, is_leaf=is_state) if is_state(x)
    }

    def alike(x: Any) -> Any:
        old = before.get(jtu.tree_structure(x)) if is_state(x) else None
        return x if old is None else jtu.tree_map(lambda new, old: new.astype(old.dtype), x, old)

    return jtu.tree_map(alike, out, is_leaf=is_state)
