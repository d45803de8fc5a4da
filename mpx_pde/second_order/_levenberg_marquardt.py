"""Levenberg–Marquardt with the residual in full precision and its linear algebra in less."""

import dataclasses
import functools as ft
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int32

from .._cast import convert
from .._dtypes import check_choice, is_real
from .._forward import Forward, check_forward, without_halves
from .._loss_scaling import DynamicLossScaling
from .._notes import noting
from .._repr import in_a_line
from .._split import SPLIT_PRODUCTS
from .._tree import dealt, select_tree
from .._types import PyTree
from ..engine import InForward, linearized, make_plan, propagate
from ..interpret._precision_report import (
    LEAST_IN_FULL,
    OF_JACOBIANS,
    PrecisionWarning,
    checked,
    traced,
    warn_user,
)
from ._gram import Reflector, conjugate_gradients, factored, first_leading, next_leading, summed


_CALL = "LevenbergMarquardt"
_FORWARDS = ("float32", "float64")
_JACOBIANS = ("float16", "bfloat16", *SPLIT_PRODUCTS, "float32", "float64")

_CLOSE = {"float32": 1e-4, "float64": 1e-9}
"""The share of the quadratic model's decrease that a solve for a step or its acceleration may
leave. With 1e-6 and a float64 residual, 120 steps with a float32 Jacobian for two solitons were
rejected 50 times and ended at 1.5 times the error of a float64 Jacobian (rejected 24 times). With
1e-9 they end at its error. With 1e-3 for accelerations alone, twelve late steps for the
Klein–Gordon equation gained a quarter of their gain with 1e-9. In float32 a millionth is below
rounding."""

_BLOCK, _ROWS = 2**21, 1024
"""The number of entries in a block of the Jacobian, which a CPU's cache holds, and the smallest
number of rows, which keeps a GPU busy."""

_TRIES = 4
"""The number of growing dampings that an update tries before it rejects the step and its points."""


class LevenbergMarquardtState(eqx.Module):
    """The state of [`mpx_pde.LevenbergMarquardt`][] between steps.

    **Attributes:**

    - `loss`: the loss after the last step; infinite before the first.
    - `damping`: the damping of the next step.
    - `growth`: the factor on the damping if the next try is not taken.
    - `taken`: true if the last step changed the model.
    - `steps`, `rejected`: the numbers of tries that were taken and that were not taken, int32.
    - `scaling`: the loss scaling of a float16 Jacobian.
    - `iterations`: the largest number of conjugate gradient iterations of a try in the last step,
        without its acceleration, int32. If it reaches `refinements`, the Jacobian is too narrow.
    - `leading`: directions of the largest singular values of the Jacobian; `None` in float64.
    """

    loss: Float[Array, ""]
    damping: Float[Array, ""]
    growth: Float[Array, ""]
    taken: Bool[Array, ""]
    steps: Int32[Array, ""]
    rejected: Int32[Array, ""]
    scaling: DynamicLossScaling
    iterations: Int32[Array, ""]
    leading: Reflector | None


class LevenbergMarquardt(eqx.Module):
    """Minimizes a sum of squares by damped Gauss–Newton steps.

    The residual decides where training ends, and its Jacobian only how it gets there. So the
    residual and the gradient `g` are evaluated in true float32 or in float64, and the Jacobian may
    be narrower.

    A step `v` solves `(Jᵀ J + damping) v = -g`. The Gram matrix `Jᵀ J` is summed over blocks of the
    examples, from products in the precision of the Jacobian, and factorized. With a float64
    Jacobian, the factorization solves for the step. With a narrower one, it preconditions conjugate
    gradients, whose products are in the precision of the residual. They run until the step gains as
    much as the exact one, to 1e-9 (1e-4 in float32). The rounding of `Jᵀ J` is relative to its
    largest singular values. So the Jacobian is turned until up to 192 of their directions come
    first, and the rest has a Gram matrix of its own. The state updates the directions at each step.

    The residual of a network bends long before such a step ends. So half of an acceleration is
    added to the step, unless it is too large. The acceleration solves the same system for the
    second derivative of the residual along `v` (Transtrum and Sethna, *Improvements to the
    Levenberg-Marquardt algorithm*, arXiv 1201.5885). The step is taken only if the loss falls.
    Otherwise the damping rises, and up to three more are tried with the same Gram matrix. If none
    is taken, or anything is not finite, the model is returned bit-identical. The damping does not
    rise if a step changes nothing, or if the residual or Jacobian is not finite, because the next
    examples may need less. The damping follows the ratio of the decrease to the one that the linear
    model predicted (Nielsen, *Damping parameter in Marquardt's method*, 1999).

    A step takes `residuals × parameters²` operations and the memory of a few matrices of
    `parameters²` entries, so this is for up to a few thousand parameters.

    ```python
    def interior(model, point):
        d = mpx.partials(model, ["u_xx", "u_yy"], coords="xy", outputs="u")(point)
        return d["u_xx"] + d["u_yy"] - source(point)


    def boundary(model, point):
        return 10.0 * model(point)


    optimizer = mpx.LevenbergMarquardt((interior, boundary), jacobian="bfloat16")
    state = optimizer.init(model)
    step = eqx.filter_jit(optimizer.update)
    for _ in range(200):
        model, state = step(model, state, (points, edge))
    ```
    """

    residuals: tuple[Callable[..., Any], ...]
    forward: str = eqx.field(static=True)
    jacobian: str = eqx.field(static=True)
    damping: float = eqx.field(static=True)
    min_damping: float = eqx.field(static=True)
    max_damping: float = eqx.field(static=True)
    acceleration: float = eqx.field(static=True)
    refinements: int = eqx.field(static=True)
    solver: Any

    def __init__(
        self,
        residuals: Callable[..., Any] | tuple[Callable[..., Any], ...],
        *,
        forward: str = "float32",
        jacobian: str | None = None,
        damping: float = 1e-3,
        min_damping: float = 1e-14,
        max_damping: float = 1e12,
        acceleration: float = 0.75,
        refinements: int = 100,
        solver: Any = None,
    ):
        """**Arguments:**

        - `residuals`: a function of the model and *one* example that returns the residual there, an
            array of any shape; or a tuple of such functions. The loss is the sum over them of the
            mean over their examples of the sum of squares. Put weights into the residuals.
        - `forward`: the precision of the residual and of the linear solve, `"float32"` or
            `"float64"`.
        - `jacobian`: the precision of the Jacobian and of the products that make its Gram matrix,
            no wider than `forward`, which is the default: `"float16"`, `"bfloat16"`, `"float32"`,
            `"float64"`, or a split product such as `"bfloat16_x3"` for the Gram matrix of a float32
            Jacobian.
        - `damping`: the first damping, relative to the largest squared norm of a Jacobian column.
        - `min_damping`, `max_damping`: the bounds of the damping, relative to the same norm.
        - `acceleration`: the largest length of the acceleration, relative to the step, at which
            half of it is added. It takes the second derivative of the residuals in forward mode. 0
            omits it.
        - `refinements`: the largest number of conjugate gradient iterations that solve for a step,
            unless the Jacobian is float64. Each takes a product with the Jacobian in full and one
            with its transpose. The state has their number; a `PrecisionWarning` says when they did
            not suffice. With 0 the factorization alone solves.
        - `solver`: a solver of [lineax](https://docs.kidger.site/lineax) for the positive definite
            matrix; by default a Cholesky decomposition.

        **Raises:** `TypeError` for residuals that are not functions or a `solver` that is not one;
        `ValueError` for precisions that are unknown or need 64-bit types, a `jacobian` wider than
        `forward`, dampings that are not positive and in order, a negative `acceleration`, numbers
        that are not finite, and `refinements` that are not an integer of at least 0.
        """
        functions = residuals if isinstance(residuals, tuple) else (residuals,)
        if not functions or not all(callable(f) for f in functions):
            raise TypeError(
                f"`{_CALL}` takes a function of the model and one example as `residuals`, or a "
                f"tuple of such functions, but got {in_a_line(residuals)}."
            )
        jacobian = forward if jacobian is None else jacobian
        check_choice(forward, _FORWARDS, _CALL, "forward")
        if jacobian not in _JACOBIANS or (jacobian == "float64" and forward != "float64"):
            raise ValueError(
                f"`{_CALL}` takes one of {_JACOBIANS} as `jacobian`, no wider than `forward` "
                f"({forward!r}), but got {jacobian!r}."
            )
        _check_dampings(_CALL, min_damping, damping, max_damping, acceleration)
        _check_solver(solver, _CALL)
        if type(refinements) is not int or refinements < 0:
            raise ValueError(f"`{_CALL}` needs `refinements` >= 0, but got {refinements!r}.")
        self.residuals = functions
        self.forward = check_forward(forward, _CALL)
        self.jacobian = jacobian
        self.damping = float(damping)
        self.min_damping, self.max_damping = float(min_damping), float(max_damping)
        self.acceleration = float(acceleration)
        self.refinements = refinements
        self.solver = solver

    @property
    def _dtype(self) -> Any:
        return jnp.dtype(self.forward)

    def init(self, model: PyTree) -> LevenbergMarquardtState:
        """Returns the first state.

        **Arguments:**

        - `model`: the PyTree whose floating-point arrays are optimized.

        **Returns:** a `LevenbergMarquardtState`.

        **Raises:** `ValueError` for a model without parameters, or with complex ones. Issues a
        `PrecisionWarning` for parameters of a narrower dtype than `forward`.
        """
        _check_parameters(model, f"{_CALL}.init", self._dtype)
        number = lambda x: jnp.array(x, self._dtype)
        columns = sum(x.size for x in jtu.tree_leaves(model) if eqx.is_inexact_array(x))
        leading = first_leading(columns, self._narrow)
        return LevenbergMarquardtState(
            loss=number(jnp.inf),
            damping=number(self.damping),
            growth=number(2.0),
            taken=jnp.array(False),
            steps=jnp.array(0, jnp.int32),
            rejected=jnp.array(0, jnp.int32),
            scaling=DynamicLossScaling(1.0),
            iterations=jnp.array(0, jnp.int32),
            leading=leading if leading.y.size else None,  # Orbax cannot save an empty array
        )

    def update(
        self, model: PyTree, state: LevenbergMarquardtState, batches: PyTree
    ) -> tuple[PyTree, LevenbergMarquardtState]:
        """Takes one step.

        **Arguments:**

        - `model`: the PyTree whose floating-point arrays are optimized; other leaves are kept.
        - `state`: from `init` or the last step.
        - `batches`: the examples of the residual: a PyTree of arrays with a leading axis. With a
            tuple of residuals, a tuple with the examples of each. A tuple of length one holds the
            examples of a single residual.

        **Returns:** `(model, state)`, in the dtypes of the arguments.

        **Raises:** `ValueError` if several residuals do not get a tuple of as many batches, for the
        state of a model of another size, and for examples without a leading axis of one length,
        with one on an explicit axis of a mesh, or none; `TypeError` for another `state`, and for
        residuals that do not return a real floating-point array.
        """
        if not isinstance(state, LevenbergMarquardtState):
            raise TypeError(
                f"`{_CALL}.update` takes the model, the state that `init(model)` returned, and the "
                f"examples, but got {in_a_line(state)} as `state`."
            )
        if jnp.ndim(state.damping):
            raise ValueError(
                f"`{_CALL}.update` takes the state of one model, but got one whose `damping` has "
                f"shape {jnp.shape(state.damping)}, as an update under `jax.vmap` returns it for "
                "all members. Map this call over the state too, or take that of a member."
            )
        count, given = len(self.residuals), len(batches) if type(batches) is tuple else None
        if count == 1 and given != 1:
            batches = (batches,)
        elif given != count:
            raise ValueError(
                f"`{_CALL}.update` needs a tuple with the examples of each of the {count} "
                f"residuals as `batches`, but got a {type(batches).__name__}"
                + (f" of {given}." if given is not None else ".")
            )
        params, static = eqx.partition(model, eqx.is_inexact_array)
        theta, unravel = ravel_pytree(params)
        leading = state.leading or first_leading(theta.size, self._narrow)
        if theta.size != len(leading.y):
            raise ValueError(
                f"`{_CALL}.update` got a state that `init` made for a model of "
                f"{len(leading.y):,} parameters, but a model of {theta.size:,}. It takes the "
                "model, its state and the examples, in this order."
            )
        start = theta.astype(self._dtype)
        parameters = lambda flat: unravel(flat.astype(theta.dtype))
        values = lambda flat: self._values(parameters(flat), static, batches)
        r, push = jax.linearize(values, start)
        if r.size == count and all(map(_is_whole_batch, batches)):
            warn_user(
                f"`{_CALL}.update` got one number from {'each' if count > 1 else 'the'} residual, "
                f"of arrays that look like many examples, {jtu.tree_map(jnp.shape, batches)}, with "
                "a leading axis of 1. A residual takes *one* example and returns what should be "
                "zero there, not the loss of a batch: stack the examples along the leading axis, "
                "and leave squares and means to the optimizer. If it is meant, filter "
                "`mpx_pde.PrecisionWarning`."
            )
        transposed = jax.linear_transpose(push, start)
        pull = lambda b: transposed(b)[0]
        rows = lambda block: self._rows(params, static, state.scaling, *block)
        blocks = self._blocks(batches, r.size, theta.size)
        sums = summed(rows, blocks, leading, self.jacobian)
        evaluated = jnp.all(jnp.isfinite(r))
        finite = evaluated & jnp.all(jnp.isfinite(sums.squares))
        loss = jnp.where(evaluated, jnp.sum(r**2), jnp.inf)
        r = jnp.where(finite, r, 0.0)
        size = jnp.maximum(jnp.max(sums.squares), jnp.finfo(sums.squares.dtype).tiny)
        g = pull(r)
        # Rounding along the leading directions would move parameters that no residual depends on.
        unused = (sums.squares == 0) & (g == 0)
        most = state.rejected + jnp.where(finite, _TRIES, 1)

        def attempt(carry):
            last, _ = carry
            damping = last.damping * size.astype(self._dtype)
            narrow = damping.astype(size.dtype)
            direct = factored(sums, leading, narrow, self.solver, self.jacobian)
            solve = lambda b, s: (direct(s), jnp.array(0, jnp.int32))
            if self._narrow and self.refinements:
                most, close = self.refinements, _CLOSE[self.forward]
                solve = lambda b, s: conjugate_gradients(
                    push, pull, direct, damping, b, s, sums.squares, most=most, close=close
                )
            delta, foretold, iterations = self._step(values, start, r, g, push, pull, solve)
            delta = jnp.where(unused, 0.0, delta)
            new = jnp.sum(values(start + delta) ** 2)
            moves = finite & jnp.any(ravel_pytree(parameters(start + delta))[0] != theta)
            take = moves & jnp.isfinite(new) & (new < loss) & jnp.all(jnp.isfinite(delta))
            # A step that is not taken has no decrease, and `loss` may be infinite.
            gained = jnp.where(take, loss, 1.0) - jnp.where(take, new, 1.0)
            ratio = gained / jnp.maximum(foretold, jnp.finfo(self._dtype).tiny)
            next_damping, growth = self._damped(last, take, moves, ratio)
            one = take.astype(jnp.int32)
            after = dataclasses.replace(
                last,
                loss=jnp.where(take, new, loss),
                damping=next_damping,
                growth=growth,
                taken=take,
                steps=last.steps + one,
                rejected=last.rejected + 1 - one,
                iterations=jnp.maximum(last.iterations, iterations),
            )
            return jtu.tree_map(lambda x, y: x.astype(y.dtype), after, last), delta

        going = lambda carry: ~carry[0].taken & (carry[0].rejected < most)
        with (
            jax.default_matmul_precision("highest"),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            scaling = state.scaling
            first = dataclasses.replace(
                state,
                loss=loss,
                taken=jnp.zeros_like(state.taken),
                iterations=jnp.zeros_like(state.iterations),
                scaling=scaling.adjust(finite) if self.jacobian == "float16" else scaling,
                leading=None if state.leading is None else next_leading(sums, leading),
            )
            first = jtu.tree_map(lambda x, y: x.astype(y.dtype), first, state)
            after, delta = lax.while_loop(going, attempt, (first, jnp.zeros_like(start)))
        self._tell(after, finite | ~evaluated)
        moved = select_tree(after.taken, parameters(start + delta), params)
        alike = lambda x, y: convert(x, x.dtype, getattr(y, "weak_type", False))
        return eqx.combine(jtu.tree_map(alike, moved, params), static), after

    def _step(self, values, start, r, g, push, pull, solve):
        """Returns the step from `start`, the decrease of the loss that the linear model predicts,
        and the number of iterations. `push(x)` is `J x`, `pull(b)` is `Jᵀ b`, `g` is `Jᵀ r`, and
        `solve(b, s)` solves `(Jᵀ J + damping) x = s`, where `s` is `Jᵀ b`."""
        v, iterations = solve(-r, -g)
        if self.acceleration:
            plan = make_plan([(0,), (0, 0)], [], (None,))
            _, streams, _ = propagate(values, start, plan, [v], [], lambda dtype: {})
            found = (streams.get(key, jnp.zeros_like(r)) for key in plan.asked)
            along, bent = (x.astype(r.dtype) for x in found)
            half, _ = solve(-bent / 2, pull(-bent / 2))
            length = jnp.linalg.norm
            small = 2 * length(half) <= self.acceleration * length(v)
            delta = v + jnp.where(small, half, 0.0)  # NaN is not small
        else:
            along, delta = push(v), v
        return delta, -2 * g @ v - along @ along, iterations

    def _damped(self, state, take, moves, ratio):
        """Returns the next damping, and the factor on it if the step after is not taken. `ratio` is
        the decrease of the loss relative to the predicted one. If `moves` is false, there is no
        step or it changes nothing, so both are kept."""
        shrink = jnp.maximum(1 / 3, 1 - (2 * jnp.clip(ratio, 0.0, 1.0) - 1) ** 3)
        growth = jnp.where(moves, state.growth, 1.0)
        damping = state.damping * jnp.where(take, shrink, growth)
        faster = jnp.where(growth > 1, 2.0, 1.0) * state.growth
        damping = jnp.clip(damping, self.min_damping, self.max_damping)
        # Doubled without a bound, the factor would become infinite.
        return damping, jnp.where(take, 2.0, jnp.minimum(faster, 2.0**60))

    def _tell(self, state: LevenbergMarquardtState, finite: Bool[Array, ""]) -> None:
        """Warns at run time if the solve for a step used all its iterations, or if a float16
        Jacobian overflows with the smallest loss scale."""
        wider = "float32" if self.jacobian != "float32" else self.forward
        mend = f"`jacobian={wider!r}`" if wider != self.jacobian else "`forward='float64'`"
        if self._narrow and self.refinements:
            _warn_if(
                state.iterations >= self.refinements,
                f"`{_CALL}` ended the solve for a step after {self.refinements} iterations "
                f"(`refinements`), before it converged: a {self.jacobian} Jacobian hardly "
                f"preconditions it any more. Pass {mend}, or a larger `min_damping`.",
            )
        if self.jacobian == "float16":
            scaling = state.scaling
            _warn_if(
                ~finite & (scaling.loss_scaling <= scaling.min_loss_scaling),
                f"`{_CALL}` takes no step: the float16 Jacobian overflows at the smallest loss "
                "scale. Write residuals of order one, or pass `jacobian='bfloat16'`.",
            )

    def _pulled(self, fun: Callable[..., Any], params: PyTree, static: PyTree, x: Any) -> Any:
        """Returns a residual at one example, in the precision `forward`, and its pullback to the
        parameters, in that of the `jacobian`."""
        backward = "float32" if self.jacobian in SPLIT_PRODUCTS else self.jacobian
        if backward == self.forward:
            return jax.vjp(lambda p: self._residual(fun, p, static, x), params)
        forward = Forward(self.forward, backward)
        in_forward = InForward(fun, forward)
        values = lambda p, static, x: (self._residual(in_forward, p, static, x), ())
        (r, _), pull = linearized(values, forward, params, static, x, in_full=lambda _: True)
        return r, lambda cotangent: (pull(cotangent),)

    def _residual(self, fun: Callable[..., Any], params: PyTree, static: PyTree, x: Any) -> Array:
        """Evaluates one residual at one example, with the parameters in the residual's dtype."""
        wide = jtu.tree_map(lambda x: x.astype(self._dtype), params)
        note = (
            f"`{_CALL}.update` calls each residual with the model and *one* example, here of shape "
            f"{jtu.tree_map(jnp.shape, x)}, and not with a batch. Leave `jax.vmap` and means over "
            "examples out of it."
        )
        with without_halves(), noting(note, Exception):
            out = fun(eqx.combine(wide, static), x)
        return _as_vector(out, f"{_CALL}.update")

    def _values(self, params: PyTree, static: PyTree, batches: tuple) -> Float[Array, " rows"]:
        out = []
        for fun, batch in zip(self.residuals, batches, strict=True):
            weight = 1 / math.sqrt(_length_of(batch, f"{_CALL}.update"))
            one = ft.partial(self._residual, fun, params, static)
            with jax.default_matmul_precision("highest"):
                r = jax.vmap(one)(batch).astype(self._dtype)
            out.append(jnp.ravel(r) * weight)
        return jnp.concatenate(out)

    @property
    def _narrow(self) -> bool:
        """Returns whether the Jacobian is narrower than float64."""
        return self.jacobian != "float64"

    def _blocks(self, batches: tuple, rows: int, columns: int) -> tuple:
        """Splits the examples into blocks whose Jacobians are small. Returns these, stacked along a
        leading axis, and the weights of their residuals, which are 0 for examples that fill up."""
        most = max(_length_of(batch, f"{_CALL}.update") for batch in batches)
        count = min(most, max(1, math.ceil(rows / max(_BLOCK // columns, _ROWS))))

        def split(batch):
            length = _length_of(batch, f"{_CALL}.update")
            each = math.ceil(length / count)
            index = jnp.arange(count * each)
            weight = jnp.where(index < length, 1 / math.sqrt(length), 0.0).astype(self._dtype)
            pick = lambda x: x if count * each == length else x[jnp.minimum(index, length - 1)]
            cut = lambda x: dealt(pick(jnp.asarray(x)), count)
            return jtu.tree_map(cut, batch), dealt(weight, count)

        batches, weights = zip(*map(split, batches), strict=True)
        return batches, weights

    def _rows(
        self, params: PyTree, static: PyTree, scaling: DynamicLossScaling, batches: tuple, weights
    ) -> Float[Array, "rows parameters"]:
        """Returns the rows of the Jacobian that belong to a block."""
        args = (params, static, scaling, batches, weights)
        if not self._half or not traced(args):  # in eager mode there is no program to check
            return self._linearized(*args)
        return checked(
            self._linearized,
            args,
            _CALL,
            jnp.dtype(self.jacobian),
            OF_JACOBIANS,
            least=LEAST_IN_FULL,
            instead=f"jacobian={self.forward!r}",
        )

    @property
    def _half(self) -> bool:
        return self.jacobian in ("float16", "bfloat16")

    def _linearized(
        self, params: PyTree, static: PyTree, scaling: DynamicLossScaling, batches: tuple, weights
    ) -> Float[Array, "rows parameters"]:
        scale = scaling.loss_scaling  # 1 except for float16
        dtype = jnp.dtype("float32" if self._narrow else "float64")
        jacs = []
        for fun, batch, weight in zip(self.residuals, batches, weights, strict=True):

            def one(x, weight, fun=fun):
                r, pull = self._pulled(fun, params, static, x)
                seeds = jnp.eye(r.size, dtype=r.dtype) * scale.astype(r.dtype)
                (pulled,) = jax.vmap(pull)(seeds)
                rows = lambda g: g.reshape(r.size, math.prod(g.shape[1:]))  # `g` may be empty
                flat = [rows(g).astype(dtype) for g in jtu.tree_leaves(pulled)]
                return jnp.concatenate(flat, axis=1) * weight.astype(dtype)

            # As a context of the whole program, `highest` would apply to half products too.
            with nullcontext() if self._half else jax.default_matmul_precision("highest"):
                jac = jax.vmap(one)(batch, weight)
            jacs.append(jac.reshape(-1, jac.shape[-1]))
        return jnp.concatenate(jacs) / scale.astype(dtype)


def _warn_if(condition: Bool[Array, ""], text: str) -> None:
    """Warns at run time if `condition` is true."""

    def tell(condition):  # under `vmap` this is always called
        if np.any(condition):
            warnings.warn(text, PrecisionWarning, stacklevel=2)

    run = lambda condition: jax.debug.callback(tell, condition)
    lax.cond(condition, run, lambda _: None, condition)


def _check_dampings(call: str, least: Any, first: Any, most: Any, acceleration: Any) -> None:
    values = {"min_damping": least, "damping": first, "max_damping": most}
    for name, x in {**values, "acceleration": acceleration}.items():
        if not is_real(x) or not math.isfinite(x):
            raise ValueError(f"`{call}` needs a finite number as `{name}`, but got {x!r}.")
    if not 0 < least <= first <= most:
        raise ValueError(
            f"`{call}` needs 0 < `min_damping` <= `damping` <= `max_damping`, but got {least!r}, "
            f"{first!r} and {most!r}."
        )
    if acceleration < 0:
        raise ValueError(f"`{call}` needs `acceleration` >= 0, but got {acceleration!r}.")


def _check_solver(solver: Any, call: str) -> None:
    if solver is not None and not (hasattr(solver, "init") and hasattr(solver, "compute")):
        raise TypeError(
            f"`{call}` takes a solver of lineax as `solver`, such as `lineax.Cholesky()`, but got "
            f"{in_a_line(solver)}."
        )


def _check_parameters(model: PyTree, call: str, dtype: Any) -> None:
    """Checks that there are parameters and that they are real. Warns if some have a narrower dtype
    than the residual."""
    leaves = jtu.tree_leaves_with_path(model)
    found = {jtu.keystr(path): x.dtype for path, x in leaves if eqx.is_inexact_array(x)}
    if not found:
        raise ValueError(f"`{call}` needs a model with floating-point arrays.")
    if any(jnp.issubdtype(x, jnp.complexfloating) for x in found.values()):
        raise ValueError(
            f"`{call}` finds real parameters, but the model has complex arrays. Keep their real "
            "and imaginary parts in arrays of their own."
        )
    narrow = [f"{path} ({x})" for path, x in found.items() if x.itemsize < dtype.itemsize]
    if narrow:
        warnings.warn(
            f"`{call}` got parameters in less than {dtype}, the precision of the residual: "
            f"{narrow[0]}"
            + (f" and {len(narrow) - 1} more" if narrow[1:] else "")
            + ". Each step is rounded to their dtype. Cast all, those that `FullPrecision` keeps "
            "too: "
            f"`jax.tree.map(lambda x: mpx_pde.cast_tree(x, '{dtype}'), model)`.",
            PrecisionWarning,
            stacklevel=3,
        )


def _length_of(batch: PyTree, call: str) -> int:
    """Returns the number of examples in a batch."""
    arrays = list(map(jnp.asarray, jtu.tree_leaves(batch)))
    if laid_out := [s for x in arrays if any((s := jax.typeof(x).sharding.spec)[:1])]:
        raise ValueError(
            f"`{call}` needs examples on Auto axes of a mesh, but got some on explicit axes, "
            f"{laid_out[0]}. Make the mesh by `jax.make_mesh(..., axis_types="
            "(jax.sharding.AxisType.Auto,))`, with one for each axis."
        )
    lengths = {x.shape[0] if x.ndim else -1 for x in arrays}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"`{call}` needs examples stacked along a leading axis of one length, but got arrays "
            f"with leading axes of {sorted(map(str, lengths))}."
        )
    if lengths == {0}:
        raise ValueError(f"`{call}` needs at least one example of each residual, but got none.")
    return lengths.pop()


def _is_whole_batch(batch: PyTree) -> bool:
    """Returns whether the one example of a batch has an array of several rows, like a batch."""
    shapes = [jnp.shape(x) for x in jtu.tree_leaves(batch)]
    return all(s[0] == 1 for s in shapes) and any(len(s) > 2 and s[1] > 1 for s in shapes)


def _as_vector(out: Any, call: str) -> Float[Array, " entries"]:
    """Flattens a residual at one example to a vector, after checking that it is a real array."""
    if not eqx.is_array_like(out) or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
        what = type(out).__name__
        if hasattr(out, "dtype"):
            what = f"an array of dtype {out.dtype.name}"
        raise TypeError(
            f"`{call}` needs residuals that return a real floating-point array at one example, but "
            f"one returned {what}. Stack several, or pass a function for each."
        )
    return jnp.ravel(out)
