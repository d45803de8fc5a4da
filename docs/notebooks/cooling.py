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
# # Cooling in three dimensions
#
# A block with three fins sits on a warm chip. Heat comes in from below, spreads (ΔT = 0)
# and leaves through the surface (∂T/∂n = −T). The problem belongs to the
# collection in [`examples/problems`](../../results/). Its file contains the energy that the
# temperature minimizes, the geometry by signed distances and a finite-volume reference. This page
# trains it for a short while with a handwritten loop.

# %%
import sys

sys.path.insert(0, "../..")  # the root of a clone

import equinox as eqx
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax.contrib

import mpx_pde as mpx
from examples.problems import finned_block_3d as block

# %% [markdown]
# ## One compiled step
#
# Weights are float32 and are rounded to bfloat16 for the backward pass only: with
# `forward="float32"` the loss, and all derivatives in it, are computed in float32. No scaling is
# needed then.

# %%
optimizer = optax.contrib.muon(optax.warmup_cosine_decay_schedule(0, 1e-2, 30, 600))


def train(precision, steps=600):
    net = block.PROBLEM.network(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    scaling = mpx.NoOpLossScaling()
    options = {"use_mixed_precision": precision != "float32", "forward": "float32"}
    options["policy"] = "params=float32,compute=bfloat16,output=float32"

    @eqx.filter_jit
    def step(net, opt_state, scaling, key):
        batch = block.PROBLEM.sample(key)
        scaling, finite, grads = mpx.filter_grad(block.loss, scaling, **options)(net, batch)
        net, opt_state = mpx.optimizer_update(net, optimizer, opt_state, grads, finite)
        return net, opt_state, scaling

    for key in jax.random.split(jax.random.key(1), steps):
        net, opt_state, scaling = step(net, opt_state, scaling, key)
    return net


nets = {"float32": train("float32"), "backward in bfloat16": train("bfloat16")}

# %% [markdown]
# ## Comparison with finite volumes

# %%
reference = block.reference(20)
found = {name: np.asarray(jax.vmap(net)(reference.points)) for name, net in nets.items()}
for name, t in found.items():
    error = np.linalg.norm(t - reference.values) / np.linalg.norm(reference.values)
    print(f"{name:21} relative error {error:.1e}")

# %%
middle = np.isclose(reference.points[:, 1], reference.points[:, 1][len(reference.points) // 2])
x, z = reference.points[middle][:, 0], reference.points[middle][:, 2]
fields = {"finite volumes": reference.values, **found}
low, high = reference.values.min(), reference.values.max()
figure, axes = plt.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
for axis, (name, t) in zip(axes, fields.items(), strict=True):
    image = axis.scatter(x, z, c=t[middle], marker="s", s=14, vmin=low, vmax=high, cmap="inferno")
    axis.set(title=name, xlabel="x", aspect="equal")
axes[0].set(ylabel="z")
figure.colorbar(image, ax=axes, label="temperature T")
plt.show()

# %% [markdown]
# `python -m examples.problems run finned_block_3d` runs the whole training, in any precision.
