"""The description of a problem, as the files of the problems give it, and the parts they share."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray, PyTree

import mpx_pde as mpx


class Reference(NamedTuple):
    """Values to compare the fields with, in float64; NaN entries are ignored."""

    points: Float[np.ndarray, "n coords"]
    values: Float[np.ndarray, "n *fields"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The description that a file gives to the runner.

    - `network(key)`: the network, in float32.
    - `loss(model, points, *, derivatives=None)`: the loss on the points of one step. `derivatives`
      is passed to `mpx.partials` as its `scaling`.
    - `sample(key)`: the points of one step, a PyTree of float32 arrays.
    - `points(model, key)`: the points of `STEPS_PER_CALL` steps, for a problem that chooses them.
    - `coords`, `order`: the coordinates and the order of its derivatives; order 0 for a network
      that is not differentiated.
    - `exact(point)`: the solution, in the dtype of the point, for comparison at the points `at`.
      The tests check that `loss` vanishes there in float64.
    - `reference()`: values to compare the fields with, if no solution is known.
    - `free`: indices of fields that are known up to a constant, such as a pressure.
    - `errors(model)`: errors by name, instead of these; the first is *the* error.
    - `steps`, `learning_rate`: the learning rate rises at first, then falls as a cosine.
    - `as_trained`: whether to evaluate with the weights in the precision of the training.
    - `derivatives()`: a derivative scaling other than one scale for each coordinate.
    - `quick`: the same problem with fewer data for `--quick`, if data take long to make.
    - `deep`: the facts that the second-order recipe of `_deep.py` needs, for problems that have it.
    - `paper`: fields at the size of the problem's paper, by name, for a GPU.
    """

    title: str
    network: Callable[[PRNGKeyArray], Any]
    loss: Callable[..., Float32[Array, ""]]
    sample: Callable[[PRNGKeyArray], PyTree] | None = None
    points: Callable[[Any, PRNGKeyArray], PyTree] | None = None
    coords: Sequence[str] = ()
    order: int = 0
    exact: Callable[[Array], Array] | None = None
    at: Float[np.ndarray, "n coords"] | None = None
    reference: Callable[[], Reference] | None = None
    free: Sequence[int] = ()
    errors: Callable[[Any], Mapping[str, float]] | None = None
    fields: Sequence[str] = "u"
    steps: int = 2000
    learning_rate: float = 1e-2
    optimizer: str = "muon"
    family: str = "PINN"
    as_trained: bool = False
    derivatives: Callable[[], mpx.DerivativeScaling] | None = None
    quick: "Problem | None" = None
    deep: Any = None
    paper: Mapping[str, Any] = field(default_factory=dict)


def problem(name: str, title: str, **given: Any) -> Problem:
    """Returns the problem of a module.

    The module defines those of the functions `network`, `loss`, `sample`, `points`, `exact`,
    `reference` and `errors` that it needs, the points `AT`, the recipe `DEEP` and the sizes
    `PAPER`. `given` are the other fields, and take precedence.
    """
    names = ("network", "loss", "sample", "points", "exact", "reference", "errors")
    return Problem(title=title, **{**parts(name, *names, "AT", "DEEP", "PAPER"), **given})


def parts(name: str, *names: str) -> dict[str, Any]:
    """Returns those of the names that a module defines."""
    module = vars(sys.modules[name])
    return {part.lower(): module[part] for part in names if part in module}


# --- Networks --------------------------------------------------------------------------------


class InUnits(eqx.Module):
    """A network whose coordinates are measured in other units, also for its Fourier features."""

    network: Callable
    units: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, point: Float[Array, " coords"]) -> Float[Array, "*fields"]:
        return self.network(point / jnp.asarray(self.units, point.dtype))


def coordinate_mlp(
    *sizes: Any, form: Callable | None = None, units: tuple[float, ...] = (), **options: Any
) -> Callable[[PRNGKeyArray], Any]:
    """Returns a function of a key that makes a `CoordinateMLP` of these sizes and options, with its
    coordinates in `units` and its outputs in a `form`, if given."""

    def network(key):
        mlp: Any = mpx.nn.CoordinateMLP(*sizes, key=key, **options)
        mlp = InUnits(mlp, units) if units else mlp
        return mpx.nn.Ansatz(mlp, form) if form else mlp

    return network


def from_start(
    exact: Callable, rise: Callable[[Array], Array] = lambda t: t
) -> Callable[[Array, Array], Array]:
    """Returns the form u(0, x) + `rise`(t) N(t, x) with the initial values of a solution. The first
    coordinate is t."""

    def form(point, n):
        start = np.eye(len(point))[0] == 0
        return exact(point * jnp.asarray(start, point.dtype)) + rise(point[0]) * n

    return form


# --- Points ----------------------------------------------------------------------------------

STEPS_PER_CALL = 100  # steps in one compiled call, and between two choices of points
Corner = Sequence[float] | Array


def grid(*axes: Float[np.ndarray, " n"]) -> Float[np.ndarray, "points coords"]:
    """Returns all points with coordinates from these axes; the last axis varies fastest."""
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))


def uniform(
    key: PRNGKeyArray, count: int, low: Corner, high: Corner, dtype: Any = float
) -> Float[Array, "count coords"]:
    """Draws points in a box with the corners `low` and `high`."""
    low_corner, high_corner = jnp.asarray(low, dtype), jnp.asarray(high, dtype)
    return jax.random.uniform(key, (count, len(low)), dtype, minval=low_corner, maxval=high_corner)


def quasirandom(
    key: PRNGKeyArray, count: int, low: Corner, high: Corner, dtype: Any = float
) -> Float[Array, "count coords"]:
    """Draws points that fill a box more evenly than those of `uniform`.

    They are a randomly shifted lattice whose steps are powers of a generalized golden ratio
    (Roberts, 2018).
    """
    low_corner, high_corner = jnp.asarray(low, dtype), jnp.asarray(high, dtype)
    ratio = np.roots([1, *[0] * (len(low) - 1), -1, -1]).real.max()
    steps = (ratio ** -np.arange(1.0, len(low) + 1) * 2**32).astype(np.uint32)
    shift = jax.random.bits(key, (len(low),), jnp.uint32)
    # Integers wrap around without loss.
    part = lambda i: (i * steps + shift).astype(dtype) / 2.0**32
    place = lambda i: low_corner + (high_corner - low_corner) * part(i)
    return jax.vmap(place)(jnp.arange(count, dtype=jnp.uint32))


def choose(
    key: PRNGKeyArray,
    points: Float32[Array, "candidates coords"],
    residuals: Float32[Array, " candidates"],
    batch: int,
    *,
    floor: float = 4.0,
) -> Float32[Array, "steps batch coords"]:
    """Draws batches for the next steps; candidates with a large residual are taken more often
    (residual-based adaptive distribution, Wu et al., 2023)."""
    size = jnp.abs(residuals)
    density = size / jnp.mean(size) + floor
    shape = (STEPS_PER_CALL, batch)
    return jax.random.choice(key, points, shape, p=density / jnp.sum(density))


def on_faces(
    key: PRNGKeyArray,
    count: int,
    low: Corner,
    high: Corner,
    axes: Sequence[int],
    draw: Callable[..., Float[Array, "count coords"]] = uniform,
) -> Float[Array, "count coords"]:
    """Draws points on the faces of a box across `axes`, (nearly) the same number on each."""
    points = draw(key, count, low, high)
    face = np.arange(count) % (2 * len(axes))
    ends = np.asarray([low, high], points.dtype)
    axis = np.asarray(axes)[face // 2]
    return points.at[np.arange(count), axis].set(ends[face % 2, axis])


def draws(**boxes: tuple) -> Callable[[PRNGKeyArray], dict[str, Float32[Array, "n coords"]]]:
    """Returns a function that draws points by name: in the box `(count, low, high)` or, if axes
    follow, on the faces of the box across them."""

    def sample(key):
        keys = jax.random.split(key, len(boxes))
        return {
            name: (uniform if len(box) == 3 else on_faces)(k, *box)
            for k, (name, box) in zip(keys, boxes.items(), strict=True)
        }

    return sample


def adaptive(
    residuals: Callable, low: Sequence[float], high: Sequence[float], *, batch: int = 512
) -> Callable[[Any, PRNGKeyArray], Float32[Array, "steps batch coords"]]:
    """Returns a function that chooses points where residuals are large, from 16 times as many."""

    def points(u, key):
        candidate_key, choice_key = jax.random.split(key)
        found = uniform(candidate_key, 16 * batch, low, high)
        return choose(choice_key, found, residuals(u, found), batch)

    return points


# --- Values ----------------------------------------------------------------------------------


def values_at(model: Any, points: Float[np.ndarray, "n coords"]) -> Float[np.ndarray, "n *fields"]:
    """Evaluates the fields of a network at points, with the weights as they are."""
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in arrays) else jnp.float32
    at = eqx.filter_jit(lambda model, points: jax.lax.map(model, points, batch_size=4096))
    return np.asarray(at(model, jnp.asarray(points, dtype)), np.float64)


def mean_square(residual: Callable) -> Callable[..., Float32[Array, ""]]:
    """Returns the loss of a residual at a point: its squares, summed over its entries and averaged
    over the points."""

    def loss(model, points, *, derivatives=None):
        r = jax.vmap(lambda point: residual(model, point, derivatives))(points)
        return jnp.mean(jnp.sum(r.reshape(len(points), -1) ** 2, axis=1))

    return loss


def with_values(
    residual: Callable, exact: Callable, at: str, names: str, weight: float = 1, **given: Any
) -> Callable[..., Float32[Array, ""]]:
    """Returns the loss of a residual at the points `"inside"`, plus `weight` times the `misfit` of
    fields at the points `at`. `given` are the coordinates and outputs of the network."""
    loss = mean_square(residual)

    def both(fields, points, *, derivatives=None):
        inside = loss(fields, points["inside"], derivatives=derivatives)
        wrong = misfit(fields, exact, points[at], names, {**given, "scaling": derivatives})
        return inside + weight * wrong

    return both


def misfit(
    fields: Callable,
    exact: Callable,
    points: Float[Array, "n coords"],
    names: Sequence[str],
    given: Mapping[str, Any],
) -> Float32[Array, ""]:
    """Returns the mean squared error of these fields at points; `exact` returns all fields."""
    d = jax.vmap(mpx.partials(fields, [*names], **given))(points)
    want = jax.vmap(exact)(points).reshape(len(points), -1)
    return jnp.mean(jnp.stack([(d[n] - want[:, given["outputs"].index(n)]) ** 2 for n in names]))
