"""The precisions in which the equations of both passes are evaluated."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from ..program import _tables as tables
from ..program._flat import Step
from ..program._jaxpr import (
    in_context_of,
    is_again,
    own_bind,
    with_jaxprs,
    with_products,
)
from ..program._lines import source_of
from ..program._products import KEPT_IN_HALF
from ..program._rebind import bodies_in
from ._products import backward_product, forward_product


class Precisions(NamedTuple):
    """The precisions of both passes.

    Products of the backward pass round their operands to half, if a cotangent is among what they
    are made of. A rule of the user's may evaluate a function again before it differentiates it, and
    decide by what it finds: that is done as in the forward pass.

    **Attributes:**

    - `algorithm`: the split product of the forward pass; `None` for the highest precision.
    - `half`: the dtype of what is kept, and of the operands of products in the backward pass.
    - `in_full`: equations of the backward pass, by their `id`, that are evaluated as those of the
        forward pass.
    """

    algorithm: str | None
    half: np.dtype
    in_full: Collection[int] = ()

    def forward(self, step: Step, operands: Sequence[Any]) -> list:
        """Evaluates an equation of the forward pass."""
        return _bound(step, self._forward(step.eqn), operands)

    def backward(
        self, step: Step, operands: Sequence[Any], moves: Sequence[bool]
    ) -> tuple[list, list[bool]]:
        """Evaluates an equation of the backward pass, given which operands depend on a cotangent.
        Also returns which results do."""
        eqn, moving = self._backward(step.eqn, moves)
        return _bound(step, eqn, operands), moving

    def again(self, step: Step, operands: Sequence[Any]) -> list:
        """Evaluates a product of the forward pass again. Its result is rounded, too, as it would be
        if it were kept."""
        eqn = backward_product(step.eqn, self.half)
        if eqn is step.eqn:
            return _bound(step, eqn, operands)
        with in_context_of(eqn):
            rounded = eqn.replace(params={**eqn.params, "out_dtype": self.half})
            (out,) = own_bind(rounded, operands)
            return [_overflow_as_nan(out).astype(eqn.params["out_dtype"])]

    def kept(self, x: Any, made: Step) -> Any:
        """Rounds an array that a step made."""
        with in_context_of(made.eqn), jax.named_scope(KEPT_IN_HALF):
            return lax.optimization_barrier(_overflow_as_nan(x.astype(self.half), x))

    def rounded(self, x: Any) -> Any:
        """Returns the values of an array as `kept` rounds them, but for numbers below float16's
        smallest normal one, which have more digits. So a sum of both is evaluated in one pass."""
        return lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(self.half).nmant)

    def _forward(self, eqn: JaxprEqn) -> JaxprEqn:
        return with_products(eqn, partial(forward_product, algorithm=self.algorithm))

    def _backward(self, eqn: JaxprEqn, moves: Sequence[bool]) -> tuple[JaxprEqn, list[bool]]:
        """Returns an equation of the backward pass with its products rounded, and which results
        depend on a cotangent, given which operands do."""
        moving = [any(moves)] * len(eqn.outvars)
        if not any(moves) or is_again(eqn) or id(eqn) in self.in_full:
            return self._forward(eqn), moving
        if eqn.primitive.name in tables.PRODUCTS:
            return backward_product(eqn, self.half), moving
        bodies = bodies_in(eqn)
        if not bodies:
            whole = lambda jaxpr: self._body(jaxpr, [True] * len(jaxpr.invars))[0]
            return with_jaxprs(eqn, whole), moving
        found: dict[int, Jaxpr] = {}
        made = [any(moves[: bodies[0][1]])] * len(eqn.outvars)
        for closed, start, carried in bodies:
            inner, results = self._loop(closed.jaxpr, moves[start:], carried)
            found[id(closed.jaxpr)] = inner
            made = [a or b for a, b in zip(made, results, strict=True)]
        # What tells whether a loop goes on is evaluated as in the forward pass.
        forward = lambda x: x.replace(eqns=list(map(self._forward, x.eqns)))
        return with_jaxprs(eqn, lambda x: found.get(id(x)) or forward(x)), made

    def _loop(
        self, jaxpr: Jaxpr, moves: Sequence[bool], carried: range
    ) -> tuple[Jaxpr, list[bool]]:
        """Returns a body as `_body` does, with what it carries from step to step."""
        moves = list(moves)
        while True:
            inner, results = self._body(jaxpr, moves)
            more = [i for i, result in zip(carried, results, strict=False) if result > moves[i]]
            if not more:
                return inner, results
            for i in more:
                moves[i] = True

    def _body(self, jaxpr: Jaxpr, moves: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
        moving = {x for x, moves in zip(jaxpr.invars, moves, strict=True) if moves}
        moves_of = lambda atoms: [isinstance(x, Var) and x in moving for x in atoms]
        eqns = []
        for eqn in jaxpr.eqns:
            inner, results = self._backward(eqn, moves_of(eqn.invars))
            eqns.append(inner)
            moving.update(x for x, moves in zip(eqn.outvars, results, strict=True) if moves)
        return jaxpr.replace(eqns=eqns), moves_of(jaxpr.outvars)


def _bound(step: Step, eqn: JaxprEqn, operands: Sequence[Any]) -> list:
    with in_context_of(step.eqn, source_of(step.eqn, step.calls)):
        return own_bind(eqn, operands)


def _overflow_as_nan(half: Any, unrounded: Any = None) -> Any:
    """Returns values in half with NaN in place of each that overflowed, so that it is seen. Without
    the `unrounded` values, an infinity counts as one. bfloat16 has the range of float32."""
    if half.dtype != np.float16:
        return half
    if unrounded is None:
        lost = ~lax.is_finite(half)
    else:
        lost = lax.is_finite(unrounded) & ~lax.is_finite(half)
    return lax.select(lost, lax.full_like(half, jnp.nan), half)
