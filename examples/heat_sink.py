"""Flow and temperature around a heat sink by a physics-informed network.

Three heated fins stand in a channel, as in the two-dimensional heat sink of PhysicsNeMo. The flow
is steady and incompressible, and carries the temperature along:

    u·∇u + ∇p = ν ∇²u,      ∇·u = 0,      u·∇T = D ∇²T,

with a parabola of u and T = 0 at the inlet, no slip and T = 1 at the fins, no slip and no heat flux
at the walls, p = 0 and v = 0 at the outlet. The network returns u, v, p and T.

    python examples/heat_sink.py
    python examples/heat_sink.py --quick                  # about a minute
    python examples/heat_sink.py --precision float32 float16 --seed 1

The geometry is given by distance functions. A smooth one that vanishes at the fins (by R-functions,
Sukumar & Srivastava, 2022) builds all boundary conditions into the fields but the heat flux at the
walls, which is a term of the loss; the exact one says where points are. Another term is that each
cross-section lets through what comes in. So that a CPU trains it in a minute or two, the problem
is smaller than the original: ν = D = 0.05, that is Re = 20, fins half as long and a channel of
length 2. The reference is a finite-volume solution; at its resolution it is itself uncertain by
about 1% in u and T, and by 2 to 4% in v and p, since all are singular in the corners of the fins.

What to expect in float32: relative L2 errors of about 1% in T, 5% in u, 7% in p and 18% in v, which
is small but near the corners.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _heat_sink_reference import (
    DIFFUSIVITY,
    FINS,
    VISCOSITY,
    X_IN,
    X_OUT,
    Y_HIGH,
    Y_LOW,
    HeatSink,
    fin_distance,
    inlet,
    reference,
)
from _pinn import (
    PRECISIONS,
    STEPS_PER_CALL,
    Problem,
    Result,
    Training,
    arguments,
    draw_fields,
    evaluate,
    run,
    run_main,
)
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx


BATCH, WALL = 512, 64  # points in the fluid and on the walls, in a step
SECTIONS, ACROSS = 8, 80  # cross-sections in a step, and points on each
CANDIDATES = 80_000  # points in the channel of which those in the fluid are taken


# --- The fields ------------------------------------------------------------------------------


def away(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
    """0 at the fins, about the distance to them nearby, and 1 far away; smooth in the fluid."""

    def from_fin(box):
        x0, x1, y0, y1 = box
        # Positive between two parallel lines; both are so inside the fin.
        a = (x - x0) * (x1 - x) / (x1 - x0)
        b = (y - y0) * (y1 - y) / (y1 - y0)
        distance = jnp.sqrt(a**2 + b**2) - a - b
        return distance / (distance + 0.05)

    one, two, three = map(from_fin, FINS)
    return one * two * three


def form(point: Float[Array, "2"], outputs: Float[Array, "4"]) -> Float[Array, "4"]:
    """u, v, p, T from what the network returns."""
    x, y = point
    near, far = away(x, y), away(jnp.full_like(x, X_IN), y)
    inside, passed, ahead = 1 - 4 * y**2, x - X_IN, X_OUT - x
    u = near * (inlet(y) / far + inside * passed * outputs[0])
    v = near * inside * passed * ahead * outputs[1]
    t = 1 - near * (1 / far + passed * outputs[3])
    return jnp.stack([u, v, PRESSURE * ahead * outputs[2], t])


PRESSURE = 10.0  # of the size of the drop across the fins


def network(key: PRNGKeyArray) -> mpx.nn.Ansatz:
    mlp = mpx.nn.CoordinateMLP(2, 4, 48, 4, key=key, fourier_features=(24, 0.7))
    return mpx.nn.Ansatz(mlp, form)


# --- The equations ---------------------------------------------------------------------------


OUTPUTS = ["u", "v", "p", "t"]
TERMS = ["u", "v", *(f"{f}_{c}" for f in OUTPUTS for c in "xy")]
TERMS += [f"{f}_{c}{c}" for f in "uvt" for c in "xy"]
CORNERS = np.array([(x, y) for *xs, y0, y1 in FINS for x in xs for y in (y0, y1)], np.float32)


def residuals(
    fields: Any, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, "4 batch"]:
    """Of mass, momentum and heat. All but the first are singular in the corners of the fins, and
    weigh less there."""
    terms = mpx.partials(fields, TERMS, coords="xy", outputs=OUTPUTS, scaling=derivatives)
    d = jax.vmap(terms)(points)

    def transport(name, diffusivity):
        carried = d["u"] * d[f"{name}_x"] + d["v"] * d[f"{name}_y"]
        return carried - diffusivity * (d[f"{name}_xx"] + d[f"{name}_yy"])

    x = transport("u", VISCOSITY) + d["p_x"]
    y = transport("v", VISCOSITY) + d["p_y"]
    heat = transport("t", DIFFUSIVITY)
    apart = points[:, None, :] - CORNERS[None, :, :]
    near = jnp.minimum(jnp.sqrt(jnp.min(jnp.sum(apart**2, axis=2), axis=1)) / 0.1, 1.0) ** 2
    return jnp.stack([d["u_x"] + d["v_y"], MOMENTUM * near * x, MOMENTUM * near * y, near * heat])


MOMENTUM = 0.2  # weight of the momentum balance, whose terms are of the size of the pressure


def loss(fields: Any, points: dict[str, Array], *, derivatives: Any = None) -> Float32[Array, ""]:
    inside = residuals(fields, points["fluid"], derivatives)
    terms = mpx.partials(fields, ["t_y"], coords="xy", outputs=OUTPUTS, scaling=derivatives)
    flux = jax.vmap(terms)(points["wall"])["t_y"]
    # Each cross-section lets through a mean speed of 1.
    u = mpx.partials(fields, ["u"], coords="xy", outputs=OUTPUTS, scaling=derivatives)
    speed = jax.vmap(jax.vmap(u))(points["sections"])["u"]
    x, y = jnp.moveaxis(points["sections"], -1, 0)
    through = jnp.mean(jnp.where(fin_distance(x, y) > 0, speed, 0.0), axis=1)
    return (
        jnp.mean(jnp.sum(inside**2, axis=0))
        + jnp.mean(flux**2)
        + THROUGH * jnp.mean((through - 1) ** 2)
    )


THROUGH = 4.0  # weight of the flow through cross-sections


def choose_points(_: Any, key: PRNGKeyArray) -> dict[str, Float32[Array, "steps batch 2"]]:
    fluid, wall, side, section = jax.random.split(key, 4)
    low, high = jnp.array([X_IN, Y_LOW]), jnp.array([X_OUT, Y_HIGH])
    points = jax.random.uniform(fluid, (CANDIDATES, 2), minval=low, maxval=high)
    # Those in the fluid first. A point on a fin's surface would be where the root has no slope.
    outside = fin_distance(points[:, 0], points[:, 1]) > 1e-4
    points = points[jnp.argsort(~outside)][: STEPS_PER_CALL * BATCH]
    shape = (STEPS_PER_CALL, WALL)
    x = jax.random.uniform(wall, shape, minval=X_IN, maxval=X_OUT)
    y = jax.random.choice(side, jnp.array([Y_LOW, Y_HIGH]), shape)
    at = jax.random.uniform(section, (STEPS_PER_CALL, SECTIONS, 1), minval=X_IN, maxval=X_OUT)
    across = jnp.linspace(Y_LOW, Y_HIGH, 2 * ACROSS + 1)[1::2]
    return {
        "sections": jnp.stack(jnp.broadcast_arrays(at, across[None, None, :]), axis=-1),
        "fluid": points.reshape(STEPS_PER_CALL, BATCH, 2),
        "wall": jnp.stack([x, y], axis=-1),
    }


# --- Results ---------------------------------------------------------------------------------


@cache
def _reference() -> HeatSink:
    return reference(80)


def errors(fields: Any) -> dict[str, float]:
    """Relative L2 errors in the fluid: their mean over the four fields, and each."""
    flow = _reference()
    got = evaluate(fields, flow.x, flow.y)
    out = {}
    for i, name in enumerate(OUTPUTS):
        want = getattr(flow, name)[~flow.solid]
        out[name] = float(np.linalg.norm(got[..., i][~flow.solid] - want) / np.linalg.norm(want))
    return {"rel. L2 error": float(np.mean(list(out.values()))), **out}


def draw(figure: Any, results: Sequence[Result]) -> None:
    flow = _reference()
    fields = [
        np.where(flow.solid, np.nan, evaluate(r.model, flow.x, flow.y)[..., 3]) for r in results
    ]
    filled = np.nan_to_num(flow.t, nan=1.0)
    draw_fields(figure, results, fields, filled, (flow.x, flow.y), names=("x", "y"), field="T")


PROBLEM = Problem(
    name="heat_sink",
    title="Heat sink",
    network=network,
    loss=loss,
    points=choose_points,
    errors=errors,
    draw=draw,
    derivatives=lambda _, mode: mpx.DerivativeScaling.per_direction("xy", order=2, mode=mode),
    full=Training(4_000, 1e-2),
    quick=Training(600, 1e-2),
    optimizer=optax.contrib.muon,
)


def main(precisions: Sequence[str] = PRECISIONS, **options: Any) -> dict[str, Result]:
    """Trains in each precision; the options are those of `_pinn.run`."""
    return run(PROBLEM, precisions, **options)


if __name__ == "__main__":
    run_main(main, arguments(__doc__, PROBLEM, out="outputs/heat_sink"))
