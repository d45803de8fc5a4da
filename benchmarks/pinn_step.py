"""How long does a cavity step take, and in how much memory? Rivals by width, points and order.

The step trains a tanh network for steady flow in two dimensions. It takes the gradient of the mean
squared residuals and updates with Adam. Order 1 means the Euler equations, order 2 (the base)
Navier–Stokes. Order 3 adds dispersion, the gradient of that Laplacian, as in the
Zakharov–Kuznetsov equation. All rivals begin with the same weights and points:

- plain JAX: nested `jax.jvp` of a plain function, in float32 (and, on a GPU, in TF32);
- folx: its forward Laplacian, in the same precisions;
- by hand: everything cast to float16, with a dynamic loss scale; MPX (0.1.8) and jmp: the same step
  with these libraries, as in their READMEs;
- PyTorch: double backward, and `torch.func` (forward over forward), in float32, by `torch.amp` in
  float16 with `GradScaler` and in bfloat16; each also compiled (which does not support double
  backward, and in 2.13 fails for `torch.func` however its derivatives are written);
- `mpx_pde`: a `CoordinateMLP` that carries derivatives through its layers, by `partials` and by
  `laplacian`. Its float32 is never TF32.

Besides time and memory, the error of the first gradient is recorded: relative L2 over all weights,
against the same gradient in float64. If loss scaling skips steps at the start, it is the error of
the first step that counts.

Rivals that are worth their compilation run at all sizes, the rest at the base.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from . import _steps
from ._report import Report, require
from ._steps import HIGHEST, START, TF32, Rival, Step, Task, alone, in_float32, precision_options


DEFAULTS = {
    "cpu": {"width": [64, 32, 128], "points": [1024, 256, 4096], "order": [2, 1, 3], "depth": [4]},
    "gpu": {"width": [512, 128, 256, 1024], "points": [65_536, 8_192], "order": [2, 1, 3]}
    | {"depth": [6]},
    "quick": {"width": [16], "points": [64], "order": [2], "depth": [2]},
}
"""Sizes; the first of each is the base, from which one size at a time departs."""
CHUNK = 4096  # points per chunk of the float64 computation

# --- The residuals ---------------------------------------------------------------------------

Layers = Sequence[tuple[Any, Any]]
"""The weights W and biases b of a tanh network: x @ W + b."""

FIRST = ["u", "v", *(f"{f}_{d}" for f in "uvp" for d in ("x", "y"))]
SECOND = ["u_xx", "u_yy", "v_xx", "v_yy"]
THIRD = ["u_xxx", "u_xyy", "v_xxy", "v_yyy"]
VISCOSITY, DISPERSION = 0.01, 1e-4


def balance(d: Mapping[str, Any], order: int = 2) -> tuple[Any, Any, Any]:
    """Returns the residuals of mass and momentum, by arithmetic that works in any library.

    **Arguments:**

    - `d`: u, v, their first derivatives and those of p; from order 2 on also the Laplacians `lap_u`
        and `lap_v`, and at order 3 their derivatives `lap_u_x` and `lap_v_y`.
    """
    mass = d["u_x"] + d["v_y"]
    x = d["u"] * d["u_x"] + d["v"] * d["u_y"] + d["p_x"]
    y = d["u"] * d["v_x"] + d["v"] * d["v_y"] + d["p_y"]
    if order >= 2:
        x, y = x - VISCOSITY * d["lap_u"], y - VISCOSITY * d["lap_v"]
    if order >= 3:
        x, y = x + DISPERSION * d["lap_u_x"], y + DISPERSION * d["lap_v_y"]
    return mass, x, y


def mean_square(d: Mapping[str, jax.Array], order: int = 2) -> jax.Array:
    """Returns the loss."""
    mass, x, y = balance(d, order)
    return jnp.mean(mass**2 + x**2 + y**2)


# --- Derivatives by this library -------------------------------------------------------------


def residuals(model, points, *, derivatives, order=2):
    """Returns the mean squared residuals by `partials`."""
    names = FIRST + (SECOND if order >= 2 else []) + (THIRD if order >= 3 else [])
    terms = mpx.partials(model, names, coords="xy", outputs="uvp", scaling=derivatives)
    d = jax.vmap(terms)(points)
    if order >= 2:
        d |= {f"lap_{f}": d[f"{f}_xx"] + d[f"{f}_yy"] for f in "uv"}
    if order >= 3:
        d |= {"lap_u_x": d["u_xxx"] + d["u_xyy"], "lap_v_y": d["v_xxy"] + d["v_yyy"]}
    return mean_square(d, order)


def laplacian_residuals(model, points, *, derivatives):
    """Returns the same at order 2 by `laplacian`, which carries the sum of second derivatives."""
    terms = mpx.laplacian(model, FIRST, coords="xy", outputs="uvp", scaling=derivatives)
    return mean_square(jax.vmap(terms)(points))


# --- The same in plain JAX -------------------------------------------------------------------


def initial_layers(width: int, depth: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Makes the initial weights of all rivals: Glorot's normal initialization, in float32."""
    random = np.random.default_rng(0)
    weight = lambda m, n: random.normal(0, np.sqrt(2 / (m + n)), (m, n)).astype(np.float32)
    sizes = [2, *(width,) * depth, 3]
    return [(weight(m, n), np.zeros(n, np.float32)) for m, n in itertools.pairwise(sizes)]


def initial_points(count: int) -> np.ndarray:
    """Draws collocation points in the unit square."""
    return np.random.default_rng(1).random((count, 2), np.float32)


def network(layers: Layers, point: jax.Array) -> jax.Array:
    """Evaluates the network as a plain function, in the dtype of its arguments."""
    *hidden, (weight, bias) = layers
    for w, b in hidden:
        point = jnp.tanh(point @ w + b)
    return point @ weight + bias


def coordinate_mlp(layers: Layers) -> mpx.nn.CoordinateMLP:
    """Builds the same network as this library's `CoordinateMLP`."""
    width, depth = len(layers[0][1]), len(layers) - 1
    return with_layers(mpx.nn.CoordinateMLP(2, 3, width, depth, key=jax.random.key(0)), layers)


def with_layers(model: mpx.nn.CoordinateMLP, layers: Layers) -> mpx.nn.CoordinateMLP:
    """Returns the network with other weights."""
    flat = jax.tree.map(jnp.asarray, [array for layer in layers for array in layer])
    return eqx.tree_at(lambda m: [x for layer in layers_of(m) for x in layer], model, flat)


def layers_of(model: Any) -> Layers:
    """Returns the layers of either network, or of a PyTree of its shape such as its gradient."""
    if not isinstance(model, mpx.nn.CoordinateMLP):
        return model
    dense = [model.first.module, *model.hidden, model.last]
    return [(layer.weight, layer.bias) for layer in dense]


def nested(
    fun: Callable, order: int, *, jvp: Callable = jax.jvp, eye: Callable = jnp.eye
) -> Callable:
    """Returns a function from a point to the inputs of `balance`, by forward over forward mode."""

    def along(f, e):
        return lambda p: jvp(f, (p,), (e,))[1]

    def terms(point):
        ex, ey = eye(2, dtype=point.dtype)
        laplacian = lambda p: along(along(fun, ex), ex)(p) + along(along(fun, ey), ey)(p)
        d = named(fun(point), along(fun, ex)(point), along(fun, ey)(point))
        if order >= 2:
            d["lap_u"], d["lap_v"], _ = laplacian(point)
        if order >= 3:
            d["lap_u_x"] = along(laplacian, ex)(point)[0]
            d["lap_v_y"] = along(laplacian, ey)(point)[1]
        return d

    return terms


def nested_loss(layers, points, *, order, finish=None):
    """Returns the mean squared residuals by nested `jax.jvp`, in the precision of the arguments.

    By default the loss is computed from the derivatives in float32; `finish` replaces that.
    """
    wide = lambda d: mean_square(jax.tree.map(lambda x: x.astype(jnp.float32), d), order)
    return (finish or wide)(jax.vmap(nested(partial(network, layers), order))(points))


def named(value: Any, x: Any, y: Any) -> dict[str, Any]:
    """Names the fields and first derivatives of arrays whose first axis is u, v, p."""
    d = {"u": value[0], "v": value[1]}
    for i, f in enumerate("uvp"):
        d[f"{f}_x"], d[f"{f}_y"] = x[i], y[i]
    return d


# --- The rivals ------------------------------------------------------------------------------


def folx_loss(layers, points, *, order):
    """Computes the loss by folx: one pass for value, Jacobian and Laplacian."""
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


def by_mpx(order: int) -> Rival:
    """Takes the step with MPX as in its README: critical operations in full precision."""

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
    """Returns this library's step, with its model and its scaling."""
    loss = laplacian_residuals if method == "laplacian" else partial(residuals, order=order)

    def scaling():
        with mpx.half_precision("bfloat16" if precision == "bfloat16" else "float16"):
            derivatives = mpx.DerivativeScaling.per_direction("xy", order=order)
            return mpx.Scaling(mpx.DynamicLossScaling(START), derivatives)

    options = {**precision_options(precision), "keep_full": (False, True), "forward": forward}
    ours = _steps.by_library(alone(loss), **options)
    return ours._replace(scaling=scaling, model=partial(coordinate_mlp, layers))


def jax_rivals(layers: Layers, order: int, gpu: bool) -> dict[str, Rival]:
    """Returns the rivals in JAX.

    On a GPU, JAX multiplies in TF32 by default; this library always uses the requested precision.
    """
    by_jvp, by_folx = (alone(partial(loss, order=order)) for loss in (nested_loss, folx_loss))
    out: dict[str, Rival] = {}
    for precision, products in {"float32": HIGHEST, **({"TF32": TF32} if gpu else {})}.items():
        folx = in_float32(by_folx, products)._replace(needs=("folx",))
        out[f"plain JAX, nested jvp, {precision}"] = in_float32(by_jvp, products)
        out[f"folx, forward Laplacian, {precision}"] = folx
    out["by hand, nested jvp, float16"] = _steps.by_hand(by_jvp, "float16")
    out["MPX, nested jvp, float16"] = by_mpx(order)
    out["jmp, nested jvp, float16"] = by_jmp(order)
    for method in ("partials", "laplacian") if order == 2 else ("partials",):
        for precision in ("float32", "float16", "bfloat16"):
            rival = by_library(layers, method, precision, order)
            out[f"mpx_pde, {method}, {precision}"] = rival
    return out


def everywhere(rival: str) -> bool:
    """Returns whether a rival is worth its compilation at all sizes, or only at the base."""
    library, method, *_, precision = rival.split(", ")
    if library == "mpx_pde":
        return method == "partials" and precision != "bfloat16"
    compiled = rival.count(", ") == 3
    return library not in ("MPX", "jmp") and method != "torch.func" and not compiled


def task(width: int, depth: int, points: int, order: int = 2, gpu: bool = False) -> Task:
    layers = initial_layers(width, depth)
    exact = partial(nested_loss, order=order, finish=partial(mean_square, order=order))
    return Task(
        {"width": width, "points": points, "order": order, "depth": depth},
        lambda: jax.tree.map(jnp.asarray, layers),
        alone(exact),
        lambda: [initial_points(points)],
        jax.ShapeDtypeStruct((points, 2), jnp.float32),
        jax_rivals(layers, order, gpu),
        chunk=CHUNK,
    )


def torch_rivals(gpu: bool, quick: bool, task: Task) -> dict[str, Callable[[], Step]]:
    """Returns the steps by PyTorch, with each of its methods, precisions and compilers."""
    from ._torch.cavity import METHODS, cavity_step

    layers = initial_layers(task.where["width"], task.where["depth"])
    ways = itertools.product(
        [""] if quick else ["", ", compiled"],
        METHODS,
        ["float32", *(["TF32"] if gpu else []), "float16", "bfloat16"],
    )
    return {
        f"PyTorch, {method}{compiled}, {precision}": partial(
            cavity_step,
            *(method, precision, bool(compiled), START),
            *(layers, *task.batches(), task.where["order"]),
        )
        for compiled, method, precision in ways
    }


# --- Sizes -----------------------------------------------------------------------------------


def sizes(values: dict[str, list[int]]) -> Iterator[dict[str, int]]:
    """Yields the base, then one departure from it at a time."""
    base = {name: first for name, (first, *_) in values.items()}
    yield base
    for name, (_, *others) in values.items():
        yield from ({**base, name: value} for value in others)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = "the first is the base, from which one size at a time departs"
    parser.add_argument("--widths", type=int, nargs="+", help=of)
    parser.add_argument("--points", type=int, nargs="+", help=of)
    parser.add_argument("--depth", type=int, nargs="+", help="hidden layers")
    _steps.add_arguments(parser, rounds=10, minutes=None)


def run(report: Report, args: argparse.Namespace) -> bool:
    gpu = jax.default_backend() == "gpu"
    defaults = DEFAULTS["quick" if args.quick else "gpu" if gpu else "cpu"]
    given = {"width": args.widths, "points": args.points, "depth": args.depth}
    values = {name: given.get(name) or default for name, default in defaults.items()}
    base = next(sizes(values))
    tasks = (task(**case, gpu=gpu) for case in sizes(values))
    others = partial(torch_rivals, gpu, args.quick)
    at = lambda task, rival: task.where == base or everywhere(rival)
    return _steps.run_sizes(report, args, tasks, others, ("torch",), chosen=at)
