"""Levenberg–Marquardt with the residual in full precision and its Jacobian in half."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int32

from .._dtypes import is_half
from .._forward import Forward, check_forward
from .._loss_scaling import DynamicLossScaling
from .._repr import in_a_line
from .._tree import select_tree
from .._types import PyTree
from ..engine import InForward
from ..interpret._precision_report import LEAST_IN_FULL, OF_JACOBIANS, checked, traced
from ._conjugate import refined
from ._residuals import as_vector, check_dampings, check_parameters, check_solver, length_of


_CALL = "LevenbergMarquardt"
_FORWARDS = ("float32", "float64")
_JACOBIANS = ("float16", "bfloat16", "float32", "float64")


class LevenbergMarquardtState(eqx.Module):
    """The state of [`mpx_pde.LevenbergMarquardt`][] between steps.

    **Attributes:**

    - `loss`: the loss after the last step; infinite before the first.
    - `damping`: that of the next step.
    - `growth`: what the damping is multiplied by when the next step is rejected.
    - `taken`: whether the last step changed the model.
    - `steps`, `rejected`: how many were taken and how many not, int32.
    - `scaling`: the loss scaling of a float16 Jacobian.
    """

    loss: Float[Array, ""]
    damping: Float[Array, ""]
    growth: Float[Array, ""]
    taken: Bool[Array, ""]
    steps: Int32[Array, ""]
    rejected: Int32[Array, ""]
    scaling: DynamicLossScaling


class LevenbergMarquardt(eqx.Module):
    """Minimizes a sum of squares by damped Gauss–Newton steps.

    The residual decides where a training ends, and its Jacobian only how it gets there. So the
    residual is evaluated in float32 (which means it) or float64, the Jacobian may be in half
    precision, and the linear problem is solved in the precision of the residual.

    A step `v` solves `(Jᵀ J + damping) v = -g`, where `g` is the gradient in full precision. A half
    Jacobian preconditions that, and products with the one in full refine it. The residual of a
    network bends long before such a step ends, so half of the acceleration that the same system
    gives for the second derivative of the residual along `v` is added, unless it is too large
    (Transtrum and Sethna, *Improvements to the Levenberg-Marquardt algorithm*, arXiv 1201.5885).
    The step is taken only if the loss falls; otherwise, and if anything is not finite, the model
    comes back to the bit as it was, and the damping rises. The damping follows the ratio of the
    decrease to the one that the linear model foretold (Nielsen, *Damping parameter in Marquardt's
    method*, 1999).

    A Jacobian has as many entries as there are residuals times parameters, and a step takes some
    `2 residuals parameters²` operations: this is for up to a few thousand of either.
    Needs [lineax](https://docs.kidger.site/lineax): `pip install "mpx-pde[second_order]"`.

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
        refinements: int = 20,
        solver: Any = None,
    ):
        """**Arguments:**

        - `residuals`: a function of the model and *one* example that returns the residual there, an
            array of any shape; or a tuple of such functions. The loss is the sum over them of the
            mean over their examples of the sum of squares: put weights into the residuals.
        - `forward`: the precision of the residual and of the linear solve, `"float32"` or
            `"float64"`.
        - `jacobian`: that of the Jacobian: `"float16"`, `"bfloat16"`, `"float32"` or `"float64"`,
            no wider than `forward`; by default the same.
        - `damping`: the first, relative to the largest squared norm of a column of the Jacobian.
        - `min_damping`, `max_damping`: its bounds, relative likewise.
        - `acceleration`: how long the acceleration may be, relative to half of the step, if it is
            to be added. It takes the second derivative of the residuals in forward mode; with 0 it
            is left out.
        - `refinements`: where the Jacobian is narrower than the residual, how many conjugate
            gradients at most refine a solve, each by a product with the Jacobian in full and one
            with its transpose; with 0 the rounded one is the metric.
        - `solver`: a solver of lineax for the positive definite matrix `Jᵀ J + damping`. By
            default `lineax.Cholesky()` in float64. In float32, where the product of Jacobians
            would have lost what counts, `R` of a QR decomposition of the Jacobian and the damping
            below it, and the solution refined once (Björck's corrected seminormal equations).

        **Raises:** `TypeError` for residuals that are no functions and a `solver` that is none,
        `ValueError` for precisions that are unknown or need 64-bit types, dampings that are not
        positive and in order, a negative `acceleration`, and `refinements` that are no number.
        """
        functions = residuals if isinstance(residuals, tuple) else (residuals,)
        if not functions or not all(callable(f) for f in functions):
            raise TypeError(
                f"`{_CALL}` takes a function of the model and one example as `residuals`, or a "
                f"tuple of such functions, but got {residuals!r}."
            )
        jacobian = forward if jacobian is None else jacobian
        if forward not in _FORWARDS:
            raise ValueError(f"`{_CALL}` takes {_FORWARDS} as `forward`, but got {forward!r}.")
        if jacobian not in _JACOBIANS or (jacobian == "float64" and forward != "float64"):
            raise ValueError(
                f"`{_CALL}` takes one of {_JACOBIANS} as `jacobian`, no wider than `forward` "
                f"({forward!r}), but got {jacobian!r}."
            )
        check_dampings(_CALL, min_damping, damping, max_damping, acceleration)
        check_solver(solver, _CALL)
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
        """The first state.

        **Arguments:**

        - `model`: the PyTree whose floating-point arrays are to be found.

        **Returns:** a `LevenbergMarquardtState`.
        """
        check_parameters(model, f"{_CALL}.init")
        number = lambda x: jnp.array(x, self._dtype)
        return LevenbergMarquardtState(
            loss=number(jnp.inf),
            damping=number(self.damping),
            growth=number(2.0),
            taken=jnp.array(False),
            steps=jnp.array(0, jnp.int32),
            rejected=jnp.array(0, jnp.int32),
            scaling=DynamicLossScaling(1.0),
        )

    def update(
        self, model: PyTree, state: LevenbergMarquardtState, batches: PyTree
    ) -> tuple[PyTree, LevenbergMarquardtState]:
        """One step.

        **Arguments:**

        - `model`: the PyTree whose floating-point arrays are to be found; other leaves are kept.
        - `state`: from `init` or the last step.
        - `batches`: the examples of the residual: a PyTree of arrays with a leading axis. With a
            tuple of residuals, a tuple with the examples of each.

        **Returns:** `(model, state)`, in the dtypes of those passed in.

        **Raises:** `ValueError` for a tuple of another length than that of the residuals, and for
        examples without a leading axis of one length, or none; `TypeError` for another `state`, and
        for residuals that return no real array.
        """
        if not isinstance(state, LevenbergMarquardtState):
            raise TypeError(
                f"`{_CALL}.update` takes the model, the state that `init(model)` returned, and the "
                f"examples, but got {in_a_line(state)} as `state`."
            )
        if len(self.residuals) == 1 and not isinstance(batches, tuple):
            batches = (batches,)
        if not isinstance(batches, tuple) or len(batches) != len(self.residuals):
            raise ValueError(
                f"`{_CALL}.update` needs a tuple with the examples of each of the "
                f"{len(self.residuals)} residuals as `batches`, but got {type(batches).__name__}"
                + (f" of {len(batches)}." if isinstance(batches, tuple) else ".")
            )
        params, static = eqx.partition(model, eqx.is_inexact_array)
        theta, unravel = ravel_pytree(params)
        start = theta.astype(self._dtype)
        parameters = lambda flat: unravel(flat.astype(theta.dtype))
        values = lambda flat: self._values(parameters(flat), static, batches)
        r, jac, finite = self._as_asked(params, static, state.scaling, batches)
        push, pull = None, lambda b: b @ jac
        if self.jacobian != self.forward:
            r, push = jax.linearize(values, start)
            transposed = jax.linear_transpose(push, start)
            pull = lambda b: transposed(b)[0]
        finite &= jnp.all(jnp.isfinite(r))
        r = jnp.where(finite, r, 0.0)
        loss = jnp.where(finite, jnp.sum(r**2), jnp.inf)

        size = jnp.maximum(jnp.max(jnp.sum(jac**2, axis=0)), jnp.finfo(self._dtype).tiny)
        with (
            jax.default_matmul_precision("highest"),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            damping = state.damping * size
            direct = self._factored(jac, damping)
            solve = lambda b: direct(pull(b))
            if push is not None and self.refinements:
                solve = partial(refined, push, pull, direct, damping, most=self.refinements)
            delta, foretold = self._step(values, start, r, pull, solve)
        moved = parameters(start + delta)
        new = jnp.sum(self._values(moved, static, batches) ** 2)
        take = finite & jnp.isfinite(new) & (new < loss) & jnp.all(jnp.isfinite(delta))
        return self._after(
            model, eqx.combine(moved, static), state, take, finite, (loss, new, foretold)
        )

    def _step(self, values, start, r, pull, solve):
        """The step from `start`, and the decrease of the loss that the linear model foretells.
        `pull(b)` is `Jᵀ b`, and `solve(b)` solves `(Jᵀ J + damping) x = Jᵀ b`."""
        g = pull(r)
        v = -solve(r)
        slope = lambda flat: jax.jvp(values, (flat,), (v,))[1]
        delta = v
        if self.acceleration:
            along, bent = jax.jvp(slope, (start,), (v,))
            half = -solve(bent) / 2
            length = jnp.linalg.norm
            small = 2 * length(half) <= self.acceleration * length(v)
            delta = v + jnp.where(small, half, 0.0)  # NaN is not small
        else:
            along = slope(start)
        return delta, -2 * g @ v - along @ along

    def _after(self, model, moved, state, take, finite, losses):
        loss, new, foretold = losses
        # Where the step was not taken there is no decrease to speak of, and `loss` may be infinite.
        gained = jnp.where(take, loss, 1.0) - jnp.where(take, new, 1.0)
        ratio = gained / jnp.maximum(foretold, jnp.finfo(self._dtype).tiny)
        shrink = jnp.maximum(1 / 3, 1 - (2 * jnp.clip(ratio, 0.0, 1.0) - 1) ** 3)
        # A float16 Jacobian that is not finite says nothing of the damping: its scale falls.
        scaled = self.jacobian == "float16"
        growth = jnp.where(finite, state.growth, 1.0) if scaled else state.growth
        damping = state.damping * jnp.where(take, shrink, growth)
        one = take.astype(jnp.int32)
        after = LevenbergMarquardtState(
            loss=jnp.where(take, new, loss),
            damping=jnp.clip(damping, self.min_damping, self.max_damping),
            growth=jnp.where(take, 2.0, jnp.where(growth > 1, 2.0, 1.0) * state.growth),
            taken=take,
            steps=state.steps + one,
            rejected=state.rejected + 1 - one,
            scaling=state.scaling.adjust(finite) if scaled else state.scaling,
        )
        after = jtu.tree_map(lambda x, y: x.astype(y.dtype), after, state)
        return select_tree(take, moved, model), after

    def _evaluated(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` with values in the precision of `forward` and derivatives in that of `jacobian`."""
        if self.jacobian == self.forward:
            return fun
        return InForward(fun, Forward(self.forward, self.jacobian))

    def _wide(self, params: PyTree) -> PyTree:
        """The parameters in the precision of the residual."""
        return jtu.tree_map(lambda x: x.astype(self._dtype), params)

    def _values(self, params: PyTree, static: PyTree, batches: tuple) -> Float[Array, " rows"]:
        out = []
        for fun, batch in zip(self.residuals, batches, strict=True):
            weight = 1 / math.sqrt(length_of(batch, f"{_CALL}.update"))
            at = lambda x, fun=fun: fun(eqx.combine(self._wide(params), static), x)
            one = lambda x, at=at: as_vector(at(x), f"{_CALL}.update")
            with jax.default_matmul_precision("highest"):
                r = jax.vmap(one)(batch).astype(self._dtype)
            out.append(jnp.ravel(r) * weight)
        return jnp.concatenate(out)

    def _linearized(
        self, params: PyTree, static: PyTree, scaling: DynamicLossScaling, batches: tuple
    ) -> tuple[Float[Array, " rows"], Float[Array, "rows parameters"], Bool[Array, ""]]:
        """Residuals, their Jacobian, and whether both are finite. What is not is zero."""
        scale = scaling.loss_scaling if is_half(jnp.dtype(self.jacobian)) else None
        rows, jacs = [], []
        for fun, batch in zip(self.residuals, batches, strict=True):
            weight = 1 / math.sqrt(length_of(batch, f"{_CALL}.update"))
            at = self._evaluated(fun)

            def one(x, at=at):
                out = lambda p: at(eqx.combine(self._wide(p), static), x)
                value = lambda p: as_vector(out(p), f"{_CALL}.update")
                r, pull = jax.vjp(value, params)
                seeds = jnp.eye(r.size, dtype=r.dtype)
                if scale is not None:
                    seeds = seeds * scale.astype(r.dtype)
                (pulled,) = jax.vmap(pull)(seeds)
                flat = [g.reshape(r.size, -1).astype(self._dtype) for g in jtu.tree_leaves(pulled)]
                return r.astype(self._dtype), jnp.concatenate(flat, axis=1)

            # As a wish of the program's, `highest` would hold for halves too.
            half = is_half(jnp.dtype(self.jacobian))
            with nullcontext() if half else jax.default_matmul_precision("highest"):
                r, jac = jax.vmap(one)(batch)
            rows.append(jnp.ravel(r) * weight)
            jacs.append(jac.reshape(-1, jac.shape[-1]) * weight)
        r, jac = jnp.concatenate(rows), jnp.concatenate(jacs)
        if scale is not None:
            jac = jac / scale.astype(self._dtype)
        finite = jnp.all(jnp.isfinite(r)) & jnp.all(jnp.isfinite(jac))
        return jnp.where(finite, r, 0.0), jnp.where(finite, jac, 0.0), finite

    def _as_asked(self, *args: Any) -> tuple:
        """`_linearized`, with a warning where a half Jacobian is taken in full after all."""
        dtype = jnp.dtype(self.jacobian)
        if not is_half(dtype) or not traced(args):  # run eagerly there is no program to look at
            return self._linearized(*args)
        instead = f"jacobian={self.forward!r}"
        return checked(
            self._linearized, args, _CALL, dtype, OF_JACOBIANS, least=LEAST_IN_FULL, instead=instead
        )

    def _factored(
        self, jac: Float[Array, "rows parameters"], damping: Float[Array, ""]
    ) -> Callable[[Float[Array, " parameters"]], Float[Array, " parameters"]]:
        """Solves with `Jᵀ J + damping`, decomposed once."""
        try:
            import lineax as lx
        except ImportError as e:
            raise ImportError(
                f'`{_CALL}` solves by lineax. Install it: `pip install "mpx-pde[second_order]"`.'
            ) from e
        one = jnp.eye(jac.shape[1], dtype=jac.dtype)
        if self.solver is None and self.forward == "float32":
            stacked = jnp.concatenate([jac, jnp.sqrt(damping) * one])
            upper = jnp.linalg.qr(stacked, mode="r")
            above = lx.MatrixLinearOperator(upper, lx.upper_triangular_tag)
            below = lx.MatrixLinearOperator(upper.T, lx.lower_triangular_tag)
            by = lambda operator, b: lx.linear_solve(operator, b, lx.Triangular(), throw=False)
            through = lambda b: by(above, by(below, b).value).value

            def corrected(b):
                x = through(b)
                return x + through(b - (jac @ x) @ jac - damping * x)

            return corrected
        matrix = jac.T @ jac + damping * one
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        solver = lx.Cholesky() if self.solver is None else self.solver
        state = solver.init(operator, options={})
        return lambda b: lx.linear_solve(operator, b, solver, state=state, throw=False).value
