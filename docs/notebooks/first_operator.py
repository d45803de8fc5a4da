# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first neural operator
#
# A Fourier neural operator learns a map between functions: from the force f on a string to its
# deflection u, where −u″ + u = f on a periodic interval. The data are exact, because the equation
# is a division in Fourier space.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import mpx_pde as mpx


def samples(count, points, seed):
    """Draws forces of twelve random waves each, and deflections; shape `[count, 1, points]`."""
    random = np.random.default_rng(seed)
    k = np.arange(1, 13)
    parts = random.normal(size=(2, count, 12)) / np.sqrt(k)
    wave = parts[0] + 1j * parts[1]
    x = np.arange(points) / points
    basis = np.exp(2j * np.pi * k[:, None] * x)
    f = (wave @ basis).real
    u = ((wave / (1 + (2 * np.pi * k) ** 2)) @ basis).real
    return f[:, None].astype(np.float32), (100 * u[:, None]).astype(np.float32)


train_data, test_data = samples(512, 64, 0), samples(64, 64, 1)

# %% [markdown]
# ## The model and the step
#
# `mpx.nn.FNO` takes one sample, channels first. Its spectral layers multiply truncated DFT
# matrices in the dtype of its weights: tensor cores can compute them, whereas an FFT would stay in
# float32. `keep_full=(False, True)` passes the fields in unchanged, in float32; the model removes
# their mean before it rounds them.


# %%
def loss(model, batch):
    f, u = batch
    return jnp.mean((jax.vmap(model)(f) - u) ** 2)


optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, 400))


def train(mixed, dtype="float16", steps=400):
    model = mpx.nn.FNO(1, 1, 16, 3, 12, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.DynamicLossScaling()
    policy = f"params=float32,compute={dtype},output=float32"
    options = {"use_mixed_precision": mixed, "policy": policy, "keep_full": (False, True)}

    @eqx.filter_jit
    def step(model, opt_state, scaling, batch):
        _, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling, **options)(
            model, batch
        )
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, opt_state, scaling

    random = np.random.default_rng(2)
    for _ in range(steps):
        rows = random.integers(len(train_data[0]), size=32)
        batch = tuple(jnp.asarray(part[rows]) for part in train_data)
        model, opt_state, scaling = step(model, opt_state, scaling, batch)
    return model


models = {"float32": train(False), "float16": train(True), "bfloat16": train(True, "bfloat16")}

# %% [markdown]
# ## Test errors on the training grid and on a finer one
#
# The model maps functions to functions, so it accepts any grid fine enough for its modes.


# %%
def error(model, data):
    f, u = data
    got = jax.vmap(model)(jnp.asarray(f))
    return float(jnp.mean(jnp.linalg.norm(got - u, axis=-1) / jnp.linalg.norm(u, axis=-1)))


finer = samples(64, 256, 1)
for name, model in models.items():
    print(f"{name:9} 64 points: {error(model, test_data):.2%}, 256: {error(model, finer):.2%}")

# %%
f, u = (part[0, 0] for part in finer)
x = np.arange(256) / 256
plt.figure(figsize=(8, 3.2))
plt.plot(x, u, "k", lw=3, alpha=0.3, label="exact")
for name, model in models.items():
    plt.plot(x, model(jnp.asarray(f[None]))[0], lw=1, label=name)
plt.xlabel("x")
plt.ylabel("100 u")
plt.legend()
plt.show()

# %% [markdown]
# Next: [neural operators in half precision](../../operators/), and their [results on Darcy and
# Navier–Stokes](../../results/#neural-operators).
