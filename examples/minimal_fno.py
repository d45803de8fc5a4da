"""A Fourier neural operator in mixed precision, in one page: it advances a periodic field by half a
unit of time with Burgers' equation u_t + u u_x = u_xx / 50.

    python examples/minimal_fno.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx_pde as mpx


STEPS, BATCH, GRID, SAMPLES = 1000, 32, 128, 768


def solve(u, time=0.5, steps=800):
    """Solves pseudo-spectrally in space, by the midpoint rule in time, with exact diffusion."""
    k = jnp.fft.rfftfreq(GRID, 1 / GRID)
    dt, kept = time / steps, k < GRID / 3
    half = jnp.exp(-(k**2) / 50 * dt / 2)

    def slope(y):
        return -0.5j * k * kept * jnp.fft.rfft(jnp.fft.irfft(y, GRID) ** 2)

    def step(y, _):
        middle = half * (y + dt / 2 * slope(y))
        return half * (half * y + dt * slope(middle)), None

    return jnp.fft.irfft(jax.lax.scan(step, jnp.fft.rfft(u), length=steps)[0], GRID)


def fields(key, samples):
    """Draws random smooth fields, shape [samples, GRID]: eight modes that fall off as 1 / k."""
    x = 2 * jnp.pi * jnp.arange(GRID) / GRID
    k = jnp.arange(1, 9)
    waves = jnp.concatenate([jnp.sin(k[:, None] * x), jnp.cos(k[:, None] * x)])
    return jax.random.normal(key, (samples, 16)) / jnp.tile(k, 2) @ waves


def loss(model, inputs, targets):
    return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)


def main(steps=STEPS, samples=SAMPLES):
    key, data, net = jax.random.split(jax.random.key(0), 3)
    inputs = fields(data, samples + 64)[:, None]  # one channel
    targets = jax.jit(jax.vmap(jax.vmap(solve)))(inputs)
    model = mpx.nn.FNO(1, 1, hidden_channels=32, num_layers=4, modes=32, key=net)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.DynamicLossScaling()

    @eqx.filter_jit
    def step(model, opt_state, scaling, inputs, targets):
        # Weights, fields and transforms are in half precision, gradients and master weights in
        # float32. Fields are passed in uncast: the layers remove their mean before rounding them.
        value_and_grad = mpx.filter_value_and_grad(loss, scaling, keep_full=(False, True, True))
        value, scaling, finite, grads = value_and_grad(model, inputs, targets)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, opt_state, scaling, value

    for i in range(steps):
        key, now = jax.random.split(key)
        batch = jax.random.randint(now, (BATCH,), 0, samples)
        state = model, opt_state, scaling
        model, opt_state, scaling, value = step(*state, inputs[batch], targets[batch])
        if (i + 1) % max(steps // 6, 1) == 0:
            print(f"step {i + 1}: loss {value:.2e}, skipped {scaling.skipped_steps}")

    error = jax.vmap(model)(inputs[samples:]) - targets[samples:]
    error = jnp.linalg.norm(error) / jnp.linalg.norm(targets[samples:])
    print(f"relative L2 error on 64 fields not seen before {error:.2e}")
    return error


if __name__ == "__main__":
    main()
