"""The Black–Scholes–Barenblatt equation of 100 assets, from the payoff |x|² at t = 1 back to t = 0.

u_t + ½ σ² Σᵢ xᵢ² u_ii = r (u − x·∇u) with σ = 0.4 and r = 0.05: u = e^((r + σ²)(1 − t)) |x|²
(Raissi, *Forward–backward stochastic neural networks*, 2018). In y = ln x its factors are constant.
Prices are between ½ and 3/2, and u is per asset. Each step draws 16 second derivatives, twice, so
that the product of two residuals is unbiased.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, problem, uniform


SIZE, SAMPLES = 100, 16
SIGMA, RATE = 0.4, 0.05
ASSETS = [f"y{i}" for i in range(SIZE)]
LOW, HIGH = (0.0, *(np.log(0.5),) * SIZE), (1.0, *(np.log(1.5),) * SIZE)


def exact(point):
    return jnp.exp((RATE + SIGMA**2) * (1 - point[0])) * jnp.mean(jnp.exp(2 * point[1:]))


form = lambda p, n: jnp.mean(jnp.exp(2 * p[1:])) + (1 - p[0]) * n
network = coordinate_mlp(1 + SIZE, "scalar", 64, 3, form=form)


def residual(u, points, key, derivatives):
    """Samples the residual at each point."""
    given = {"coords": ["t", *ASSETS], "outputs": "u", "scaling": derivatives}
    drift = {(name,): RATE - SIGMA**2 / 2 for name in ASSETS}
    spread = {(name, name): SIGMA**2 / 2 for name in ASSETS}
    first = mpx.linear_operator(u, {"drift": {("t",): 1.0, **drift}}, ["u"], **given)
    second = mpx.linear_operator(u, {"spread": spread}, samples=SAMPLES, key=key, **given)
    a, b = jax.vmap(first)(points), jax.vmap(second)(points)
    return a["drift_u"] - RATE * a["u"] + b["spread_u"]


def loss(u, batch, *, derivatives=None):
    points, keys = batch
    one, two = (residual(u, points, key, derivatives) for key in keys)
    return jnp.mean(one * two)


def sample(key):
    points, keys = jax.random.split(key)
    return uniform(points, 64, LOW, HIGH), jax.random.split(keys)


AT = np.asarray(uniform(jax.random.key(1), 2000, LOW, HIGH), np.float64)
PROBLEM = problem(
    __name__,
    "Black–Scholes, 100 assets",
    coords=["t", *ASSETS],
    order=2,
    steps=1000,
    # One scale per order: one per coordinate, for 101 coordinates, would take 5,000 histograms.
    derivatives=lambda: mpx.DerivativeScaling.per_order(2),
)
