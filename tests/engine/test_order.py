"""Tests the order in which a backward pass sums, and the arrays that it writes before."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, normal, policy

import mpx_pde as mpx
from mpx_pde.products._order import summed_apart


in_full = lambda weight, x: jnp.sum(jnp.sin(x * weight))
apart = lambda weight, x: in_full(summed_apart(weight, x), x)
total = lambda f: lambda w, xs: jnp.sum(jax.vmap(f, (None, 0))(w, xs))
halves = lambda xs: xs.reshape(2, -1, xs.shape[-1])
both = lambda w: jnp.stack([w, 2 * w])
ORDERS = {
    "gradient of a batch": lambda f: jax.grad(total(f)),
    "batch of gradients": lambda f: lambda w, xs: sum(jax.vmap(jax.grad(f), (None, 0))(w, xs)),
    "in a checkpoint": lambda f: jax.grad(total(jax.checkpoint(f))),
    "two batches": lambda f: jax.grad(lambda w, xs: total(total(f))(w, halves(xs))),
    "networks too": lambda f: lambda w, xs: jax.vmap(jax.grad(total(f)), (0, None))(both(w), xs),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_weight_has_the_gradient_that_it_has(order):
    weight, points = normal(0, (4,)), normal(1, (6, 4))
    want = ORDERS[order](in_full)(weight, points)
    np.testing.assert_allclose(jax.jit(ORDERS[order](apart))(weight, points), want, rtol=1e-6)


def test_a_norm_s_weight_is_summed_over_points_by_itself():
    """Checks that products with the cotangents are written once for all streams, then summed."""
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(i, 16, key=k) for i, k in zip((2, 16), keys, strict=True)]
    norms = [eqx.nn.LayerNorm(16) for _ in layers]

    def network(model, p):
        for layer, norm in zip(*model, strict=True):
            p = jnp.tanh(norm(layer(p)))
        return jnp.sum(p)

    def loss(model, points):
        terms = mpx.partials(lambda p: network(model, p), ["u_xx"], coords="xy", outputs="u")
        return jnp.mean(jax.vmap(terms)(points)["u_xx"] ** 2)

    options = {"policy": policy("bfloat16"), "keep_full": (False, True)}
    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)
    program = eqx.filter_make_jaxpr(gradient)((layers, norms), normal(1, (8, 2)))[0]
    written = [e.outvars[0].aval for e in equations(program) if e.primitive.name == "written"]
    assert [x.shape for x in written if x.dtype == jnp.float32] == 2 * [(8, 16)]


@pytest.mark.parametrize("forward", ["float32", "bfloat16_x3"])
def test_sizes_within_a_network_may_be_open_and_weights_empty(forward):
    """Tests a residual network of tokens, whose number an export leaves open."""

    def network(model, p):
        first, weight, tokens = model
        h = jnp.tanh(tokens * (first @ p))
        h = h + jnp.tanh(h @ weight)
        return jnp.mean(h + jnp.tanh(h @ weight)) + jnp.sum(weight[0, :0] * h[0, :0])

    def loss(model, points):
        terms = mpx.partials(lambda p: network(model, p), ["u_xx"], coords="xy", outputs="u")
        return jnp.mean(jax.vmap(terms)(points)["u_xx"] ** 2)

    gradient = mpx.filter_grad(loss, mpx.DynamicLossScaling(1.0), forward=forward)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    (count,) = jax.export.symbolic_shape("n")
    model = shape(16, 2), shape(16, 16), shape(count, 16)
    exported = jax.export.export(jax.jit(lambda *args: gradient(*args)[2]))(model, shape(4, 2))
    assert exported.out_avals[2].shape == (count, 16)
