"""Training steps on the cavity: how libraries of JAX differentiate and lower the precision.

All begin with the same weights and points and take Adam.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import mpx_pde as mpx

from . import _steps
from ._cavity import (
    Layers,
    coordinate_mlp,
    initial_layers,
    initial_points,
    laplacian_residuals,
    mean_square,
    named,
    nested,
    network,
    residuals,
)
from ._rivals import require
from ._steps import (
    HIGHEST,
    START,
    TF32,
    Rival,
    Task,
    alone,
    by_hand,
    in_float32,
    precision_options,
)


Who = tuple[str, str, str]
"""A rival: library, method and precision."""

# --- Losses ----------------------------------------------------------------------------------


def _widened(order: int) -> Callable[[Any], jax.Array]:
    """The loss of derivatives in any precision: residuals and their mean in float32."""
    return lambda d: mean_square(jax.tree.map(lambda x: x.astype(jnp.float32), d), order)


def nested_loss(layers, points, *, order, finish=None):
    """By nested `jax.jvp`, in the precision of the arguments up to the residuals."""
    finish = finish or _widened(order)
    return finish(jax.vmap(nested(partial(network, layers), order))(points))


def folx_loss(layers, points, *, order):
    """By folx: one pass for value, Jacobian and Laplacian."""
    forward = require("folx").forward_laplacian(partial(network, layers))

    def terms(point):
        out = forward(point)
        d = named(out.x, *out.jacobian.dense_array)
        d["lap_u"], d["lap_v"], _ = out.laplacian
        if order >= 3:
            along = lambda e: jax.jvp(lambda p: forward(p).laplacian, (point,), (e,))[1]
            d["lap_u_x"], d["lap_v_y"] = along(jnp.eye(2)[0])[0], along(jnp.eye(2)[1])[1]
        return d

    return mean_square(jax.vmap(terms)(points), order)


# --- Rivals ----------------------------------------------------------------------------------


def by_mpx(order: int) -> Rival:
    """As MPX's README has it, what is critical in full precision."""

    def loss(layers, points):
        full_precision = require("mpx").force_full_precision
        finish = full_precision(partial(mean_square, order=order), jnp.float32)
        return nested_loss(layers, points, order=order, finish=finish)

    return _steps.by_mpx(alone(loss), "float16")


def by_jmp(order: int) -> Rival:
    def loss(policy):
        finish = lambda d: mean_square(policy.cast_to_output(d), order)
        return alone(partial(nested_loss, order=order, finish=finish))

    return _steps.by_jmp(loss, "float16")


def by_library(
    layers: Layers, method: str, precision: str, order: int, forward: str = "half"
) -> Rival:
    """The step by this library, its model and its scaling."""

    def loss(model, points, *, derivatives):
        if method == "laplacian":
            return laplacian_residuals(model, points, derivatives=derivatives)
        return residuals(model, points, derivatives=derivatives, order=order)

    def scaling():
        with mpx.half_precision("bfloat16" if precision == "bfloat16" else "float16"):
            derivatives = mpx.DerivativeScaling.per_direction("xy", order=order)
            return mpx.Scaling(mpx.DynamicLossScaling(START), derivatives)

    options = {**precision_options(precision), "keep_full": (False, True), "forward": forward}
    ours = _steps.by_library(alone(loss), **options)
    return ours._replace(scaling=scaling, model=partial(coordinate_mlp, layers))


def jax_rivals(layers: Layers, order: int, gpu: bool) -> dict[Who, Rival]:
    """On a GPU, JAX multiplies in TF32 unless told otherwise; this library always does as told."""
    full = {"float32": HIGHEST} | ({"TF32": TF32} if gpu else {})
    by_jvp, by_folx = (alone(partial(loss, order=order)) for loss in (nested_loss, folx_loss))
    out: dict[Who, Rival] = {}
    for precision, products in full.items():
        out["jax", "nested jvp", precision] = in_float32(by_jvp, products)
        out["folx", "forward Laplacian", precision] = in_float32(by_folx, products)
    halves = {"by hand": by_hand(by_jvp, "float16"), "mpx": by_mpx(order), "jmp": by_jmp(order)}
    out |= {(library, "nested jvp", "float16"): rival for library, rival in halves.items()}
    for method in ("partials", "laplacian") if order == 2 else ("partials",):
        for precision in ("float32", "float16", "bfloat16"):
            out["mpx_pde", method, precision] = by_library(layers, method, precision, order)
    return out


def everywhere(who: Who) -> bool:
    """Whether a rival is worth its compilation at all sizes, or only at the first."""
    library, method, precision = who
    if library == "mpx_pde":
        return method == "partials" and precision != "bfloat16"
    at_all = ("nested jvp", "forward Laplacian", "double backward")
    return library not in ("mpx", "jmp") and method in at_all


def cavity(width: int, depth: int, points: int, order: int = 2, gpu: bool = False) -> Task:
    layers = initial_layers(width, depth)
    exact = partial(nested_loss, order=order, finish=partial(mean_square, order=order))
    return Task(
        f"{width} × {depth}, {points:,} points, order {order}",
        {"width": width, "points": points, "order": order, "depth": depth},
        lambda: jax.tree.map(jnp.asarray, layers),
        alone(exact),
        lambda: [initial_points(points)],
        jax.ShapeDtypeStruct((points, 2), jnp.float32),
        jax_rivals(layers, order, gpu),
    )
