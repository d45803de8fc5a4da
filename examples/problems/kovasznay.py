"""Kovasznay flow, the steady flow behind a grid at Re = 40, on −½ ≤ x ≤ 1 and −½ ≤ y ≤ 3/2.

u·∇u + ∇p = ∇²u / Re, ∇·u = 0. The velocities on the boundary are those of the solution (Kovasznay,
1948): u = 1 − e^(λx) cos 2πy, v = λ/2π e^(λx) sin 2πy, p = (1 − e^(2λx))/2,
λ = Re/2 − √(Re²/4 + 4π²).
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep, between, ends
from ._problem import coordinate_mlp, draws, grid, problem, with_values


RE = 40.0
RATE = RE / 2 - np.sqrt(RE**2 / 4 + 4 * np.pi**2)
LOW, HIGH = (-0.5, -0.5), (1.0, 1.5)


def exact(point):
    x, y = point
    decay = jnp.exp(RATE * x)
    u = 1 - decay * jnp.cos(2 * jnp.pi * y)
    v = RATE / (2 * np.pi) * decay * jnp.sin(2 * jnp.pi * y)
    return jnp.stack([u, v, (1 - decay**2) / 2])


network = coordinate_mlp(2, 3, 40, 4)


def residual(fields, point, derivatives=None):
    given = {"coords": "xy", "outputs": "uvp", "scaling": derivatives}
    names = ["u", "v", *(f"{f}_{c}" for f in "uvp" for c in "xy")]
    d = mpx.laplacian(fields, names, **given)(point)
    carried = lambda f: d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"]
    x = carried("u") + d["p_x"] - d["lap_u"] / RE
    y = carried("v") + d["p_y"] - d["lap_v"] / RE
    return jnp.stack([x, y, d["u_x"] + d["v_y"]])


loss = with_values(residual, exact, "edges", "uv", 5, coords="xy", outputs="uvp")


sample = draws(inside=(384, LOW, HIGH), edges=(128, LOW, HIGH, (0, 1)))
AT = grid(np.linspace(-0.5, 1, 76), np.linspace(-0.5, 1.5, 101))


def form(point, n):
    """Blends the velocities on the boundary over the rectangle, and adds a term that vanishes
    there."""
    inside = ends(point, LOW, HIGH, 0) * ends(point, LOW, HIGH, 1)
    along_y = lambda p: between(lambda q: exact(q)[:2], p, LOW, HIGH, 1)
    rest = lambda p: exact(p)[:2] - along_y(p)
    velocities = along_y(point) + between(rest, point, LOW, HIGH, 0)
    return jnp.concatenate([velocities + inside * n[:2], n[2:]])


DEEP = Deep(residual=residual, form=form, low=LOW, high=HIGH, outputs=3)
PROBLEM = problem(
    __name__, "Kovasznay flow", coords="xy", order=2, fields="uvp", free=(2,), steps=3000
)
