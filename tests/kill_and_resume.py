"""Trains, is killed at a random moment, goes on from its last checkpoint, and so on to the end.

    python tests/kill_and_resume.py FOLDER KILLS

Each life is a fork of this process, which has imported everything but has started no backend.
In `FOLDER`, `whole` is the last checkpoint of a run that nobody killed, and `parts` that of the one
that was killed `KILLS` times by SIGKILL. The test that starts this compares them.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx_pde as mpx


STEPS = 400


def loss(model, points, *, derivatives):
    terms = mpx.partials(model, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    return jnp.mean((d["u_xx"] + 9 * d["u"]) ** 2)


def train(path: Path, tell: int | None) -> None:
    """Trains to `STEPS`, from the checkpoint at `path` if there is one; writes a byte to the file
    descriptor `tell` after each step."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def start():
        model = mpx.nn.CoordinateMLP(1, "scalar", 8, 2, key=jax.random.key(0))
        scaling = mpx.Scaling(
            mpx.DynamicLossScaling(2.0**15, period=5, max_loss_scaling=2.0**24),
            mpx.DerivativeScaling.per_direction("x", order=2, growth_interval=7),
        )
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, opt_state, scaling, jax.random.key(1), jnp.array(0)

    @jax.jit
    def step(state):
        model, opt_state, scaling, key, i = state
        key, draw = jax.random.split(key)
        points = jax.random.uniform(draw, (16, 1))
        points = jnp.where(i % 10 == 9, jnp.nan, points)  # steps to be skipped
        grad_fn = mpx.filter_grad(loss, scaling, keep_full=(False, True))
        scaling, finite, grads = grad_fn(model, points)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, opt_state, scaling, key, i + 1

    state = start()
    if path.exists():
        state = mpx.restore_checkpoint(path, state)
    while state[-1] < STEPS:
        state = step(state)
        mpx.save_checkpoint(path, state)
        if tell is not None:
            os.write(tell, b".")


def life(path: Path, kill_after: int | None, pause: float) -> bool:
    """Trains in a fork, which is killed `pause` seconds after so many steps. Whether it was."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(path, write)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    steps = 0
    while steps != kill_after and os.read(read, 1):
        steps += 1
    if steps == kill_after:
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        raise RuntimeError("The training itself failed.")
    return False


def main(folder: Path, kills: int) -> None:
    # The lives compile the same two programs.
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    life(folder / "whole", None, 0.0)
    draw = random.Random(0)
    killed = 0
    while killed < kills:
        # A few steps a life, so that the run outlives all of them.
        if not life(folder / "parts", draw.randint(1, 3), 0.01 * draw.random()):
            raise RuntimeError(f"The run ended after {killed} kills.")
        killed += 1
    life(folder / "parts", None, 0.0)
    print(f"killed {killed} times")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
