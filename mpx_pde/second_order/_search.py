"""Tries steps with growing damping until one lowers the loss."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int32

from ..engine import make_plan, propagate
from ._gram import Reflector
from ._residuals import Linearized


CLOSE = {"float32": 1e-4, "float64": 1e-9}
"""The share of the quadratic model's decrease that a solve for a step or its acceleration may
leave. With 1e-6 and a float64 residual, 120 steps with a float32 Jacobian for two solitons were
rejected 50 times and ended at 1.5 times the error of a float64 Jacobian (rejected 24 times). With
1e-9 they end at its error. With 1e-3 for accelerations alone, twelve late steps for the
Klein–Gordon equation gained a quarter of their gain with 1e-9. In float32 a millionth is below
rounding."""

TRIES = 4
"""The number of growing dampings that an update tries before it rejects the step and its points."""

Solve = Callable[[Array, Array], tuple[Array, Int32[Array, ""]]]
"""Solves `(Jᵀ J + damping) x = s`, where `s` is `Jᵀ b`. Takes `b` and `s`, and returns `x` and the
number of iterations."""


@runtime_checkable
class System(Protocol):
    """A linear system for the steps from one model, summed over the examples once and factorized
    for each damping.

    **Attributes:**

    - `squares`: the squared norms of the columns of the Jacobian.
    """

    @property
    def squares(self) -> Float[Array, " parameters"]: ...

    def factored(self, damping: Float[Array, ""]) -> Solve: ...

    def next_leading(self) -> Reflector | None:
        """Returns the directions of the largest singular values, for the next step."""
        ...


class Damping(eqx.Module):
    """Nielsen's rule for the damping, between two bounds."""

    least: float = eqx.field(static=True)
    most: float = eqx.field(static=True)

    def after(
        self, state: Any, take: Bool[Array, ""], moves: Bool[Array, ""], ratio: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the next damping, and the factor on it if the step after is not taken. `ratio` is
        the decrease of the loss relative to the predicted one. If `moves` is false, there is no
        step or it changes nothing, so both are kept."""
        shrink = jnp.maximum(1 / 3, 1 - (2 * jnp.clip(ratio, 0.0, 1.0) - 1) ** 3)
        growth = jnp.where(moves, state.growth, 1.0)
        damping = state.damping * jnp.where(take, shrink, growth)
        faster = jnp.where(growth > 1, 2.0, 1.0) * state.growth
        damping = jnp.clip(damping, self.least, self.most)
        # Doubled without a bound, the factor would become infinite.
        return damping, jnp.where(take, 2.0, jnp.minimum(faster, 2.0**60))


@dataclasses.dataclass(frozen=True)
class Search:
    """The tries of one update.

    **Attributes:**

    - `evaluated`, `finite`: whether all residuals are finite, and the Jacobian too.
    - `r`, `g`: the residuals and `Jᵀ r`, or zeros if something is not finite.
    - `size`: what dampings are relative to, the largest entry of `system.squares`.
    """

    at: Linearized
    system: System
    rule: Damping
    acceleration: float
    loss: Float[Array, ""]
    evaluated: Bool[Array, ""]
    finite: Bool[Array, ""]
    size: Float[Array, ""]
    r: Float[Array, " rows"]
    g: Float[Array, " parameters"]

    @classmethod
    def begun(cls, at: Linearized, system: System, rule: Damping, acceleration: float) -> "Search":
        evaluated = jnp.all(jnp.isfinite(at.r))
        finite = evaluated & jnp.all(jnp.isfinite(system.squares))
        loss = jnp.where(evaluated, jnp.sum(at.r**2), jnp.inf)
        r = jnp.where(finite, at.r, 0.0)
        tiny = jnp.finfo(system.squares.dtype).tiny
        size = jnp.maximum(jnp.max(system.squares), tiny)
        return cls(at, system, rule, acceleration, loss, evaluated, finite, size, r, at.pull(r))

    def __call__(self, state: Any) -> tuple[Any, Float[Array, " parameters"]]:
        """Returns the state after the first step that lowers the loss, or after the last try, and
        the step."""
        most = state.rejected + jnp.where(self.finite, TRIES, 1)
        going = lambda carry: ~carry[0].taken & (carry[0].rejected < most)
        begun = state, jnp.zeros_like(self.at.start)
        return lax.while_loop(going, lambda carry: self._tried(carry[0]), begun)

    def _tried(self, last: Any) -> tuple[Any, Float[Array, " parameters"]]:
        at = self.at
        damping = last.damping * self.size.astype(at.start.dtype)
        delta, predicted, iterations = self._step(self.system.factored(damping))
        # Rounding along the leading directions would move parameters that no residual depends on.
        unused = (self.system.squares == 0) & (self.g == 0)
        delta = jnp.where(unused, 0.0, delta)
        new = jnp.sum(at.values(at.start + delta) ** 2)
        there = ravel_pytree(at.parameters(at.start + delta))[0]
        moves = self.finite & jnp.any(there != at.theta)
        take = moves & jnp.isfinite(new) & (new < self.loss) & jnp.all(jnp.isfinite(delta))
        # A step that is not taken has no decrease, and `loss` may be infinite.
        gained = jnp.where(take, self.loss, 1.0) - jnp.where(take, new, 1.0)
        ratio = gained / jnp.maximum(predicted, jnp.finfo(at.start.dtype).tiny)
        next_damping, growth = self.rule.after(last, take, moves, ratio)
        one = take.astype(jnp.int32)
        after = dataclasses.replace(
            last,
            loss=jnp.where(take, new, self.loss),
            damping=next_damping,
            growth=growth,
            taken=take,
            steps=last.steps + one,
            rejected=last.rejected + 1 - one,
            iterations=jnp.maximum(last.iterations, iterations),
        )
        return jtu.tree_map(lambda x, y: x.astype(y.dtype), after, last), delta

    def _step(
        self, solve: Solve
    ) -> tuple[Float[Array, " parameters"], Float[Array, ""], Int32[Array, ""]]:
        """Returns a step, the decrease of the loss that the linear model predicts, and the number
        of iterations."""
        at, r, g = self.at, self.r, self.g
        v, iterations = solve(-r, -g)
        if self.acceleration:
            along, bent = self._bend(v)
            half, _ = solve(-bent / 2, at.pull(-bent / 2))
            length = jnp.linalg.norm
            small = 2 * length(half) <= self.acceleration * length(v)
            delta = v + jnp.where(small, half, 0.0)  # NaN is not small
        else:
            along, delta = at.push(v), v
        return delta, -2 * g @ v - along @ along, iterations

    def _bend(self, v: Float[Array, " parameters"]) -> tuple[Array, Array]:
        """Returns the first and the second derivative of the residuals along `v`."""
        plan = make_plan([(0,), (0, 0)], [], (None,))
        _, streams, _ = propagate(self.at.values, self.at.start, plan, [v], [], lambda dtype: {})
        derivatives = (streams.get(key, jnp.zeros_like(self.r)) for key in plan.asked)
        along, bent = (x.astype(self.r.dtype) for x in derivatives)
        return along, bent


def at_highest_precision(fun: Callable[[], Any]) -> Any:
    """Calls `fun` with products at the highest precision and the standard rules of promotion."""
    with (
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return fun()
