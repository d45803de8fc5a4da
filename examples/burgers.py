"""Burgers' equation by a physics-informed network, in float32, float16 and bfloat16.

The problem (Raissi et al., 2019) is the viscous Burgers equation with ν = 0.01/π,

    u_t + u u_x = ν u_xx     for −1 ≤ x ≤ 1 and 0 ≤ t ≤ 1,
    u(0, x) = −sin(πx),      u(t, ±1) = 0,

whose sine wave steepens into a shock at x = 0, about 0.01 wide. One network is trained three
times by the same Optax loop, from the same seed and among the same random points, of which each
picks those where its own residual is large: in float32, with float16 and with bfloat16 matrix
products. Each is compared with the exact solution.

    python examples/burgers.py                            # all three
    python examples/burgers.py --quick                    # all three, under a minute
    python examples/burgers.py --precision float16 --seed 1 --mode predictive
    python examples/burgers.py --precision float16 naive-float16

What to expect, from the same command on two CPU cores: a relative L2 error of about 2e-3 in
float32 and in float16, and slightly more in bfloat16, with no step skipped. Here the float16 run
takes longer than the float32 one and no less memory, since XLA converts to float32 and back on a
CPU; the speed and the memory are a matter for GPUs and TPUs. With `--quick` the errors are about
ten times as large, and scatter more between precisions.

The network that is evaluated is a running average of the float32 weights. How it is trained stands
in `_pinn.py`, and what precision means in its function `step`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _burgers_exact import NU, exact_solution
from _pinn import (
    PRECISIONS,
    Problem,
    Result,
    Training,
    arguments,
    choose,
    draw_fields,
    evaluate,
    run,
    run_main,
    uniform,
)
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx


BATCH = 512  # collocation points in a step
CANDIDATES = 8192  # points that they are chosen from


# --- The network -----------------------------------------------------------------------------


class BurgersNetwork(eqx.Module):
    """u(t, x) = −sin(πx) + t (1 − x²) N(t, x), which meets the initial and boundary values.

    The coordinates and the first and last layers stay in float32, and so does all activation
    arithmetic: only the products of the hidden layers, nearly all of the work, are in half.
    (`mpx.nn.CoordinateMLP` is such a network too; this one shows what there is to it.)
    """

    first: mpx.FullPrecision
    hidden: list[eqx.nn.Linear]
    last: mpx.FullPrecision
    activation: Callable

    def __init__(self, width: int = 32, depth: int = 4, *, key: PRNGKeyArray):
        first, last, *hidden = jax.random.split(key, depth + 1)
        self.first = mpx.FullPrecision(eqx.nn.Linear(2, width, key=first))
        self.hidden = [eqx.nn.Linear(width, width, key=k) for k in hidden]
        self.last = mpx.FullPrecision(eqx.nn.Linear(width, 1, key=last))
        self.activation = mpx.nn.tanh  # evaluated in float32, also where its input is half

    def __call__(self, point: Float[Array, "2"]) -> Float[Array, ""]:
        t, x = point
        h = self.activation(self.first(jnp.stack([2 * t - 1, x])))
        for layer in self.hidden:
            h = self.activation(layer(h.astype(layer.weight.dtype)))  # half where the weights are
        n = self.last(h.astype(point.dtype))[0]
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * n


# --- The equation ----------------------------------------------------------------------------


def residuals(
    u: BurgersNetwork, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, " batch"]:
    """u_t + u u_x − ν u_xx, divided by √(1 + |u_x|).

    Without the weight, the points inside the shock, where every term is above 100, would drown all
    the others.
    """
    terms = ["u", "u_t", "u_x", "u_xx"]
    d = jax.vmap(mpx.partials(u, terms, coords="tx", outputs="u", scaling=derivatives))(points)
    weight = jax.lax.stop_gradient(jax.lax.rsqrt(1 + jnp.abs(d["u_x"])))
    return weight * (d["u_t"] + d["u"] * d["u_x"] - NU * d["u_xx"])


def loss(
    u: BurgersNetwork, points: Float[Array, "batch 2"], *, derivatives: Any = None
) -> Float32[Array, ""]:
    return jnp.mean(residuals(u, points, derivatives) ** 2)


def choose_points(u: BurgersNetwork, key: PRNGKeyArray) -> Float32[Array, "steps batch 2"]:
    candidate_key, choice_key = jax.random.split(key)
    points = uniform(candidate_key, CANDIDATES, low=(0, -1), high=(1, 1))
    return choose(choice_key, points, residuals(u, points), BATCH)


# --- Results ---------------------------------------------------------------------------------


T, X = np.linspace(0, 1, 101), np.linspace(-1, 1, 257)
EXACT = exact_solution(*np.meshgrid(T, X, indexing="ij"))


def errors(u: BurgersNetwork) -> dict[str, float]:
    error = np.linalg.norm(evaluate(u, T, X) - EXACT) / np.linalg.norm(EXACT)
    return {"rel. L2 error": float(error)}


def draw(figure: Any, results: Sequence[Result]) -> None:
    fields = [evaluate(r.model, T, X) for r in results]
    draw_fields(figure, results, fields, EXACT, (T, X), names=("t", "x"), field="u(t, x)")


PROBLEM = Problem(
    name="burgers",
    title="Burgers' equation",
    network=lambda key: BurgersNetwork(key=key),
    loss=loss,
    points=choose_points,
    errors=errors,
    draw=draw,
    derivatives=lambda _, mode: mpx.DerivativeScaling.per_direction("tx", order=2, mode=mode),
    # At 2e-3 the three trainings stay close to each other; at 5e-3 a short one gets further, but
    # rounding differences grow, and final errors scatter by 10 to 20% whatever the precision.
    full=Training(15_000, 2e-3),
    quick=Training(1_500, 5e-3),
)


def main(precisions: Sequence[str] = PRECISIONS, **options: Any) -> dict[str, Result]:
    """Trains in each precision; the options are those of `_pinn.run`."""
    return run(PROBLEM, precisions, **options)


if __name__ == "__main__":
    run_main(main, arguments(__doc__, PROBLEM, out="outputs/burgers"))
