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
# # A first physics-informed network
#
# We solve −Δu = f on the unit square, with u = 0 at its edge. The network is a plain
# `eqx.nn.MLP`, which knows nothing of this library. We train it first in float32, then with
# half-precision products, then with the forward pass in float32 and the backward pass in half. The
# right-hand side is chosen so that u = sin πx sin 2πy is the solution.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import mpx_pde as mpx


def exact(points):
    return jnp.sin(jnp.pi * points[..., 0]) * jnp.sin(2 * jnp.pi * points[..., 1])


# %% [markdown]
# ## The loss
#
# `mpx.laplacian` evaluates `lap_u`, the sum of the second derivatives, in one pass through the
# network. A bump multiplies the network so that it vanishes at the edge, and only the equation is
# left to learn. A `Scaling` passes `derivatives` to the loss: the scales that keep derivatives
# within the range of float16.


# %%
def field(net):
    def u(p):
        x, y = p
        return x * (1 - x) * y * (1 - y) * 16 * net(p)

    return u


def loss(net, points, *, derivatives=None):
    lap = mpx.laplacian(field(net), coords="xy", outputs="u", scaling=derivatives)
    source = 5 * jnp.pi**2 * exact(points)
    return jnp.mean((jax.vmap(lap)(points)["lap_u"] + source) ** 2) / 100


# %% [markdown]
# ## The training loop
#
# The loop differs from Equinox's in two ways. The gradient transformation also returns the scaling
# for the next step and whether everything is finite, and the optimizer step takes the latter. A
# step that overflows changes only the scale.

# %%
optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, 1200))


def train(mixed, forward="half", steps=1200):
    net = eqx.nn.MLP(2, "scalar", 48, 3, jnp.tanh, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy"))
    options = {"use_mixed_precision": mixed, "forward": forward, "keep_full": (False, True)}

    @eqx.filter_jit
    def step(net, opt_state, scaling, key):
        points = jax.random.uniform(key, (512, 2))
        value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling, **options)(
            net, points
        )
        net, opt_state = mpx.optimizer_update(net, optimizer, opt_state, grads, finite)
        return net, opt_state, scaling, value

    values = []
    for key in jax.random.split(jax.random.key(1), steps):
        net, opt_state, scaling, value = step(net, opt_state, scaling, key)
        values.append(value)
    return net, jnp.stack(values), scaling


runs = {
    "float32": train(False),
    "float16": train(True),
    "float16, forward in float32": train(True, "float32"),
}

# %% [markdown]
# ## Results

# %%
axis = jnp.linspace(0, 1, 61)
grid = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1)


def error(net):
    u = jax.vmap(jax.vmap(field(net)))(grid)
    return float(jnp.linalg.norm(u - exact(grid)) / jnp.linalg.norm(exact(grid)))


for name, (net, _, scaling) in runs.items():
    print(f"{name:28} relative error {error(net):.1e}, steps skipped: {int(scaling.skipped_steps)}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, (_, values, _) in runs.items():
    left.semilogy(values, label=name, lw=1)
left.set(xlabel="step", ylabel="loss")
left.legend()
net = runs["float16, forward in float32"][0]
image = right.imshow(jax.vmap(jax.vmap(field(net)))(grid).T, origin="lower", extent=(0, 1, 0, 1))
right.set(xlabel="x", ylabel="y", title="u, learnt")
figure.colorbar(image, label="u")
plt.show()

# %% [markdown]
# ## Which products ran in half precision
#
# We did not edit the network, and nothing in it says "half". `precision_report` counts the
# products of the whole step. The layer that takes the point stays in float32, because every
# derivative magnifies the errors made there.

# %%
gradient = mpx.filter_grad(loss, runs["float16"][2], keep_full=(False, True))
print(mpx.precision_report(gradient)(runs["float16"][0], jnp.ones((512, 2)) / 3))

# %% [markdown]
# Next: [which precision to choose](../../choose/), [physics-informed networks](../../pinns/).
