"""Levenberg–Marquardt steps for `optimistix.least_squares`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .._util._types import PyTree
from ..second_order import LevenbergMarquardt


def least_squares_solver(rtol: float, atol: float, **options: Any) -> Any:
    """Returns an `optimistix.AbstractLeastSquaresSolver` that takes the steps of
    [`mpx_pde.LevenbergMarquardt`][].

    It minimizes what `optimistix.least_squares` is given, a function of `y` and `args` that returns
    a PyTree of residuals. All residuals count as one example, so their Jacobian is held whole.

    ```python
    solver = mpx.contrib.least_squares_solver(1e-8, 1e-8, forward="float64", jacobian="bfloat16")
    solution = optimistix.least_squares(fn, solver, y0, args)
    ```

    **Arguments:**

    - `rtol`, `atol`: tolerances. It ends after a step that changes each entry of `y` by less than
        `atol + rtol * |y|`, and the loss by less than `atol + rtol * loss`, or after an update that
        takes no step.
    - `options`: those of [`mpx_pde.LevenbergMarquardt`][].
    """
    import optimistix as optx

    class Solver(optx.AbstractLeastSquaresSolver):
        """Takes steps of `LevenbergMarquardt`."""

        rtol: float
        atol: float
        norm: Callable = optx.max_norm

        def init(self, fn, y, args, options, f_struct, aux_struct, tags):
            return _optimizer(fn, args).init(y), jnp.array(False)

        def step(self, fn, y, args, options, state, tags):
            before, _ = state
            new, after = _optimizer(fn, args).update(y, before, (jnp.zeros(1),))
            (flat, _), (flat_before, _) = ravel_pytree(new), ravel_pytree(y)

            def close(x, x0):
                return jnp.all(jnp.abs(x - x0) <= self.atol + self.rtol * jnp.abs(x))

            done = close(flat, flat_before) & close(after.loss, before.loss) | ~after.taken
            return new, (after, done), fn(new, args)[1]

        def terminate(self, fn, y, args, options, state, tags):
            return state[1], optx.RESULTS.successful

        def postprocess(self, fn, y, aux, args, options, state, tags, result):
            return y, aux, {"state": state[0]}

    def _optimizer(fn: Callable[[PyTree, Any], Any], args: Any) -> LevenbergMarquardt:
        residual = lambda y, _: ravel_pytree(fn(y, args)[0])[0]
        return LevenbergMarquardt(residual, **options)

    return Solver(rtol, atol)
