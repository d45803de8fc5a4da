"""Tests the order in which a backward pass sums, and the arrays that it writes before."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, normal, policy, relative

import mpx_pde as mpx
from mpx_pde.engine._program import with_products_in_order
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


def by_rows(model, points):
    return jnp.mean(jax.vmap(model)(points) ** 2)


def by_derivatives(model, points, *, derivatives=None):
    terms = mpx.partials(model, ["u_x", "u_yy"], coords="xy", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    return jnp.mean((d["u_x"] - d["u_yy"]) ** 2)


def in_a_loop(model, points):
    def stepped(p):
        return jax.lax.scan(lambda h, _: (jnp.tanh(model.layers[1](h)), None), p, length=3)[0]

    return jnp.mean(jax.vmap(stepped)(points) ** 2)


LOSSES = {
    "rows of a batch": (by_rows, 2, mpx.DynamicLossScaling(2.0**4)),
    "derivatives": (by_derivatives, 2, mpx.DynamicLossScaling(2.0**4)),
    "scaled derivatives": (
        by_derivatives,
        2,
        mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy", order=2)),
    ),
    "steps of a loop": (in_a_loop, 16, mpx.DynamicLossScaling(2.0**4)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) if x == "scaled derivatives" else x for x in LOSSES],
)
def test_a_batch_is_not_moved_behind_the_values_of_a_matrix(name):
    """Checks that a `vmap` over vectors leaves no transposes of what is kept, which XLA writes."""
    loss, size, scaling = LOSSES[name]
    model = eqx.nn.MLP(2, "scalar", 16, 3, jnp.tanh, key=jax.random.key(0))
    points = normal(1, (7, size))
    gradient = mpx.filter_grad(loss, scaling, forward="float32")
    program = eqx.filter_make_jaxpr(gradient)(model, points)[0]
    moved = [e.invars[0].aval.shape for e in equations(program) if e.primitive.name == "transpose"]
    assert not [shape for shape in moved if {7, 16} <= {*shape}]
    want = eqx.filter_jit(eqx.filter_grad(loss))(model, points)
    # Roundings of 2^-11, most of which average out.
    assert relative(eqx.filter_jit(gradient)(model, points)[2], want) < 1e-3


MOVES = {
    "matrix, vectors": ("ij,bj->ib", (3, 4), (5, 4), (1, 0)),
    "two batches": ("ij,bcj->ibc", (3, 4), (5, 2, 4), (1, 2, 0)),
    "matrices, vectors": ("kij,kbj->kib", (2, 3, 4), (2, 5, 4), (0, 2, 1)),
    "vectors of two axes": ("lij,bj->lib", (2, 3, 4), (5, 4), (2, 0, 1)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_product_takes_in_a_move_of_its_result(name):
    form, *shapes, permutation = MOVES[name]
    x, y = normal(0, shapes[0]), normal(1, shapes[1])

    def function(x, y):
        out = jnp.einsum(form, x, y)
        # Two moves are one, whatever reads them.
        return jnp.sin(jnp.transpose(out, permutation)), jnp.transpose(out, permutation)

    closed = jax.make_jaxpr(function)(x, y)
    new = closed.replace(jaxpr=with_products_in_order(closed.jaxpr))
    assert "transpose" not in {e.primitive.name for e in equations(new)}
    got = jax.core.eval_jaxpr(new.jaxpr, new.consts, x, y)
    # Another order of the same sums of at most four terms.
    for a, b in zip(got, function(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


OTHERWISE = {
    "the result itself too": lambda z: (z, z.T),
    "its entries in order too": lambda z: (jnp.cumsum(z, axis=0), z.T),
    "in one order and another": lambda z: (z[None].transpose(2, 0, 1), z.T),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_product_that_is_read_in_its_order_too_stays(name):
    x, y = normal(0, (3, 4)), normal(1, (5, 4))
    function = lambda x, y: OTHERWISE[name](jnp.einsum("ij,bj->ib", x, y))
    closed = jax.make_jaxpr(function)(x, y)
    new = closed.replace(jaxpr=with_products_in_order(closed.jaxpr))
    assert str(new) == str(closed)
