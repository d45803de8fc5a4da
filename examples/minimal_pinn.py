"""A physics-informed network in mixed precision, in one page: the heat equation u_t = u_xx / 10 on
a rod, u = 0 at both ends and sin πx + sin(3πx) / 2 at the start, against its exact solution.

    python examples/minimal_pinn.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx_pde as mpx


STEPS, POINTS = 3000, 512


def start(x):
    return jnp.sin(jnp.pi * x) + jnp.sin(3 * jnp.pi * x) / 2


def exact(t, x):
    decay = lambda k: jnp.exp(-((k * jnp.pi) ** 2) * t / 10)
    return decay(1) * jnp.sin(jnp.pi * x) + decay(3) * jnp.sin(3 * jnp.pi * x) / 2


def loss(model, points, *, derivatives):
    # One pass through the network computes all terms. They are stored in half for the backward
    # pass, and the scales that `filter_value_and_grad` passes in keep them in float16's range.
    terms = mpx.partials(model, ["u_t", "u_xx"], coords="tx", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    residual = d["u_t"] - d["u_xx"] / 10

    t, x = points.T
    u = lambda t, x: jax.vmap(model)(jnp.stack([t, x], axis=1))[:, 0]
    at_start = u(jnp.zeros_like(t), x) - start(x)
    at_ends = u(t, jnp.round(x))
    return jnp.mean(residual**2) + 10 * (jnp.mean(at_start**2) + jnp.mean(at_ends**2))


def main(steps=STEPS):
    key = jax.random.key(0)
    model = mpx.nn.CoordinateMLP(2, 1, width_size=64, depth=3, key=key)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("tx"))

    @eqx.filter_jit
    def step(model, opt_state, scaling, key):
        points = jax.random.uniform(key, (POINTS, 2))
        # The loss is computed in float32. The backward pass, and what is stored for it, are in half
        # precision. `use_mixed_precision=False` gives plain float32.
        value_and_grad = mpx.filter_value_and_grad(loss, scaling, forward="float32")
        value, scaling, finite, grads = value_and_grad(model, points)
        # A step whose gradients are not finite changes nothing.
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, opt_state, scaling, value

    for i in range(steps):
        key, now = jax.random.split(key)
        model, opt_state, scaling, value = step(model, opt_state, scaling, now)
        if (i + 1) % max(steps // 6, 1) == 0:
            print(f"step {i + 1}: loss {value:.2e}, skipped {scaling.skipped_steps}")

    t, x = jnp.meshgrid(jnp.linspace(0, 1, 64), jnp.linspace(0, 1, 64))
    u = jax.vmap(jax.vmap(lambda t, x: model(jnp.stack([t, x]))[0]))(t, x)
    error = jnp.linalg.norm(u - exact(t, x)) / jnp.linalg.norm(exact(t, x))
    print(f"relative L2 error {error:.2e}")
    return error


if __name__ == "__main__":
    main()
