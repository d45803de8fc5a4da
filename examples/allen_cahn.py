"""The Allen–Cahn equation by a physics-informed network, in float32, float16 and bfloat16.

The problem (Raissi et al., 2019) is

    u_t = D u_xx + 5 (u − u³)     for −1 ≤ x ≤ 1, periodic, and 0 ≤ t ≤ 1,
    u(0, x) = x² cos(πx),

with D = 1e-4. The values ±1 are stable, and between them stay fronts about 0.01 wide. The reference
is a Fourier solution in float64 (`_spectral_reference.py`).

    python examples/allen_cahn.py
    python examples/allen_cahn.py --quick
    python examples/allen_cahn.py --precision float16 naive-float16 --seed 1

How it is trained stands in `_pinn.py`, and what precision means in its function `step`.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
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
from _spectral_reference import allen_cahn
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx


D, REACTION = 1e-4, 5.0
BATCH = 512  # collocation points in a step
CANDIDATES = 8192  # points that they are chosen from


# --- The network -----------------------------------------------------------------------------


class AllenCahnNetwork(eqx.Module):
    """u(t, x) = u₀(t, x) + t N(t, x), with N periodic in x, and u₀(0, x) the initial values.

    The initial x² cos(πx) has a kink at ±1, which diffusion rounds off. So in u₀ the x² turns into
    (1 − cos πx) / 2, equal to it at 0 and ±1 and smooth, while t grows.
    """

    mlp: mpx.nn.CoordinateMLP

    def __init__(self, *, key: PRNGKeyArray):
        self.mlp = mpx.nn.CoordinateMLP(
            2, "scalar", 32, 4, key=key, periodic={1: 2.0}, full_precision_last=True
        )

    def __call__(self, point: Float[Array, "2"]) -> Float[Array, ""]:
        t, x = point
        smooth = (1 - jnp.cos(jnp.pi * x)) / 2
        start = (smooth + jnp.exp(-10 * t) * (x**2 - smooth)) * jnp.cos(jnp.pi * x)
        return start + t * self.mlp(jnp.stack([2 * t - 1, x]))


# --- The equation ----------------------------------------------------------------------------


def residuals(
    u: AllenCahnNetwork, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, " batch"]:
    """u_t − D u_xx − 5 (u − u³), times e^(−5t).

    Where u is small, what is wrong at time t has grown by e^(5 (1 − t)) at the end. Without the
    weight training ends in a wrong solution, with fronts where early errors put them.
    """
    terms = mpx.partials(u, ["u", "u_t", "u_xx"], coords="tx", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    residual = d["u_t"] - D * d["u_xx"] - REACTION * (d["u"] - d["u"] ** 3)
    return jnp.exp(-REACTION * points[:, 0].astype(residual.dtype)) * residual


def loss(
    u: AllenCahnNetwork, points: Float[Array, "batch 2"], *, derivatives: Any = None
) -> Float32[Array, ""]:
    return jnp.mean(residuals(u, points, derivatives) ** 2)


def choose_points(u: AllenCahnNetwork, key: PRNGKeyArray) -> Float32[Array, "steps batch 2"]:
    candidate_key, choice_key = jax.random.split(key)
    points = uniform(candidate_key, CANDIDATES, low=(0, -1), high=(1, 1))
    return choose(choice_key, points, residuals(u, points), BATCH)


# --- Results ---------------------------------------------------------------------------------


T, X = np.linspace(0, 1, 101), np.linspace(-1, 1, 257)


def reference() -> Float[np.ndarray, "t x"]:
    """The solution on the grid of `T` and `X`."""
    x = np.linspace(-1, 1, 1024, endpoint=False)
    u = allen_cahn(
        x**2 * np.cos(np.pi * x),
        diffusivity=D,
        reaction=REACTION,
        length=2.0,
        time=1.0,
        steps=200,
        every=2,
    )[:, ::4]
    return np.concatenate([u, u[:, :1]], axis=1)  # x = 1 is x = −1


REFERENCE = reference()


def errors(u: AllenCahnNetwork) -> dict[str, float]:
    error = np.linalg.norm(evaluate(u, T, X) - REFERENCE) / np.linalg.norm(REFERENCE)
    return {"rel. L2 error": float(error)}


def draw(figure: Any, results: Sequence[Result]) -> None:
    fields = [evaluate(r.model, T, X) for r in results]
    draw_fields(figure, results, fields, REFERENCE, (T, X), names=("t", "x"), field="u(t, x)")


PROBLEM = Problem(
    name="allen_cahn",
    title="Allen–Cahn equation",
    network=lambda key: AllenCahnNetwork(key=key),
    loss=loss,
    points=choose_points,
    errors=errors,
    draw=draw,
    derivatives=lambda _, mode: mpx.DerivativeScaling.per_direction("tx", order=2, mode=mode),
    # Muon gets there in a fifth of the steps that Adam takes.
    optimizer=optax.contrib.muon,
    full=Training(3_000, 2e-2),
    quick=Training(1_000, 2e-2),
)


def main(precisions: Sequence[str] = PRECISIONS, **options: Any) -> dict[str, Result]:
    """Trains in each precision; the options are those of `_pinn.run`."""
    return run(PROBLEM, precisions, **options)


if __name__ == "__main__":
    run_main(main, arguments(__doc__, PROBLEM, out="outputs/allen_cahn"))
