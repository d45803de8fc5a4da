"""The ways into the engine: a function and a plan, for derivatives at a point, and a whole loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._cast import convert
from .._dtypes import asked_of_context, is_half, precision_of_user
from .._forward import Forward, forward_in, present_forward
from .._notes import noting
from ..interpret import _tables as tables
from ..interpret._jaxpr import equations_in, trace_arrays
from ._evaluate import Evaluator
from ._plan import Index, Plan
from ._products import Product
from ._rules import Rules
from ._segments import Kinds
from ._streams import DATA, RAW, WITH_STREAMS, Jet, Storage, is_inexact, primal_of, tell


class Equation(NamedTuple):
    """Tells what became of an equation that depends on the point.

    **Attributes:**

    - `primitive`, `line`: what it is, and where.
    - `rule`: how its derivatives were taken; `"nested"` where there is no rule.
    - `precision`: what a product was multiplied in.
    """

    primitive: str
    line: str
    rule: str
    precision: str


def half_of(closed: ClosedJaxpr) -> np.dtype | None:
    """The half type that a program computes in, by its arrays and its mixed products."""

    for eqn in equations_in(closed):
        own = [eqn.params["dtype"]] if eqn.primitive.name in tables.MIXED else []
        avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars) if is_inexact(v.aval)]
        for dtype in filter(is_half, (*own, *(x.dtype for x in avals))):
            return np.dtype(dtype)
    return None


def _evaluator(
    closed: ClosedJaxpr,
    rules: Rules,
    scales: Callable,
    note: list[Equation] | None,
    lost: dict[Index, Array],
) -> Evaluator:
    """How a program is evaluated: as the loss around it says, else by its own arrays."""
    told: dict[str, Any] = {"caller": source_info_util.current()}
    if note is not None:
        told["note"] = lambda step, *how: note.append(Equation(step.name, *how))
    narrow = np.dtype(np.float32)
    forward, asked = present_forward(), asked_of_context()
    if forward is None and asked is not None and asked[0] == "autocast":
        forward = Forward("half", asked[1])
    if forward is not None and forward.inside:
        return Evaluator(rules, Storage(narrow), Product(open=True), **told)
    dtype = half_of(closed) if forward is None else forward.dtype
    scaled = {} if dtype is None else scales(dtype)
    # Of masters in float64 is asked less, of a program that says float64 it is not.
    storage = Storage(narrow, dtype, scaled, narrows=forward is not None)
    if forward is not None and forward.full:
        told["lost"] = partial(tell, lost)
        told["full"] = Storage(forward.registers), Product(algorithm=forward.algorithm)
    return Evaluator(rules, storage, Product(masters=forward is not None), **told)


def propagate(
    fun: Callable[[Array], Array],
    point: Array,
    plan: Plan,
    seeds: Sequence[Any],
    weights: Sequence[Sequence[Any]],
    scales: Callable[[np.dtype], Mapping[Index, tuple[Array, Array]]],
    note: list[Equation] | None = None,
) -> tuple[Array, dict[Index, Array], dict[Index, Array]]:
    """A function at a point, with the derivatives of a plan.

    The function is traced once, and its equations are evaluated on the value and its streams
    together (see `_rules.py`).

    **Arguments:**

    - `fun`: a function of one array that returns one array.
    - `point`: where, of any floating dtype.
    - `plan`: which derivatives; see [`make_plan`][].
    - `seeds`: for each direction of the plan a vector like `point`, or a matrix of several. Give
        those that are known as NumPy arrays: what vanishes by them is left out.
    - `weights`: for each sum the factors of its summands.
    - `scales`: the scales of stored streams, by the half type; see [`Storage`][].
    - `note`: a list to which every equation that depends on the point is added.

    **Returns:**

    The value; the streams that were asked for by their keys, in float32 or wider, of which those
    that vanish are missing; and, for every stream that is kept with a scale where the forward pass
    is in full, whether it did not fit in some layer.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        forward = present_forward()
        if forward is not None and forward.full:
            forward = forward._replace(inside=True)
        with precision_of_user(), forward_in(forward):
            closed = jax.make_jaxpr(fun)(point)
        rules, lost = Rules(plan, weights), dict[Index, Array]()
        evaluator = _evaluator(closed, rules, scales, note, lost)
        streams: dict[Index, Any] = {(i,): x for i, x in enumerate(seeds) if (i,) in plan.indices}
        for key in rules.weights:
            first = rules.gather(key, lambda i: [(1, seeds[i[0]])] if len(i) == 1 else ())
            if first is not None:
                streams[key] = first

        asked = {*plan.asked, *rules.weights}
        scope = nullcontext() if evaluator.full is None else jax.named_scope(WITH_STREAMS)
        with scope:
            (out,) = evaluator.program(closed, [Jet(point, streams, RAW)], asked)
        if not isinstance(out, Jet):
            return jnp.asarray(out), {}, lost
        out = evaluator.above.storage.loaded(out, closed.out_avals[0].dtype)
        shape = out.primal.shape
        full = {k: jnp.broadcast_to(x, plan.shape(k, shape)) for k, x in out.streams.items()}
    return jnp.asarray(out.primal), full, lost


class InForward(eqx.Module):
    """A function whose values are those of one precision, and whose derivatives are taken in half.

    It is traced, and cut into layers, as a network is whose derivatives are propagated, though with
    no streams: a layer is evaluated in full, what enters it is kept in half, and its derivative is
    that of the half layer there. [`mpx_pde.partials`][] on the way do the same by themselves. The
    floating-point arrays of the first argument are masters, which enter products as they are. What
    is computed of the others alone is data: evaluated once, in full, and rounded where a product
    with the model takes it.

    **Attributes:**

    - `fun`: the loss.
    - `forward`: the two precisions.
    - `kept`: the paths in `(fun, args, kwargs)` of arrays that stay in full: a product with one of
        them is one of full precision, backward too.
    """

    fun: Any
    forward: Forward = eqx.field(static=True)
    kept: frozenset = eqx.field(static=True, default=frozenset())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        narrow, wide = np.dtype(np.float32), forward.registers
        program = self.fun, args, kwargs
        wider = wide != narrow
        # The program is traced as wide as it is evaluated, its own numbers and what it calls too.
        given: Any = jtu.tree_map_with_path(_in_float64, program) if wider else program
        told = (TypeError, ValueError) if wider else ()
        noted = noting(_NAMES_FLOAT32, *told, about="float64")
        with forward_in(forward), precision_of_user(), noted:
            closed, leaves, assemble = trace_arrays(*given)
        storage = Storage(narrow, forward.dtype, narrows=wider)
        full = Storage(wide), Product(algorithm=forward.algorithm)
        evaluator = Evaluator(Rules(Plan(())), storage, Product(masters=True), full=full)
        # Places in the first of the arguments.
        params = {i for i, (path, _) in enumerate(leaves) if _place(path) == [1, 0]}
        kept = {i for i, (path, _) in enumerate(leaves) if tuple(path) in self.kept}
        inexact = {i for i, (_, x) in enumerate(leaves) if is_inexact(x)}
        halves, data = (inexact & params) - kept, inexact - params
        operands = [
            Jet(x, {}, RAW if i in kept else DATA) if i in data else x
            for i, (_, x) in enumerate(leaves)
        ]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            out = evaluator.program(closed, operands, operand_kinds=Kinds(halves, params))
        pairs = zip(out, closed.out_avals, strict=True)
        results = assemble([_leaving(x, aval, wide) for x, aval in pairs])
        return _states_as(program, results) if wider else results


def _place(path: tuple) -> list:
    return [getattr(k, "idx", getattr(k, "key", None)) for k in path[:2]]


_NAMES_FLOAT32 = (
    "`forward='float64'` evaluates this function with float64 in place of float32 arrays. Where it "
    "names float32, name the dtype of an array in its place, such as `x.dtype`."
)


def _in_float64(path: tuple, x: Any) -> Any:
    """Casts an array of float32 or of such complex numbers; derivative scales stay as they are."""
    single = eqx.is_inexact_array(x) and jnp.finfo(x.dtype).dtype == np.float32
    if not single or _place(path) == [2, "derivatives"]:
        return x
    return convert(x, np.promote_types(x.dtype, np.float64), getattr(x, "weak_type", False))


def _states_as(given: Any, out: Any) -> Any:
    """Returns results whose `eqx.nn.State` has the dtypes that it was given in, for the next
    step."""
    is_state = lambda x: isinstance(x, eqx.nn.State)
    before = {
        jtu.tree_structure(x): x for x in jtu.tree_leaves(given, is_leaf=is_state) if is_state(x)
    }

    def alike(x: Any) -> Any:
        old = before.get(jtu.tree_structure(x)) if is_state(x) else None
        return x if old is None else jtu.tree_map(lambda new, old: new.astype(old.dtype), x, old)

    return jtu.tree_map(alike, out, is_leaf=is_state)


def _leaving(x: Any, aval: Any, wide: np.dtype) -> Any:
    """A result in the dtype of the program, or in float64 where that was asked for."""
    x = jnp.asarray(primal_of(x))
    if not jnp.issubdtype(x.dtype, jnp.floating) or (wide.itemsize > 4 and x.dtype == wide):
        return x
    return x.astype(aval.dtype)
