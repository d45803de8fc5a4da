"""Trainings by dual steps: from the same weights, at the same points, by one compiled step."""

import time
from typing import Any

import equinox as eqx
import jax
import numpy as np

import mpx_pde as mpx

from ._rivals import values


JUDGED = 4
"""The number of last draws that an error is the median of, since it rises and falls with them."""


@eqx.filter_jit
def _drawn(problem: Any, key: Any) -> Any:
    return problem.batches(key)


class Trainer:
    """Trains by steps of an optimizer, by default dual ones with a float64 residual. Compiles once
    for all seeds."""

    def __init__(self, problem: Any, optimizer: Any = None, **options: Any):
        options = {"forward": "float64", "method": "dual", **options}
        self.problem = problem
        self.optimizer = optimizer or mpx.LevenbergMarquardt(problem.residuals, **options)
        self._update = eqx.filter_jit(self.optimizer.update)

    def __call__(self, seed: int, steps: int, redraw: int) -> dict[str, Any]:
        """Draws points anew every `redraw` steps. Errors are those at the end of every fifth
        step."""
        key = jax.random.key(seed)
        model, batches = self.problem.network(key), _drawn(self.problem, key)
        state, errors, iterations, spent = self.optimizer.init(model), [], [], []
        for step in range(steps):
            if step and step % redraw == 0:
                batches = _drawn(self.problem, jax.random.fold_in(key, step))
            began = time.process_time()
            model, state = jax.block_until_ready(self._update(model, state, batches))
            spent.append(time.process_time() - began)
            iterations.append(int(state.iterations))
            if (step + 1) % 5 == 0:
                errors.append(float(f"{self.problem.error(model):.4g}"))
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        return {
            "parameters": sum(x.size for x in arrays),
            "rows": eqx.filter_eval_shape(values, self.problem.residuals, model, batches).size,
            "cpu_seconds_a_step": float(np.median(spent)),
            "error": float(np.median(errors[-JUDGED:])),
            "loss": float(state.loss),
            "damping": float(state.damping),
            "rejected": int(state.rejected),
            "iterations": iterations,
            "errors": errors,
        }
