"""Tests gradients and memory with the defaults that JAX 0.12 announces.

Older versions lack some of these flags or cannot map a checkpoint's name with them. `jax_scan3` is
left out: JAX 0.12.0.1 has no reverse mode for it yet.
"""

import contextlib
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_float64, policy, relative

import mpx_pde as mpx


FLAGS = (
    "jax_remat3",
    "jax_custom_vjp3",
    "jax_custom_jvp3",
    "jax_remat_barrier_no_cotangents",
)


@contextlib.contextmanager
def coming(flags):
    before = {name: getattr(jax.config, name) for name in flags}
    try:
        for name in before:
            jax.config.update(name, True)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


KEY = jax.random.key(0)


def pinn(model, points):
    terms = mpx.partials(model, ["u", "u_t", "u_xx"], coords="tx", outputs="u")
    d = jax.vmap(terms)(points)
    return jnp.mean((d["u_t"] - 0.1 * d["u_xx"] + d["u"] ** 3) ** 2)


def operator(model, fields):
    return jnp.mean((jax.vmap(model)(fields[0]) - fields[1]) ** 2)


def rollout(model, points):
    step = jax.checkpoint(lambda u, _: (u + 0.1 * jax.vmap(model)(u), None))
    return jnp.mean(jax.lax.scan(step, points, length=4)[0] ** 2)


POINTS = jax.random.uniform(jax.random.key(1), (512, 2))
LOSSES = {
    "pinn": (pinn, mpx.nn.CoordinateMLP(2, "scalar", 32, 3, key=KEY), POINTS),
    "fno": (
        operator,
        mpx.nn.FNO(1, 1, 8, 3, (4, 4), key=KEY),
        jax.random.normal(KEY, (2, 2, 1, 16, 16)),
    ),
    "rollout": (rollout, eqx.nn.MLP(2, 2, 32, 2, jnp.tanh, key=KEY), POINTS),
}
# The roundings of a few layers in bfloat16 add up to some units of 2^-8.
WAYS = {
    "float32": ({"use_mixed_precision": False}, 1e-4),
    "forward": ({"forward": "float32"}, 2.0**-5),
    "cast": ({}, 2.0**-4),
    "autocast": ({"autocast": True}, 2.0**-4),
}


def compiled(name, way):
    """Returns a gradient, and the temporary memory that it takes."""
    loss, model, batch = LOSSES[name]
    options = {
        "policy": policy("bfloat16"),
        "keep_full": (False, loss is not rollout),
        **WAYS[way][0],
    }
    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)
    params, static = eqx.partition(model, eqx.is_array)
    run = jax.jit(lambda params, batch: gradient(eqx.combine(params, static), batch)[2])
    program = run.lower(params, batch).compile()
    return program(params, batch), program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 announces them")
@pytest.mark.filterwarnings("ignore:.*is done in half")  # checkpoints by `jax_remat3` stay full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_stay_right_and_memory_is_told(name, way, record_property):
    loss, model, batch = LOSSES[name]
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, eqx.filter_grad(loss)(*in_float64((model, batch))))
    _, before = compiled(name, way)
    with coming(FLAGS), warnings.catch_warnings():
        # A checkpoint of the user is opaque then: its products are in full, and that is told.
        warnings.simplefilter("ignore", mpx.PrecisionWarning)
        got, memory = compiled(name, way)
    assert relative(got, want) < WAYS[way][1]
    record_property("memory", f"{name}, {way}: {before} to {memory} bytes")
    # JAX no longer lets what it evaluates again wait for cotangents, and evaluates a checkpoint
    # once that forward mode differentiates, as a `custom_jvp` rule does. That costs plain JAX as
    # much: a chain of checkpoints takes 1.7 times the memory. Beyond that nothing may be kept.
    assert memory < 4 * before + 2**20
