"""Measures the programs of this folder in each mode against themselves in float64."""

import dataclasses
import functools as ft
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx

from . import graphs, grids, implicit, physics_informed, sequences
from ._client import Client


GROUPS = {
    "physics-informed": physics_informed.CLIENTS,
    "sequences": sequences.CLIENTS,
    "grids": grids.CLIENTS,
    "solvers inside": implicit.CLIENTS,
    "graphs, tables, forces": graphs.CLIENTS,
}
CLIENTS = {name: make for group in GROUPS.values() for name, make in group.items()}
MODES = {"forward": {"forward": "float32"}, "autocast": {"autocast": True}, "cast": {}}
STEPS = 6
"""The steps of a training that count as skipped or taken, from the default loss scale on."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a mode does to a program.

    **Attributes:**

    - `value`, `gradient`: errors relative to float64 of the first step that was taken.
    - `share`: the share of the backward pass's products in half, `None` without products.
    - `kept`: the bytes that the backward pass keeps, relative to float32's.
    - `skipped`: the skipped steps of the first `STEPS`.
    - `told`: the first lines of the library's warnings, or of an error. Some functions of JAX take
      no halves.
    """

    value: float
    gradient: float
    share: float | None
    kept: float | None
    skipped: int
    told: tuple[str, ...]


def flat(tree: Any) -> np.ndarray:
    leaves = [x for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in leaves])


def relative(got: Any, want: Any) -> float:
    got, want = flat(got), flat(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@ft.cache
def client(name: str) -> Client:
    return CLIENTS[name]()


@ft.cache
def exact(name: str) -> tuple[np.ndarray, Any]:
    """Returns the value and the gradient in float64."""
    loss, params, data, plain = client(name)
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64)) if eqx.is_inexact_array(x) else x
        params, data = jax.tree.map(wide, (params, data))
        value, grads = eqx.filter_jit(eqx.filter_value_and_grad(plain or loss))(params, *data)
        assert value.dtype == jnp.float64
        return jax.device_get((value, eqx.filter(grads, eqx.is_inexact_array)))


def kept_by(loss: Any, params: Any, *data: Any) -> int:
    """Returns the bytes of all numbers that JAX keeps for the backward pass of a loss."""
    moved, rest = eqx.partition(params, eqx.is_inexact_array)
    run = lambda p: loss(eqx.combine(p, rest), *data)
    pull = jax.eval_shape(lambda p: jax.vjp(run, p)[1], moved)
    leaves = [x for x in jax.tree.leaves(pull) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(x.size * x.dtype.itemsize for x in leaves)


def gradient(name: str, mode: str, half: str, scaling: Any) -> Any:
    policy = f"params=float32,compute={half},output=float32"
    return mpx.filter_value_and_grad(client(name).loss, scaling, policy=policy, **MODES[mode])


def measured(name: str, mode: str, half: str) -> Measured:
    """Takes the first steps of a training, and compares the first one that counts."""
    try:
        return _measured(name, mode, half)
    except (TypeError, ValueError, NotImplementedError) as error:
        if mode != "cast":
            raise
        return Measured(np.nan, np.nan, None, None, 0, (str(error).split("\n")[0],))


def _measured(name: str, mode: str, half: str) -> Measured:
    params, data = client(name)[1:3]
    optimizer = optax.adam(1e-3)

    @eqx.filter_jit
    def step(params, state, scaling):
        run = gradient(name, mode, half, scaling)
        value, scaling, finite, grads = run(params, *data)
        params, state = mpx.optimizer_update(params, optimizer, state, grads, finite)
        return params, state, scaling, value, finite, grads

    state, scaling = (
        optimizer.init(eqx.filter(params, eqx.is_inexact_array)),
        mpx.DynamicLossScaling(),
    )
    first, skipped = None, 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            params, state, scaling, value, finite, grads = step(params, state, scaling)
            first = (value, grads) if first is None and finite else first
            skipped += not finite
        report = mpx.precision_report(gradient(name, mode, half, mpx.NoOpLossScaling()))
        report = report(client(name).params, *data)
    want_value, want = exact(name)
    value, grads = (np.nan, want) if first is None else first
    backward = [row for row in report.rows if row.backward]
    ours = [w for w in told if issubclass(w.category, mpx.PrecisionWarning)]
    return Measured(
        float(abs(value - want_value) / abs(want_value)),
        np.nan if first is None else relative(grads, want),
        report.backward_half_share if backward else None,
        report.kept_in_half / kept_by(*client(name)[:2], *data) if mode == "forward" else None,
        skipped,
        tuple(str(w.message).split("\n")[0] for w in ours),
    )
