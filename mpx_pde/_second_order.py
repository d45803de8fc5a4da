"""Levenberg–Marquardt with the residual in full precision and its Jacobian in half."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int32

from ._dtypes import is_half
from ._forward import Forward, check_forward
from ._loss_scaling import DynamicLossScaling
from ._tree import select_tree
from ._types import PyTree
from .propagation import InForward


_CALL = "LevenbergMarquardt"
_FORWARDS = ("float32", "float64")
_JACOBIANS = ("float16", "bfloat16", "float32", "float64")


class LevenbergMarquardtState(eqx.Module):
    """What [`mpx_pde.LevenbergMarquardt`][] keeps between steps.

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

    A step minimizes `|r + J d|² + damping |d|²` by a QR decomposition, which does not square the
    condition of `J`. It is taken only if the loss falls; otherwise, and if anything is not finite,
    the model comes back to the bit as it was, and the damping rises. The damping follows the ratio
    of the decrease to the one that the linear model foretold (Nielsen, *Damping parameter in
    Marquardt's method*, 1999).

    A Jacobian has as many entries as there are residuals times parameters, and a step takes some
    `2 (residuals + parameters) parameters²` operations: this is for up to a few thousand of either.
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
    solver: Any

    def __init__(
        self,
        residuals: Callable[..., Any] | tuple[Callable[..., Any], ...],
        *,
        forward: str = "float32",
        jacobian: str | None = None,
        damping: float = 1e-3,
        min_damping: float = 1e-12,
        max_damping: float = 1e12,
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
        - `solver`: a solver of lineax for the stacked least-squares problem; by default
            `lineax.QR()`.

        **Raises:** `TypeError` for residuals that are no functions, `ValueError` for precisions
        that are unknown or need 64-bit types, and dampings that are not positive and in order.
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
        if not 0 < min_damping <= damping <= max_damping < float("inf"):
            raise ValueError(
                f"`{_CALL}` needs 0 < `min_damping` <= `damping` <= `max_damping`, but got "
                f"{min_damping!r}, {damping!r} and {max_damping!r}."
            )
        self.residuals = functions
        self.forward = check_forward(forward, _CALL)
        self.jacobian = jacobian
        self.damping = float(damping)
        self.min_damping, self.max_damping = float(min_damping), float(max_damping)
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
        if not jtu.tree_leaves(eqx.filter(model, eqx.is_inexact_array)):
            raise ValueError(f"`{_CALL}.init` needs a model with floating-point arrays.")
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
        examples without a leading axis of one length.
        """
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
        r, jac, finite = self._linearized(params, static, state.scaling, batches)
        loss = jnp.where(finite, jnp.sum(r**2), jnp.inf)

        size = jnp.maximum(jnp.max(jnp.sum(jac**2, axis=0)), jnp.finfo(self._dtype).tiny)
        delta = self._solve(jac, r, state.damping * size)
        moved = unravel((theta.astype(self._dtype) + delta).astype(theta.dtype))
        new = jnp.sum(self._values(moved, static, batches) ** 2)
        foretold = jnp.sum(r**2) - jnp.sum((r + jac @ delta) ** 2)
        take = finite & jnp.isfinite(new) & (new < loss) & jnp.all(jnp.isfinite(delta))
        return self._after(
            model, eqx.combine(moved, static), state, take, finite, (loss, new, foretold)
        )

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

    def _values(self, params: PyTree, static: PyTree, batches: tuple) -> Float[Array, " rows"]:
        out = []
        for fun, batch in zip(self.residuals, batches, strict=True):
            at = self._evaluated(fun)
            weight = 1 / math.sqrt(_length(batch))
            one = lambda x, at=at: jnp.ravel(at(eqx.combine(params, static), x))
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
            weight = 1 / math.sqrt(_length(batch))
            at = self._evaluated(fun)

            def one(x, at=at):
                value = lambda p: jnp.ravel(at(eqx.combine(p, static), x))
                r, pull = jax.vjp(value, params)
                seeds = jnp.eye(r.size, dtype=r.dtype)
                if scale is not None:
                    seeds = seeds * scale.astype(r.dtype)
                (pulled,) = jax.vmap(pull)(seeds)
                flat = [g.reshape(r.size, -1).astype(self._dtype) for g in jtu.tree_leaves(pulled)]
                return r.astype(self._dtype), jnp.concatenate(flat, axis=1)

            with jax.default_matmul_precision("highest"):
                r, jac = jax.vmap(one)(batch)
            rows.append(jnp.ravel(r) * weight)
            jacs.append(jac.reshape(-1, jac.shape[-1]) * weight)
        r, jac = jnp.concatenate(rows), jnp.concatenate(jacs)
        if scale is not None:
            jac = jac / scale.astype(self._dtype)
        finite = jnp.all(jnp.isfinite(r)) & jnp.all(jnp.isfinite(jac))
        return jnp.where(finite, r, 0.0), jnp.where(finite, jac, 0.0), finite

    def _solve(
        self,
        jac: Float[Array, "rows parameters"],
        r: Float[Array, " rows"],
        damping: Float[Array, ""],
    ) -> Float[Array, " parameters"]:
        try:
            import lineax as lx
        except ImportError as e:
            raise ImportError(
                f'`{_CALL}` solves by lineax. Install it: `pip install "mpx-pde[second_order]"`.'
            ) from e
        n = jac.shape[1]
        stacked = jnp.concatenate([jac, jnp.sqrt(damping) * jnp.eye(n, dtype=jac.dtype)])
        right = jnp.concatenate([-r, jnp.zeros(n, jac.dtype)])
        solver = lx.QR() if self.solver is None else self.solver
        with (
            jax.default_matmul_precision("highest"),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            operator = lx.MatrixLinearOperator(stacked)
            return lx.linear_solve(operator, right, solver, throw=False).value


def _length(batch: PyTree) -> int:
    lengths = {x.shape[0] if x.ndim else -1 for x in map(jnp.asarray, jtu.tree_leaves(batch))}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"`{_CALL}.update` needs examples stacked along a leading axis of one length, but got "
            f"arrays with leading axes of {sorted(map(str, lengths))}."
        )
    return lengths.pop()
