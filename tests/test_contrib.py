"""Loops, and layers, of libraries that people will not leave."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import tree_equal_bits

import mpx_pde as mpx


def problem():
    """A closed loop: it takes a loss and an optimizer, and knows nothing of scales."""

    def solve(loss, optimizer, params, steps):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        run = jax.jit(lambda c: jax.lax.scan(step, c, length=steps))
        # As in most loops.
        with jax.numpy_dtype_promotion("standard"):
            return run((params, optimizer.init(params)))

    target = jnp.array([1.0, -2.0, 0.5])

    def half_loss(net):
        # Gradients of 1e-7 vanish in float16 unless the loss is scaled.
        error = (net - target).astype(jnp.float16)
        return jnp.sum((jnp.float16(1e-4) * error) ** 2).astype(jnp.float32)

    return solve, half_loss, target


def test_a_loop_that_takes_an_optimizer_alone_trains_with_a_scale_that_moves():
    solve, half_loss, target = problem()

    def loss(params):
        return half_loss(params["net"]) * jax.lax.stop_gradient(params["scale"])

    optimizer = mpx.contrib.scale_by_loss_scaling(
        optax.adam(3e-2),
        mpx.DynamicLossScaling(2.0**15, period=50),
        scale_in_params=lambda p: p["scale"],
    )
    params = {"net": jnp.zeros(3), "scale": jnp.float32(2.0**15)}
    (params, state), _ = solve(loss, optimizer, params, 600)
    np.testing.assert_allclose(params["net"], target, atol=2e-2)
    assert params["scale"] == state.scaling.loss_scaling


def test_what_is_not_finite_is_skipped_and_lowers_the_scale():
    optimizer = mpx.contrib.scale_by_loss_scaling(
        optax.adam(1e-2),
        mpx.DynamicLossScaling(2.0**15),
        scale_in_params=lambda p: p["scale"],
    )
    params = {"net": jnp.ones(3), "scale": jnp.float32(2.0**15)}
    state = optimizer.init(params)
    grads = {"net": jnp.array([1.0, jnp.inf, 0.0]), "scale": jnp.float32(0)}
    updates, after = jax.jit(optimizer.update)(grads, state, params)
    assert tree_equal_bits(after.inner, state.inner)
    new = optax.apply_updates(params, updates)
    assert (new["net"] == params["net"]).all()
    assert new["scale"] == after.scaling.loss_scaling == 2.0**14
    assert after.scaling.skipped_steps == 1


@pytest.mark.parametrize(("begin", "rate"), [(2.0**10, 0.5), (2.0**14, 1.0)])
def test_gradients_are_unscaled_by_the_scale_that_the_loss_had(begin, rate):
    """Another than the state's: the loop multiplies all updates by a rate, or began elsewhere."""
    net, steps = jnp.array([1.0, -2.0, 0.5]), 4
    optimizer = optax.chain(
        mpx.contrib.scale_by_loss_scaling(
            optax.sgd(0.25),
            mpx.DynamicLossScaling(2.0**10, period=2),
            scale_in_params=lambda p: p["scale"],
        ),
        optax.scale(rate),
    )
    params = {"net": net, "scale": jnp.float32(begin)}
    state = optimizer.init(params)
    scales = []
    for _ in range(steps):
        scales.append(float(params["scale"]))
        grads = {"net": params["net"] * params["scale"], "scale": jnp.float32(0)}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert len({*scales}) > 1
    # The scale is no power of two where the rate halves its way: a few roundings.
    np.testing.assert_allclose(params["net"], net * (1 - 0.25 * rate) ** steps, rtol=1e-6)


def test_a_static_scale_gives_the_same_steps_as_none():
    solve, half_loss, _ = problem()
    plain = lambda net: jnp.sum((net - 1.0) ** 2)
    net = jnp.zeros(3)
    (want, _), _ = solve(plain, optax.adam(1e-2), net, 20)
    static = mpx.contrib.scale_by_loss_scaling(optax.adam(1e-2), mpx.StaticLossScaling(1024.0))
    (got, state), _ = solve(lambda net: 1024.0 * plain(net), static, net, 20)
    # Powers of two are exact.
    assert (got == want).all()
    assert isinstance(state, mpx.contrib.LossScalingState)


def test_errors():
    optimizer = optax.sgd(1.0)
    scale = mpx.contrib.scale_by_loss_scaling
    with pytest.raises(ValueError, match="needs `scale_in_params`"):
        scale(optimizer, mpx.DynamicLossScaling())
    both = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("x"))
    with pytest.raises(TypeError, match=r"Pass its `loss`"):
        scale(optimizer, both)
    moving = scale(optimizer, mpx.DynamicLossScaling(), scale_in_params=lambda p: p["s"])
    with pytest.raises(ValueError, match="needs a float32 scalar"):
        moving.init({"s": jnp.zeros(3)})
    with pytest.raises(ValueError, match="found no spectral convolution"):
        mpx.contrib.convert_spectral_layers(eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0)))


class ForeignSpectralConv(eqx.Module):
    """What pdequinox holds, evaluated by a sum over frequencies in NumPy."""

    num_spatial_dims: int
    num_modes: tuple[int, ...]
    weights_real: jax.Array
    weights_imag: jax.Array

    def by_hand(self, x):
        *modes, last = self.num_modes
        weight = np.asarray(self.weights_real) + 1j * np.asarray(self.weights_imag)
        y = np.fft.rfftn(np.asarray(x, np.float64), axes=range(1, x.ndim))
        out = np.zeros((weight.shape[1], *y.shape[1:]), complex)
        dims = len(self.num_modes)
        for group, w in enumerate(weight):
            # The sign of the first axis changes fastest.
            signs = [group >> axis & 1 for axis in range(dims - 1)]
            where = tuple(
                slice(-m, None) if negative else slice(None, m)
                for m, negative in zip(modes, signs, strict=True)
            )
            where = (slice(None), *where, slice(None, last))
            out[where] = np.einsum("i...,oi...->o...", y[where], w)
        return np.fft.irfftn(out, s=x.shape[1:], axes=range(1, x.ndim))


@pytest.mark.parametrize("modes", [(5,), (3, 4), (2, 3, 2), (1, 1)])
def test_spectral_layers_of_pdequinox_compute_the_same(modes):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (2 ** (len(modes) - 1), 3, 2, *modes)
    layer = ForeignSpectralConv(
        len(modes), modes, jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape)
    )
    x = jax.random.normal(keys[2], (2, *(12, 10, 8)[: len(modes)]))
    model = mpx.contrib.convert_spectral_layers({"layer": layer, "other": jnp.tanh})
    assert model["other"] is jnp.tanh
    got = model["layer"](x)
    want = layer.by_hand(x)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.max(np.abs(want)))


def test_the_fno_of_pdequinox_in_half_precision():
    pdequinox = pytest.importorskip("pdequinox")
    fno = pdequinox.arch.ClassicFNO(
        2, 1, 1, hidden_channels=8, num_modes=4, num_blocks=2, key=jax.random.key(0)
    )
    mine = mpx.contrib.convert_spectral_layers(fno)
    x = jax.random.normal(jax.random.key(1), (1, 16, 16))
    with jax.numpy_dtype_promotion("standard"):
        want = fno(x)
    np.testing.assert_allclose(mine(x), want, atol=1e-5)
    half = mpx.cast_to_bfloat16(mine)(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    error = jnp.linalg.norm(half.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    # Two blocks, each of which rounds some eight times to 2^-9 of what it stores.
    assert error < 16 * 2**-9
    assert all(x.dtype == jnp.float32 for x in jtu.tree_leaves(eqx.filter(mine, eqx.is_array)))


def test_multi_steps_of_optax_goes_in_as_it_is():
    """As it goes into `optimizer_update`."""
    several = optax.MultiSteps(optax.sgd(0.5), 2)
    optimizer = mpx.contrib.scale_by_loss_scaling(several, mpx.StaticLossScaling(4.0))
    w = jnp.ones(2)
    state = optimizer.init(w)
    first, state = optimizer.update(4 * w, state, w)
    second, state = optimizer.update(4 * w, state, w)
    np.testing.assert_array_equal(jnp.stack([first, second]), [[0.0, 0.0], [-0.5, -0.5]])


def test_no_scaling_needs_no_place_for_its_scale():
    """As bfloat16 asks for."""
    optimizer = mpx.contrib.scale_by_loss_scaling(optax.sgd(0.5), mpx.NoOpLossScaling())
    w = jnp.ones(2)
    state = optimizer.init(w)
    update, state = optimizer.update(w.astype("bfloat16"), state, w)
    np.testing.assert_array_equal(update, [-0.5, -0.5])
    skipped, state = optimizer.update(w * jnp.inf, state, w)
    np.testing.assert_array_equal(skipped, [0.0, 0.0])
