"""The lid-driven cavity by a physics-informed network, laminar and with a turbulence model.

A lid of speed 1 drives the steady flow in the unit square at Re = 100:

    u u_x + v u_y + p_x = (2 ν u_x)_x + (ν (u_y + v_x))_y,
    u v_x + v v_y + p_y = (ν (u_y + v_x))_x + (2 ν v_y)_y,      u_x + v_y = 0,

with u = 1 on the whole lid and no slip at the other walls. The network returns u, v and p. With
`--turbulence zero-equation` the viscosity is not 1/Re but (Xue et al., equation 1)

    ν = 1/Re + l² √(2 u_x² + 2 v_y² + (u_y + v_x)²),    l = min(0.419 d, 0.045),

where d is the distance to the nearest wall. Its derivatives are then derivatives of derivatives:
the terms `nu_x` and `nu_y`, whose range is another than that of second derivatives and which have
a scaler of their own. With `--turbulence zero-equation-flattened` the product rule is written out
instead, so that all terms are derivatives of u and v.

    python examples/lid_driven_cavity.py
    python examples/lid_driven_cavity.py --quick          # under a minute
    python examples/lid_driven_cavity.py --turbulence zero-equation --precision float32 float16

The velocity jumps in the two corners of the lid, where the flow is that of a plate that scrapes
along another (Taylor, 1962), with pressures like 1/r. Fields that have these corners and meet all
boundary conditions are added to what the network, multiplied by a function that vanishes at the
walls, has to learn. Errors are those of u on the vertical and of v on the horizontal centre line,
against a finite-volume solution, and against the table of Ghia, Ghia & Shin (1982).

What to expect of the laminar flow: a relative L2 error of about 1.5e-3 in float32 and in float16,
and ten times as much in bfloat16; against the table about 1e-2, which is the error of the table.
Where the fields turn steep in the corners, the second derivatives of a trained network leave
float16 at scale 1: some steps in a thousand are skipped and the derivative scales fall to 1/2. In
`naive-float16` derivatives overflow too, but only the loss scale can give way: it falls until the
gradients vanish, and the error stays of the order of 1.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _cavity_reference import GHIA_U, GHIA_V, center_lines, mixing_length
from _pinn import (
    PRECISIONS,
    STEPS_PER_CALL,
    Problem,
    Result,
    Training,
    arguments,
    run,
    run_main,
)
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx


NU = 1 / 100
BATCH = 384  # collocation points in a step
MODELS = ("none", "zero-equation", "zero-equation-flattened")


# --- The fields ------------------------------------------------------------------------------


# The stream function r f(θ) of a plate (θ = 0) that scrapes along another (θ = π/2).
_B = 1 / (np.pi / 2 - 2 / np.pi)
_A, _C = -_B * np.pi / 2, 2 * _B / np.pi


def stream_function(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
    """Its velocities are 1 on the lid and 0 at the walls, and those of the scraper in the corners:
    the product of both corners' solutions."""
    d = 1 - y

    def corner(x):
        angle = jnp.arctan2(d, x)
        return _A + _B * angle + _C * angle * x / d

    return -d * corner(x) * corner(1 - x) * y**2


def form(point: Float[Array, "2"], outputs: Float[Array, "3"]) -> Float[Array, "3"]:
    """u, v, p from what the network returns."""
    x, y = point
    y = jnp.minimum(y, 1 - 1e-6)  # corners are singular, and so is the lid by the formula
    d = 1 - y
    left = (_B * d + _C * x) / (x**2 + d**2)
    right = (_B * d + _C * (1 - x)) / ((1 - x) ** 2 + d**2)
    minus_v, u = jax.grad(stream_function, (0, 1))(x, y)
    lift = jnp.stack([u, -minus_v, 2 * NU * (right - left)])
    inside = 16 * x * (1 - x) * y * (1 - y)
    return lift + outputs * jnp.stack([inside, inside, jnp.ones_like(inside)])


def network(key: PRNGKeyArray) -> mpx.nn.Ansatz:
    mlp = mpx.nn.CoordinateMLP(2, 3, 32, 4, key=key, fourier_features=(16, 0.5))
    return mpx.nn.Ansatz(mlp, form)


# --- The equations ---------------------------------------------------------------------------


FIRST = ["u", "v", "u_x", "u_y", "v_x", "v_y", "p_x", "p_y"]
SECOND = ["u_xx", "u_yy", "v_xx", "v_yy"]


def strain(d: dict[str, Array]) -> Array:
    """√G of the turbulence model; never 0, where it has no derivative."""
    shear = d["u_y"] + d["v_x"]
    return jnp.sqrt(2 * d["u_x"] ** 2 + 2 * d["v_y"] ** 2 + shear**2 + 1e-6)


def viscosity(fields: Any, terms: dict[str, Array], derivatives: Any, turbulence: str) -> Any:
    """ν, ν_x and ν_y at one point as a function of that point."""
    square = lambda p: mixing_length(p[0], p[1]) ** 2

    def nested(point):
        """ν as a field, to be differentiated as one."""

        def nu(p):
            names = ["u_x", "u_y", "v_x", "v_y"]
            d = mpx.partials(fields, names, coords="xy", outputs="uvp", scaling=derivatives)(p)
            return NU + square(p) * strain(d)

        names = ["nu", "nu_x", "nu_y"]
        n = mpx.partials(nu, names, coords="xy", outputs=["nu"], scaling=derivatives)(point)
        return n["nu"], n["nu_x"], n["nu_y"]

    def flattened(point):
        """The same by the product rule."""
        d, size, shear = terms, strain(terms), terms["u_y"] + terms["v_x"]
        along_x = 2 * d["u_x"] * d["u_xx"] + 2 * d["v_y"] * d["v_xy"]
        along_y = 2 * d["u_x"] * d["u_xy"] + 2 * d["v_y"] * d["v_yy"]
        size_x = (along_x + shear * (d["u_xy"] + d["v_xx"])) / size
        size_y = (along_y + shear * (d["u_yy"] + d["v_xy"])) / size
        length, (length_x, length_y) = jax.value_and_grad(square)(point)
        nu_x = length_x * size + length * size_x
        nu_y = length_y * size + length * size_y
        return NU + length * size, nu_x, nu_y

    return nested if turbulence == "zero-equation" else flattened


def residuals(
    fields: Any, point: Float[Array, "2"], derivatives: Any, turbulence: str
) -> Float32[Array, "3"]:
    """Of mass and momentum at one point."""
    names = FIRST + SECOND + (["u_xy", "v_xy"] if turbulence == MODELS[2] else [])
    d = mpx.partials(fields, names, coords="xy", outputs="uvp", scaling=derivatives)(point)
    mass = d["u_x"] + d["v_y"]
    nu, nu_x, nu_y = NU, 0.0, 0.0
    if turbulence != "none":
        nu, nu_x, nu_y = viscosity(fields, d, derivatives, turbulence)(point)
    shear = d["u_y"] + d["v_x"]
    x_stress = nu * (d["u_xx"] + d["u_yy"]) + 2 * nu_x * d["u_x"] + nu_y * shear
    y_stress = nu * (d["v_xx"] + d["v_yy"]) + 2 * nu_y * d["v_y"] + nu_x * shear
    x_momentum = d["u"] * d["u_x"] + d["v"] * d["u_y"] + d["p_x"] - x_stress
    y_momentum = d["u"] * d["v_x"] + d["v"] * d["v_y"] + d["p_y"] - y_stress
    return jnp.stack([mass, x_momentum, y_momentum])


def loss(
    fields: Any,
    points: Float[Array, "batch 2"],
    *,
    derivatives: Any = None,
    turbulence: str = "none",
) -> Float32[Array, ""]:
    """Mean squared residuals, those of momentum less near the two corners, where they are 1/r."""
    at = lambda p: residuals(fields, p, derivatives, turbulence)
    mass, x, y = jax.vmap(at, out_axes=1)(points)
    to_side = jnp.minimum(points[:, 0], 1 - points[:, 0])
    corner = to_side**2 + (1 - points[:, 1]) ** 2
    near = lambda radius: jnp.minimum(corner / radius**2, 1.0)
    return jnp.mean(MASS * near(0.01) * mass**2 + near(0.1) ** 2 * (x**2 + y**2))


MASS = 0.3  # weight of the mass balance


def choose_points(_: Any, key: PRNGKeyArray) -> Float32[Array, "steps batch 2"]:
    # Closer to the lid, the derivatives of the formula lose their digits.
    high = jnp.array([1.0, 0.998])
    return jax.random.uniform(key, (STEPS_PER_CALL, BATCH, 2), maxval=high)


def derivative_scaling(_: Any, mode: str, turbulence: str = "none") -> mpx.DerivativeScaling:
    if turbulence == "none":
        # Second derivatives are singular in the corners: a point close to one is a spike of many
        # powers of two over what the last steps have shown.
        return mpx.DerivativeScaling.per_direction("xy", order=2, mode=mode, margin=12)
    special = ["nu_x", "nu_y"] if turbulence == "zero-equation" else []
    return mpx.DerivativeScaling.per_order(2, special=special, mode=mode)


# --- Results ---------------------------------------------------------------------------------


S = np.linspace(0, 1, 129)[1:-1]


@cache
def _reference(turbulence: str) -> tuple[np.ndarray, np.ndarray]:
    return center_lines(S, 1 / NU, turbulence=turbulence != "none")


@eqx.filter_jit
def _at(fields: Any, points: Float[Array, "n 2"]) -> Float[Array, "n 3"]:
    return jax.vmap(fields)(points)


def lines(fields: Any, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u at (1/2, y) and v at (x, 1/2)."""
    vertical = np.stack([np.full_like(y, 0.5), y], axis=1)
    horizontal = np.stack([x, np.full_like(x, 0.5)], axis=1)
    values = np.asarray(_at(fields, jnp.float32(np.r_[vertical, horizontal])), np.float64)
    return values[: len(y), 0], values[len(y) :, 1]


def errors(fields: Any, turbulence: str = "none") -> dict[str, float]:
    """Relative L2 errors on the centre lines: both together, and each."""

    def relative(got, want):
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    got, want = lines(fields, S, S), _reference(turbulence)
    out = {"rel. L2 error": relative(np.concatenate(got), np.concatenate(want))}
    out |= {name: relative(g, w) for name, g, w in zip("uv", got, want, strict=True)}
    if turbulence == "none":
        table = GHIA_U[1:-1], GHIA_V[1:-1]
        got = lines(fields, table[0][:, 0], table[1][:, 0])
        want = np.concatenate([t[:, 1] for t in table])
        out["against Ghia et al."] = relative(np.concatenate(got), want)
    return out


def draw(figure: Any, results: Sequence[Result], turbulence: str = "none") -> None:
    left, right = figure.subplots(1, 2)
    for i, r in enumerate(results):
        u, v = lines(r.model, S, S)
        left.plot(u, S, f"C{i}", label=f"{r.label}, error {r.error:.1e}")
        right.plot(S, v, f"C{i}")
    u, v = _reference(turbulence)
    left.plot(u, S, "k:", label="finite volumes")
    right.plot(S, v, "k:")
    if turbulence == "none":
        left.plot(GHIA_U[:, 1], GHIA_U[:, 0], "ko", ms=3, label="Ghia et al., 1982")
        right.plot(GHIA_V[:, 0], GHIA_V[:, 1], "ko", ms=3)
    left.set(title="u on the vertical centre line", xlabel="u", ylabel="y")
    right.set(title="v on the horizontal centre line", xlabel="x", ylabel="v")
    left.legend(fontsize="small")


def problem(turbulence: str = "none") -> Problem:
    if turbulence not in MODELS:
        raise ValueError(f"`turbulence` must be one of {', '.join(MODELS)}, got {turbulence!r}.")
    given = {"turbulence": turbulence}
    return Problem(
        name="cavity" if turbulence == "none" else f"cavity-{turbulence}",
        title="Lid-driven cavity" + ("" if turbulence == "none" else f", {turbulence} turbulence"),
        network=network,
        loss=partial(loss, **given),
        points=choose_points,
        errors=partial(errors, **given),
        draw=partial(draw, **given),
        derivatives=partial(derivative_scaling, **given),
        full=Training(8_000, 1e-2),
        quick=Training(1_000, 1e-2),
        # Orthogonalised steps (Muon) get as far in 1,000 steps as Adam in several times as many.
        optimizer=optax.contrib.muon,
    )


def main(
    precisions: Sequence[str] = PRECISIONS, *, turbulence: str = "none", **options: Any
) -> dict[str, Result]:
    """Trains in each precision; the other options are those of `_pinn.run`."""
    return run(problem(turbulence), precisions, **options)


if __name__ == "__main__":
    options = arguments(__doc__, problem(), out="outputs/lid_driven_cavity")
    options.add_argument(
        "--turbulence", choices=MODELS, default="none", help="model of the eddy viscosity"
    )
    run_main(main, options)
