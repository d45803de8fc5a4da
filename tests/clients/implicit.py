"""Losses that contain a solver: linear systems, fixed points, optimizers and integrators."""

import diffrax
import jax
import jax.numpy as jnp
import lineax
import optimistix

from ._client import Client, normal, squared


WEIGHT, STATES = normal(0, (64, 64), 1 / 8), normal(1, (16, 64))


def ridge():
    """Solves normal equations of a network's features."""

    def loss(params, x):
        features = jnp.tanh(x @ params[0]) @ params[1]
        matrix = features.T @ features / len(x) + 1e-4 * jnp.eye(features.shape[1], dtype=x.dtype)
        solution = jnp.linalg.solve(matrix, features.T @ x[:, :1] / len(x))
        return squared(features @ solution - x[:, :1])

    return Client(loss, (WEIGHT, normal(22, (64, 8), 1 / 8)), (normal(23, (128, 64)),))


def linear_solve(solver, symmetric=False):
    """Solves a system whose matrix a network makes."""

    def loss(params, x):
        def solved(x):
            a = jnp.tanh(jnp.outer(x, x) @ params[0])
            matrix = (a @ a.T if symmetric else a) + 4 * jnp.eye(x.size, dtype=x.dtype)
            tags = lineax.positive_semidefinite_tag if symmetric else ()
            operator = lineax.MatrixLinearOperator(matrix, tags)
            return lineax.linear_solve(operator, jnp.tanh(x @ params[1]), solver).value

        return squared(jax.vmap(solved)(x) - 1)

    params = normal(2, (16, 16), 1 / 4), normal(3, (16, 16), 1 / 4)
    return lambda: Client(loss, params, (normal(4, (8, 16)),))


def fixed_point():
    """A deep equilibrium layer."""

    def loss(weight, x):
        step = lambda y, args: jnp.tanh(0.5 * y @ args[0] + args[1])
        # Autocast cannot meet a tolerance below the rounding of its products.
        solver = optimistix.FixedPointIteration(1e-3, 1e-3)
        run = {"max_steps": 64, "throw": False}
        return squared(optimistix.fixed_point(step, solver, x, (weight, x), **run).value - 1)

    return Client(loss, WEIGHT, (STATES,))


def integrated(adjoint):
    """A neural differential equation, with an adjoint of diffrax."""

    def loss(weight, u):
        term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
        options = {"adjoint": adjoint, "saveat": diffrax.SaveAt(t1=True)}
        out = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.05, u, weight, **options)
        return squared(out.ys[0] - 2 * u)

    return lambda: Client(loss, WEIGHT, (STATES,))


def unrolled_training():
    """Trains inside of the loss, and differentiates by the rate."""

    def loss(params, x):
        inner = lambda w: squared(jnp.tanh(x @ w) - x)
        w = params[0]
        for _ in range(5):
            w = w - params[1] * jax.grad(inner)(w)
        return inner(w)

    return Client(loss, (WEIGHT, jnp.float32(0.5)), (STATES,))


CLIENTS = {
    "ridge regression": ridge,
    "lineax, LU": linear_solve(lineax.LU()),
    "lineax, Cholesky": linear_solve(lineax.Cholesky(), symmetric=True),
    "optimistix, fixed point": fixed_point,
    "diffrax, direct": integrated(diffrax.DirectAdjoint()),
    "diffrax, checkpointed": integrated(diffrax.RecursiveCheckpointAdjoint()),
    "diffrax, backsolve": integrated(diffrax.BacksolveAdjoint()),
    "training inside": unrolled_training,
}
