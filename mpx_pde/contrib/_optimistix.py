"""Levenberg–Marquardt steps for `optimistix.least_squares`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.flatten_util import ravel_pytree

from .._util._types import PyTree
from ..second_order import LevenbergMarquardt


def least_squares_solver(rtol: float, atol: float, **options: Any) -> Any:
    """Returns an `optimistix.AbstractLeastSquaresSolver` that takes the steps of
    [`mpx_pde.LevenbergMarquardt`][].

    It minimizes what `optimistix.least_squares` is given, a function of `y` and `args` that returns
    a PyTree of residuals. All residuals count as one example.

    ```python
    solver = mpx.contrib.least_squares_solver(1e-8, 1e-8, forward="float64", jacobian="bfloat16")
    solution = optimistix.least_squares(fn, solver, y0, args)
    ```

    **Arguments:**

    - `rtol`, `atol`: tolerances. It ends after a step that changes each entry of `y` by less than
        `atol + rtol * |y|`, and the loss by less than `atol + rtol * loss`, or when no step is left
        that lowers the loss: a smaller one changes nothing, or the damping is at its largest. If
        residuals or their Jacobian are not finite, the result is `nonlinear_divergence`.
    - `options`: those of [`mpx_pde.LevenbergMarquardt`][]. `forward` is by default the dtype of
        `y`.
    """
    import optimistix as optx

    class Solver(optx.AbstractLeastSquaresSolver):
        """Takes steps of `LevenbergMarquardt`."""

        rtol: float
        atol: float
        norm: Callable = optx.max_norm

        def init(self, fn, y, args, options, f_struct, aux_struct, tags):
            return _optimizer(fn, y, args).init(y), jnp.array(False)

        def step(self, fn, y, args, options, state, tags):
            optimizer, (before, _) = _optimizer(fn, y, args), state
            new, after = optimizer.update(y, before, (jnp.zeros(1),))
            (flat, _), (flat_before, _) = ravel_pytree(new), ravel_pytree(y)

            def close(x, x0):
                return jnp.all(jnp.abs(x - x0) <= self.atol + self.rtol * jnp.abs(x))

            converged = close(flat, flat_before) & close(after.loss, before.loss)
            # A step that is not taken raises the damping, unless it changes nothing.
            still = after.damping == before.damping
            stuck = still | (after.damping >= optimizer.max_damping)
            return new, (after, jnp.where(after.taken, converged, stuck)), fn(new, args)[1]

        def terminate(self, fn, y, args, options, state, tags):
            after, done = state
            lost = done & ~jnp.isfinite(after.loss)
            result = optx.RESULTS.where(
                lost, optx.RESULTS.nonlinear_divergence, optx.RESULTS.successful
            )
            return done, result

        def postprocess(self, fn, y, aux, args, options, state, tags, result):
            return y, aux, {"state": state[0]}

    def _optimizer(fn: Callable[[PyTree, Any], Any], y: PyTree, args: Any) -> LevenbergMarquardt:
        # `fn` may be a closed program, which takes the dtypes of `y` alone.
        like = lambda x, x0: x.astype(x0.dtype) if eqx.is_inexact_array(x) else x
        residual = lambda new, _: ravel_pytree(fn(jtu.tree_map(like, new, y), args)[0])[0]
        dtypes = {x.dtype for x in jtu.tree_leaves(y) if eqx.is_inexact_array(x)}
        forward = "float64" if jnp.dtype("float64") in dtypes else "float32"
        return LevenbergMarquardt(residual, **{"forward": forward, **options})

    return Solver(rtol, atol)
