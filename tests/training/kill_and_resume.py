"""Trains from the last checkpoint on and saves after each step. `test_checkpoint.py` kills it.

    python tests/training/kill_and_resume.py FOLDER LIBRARY

`LIBRARY` is `equinox`, `orbax` or `none`. The process prints the number of the step that it starts
from, and that of each step after it. The last state is `FOLDER/end`.
"""

import contextlib
import functools as ft
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from helpers import oscillation
from pages import ROOT, blocks

import mpx_pde as mpx


STEPS = 60


@ft.cache
def guide() -> dict:
    """Returns the functions that save and restore, as the guide defines them."""
    names = {}
    for _, source in blocks(ROOT / "docs" / "many-gpus.md", "python"):
        if "def save" in source:
            exec(source, names)
    return names


loss = ft.partial(oscillation, square=9.0)
optimizer = optax.adam(1e-2)


def start():
    model = mpx.nn.CoordinateMLP(1, "scalar", 8, 2, key=jax.random.key(0))
    scaling = mpx.Scaling(
        mpx.DynamicLossScaling(2.0**15, period=5, max_loss_scaling=2.0**24),
        mpx.DerivativeScaling.per_direction("x", order=2, growth_interval=7),
    )
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    state = {"model": model, "opt_state": opt_state, "scaling": scaling, "step": jnp.array(0)}
    return state | {"key": jax.random.key_data(jax.random.key(1))}


@jax.jit
def advance(state):
    key, draw = jax.random.split(jax.random.wrap_key_data(state["key"]))
    step = state["step"] + 1
    points = jax.random.uniform(draw, (16, 1))
    points = jnp.where(step % 10 == 0, jnp.nan, points)  # steps to be skipped
    grad_fn = mpx.filter_grad(loss, state["scaling"], keep_full=(False, True))
    scaling, finite, grads = grad_fn(state["model"], points)
    given = optimizer, state["opt_state"], grads, finite
    model, opt_state = mpx.optimizer_update(state["model"], *given)
    state = {"model": model, "opt_state": opt_state, "scaling": scaling, "step": step}
    return state | {"key": jax.random.key_data(key)}


def main(folder: Path, library: str) -> None:
    folder.mkdir(exist_ok=True)
    state = first = start()
    path = folder / "run"
    with contextlib.ExitStack() as stack:
        if library == "orbax":
            manager = stack.enter_context(ocp.CheckpointManager(path))
            state = guide()["restore_with_orbax"](manager, state)
        elif library == "equinox" and path.exists():
            state = guide()["restore"](path, state)
        print(int(state["step"]), flush=True)
        while state["step"] < STEPS:
            state = advance(state)
            if library == "orbax":
                guide()["save_with_orbax"](manager, int(state["step"]), state)
            elif library == "equinox":
                guide()["save"](path, state)
            print(int(state["step"]), flush=True)
    # The scales have changed, so that losing them would show.
    assert state["scaling"].skipped_steps > 0
    assert any(state["scaling"].derivatives.scales != first["scaling"].derivatives.scales)
    guide()["save"](folder / "end", state)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
