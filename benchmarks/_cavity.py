"""The physics-informed step that several benchmarks measure: steady flow in two dimensions.

The residuals have derivatives up to a chosen order:

1. the Euler equations, which only transport;
2. the Navier–Stokes equations: and viscosity, the Laplacian of the velocities;
3. and dispersion, the gradient of that Laplacian (as in the Zakharov–Kuznetsov equation).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx


Layers = Sequence[tuple[Any, Any]]
"""The weights W and biases b of a tanh network: x @ W + b."""

FIRST = ["u", "v", *(f"{f}_{d}" for f in "uvp" for d in ("x", "y"))]
SECOND = ["u_xx", "u_yy", "v_xx", "v_yy"]
THIRD = ["u_xxx", "u_xyy", "v_xxy", "v_yyy"]
VISCOSITY, DISPERSION = 0.01, 1e-4


def balance(d: Mapping[str, Any], order: int = 2) -> tuple[Any, Any, Any]:
    """The residuals of mass and momentum, by arithmetic alone: for arrays of any library.

    **Arguments:**

    - `d`: u, v, their first derivatives and those of p; from order 2 on the Laplacians `lap_u` and
        `lap_v`, and at order 3 their derivatives `lap_u_x` and `lap_v_y`.
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
    """The loss."""
    mass, x, y = balance(d, order)
    return jnp.mean(mass**2 + x**2 + y**2)


# --- Derivatives by this library -------------------------------------------------------------


def residuals(model, points, *, derivatives, order=2):
    """Mean squared residuals by `partials`."""
    names = FIRST + (SECOND if order >= 2 else []) + (THIRD if order >= 3 else [])
    terms = mpx.partials(model, names, coords="xy", outputs="uvp", scaling=derivatives)
    d = jax.vmap(terms)(points)
    if order >= 2:
        d |= {f"lap_{f}": d[f"{f}_xx"] + d[f"{f}_yy"] for f in "uv"}
    if order >= 3:
        d |= {"lap_u_x": d["u_xxx"] + d["u_xyy"], "lap_v_y": d["v_xxy"] + d["v_yyy"]}
    return mean_square(d, order)


def laplacian_residuals(model, points, *, derivatives):
    """The same at order 2 by `laplacian`, which carries the sum of second derivatives."""
    terms = mpx.laplacian(model, FIRST, coords="xy", outputs="uvp", scaling=derivatives)
    return mean_square(jax.vmap(terms)(points))


# --- The same written with nothing but JAX ---------------------------------------------------


def initial_layers(width: int, depth: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The weights that all rivals begin with: Glorot's normal initialization, in float32."""
    random = np.random.default_rng(0)
    weight = lambda m, n: random.normal(0, np.sqrt(2 / (m + n)), (m, n)).astype(np.float32)
    sizes = [2, *(width,) * depth, 3]
    return [(weight(m, n), np.zeros(n, np.float32)) for m, n in itertools.pairwise(sizes)]


def initial_points(count: int) -> np.ndarray:
    """Collocation points in the unit square."""
    return np.random.default_rng(1).random((count, 2), np.float32)


def network(layers: Layers, point: jax.Array) -> jax.Array:
    """The network as a plain function, in the dtype of its arguments."""
    *hidden, (weight, bias) = layers
    for w, b in hidden:
        point = jnp.tanh(point @ w + b)
    return point @ weight + bias


def coordinate_mlp(layers: Layers) -> mpx.nn.CoordinateMLP:
    """The same network as this library's."""
    width, depth = len(layers[0][1]), len(layers) - 1
    return with_layers(mpx.nn.CoordinateMLP(2, 3, width, depth, key=jax.random.key(0)), layers)


def with_layers(model: mpx.nn.CoordinateMLP, layers: Layers) -> mpx.nn.CoordinateMLP:
    """The network with other weights."""
    flat = jax.tree.map(jnp.asarray, [array for layer in layers for array in layer])
    return eqx.tree_at(lambda m: [x for layer in layers_of(m) for x in layer], model, flat)


def layers_of(model: Any) -> Layers:
    """The layers of either network, or of a PyTree of its shape such as its gradient."""
    if not isinstance(model, mpx.nn.CoordinateMLP):
        return model
    dense = [model.first.module, *model.hidden, model.last]
    return [(layer.weight, layer.bias) for layer in dense]


def nested(
    fun: Callable, order: int, *, jvp: Callable = jax.jvp, eye: Callable = jnp.eye
) -> Callable:
    """From a point to what `balance` wants, by forward mode over forward mode."""

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
    """The mean squared residuals by nested `jax.jvp`, in the precision of the arguments; what makes
    a loss of derivatives takes them in float32, unless another does."""
    wide = lambda d: mean_square(jax.tree.map(lambda x: x.astype(jnp.float32), d), order)
    return (finish or wide)(jax.vmap(nested(partial(network, layers), order))(points))


def named(value: Any, x: Any, y: Any) -> dict[str, Any]:
    """Fields and first derivatives by their names, from arrays whose first axis is u, v, p."""
    d = {"u": value[0], "v": value[1]}
    for i, f in enumerate("uvp"):
        d[f"{f}_x"], d[f"{f}_y"] = x[i], y[i]
    return d
