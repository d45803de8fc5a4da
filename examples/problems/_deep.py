"""The deep recipe: Levenberg–Marquardt on a small network that meets the conditions.

Between problems only facts about the equation differ: residual, domain, periods, conditions, and
the number of waves in the solution. Everything else is the same for all.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import mpx_pde as mpx

from ._kept import Kept
from ._problem import Problem, on_faces, quasirandom, uniform
from ._runner import Outcome, errors_of, number


PRECISIONS = {
    "-".join(dict.fromkeys((wide, narrow))): (wide, narrow)
    for wide in ("float64", "float32")
    for narrow in (wide, "float32", "bfloat16_x3", "float16", "bfloat16")
}
"""Precisions of the residual and, after a hyphen, of the Jacobian if it differs."""

STEPS = 1200
REDRAWN = 30  # steps with the same points
MARCH = 0.7  # share of the steps in which the interval of a marching problem grows to the whole
CANDIDATES = 8  # candidates for each chosen point
POINTS = 8  # points for each parameter
TOLD = 12  # errors that a training computes on its way


class Network(eqx.Module):
    """An `eqx.nn.MLP` of tanh, followed by a form that meets the conditions.

    Its inputs run from -1 to 1. Along a coordinate in which the equation has waves, waves are
    further inputs. The units of the first layer bend at points that are spread over the domain.
    """

    mlp: eqx.nn.MLP
    deep: "Deep" = eqx.field(static=True)

    def __init__(self, deep: "Deep", dtype: Any, *, key: PRNGKeyArray):
        self.deep = deep
        key, at_key = jax.random.split(key)
        at = jax.vmap(self.inputs)(uniform(at_key, deep.width, deep.low, deep.high, dtype))
        shape = at.shape[1], deep.outputs, deep.width, deep.depth
        mlp = eqx.nn.MLP(*shape, jnp.tanh, dtype=dtype, key=key)
        bias = -jnp.sum(mlp.layers[0].weight * at, axis=1)
        self.mlp = eqx.tree_at(lambda mlp: mlp.layers[0].bias, mlp, bias)

    def inputs(self, point: Float[Array, " coords"]) -> Float[Array, " inputs"]:
        deep, found = self.deep, []
        for i, (low, high) in enumerate(zip(deep.low, deep.high, strict=True)):
            if i in deep.periodic:
                angles = 2 * np.pi / deep.periodic[i] * point[i] * np.arange(1, deep.waves + 1)
                found += [jnp.cos(angles), jnp.sin(angles)]
            else:
                x = (2 * point[i] - (low + high))[None] / (high - low)
                found.append(deep.steep.get(i, 1.0) * x)
                if i in deep.turns:
                    angle = np.pi * deep.turns[i] * x
                    found += [jnp.cos(angle), jnp.sin(angle)]
        return jnp.concatenate(found)

    def __call__(self, point: Float[Array, " coords"]) -> Float[Array, "*fields"]:
        return self.deep.form(point, self.mlp(self.inputs(point)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Deep:
    """The facts about a problem that the recipe needs.

    - `residual(fields, point)`: the residuals at a point.
    - `form(point, n)`: the fields, computed from the network's outputs.
    - `low`, `high`: corners of the domain.
    - `periodic`: the periods of coordinates, by index.
    - `turns`: the number of waves in the equation's data along coordinates, by index.
    - `steep`: the factor by which the solution is steeper along coordinates than over the whole
      domain.
    - `marches`: whether points come from a growing interval of the first coordinate.
    - `soft`: conditions that the form does not meet. Each is a residual, the corners of the box
      where it holds and, if it holds only on faces of the box, the axes across these faces.
    """

    residual: Callable[[Any, Array], Array]
    form: Callable[[Array, Array], Array]
    low: Sequence[float]
    high: Sequence[float]
    periodic: Mapping[int, float] = dataclasses.field(default_factory=dict)
    turns: Mapping[int, float] = dataclasses.field(default_factory=dict)
    steep: Mapping[int, float] = dataclasses.field(default_factory=dict)
    marches: bool = False
    soft: Sequence[tuple] = ()
    outputs: Any = "scalar"
    width: int = 20
    depth: int = 3
    waves: int = 2
    steps: int = STEPS


@dataclasses.dataclass(frozen=True)
class DeepOutcome(Outcome):
    """The outcome of a training; skipped steps are those rejected by the damping."""

    parameters: int
    curve: list[tuple[int, float, float | None]]
    """Steps, seconds and error on the way. The seconds exclude the first step and the errors."""


@eqx.filter_jit
def draw(
    deep: Deep, model: Any, key: PRNGKeyArray, count: int, high: Float[Array, " coords"]
) -> tuple[Array, ...]:
    """Draws the points of the residuals.

    They lie inside, up to `high`. Half are spread evenly, the others are drawn by the size of the
    residual.
    """
    spread = partial(quasirandom, dtype=high.dtype)
    candidates = spread(key, CANDIDATES * count, deep.low, high)
    residuals = jax.vmap(deep.residual, (None, 0))(model, candidates)
    size = jnp.sum(residuals.reshape(len(candidates), -1) ** 2, axis=1)
    noise = jax.random.gumbel(jax.random.fold_in(key, 1), size.shape, high.dtype)
    chosen = candidates[jax.lax.top_k(jnp.log(size) / 2 + noise, count // 2)[1]]
    inside = jnp.concatenate([candidates[: count - count // 2], chosen])
    soft = []
    for i, (_, low, high, *axes) in enumerate(deep.soft):
        where = jax.random.fold_in(key, 2 + i), max(1, count // 4), low, high
        soft.append(on_faces(*where, axes[0], spread) if axes else spread(*where))
    return (inside, *soft)


class DeepTrainer:
    """The training of one problem by Levenberg–Marquardt, in a precision of `PRECISIONS`."""

    optimizer_name = "levenberg-marquardt"

    def __init__(self, problem: Problem, precision: str = "float64", *, steps: int | None = None):
        if problem.deep is None:
            raise ValueError(f"the problem {problem.title!r} has no deep recipe.")
        if precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise ValueError(f"the deep recipe has no precision {precision!r}, but {known}.")
        self.problem, self.deep, self.precision = problem, problem.deep, precision
        self.forward, self.jacobian = PRECISIONS[precision]
        self.steps = self.deep.steps if steps is None else steps

    def __call__(
        self,
        seed: int,
        *,
        follow: Callable[[int, Any], bool] = lambda step, state: False,
        kept: Kept | None = None,
    ) -> DeepOutcome:
        """Trains from a seed. `follow` gets each step and the state, and ends the training by
        True. `kept` is where Ctrl-C leaves the training, and whence it goes on."""
        with jax.enable_x64(self.forward == "float64"):
            return self._trained(seed, follow, kept)

    def _trained(
        self, seed: int, follow: Callable[[int, Any], bool], kept: Kept | None
    ) -> DeepOutcome:
        deep, dtype = self.deep, jnp.dtype(self.forward)
        network_key, key = jax.random.split(jax.random.key(seed))
        model: Any = Network(deep, dtype, key=network_key)
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        count = POINTS * sum(x.size for x in arrays)
        residuals = (deep.residual, *(fun for fun, *_ in deep.soft))
        optimizer = mpx.LevenbergMarquardt(residuals, forward=self.forward, jacobian=self.jacobian)
        state = optimizer.init(model)
        update = eqx.filter_jit(optimizer.update)
        at, begin, seconds, errors = None, 0, 0.0, {}
        curve: list[tuple[int, float, float | None]] = []
        found = kept.load((model, state)) if kept is not None else None
        if found is not None:
            (model, state), told = found
            begin, seconds = int(told["step"]), float(told["seconds"])
            curve = [(int(n), float(t), number(e)) for n, t, e in told["curve"]]
        redrawn = model, state, begin, seconds, len(curve)
        try:
            for step in range(begin, self.steps):
                started = time.perf_counter()
                if step % REDRAWN == 0:
                    redrawn = model, state, step, seconds, len(curve)
                    high = jnp.asarray(deep.high, dtype)
                    if deep.marches:
                        share = min(1.0, 0.1 + step / (MARCH * self.steps))
                        high = high.at[0].set(deep.low[0] + share * (deep.high[0] - deep.low[0]))
                    at = draw(deep, model, jax.random.fold_in(key, step), count, high)
                model, state = jax.block_until_ready(update(model, state, at))
                seconds += (time.perf_counter() - started) * (step > begin)  # the first compiles
                ended = follow(step + 1, state) or step + 1 == self.steps
                if ended or (step + 1) % max(1, self.steps // TOLD) == 0:
                    errors = {n: number(e) for n, e in errors_of(self.problem, model).items()}
                    curve.append((step + 1, round(seconds, 1), next(iter(errors.values()))))
                if ended:
                    break
        except KeyboardInterrupt:
            model, state, step, seconds, told = redrawn
            if kept is not None and step:
                rows = np.array([[n, t, np.nan if e is None else e] for n, t, e in curve[:told]])
                kept.save((model, state), step=step, seconds=seconds, curve=rows)
            raise
        self.model = model
        return DeepOutcome(
            precision=self.precision,
            optimizer=self.optimizer_name,
            seed=seed,
            steps=self.steps,
            error=next(iter(errors.values())),
            errors=errors,
            loss=number(state.loss),
            skipped=int(state.rejected),
            loss_scale=float(state.scaling.loss_scaling),
            parameters=count // POINTS,
            curve=curve,
        )


# --- Forms that meet conditions --------------------------------------------------------------


def ends(point: Array, low: Sequence[float], high: Sequence[float], axis: int = 1) -> Array:
    """Returns a factor that vanishes at both ends of an axis and is 1 in the middle."""
    s = (point[axis] - low[axis]) / (high[axis] - low[axis])
    return 4 * s * (1 - s)


def between(
    fun: Callable, point: Array, low: Sequence[float], high: Sequence[float], axis: int = 1
) -> Array:
    """Interpolates linearly between the values of a function at both ends of an axis."""
    s = (point[axis] - low[axis]) / (high[axis] - low[axis])
    return (1 - s) * fun(point.at[axis].set(low[axis])) + s * fun(point.at[axis].set(high[axis]))


def from_conditions(
    exact: Callable, low: Sequence[float], high: Sequence[float], rise: Callable[[Array], Array]
) -> Callable[[Array, Array], Array]:
    """Returns a form with the values of a solution at the start of the first axis and at both ends
    of the second: their blend, plus `rise(t)` times a term that vanishes at these ends."""
    at_ends = lambda p: between(exact, p, low, high)

    def form(point, n):
        start = point.at[0].set(low[0])
        blend = exact(start) + at_ends(point) - at_ends(start)
        return blend + rise(point[0]) * ends(point, low, high) * n

    return form
