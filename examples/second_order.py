"""A Poisson equation by Levenberg–Marquardt, with residual and Jacobian in precisions of their own.

The problem is

    Δu = −2π² sin(πx) sin(πy)    in [−1, 1]²,    u = 0    on its boundary,

whose solution is sin(πx) sin(πy). A network of 595 parameters, in an ansatz that vanishes on the
boundary, takes damped Gauss–Newton steps: the residual decides where the training ends, and the
Jacobian only how it gets there.

    python examples/second_order.py                             # float64
    python examples/second_order.py --forward float32
    python examples/second_order.py --forward float32 --jacobian bfloat16
    python examples/second_order.py --optimizer lbfgs --forward float32 --jacobian bfloat16

With `--optimizer lbfgs` or `muon`, Optax's take the steps, with `forward=` of
`mpx.filter_value_and_grad`.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _command_line import parser, positive, run_main
from jaxtyping import Array, Float

import mpx_pde as mpx


PI = jnp.pi
WIDTH = 22
POINTS_PER_PARAMETER = 1.5
SPREAD = 3.0  # of the first layer's units over the square, where they would be almost linear
TOLD = 12  # moments of a training
STEPS = {"lm": 240, "lbfgs": 1000, "muon": 3000}
Point = Float[Array, "2"]


class Result(NamedTuple):
    error: float
    loss: float
    seconds: float
    curve: list[tuple[int, float]]  # error after some of the steps


def solution(point: Point) -> Float[Array, ""]:
    return jnp.sin(PI * point[0]) * jnp.sin(PI * point[1])


# --- The network and its residual ----------------------------------------------------------------


def network(key: Any, width: int, dtype: Any) -> mpx.nn.Ansatz:
    mlp = eqx.nn.MLP(2, "scalar", width, 2, jnp.tanh, dtype=dtype, key=key)
    first = lambda mlp: (mlp.layers[0].weight, mlp.layers[0].bias)
    mlp = eqx.tree_at(first, mlp, [SPREAD * x for x in first(mlp)])
    return mpx.nn.Ansatz(mlp, lambda point, u: (1 - point[0] ** 2) * (1 - point[1] ** 2) * u)


def residual(model: Any, point: Point) -> Float[Array, ""]:
    d = mpx.partials(model, ["u_xx", "u_yy"], coords="xy", outputs="u")(point)
    return (d["u_xx"] + d["u_yy"] + 2 * PI**2 * solution(point)) / 10


def points(key: Any, model: Any, dtype: Any) -> Float[Array, "n 2"]:
    """Fixed points in the square, more than there are parameters."""
    parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    count = int(POINTS_PER_PARAMETER * parameters)
    return jax.random.uniform(key, (count, 2), dtype, minval=-1, maxval=1)


@eqx.filter_jit
def error(model: Any, key: Any, dtype: Any) -> Float[Array, ""]:
    """Relative L2 error at points that the training does not know."""
    at = jax.random.uniform(key, (4096, 2), dtype, minval=-1, maxval=1)
    u, want = jax.vmap(model)(at), jax.vmap(solution)(at)
    return jnp.linalg.norm(u - want) / jnp.linalg.norm(want)


# --- The trainings -----------------------------------------------------------------------------


def by_levenberg_marquardt(model: Any, at: Array, forward: str, jacobian: str) -> Callable:
    optimizer = mpx.LevenbergMarquardt(residual, forward=forward, jacobian=jacobian)
    state = optimizer.init(model)
    update = eqx.filter_jit(optimizer.update)

    def step():
        nonlocal model, state
        model, state = update(model, state, at)
        return model, state.loss

    return step


def by_optax(name: str, model: Any, at: Array, forward: str, jacobian: str) -> Callable:
    def loss(model, at):
        return jnp.mean(jax.vmap(residual, (None, 0))(model, at) ** 2)

    optimizer = optax.lbfgs() if name == "lbfgs" else optax.contrib.muon(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    policy = f"params={forward},compute={jacobian},output={forward}"
    scaling = mpx.DynamicLossScaling() if jacobian == "float16" else mpx.NoOpLossScaling()

    options = {"policy": policy, "forward": forward, "use_mixed_precision": jacobian != forward}

    @eqx.filter_jit
    def update(model, state, scaling, at):
        differentiate = mpx.filter_value_and_grad(loss, scaling, **options)
        value, new, finite, grads = differentiate(model, at)
        extra = {}
        if name == "lbfgs":
            search = mpx.line_search_value(loss, new, **options)
            static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
            whole = lambda params: search(eqx.combine(params, static), at)
            extra = {"value": value, "grad": grads, "value_fn": whole}
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite, **extra)
        return model, state, new, value

    def step():
        nonlocal model, state, scaling
        model, state, scaling, value = update(model, state, scaling, at)
        return model, value

    return step


def train(
    optimizer: str = "lm",
    forward: str = "float64",
    jacobian: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    width: int = WIDTH,
    quiet: bool = True,
) -> Result:
    """Trains a network, and tells its error, its loss, and the time after compilation."""
    jacobian = forward if jacobian is None else jacobian
    dtype = jnp.dtype(forward)
    keys = jax.random.split(jax.random.key(seed), 3)
    model = network(keys[0], width, dtype)
    at = points(keys[1], model, dtype)
    if optimizer == "lm":
        step = by_levenberg_marquardt(model, at, forward, jacobian)
    else:
        step = by_optax(optimizer, model, at, forward, jacobian)
    steps = STEPS[optimizer] if steps is None else steps
    model, loss = jax.block_until_ready(step())
    started, curve = time.perf_counter(), []
    for i in range(1, steps):
        model, loss = step()
        if (i + 1) % max(1, steps // TOLD) == 0:
            curve.append((i + 1, float(error(model, keys[2], dtype))))
            if not quiet:
                print(f"step {i + 1}: loss {loss:.2e}, error {curve[-1][1]:.2e}", flush=True)
    seconds = time.perf_counter() - started
    return Result(float(error(model, keys[2], dtype)), float(loss), seconds, curve)


def main(
    optimizer: str = "lm",
    forward: str = "float64",
    jacobian: str | None = None,
    seed: int = 0,
    steps: int | None = None,
) -> Result:
    with jax.enable_x64(forward == "float64"):
        result = train(optimizer, forward, jacobian, seed, steps, quiet=False)
    print(f"error {result.error:.2e}, loss {result.loss:.2e}, {result.seconds:.0f} s")
    return result


def arguments() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument(
        "--optimizer", choices=tuple(STEPS), default="lm", help="what takes the steps"
    )
    options.add_argument(
        "--forward", choices=("float32", "float64"), default="float64", help="of the residual"
    )
    options.add_argument(
        "--jacobian",
        choices=("float16", "bfloat16", "float32", "float64"),
        help="of the Jacobian, or of the gradient; by default that of the residual",
    )
    options.add_argument("--seed", type=int, default=0, help="of weights and points")
    options.add_argument("--steps", type=positive, help="how many; by default enough to converge")
    return options


if __name__ == "__main__":
    run_main(main, arguments())
