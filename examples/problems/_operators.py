"""Problems of neural operators: maps between fields, and time steps that are applied repeatedly.

Their data are computed in float64, and the operators are trained in float32. The network is
evaluated in the precision in which it was trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from ._problem import Problem, parts


FINER, FINER_TESTS = 4, 16  # the finest test grid relative to training, and its number of fields


class Pairs(NamedTuple):
    """Input fields and output fields, `[samples, channels, *grid]`."""

    inputs: Float32[np.ndarray, "samples channels *grid"]
    outputs: Float32[np.ndarray, "samples channels *grid"]


class Cast(eqx.Module):
    """Casts a network's input to the dtype of its weights, and its output to float32."""

    network: Callable

    def __call__(self, field: Float[Array, "channels *grid"]) -> Float32[Array, "out *grid"]:
        weights = [x for x in jax.tree.leaves(self.network) if eqx.is_inexact_array(x)]
        return self.network(field.astype(weights[-1].dtype)).astype(jnp.float32)


def relative(got: Float[Array, "*shape"], want: Float[Array, "*shape"]) -> Float[Array, " samples"]:
    """Returns the relative L2 errors of samples along the first axis."""
    norm = lambda x: jnp.sqrt(jnp.sum(x**2, axis=tuple(range(1, x.ndim))))
    return norm(got - want) / norm(want)


def operator(name: str, title: str, *, batch: int = 2, **given: Any) -> Problem:
    """Builds the problem of a module: a map from one field to another, learned on one grid and also
    tested on finer ones. The module has these functions:

    - `data()`: pairs for training and pairs for tests; `data(n, m)` makes so many of each.
    - `finer(n)`: n pairs on a grid of `FINER` times as many points along each axis. They are
        tested there, and on every second and fourth point; not in a quick run.
    - `network(key)`: a function of a field, `[channels, *grid]`.

    **Arguments:**

    - `batch`: pairs in a step.
    - `given`: further fields of the `Problem`.
    """
    data, finer, network = parts(name, "data", "finer", "network").values()
    given = {"learning_rate": 3e-3, "optimizer": "adam", "family": "operator", **given}
    make = partial(_operator, title=title, network=network, batch=batch, as_trained=True, **given)
    quick = make(cache(lambda: data(batch, 2)), None)
    return replace(make(cache(data), cache(lambda: finer(FINER_TESTS))), quick=quick)


def _operator(
    data: Callable[[], tuple[Pairs, Pairs]],
    finer: Callable[[], Pairs] | None,
    *,
    network: Callable[[PRNGKeyArray], Any],
    batch: int,
    **given: Any,
) -> Problem:
    """Builds the problem of `operator` from these data."""

    def make_network(key):
        data()  # makes the data now, not while JAX traces `sample`
        return network(key)

    def sample(key):
        inputs, outputs = data()[0]
        at = jax.random.choice(key, len(inputs), (batch,), replace=False)
        return jnp.asarray(inputs)[at], jnp.asarray(outputs)[at]

    def loss(model, pairs, *, derivatives=None):
        inputs, outputs = pairs
        return jnp.mean(relative(jax.vmap(model)(inputs).astype(outputs.dtype), outputs))

    def errors(model):
        run = eqx.filter_jit(lambda model, x: jax.lax.map(model, x).astype(jnp.float32))

        def error(inputs, outputs):
            return float(jnp.mean(relative(run(model, jnp.asarray(inputs)), outputs)))

        out = {"rel. L2 error": error(*data()[1])}
        if finer is None:
            return out
        for every in (FINER, FINER // 2, 1):
            inputs, outputs = (x[..., ::every, ::every] for x in finer())
            out[f"rel. L2 error at {inputs.shape[-1]}²"] = error(inputs, outputs)
        return out

    return Problem(network=make_network, loss=loss, sample=sample, errors=errors, **given)


# --- Time steps ------------------------------------------------------------------------------


class Step(eqx.Module):
    """u(t + Δt) = u(t) + `size` times the network's output for u(t)."""

    network: Cast
    size: float = eqx.field(static=True)

    def __call__(self, field: Float[Array, "channels *grid"]) -> Float32[Array, "channels *grid"]:
        return field.astype(jnp.float32) + self.size * self.network(field)


def rollout(step: Callable, field: Array, steps: int) -> Array:
    """Returns the fields after 1, …, `steps` steps."""

    def body(field, _):
        new = step(field)
        return new, new

    return jax.lax.scan(body, field, length=steps)[1]


def trajectories(
    stepper: Callable[[], Callable],
    initial: Callable[[PRNGKeyArray], Array],
    *,
    count: int,
    steps: int,
    spin_up: int,
    seed: int,
) -> Float32[np.ndarray, "count times channels *grid"]:
    """Computes fields at 0, …, `steps` steps after a spin-up, in float64."""
    with jax.enable_x64(True):
        advance = stepper()

        def one(key):
            start = initial(key)
            if spin_up:
                start = rollout(advance, start, spin_up)[-1]
            return jnp.concatenate([start[None], rollout(advance, start, steps)])

        keys = jax.random.split(jax.random.key(seed), count)
        return np.asarray(jax.jit(jax.vmap(one))(keys), np.float32)


def emulator(
    name: str,
    title: str,
    *,
    told: Sequence[int] = (1, 5, 10, 20),
    count: int = 64,
    steps_each: int = 20,
    spin_up: int = 0,
    batch: int = 16,
    **given: Any,
) -> Problem:
    """Builds the problem of a module: a time step, learned from pairs of consecutive fields and
    tested by rollouts. The module has these functions:

    - `stepper()`: the solver, such as one of Exponax, a function of a field.
    - `initial(key)`: random initial fields, `[channels, *grid]`.
    - `network(key)`: a function of a field.

    **Arguments:**

    - `told`: the steps after which errors are reported; *the* error is their geometric mean.
    - `count`, `steps_each`: number and length of the training trajectories.
    - `spin_up`: steps before a trajectory begins.
    - `batch`: pairs in a training step.
    - `given`: further fields of the `Problem`.
    """
    stepper, initial, network = parts(name, "stepper", "initial", "network").values()
    make = {"spin_up": spin_up}

    @cache
    def training():
        fields = trajectories(stepper, initial, count=count, steps=steps_each, seed=0, **make)
        inputs, outputs = fields[:, :-1], fields[:, 1:]
        change = float(np.sqrt(np.mean((outputs - inputs) ** 2)))
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        return Pairs(flat(inputs), flat(outputs)), change

    @cache
    def tests():
        return trajectories(stepper, initial, count=16, steps=max(told), seed=1, **make)

    def make_network(key):
        return Step(Cast(network(key)), training()[1])

    def sample(key):
        (inputs, outputs), _ = training()
        at = jax.random.choice(key, len(inputs), (batch,), replace=False)
        return jnp.asarray(inputs)[at], jnp.asarray(outputs)[at]

    def loss(model, pairs, *, derivatives=None):
        inputs, outputs = pairs
        return jnp.mean(((jax.vmap(model)(inputs) - outputs) / model.size) ** 2)

    def errors(model) -> Mapping[str, float]:
        fields = jnp.asarray(tests())
        run = eqx.filter_jit(jax.vmap(lambda m, u: rollout(m, u, max(told)), (None, 0)))
        got = run(model, fields[:, 0])
        at = {n: float(jnp.mean(relative(got[:, n - 1], fields[:, n]))) for n in told}
        mean = float(np.exp(np.mean(np.log(list(at.values())))))
        return {"rollout": mean, **{f"step {n}": error for n, error in at.items()}}

    given = {"learning_rate": 3e-3, "steps": 1000, "network": make_network, **given}
    own = {"loss": loss, "sample": sample, "errors": errors, "as_trained": True}
    return Problem(title=title, optimizer="adam", family="emulator", **own, **given)
