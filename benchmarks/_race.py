"""Problems for a race of second-order methods: residuals, points and errors in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx_pde as mpx
from examples.problems import _deep
from examples.problems._runner import errors_of

from ._problems import problems


TESTED = 2000
"""The number of points that an error is taken at."""


@dataclasses.dataclass(frozen=True)
class Heat:
    """`u_t = Δu / π²`, or Poisson's equation if `until` is 0, on a unit cube of `dims` dimensions.

    The solution is the mean of the sines of the coordinates, times `exp(-t)`. A fifth of the points
    is on the boundary, and as many are at the start. The network is a plain MLP.
    """

    dims: int
    width: int
    depth: int
    points: int
    until: float = 0.0

    @property
    def box(self) -> tuple[list[float], list[float]]:
        high = [1.0] * self.dims
        if self.until:
            high.append(self.until)
        return [0.0] * len(high), high

    def exact(self, x: Any) -> Any:
        there = jnp.mean(jnp.sin(jnp.pi * x[: self.dims]))
        return there * jnp.exp(-x[-1]) if self.until else there

    def network(self, key: Any) -> Any:
        shape = len(self.box[0]), 1, self.width, self.depth
        return eqx.nn.MLP(*shape, jnp.tanh, key=key, dtype=jnp.float64)

    def interior(self, model: Any, x: Any) -> Any:
        names = [f"x{i}" for i in range(self.dims)]
        if self.until:
            more = {"coords": [*names, "t"], "outputs": "u", "over": names}
            found = mpx.laplacian(model, ["u_t"], **more)(x)
            return found["lap_u"] / jnp.pi**2 - found["u_t"]
        found = mpx.laplacian(model, coords=names, outputs="u")(x)
        return (found["lap_u"] + jnp.pi**2 * self.exact(x)) / 10

    def condition(self, model: Any, x: Any) -> Any:
        return jnp.reshape(model(x), ()) - self.exact(x)

    @property
    def residuals(self) -> tuple[Callable, ...]:
        return (self.interior, *[self.condition] * (2 if self.until else 1))

    def batches(self, key: Any) -> tuple[Any, ...]:
        low, high, edge = *self.box, self.points // 5
        keys, inside = jax.random.split(key, 3), self.points - edge * (2 if self.until else 1)
        drawn = [
            mpx.Points(low, high, inside)(None, key=keys[0]),
            mpx.Points(low, high, edge, faces=range(self.dims))(None, key=keys[1]),
        ]
        if self.until:
            drawn.append(mpx.Points(low, high, edge)(None, key=keys[2]).at[:, -1].set(0.0))
        return tuple(drawn)

    def error(self, model: Any) -> float:
        return float(_error(self, model))


@eqx.filter_jit
def _error(problem: Heat, model: Any) -> Any:
    points = mpx.Points(*problem.box, TESTED)(None, key=jax.random.key(9))
    want, got = jax.vmap(problem.exact)(points), jnp.ravel(jax.vmap(model)(points))
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


@dataclasses.dataclass(frozen=True)
class Collected:
    """A problem of the collection with its deep recipe, whose network meets the conditions."""

    name: str
    width: int
    depth: int
    points: int

    @property
    def _deep(self) -> _deep.Deep:
        deep = problems.load(self.name).deep
        return dataclasses.replace(deep, width=self.width, depth=self.depth)

    def network(self, key: Any) -> Any:
        return _deep.Network(self._deep, jnp.dtype("float64"), key=key)

    @property
    def residuals(self) -> tuple[Callable, ...]:
        return (self._deep.residual,)

    def batches(self, key: Any) -> tuple[Any, ...]:
        low, high = self._deep.low, self._deep.high
        return (mpx.Points(list(low), list(high), self.points)(None, key=key),)

    def error(self, model: Any) -> float:
        return float(next(iter(errors_of(problems.load(self.name), model).values())))


PROBLEMS: dict[str, Heat | Collected] = {
    "Poisson, 3-D": Heat(3, 24, 2, 1200),
    "Poisson, 5-D": Heat(5, 64, 2, 800),
    "Kovasznay": Collected("kovasznay", 20, 2, 400),
    "Poisson, 3-D, wide": Heat(3, 128, 3, 500),
    "Heat, 3 + 1": Heat(3, 48, 3, 800, until=1.0),
    "Burgers": Collected("burgers_1d", 20, 3, 2000),
    "Allen–Cahn": Collected("allen_cahn", 20, 3, 2000),
    "Poisson, 10-D": Heat(10, 64, 2, 800),
    "Poisson, 100-D": Heat(100, 64, 2, 400),
    "Poisson, 3-D, 100,000": Heat(3, 222, 3, 500),
}

SMALL: dict[str, Heat | Collected] = {
    "Poisson, 3-D": Heat(3, 40, 2, 300),
    "Poisson, 5-D": Heat(5, 40, 2, 300),
    "Heat, 3 + 1": Heat(3, 40, 2, 300, until=1.0),
    "Kovasznay": Collected("kovasznay", 40, 2, 100),
    "Burgers": Collected("burgers_1d", 40, 2, 300),
}
"""Problems with six times as many parameters as residuals, for many trainings."""
