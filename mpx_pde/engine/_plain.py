"""A whole loss, forward in one precision and backward in another."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._cast import convert
from .._dtypes import precision_of_user
from .._forward import Forward, forward_in
from .._notes import noting
from ..interpret._jaxpr import trace_arrays
from ._evaluate import Evaluator
from ._plan import Plan
from ._products import Product
from ._rules import Rules
from ._segments import Kinds
from ._streams import DATA, RAW, Jet, Storage, is_inexact, primal_of


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
