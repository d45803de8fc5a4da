"""Entry points of the engine: a function with a plan, for derivatives at a point; a whole loss."""

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

from .._cast import convert, widen
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
    """A record of how an equation that depends on the point was evaluated.

    **Attributes:**

    - `primitive`, `line`: its primitive and its source line.
    - `rule`: the rule for its derivatives; `"nested"` if there is none.
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
    closed: ClosedJaxpr,
    rules: Rules,
    scales: Callable,
    note: list[Equation] | None,
    lost: dict[Index, Array],
) -> Evaluator:
    """Builds the evaluator of a program: as the surrounding loss asks, else from its own arrays."""
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
    # Masters in float64 may be narrowed; a program that asks for float64 keeps it.
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
    """Evaluates a function at a point, together with the derivatives of a plan.

    The function is traced once. Its equations are then evaluated on the value and its streams
    together (see `_rules.py`).

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
            return widen(jnp.asarray(out)), {}, lost
        out = evaluator.above.storage.loaded(out, closed.out_avals[0].dtype)
        shape = out.primal.shape
        full = {k: jnp.broadcast_to(x, plan.shape(k, shape)) for k, x in out.streams.items()}
    return jnp.asarray(out.primal), full, lost


class InForward(eqx.Module):
    """A function whose values are computed in one precision and whose derivatives in half.

    The function is traced and cut into layers, like a network whose derivatives are propagated, but
    without streams. A layer is evaluated in full, and what enters it is kept in half. Its
    derivative is the derivative of the half layer at the kept values. [`mpx_pde.partials`][] inside
    the function do the same by themselves.

    The floating-point arrays of the first argument are masters, which enter products as they are.
    Everything computed from the other arguments alone is data. Data is evaluated once, in full, and
    rounded where a product with the model takes it.

    **Attributes:**

    - `fun`: the loss.
    - `forward`: the two precisions.
    - `kept`: the paths in `(fun, args, kwargs)` of arrays that stay in full. A product with one of
        them is taken in full precision, in the backward pass too.
    """

    fun: Any
    forward: Forward = eqx.field(static=True)
    kept: frozenset = eqx.field(static=True, default=frozenset())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        narrow, wide = np.dtype(np.float32), forward.registers
        program = self.fun, args, kwargs
        wider = wide != narrow
        # The program is traced in the dtype it is evaluated in, with its constants and callees.
        given: Any = jtu.tree_map_with_path(_in_float64, program) if wider else program
        told = (TypeError, ValueError) if wider else ()
        noted = noting(_NAMES_FLOAT32, *told, about="float64")
        with forward_in(forward), precision_of_user(), noted:
            closed, leaves, assemble = trace_arrays(*given)
        storage = Storage(narrow, forward.dtype, narrows=wider)
        full = Storage(wide), Product(algorithm=forward.algorithm)
        evaluator = Evaluator(Rules(Plan(())), storage, Product(masters=True), full=full)
        # Leaves of the first argument.
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


def _leaving(x: Any, aval: Any, wide: np.dtype) -> Any:
    """Returns a result in the dtype of the program, or in float64 if that was asked for."""
    x = jnp.asarray(primal_of(x))
    if not jnp.issubdtype(x.dtype, jnp.floating) or (wide.itemsize > 4 and x.dtype == wide):
        return x
    return x.astype(aval.dtype)
