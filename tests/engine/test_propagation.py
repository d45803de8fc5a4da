"""Networks that carry first and second derivatives through their layers, against float64."""

import re
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import coordinate_mlp, equations, program_for_gpu

import mpx_pde as mpx
from mpx_pde import nn


TERMS = ["u", "v", "u_x", "v_y", "u_xx", "u_xy", "v_yy", "v_xy"]
VARIANTS = {
    "tanh": {},
    "silu": {"activation": jax.nn.silu},
    "fourier": {"fourier_features": (8, 1.0), "periodic": {0: 2.0}},
    "full last": {"activation": jnp.sin, "full_precision_last": True},
}


def make(**options):
    return nn.CoordinateMLP(2, 2, 16, 3, key=jax.random.key(0), **options)


def form(point, fields):
    """Nonlinear in the point, in the network and in both together."""
    x, y = point
    u, v = fields
    return jnp.stack([jnp.sin(3 * x) + x * (1 - x) * u * v, jnp.exp(y * v) + x * y])


def points(n=8):
    return jax.random.uniform(jax.random.key(3), (n, 2))


def evaluate(fun, scaling=None, terms=TERMS):
    @eqx.filter_jit
    def run(fun, scaling):
        return jax.vmap(mpx.partials(fun, terms, coords="xy", outputs="uv", scaling=scaling))(
            points()
        )

    return run(fun, scaling)


def exact(model):
    """By nested `jax.jvp` of the layers as formulas, in float64."""
    mlp = model.network if isinstance(model, nn.Ansatz) else model

    def fun(leaves, p):
        h = coordinate_mlp(leaves, p)
        return form(p, h) if isinstance(model, nn.Ansatz) else h

    def run(leaves, x):
        at = lambda p: fun(leaves, p)
        first = jax.jacfwd(at)
        return jax.vmap(lambda p: (at(p), first(p), jax.jacfwd(first)(p)))(x)

    x = np.asarray(points(), np.float64)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda w: jnp.asarray(np.asarray(w, np.float64)) if eqx.is_array(w) else w, mlp
        )
        value, first, second = jax.jit(run)(wide, jnp.asarray(x))
        value, first, second = (np.asarray(z) for z in (value, first, second))
    out = {}
    for name in TERMS:
        output, _, dirs = name.partition("_")
        i = ["xy".index(c) for c in dirs]
        table = (value, first, second)[len(i)]
        out[name] = table[(slice(None), "uv".index(output), *i)]
    return out


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_all_second_derivatives(name):
    model = nn.Ansatz(make(**VARIANTS[name]), form)
    want = exact(model)
    got = evaluate(model)
    half = evaluate(mpx.cast_to_float16(model), mpx.DerivativeScaling.per_direction("xy"))
    for term in TERMS:
        assert got[term].dtype == half[term].dtype == jnp.float32
        # float32: sums of a few hundred products. float16: some ten roundings of 2^-11.
        assert relative(got[term], want[term]) < 1e-5
        assert relative(half[term], want[term]) < 0.02


def residual(fun, x, terms=("u_x", "u_xy", "v_yy", "u")):
    d = jax.vmap(mpx.partials(fun, terms, coords="xy", outputs="uv"))(x)
    return jnp.mean((d["u"] * d["u_x"] + d["u_xy"] - d["v_yy"]) ** 2)


@pytest.mark.slow
def test_gradients_of_half_weights_are_summed_over_the_streams_in_float32():
    """Each is that of float32 masters with the same values, rounded once."""
    half = mpx.cast_tree(make(), "float16")
    arrays, static = eqx.partition(make(dtype="float16"), eqx.is_array)
    values = [w.astype(jnp.float32) for w in jax.tree.leaves(eqx.filter(half, eqx.is_array))]
    masters = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), values), static)
    grad = eqx.filter_jit(eqx.filter_grad(residual))
    for got, want in zip(
        *(jax.tree.leaves(grad(m, points())) for m in (half, masters)), strict=True
    ):
        want = np.asarray(want.astype(got.dtype))
        # XLA may sum the two programs in another order: then a rounding goes the other way.
        assert np.all(np.abs(got - want) <= np.spacing(np.abs(want)))


def test_gradients_of_layers_come_in_turn():
    """What goes on to the layer before waits for the gradient of the weight."""
    params, static = eqx.partition(make(), eqx.is_inexact_array)
    loss = lambda p: residual(eqx.combine(p, static), points())
    tied = {"forward": 0, "both": 0}
    for name, fun in (("forward", loss), ("both", jax.grad(loss))):
        for equation in equations(jax.make_jaxpr(fun)(params)):
            shapes = [x.aval.shape for x in equation.invars]
            if equation.primitive.name == "optimization_barrier":
                tied[name] += any(w in shapes for w in ((16, 16), (16, 2))) and (8, 16) in shapes
    # The first layer is one with the second, before which nothing but the points is kept.
    assert tied == {"forward": 2, "both": 4}


@pytest.mark.slow
def test_the_loss_stays_differentiable_in_forward_mode():
    """A Hessian-vector product against finite differences of gradients."""
    params, static = eqx.partition(make(), eqx.is_inexact_array)
    grad = jax.jit(jax.grad(lambda p: residual(eqx.combine(p, static), points())))
    direction = jax.tree.map(jnp.ones_like, params)
    product = jax.jvp(grad, (params,), (direction,))[1]
    step = 1e-3
    ends = [jax.tree.map(lambda p, s=s: p + s * step, params) for s in (1.0, -1.0)]
    plus, minus = (grad(p) for p in ends)
    for got, a, b in zip(*map(jax.tree.leaves, (product, plus, minus)), strict=True):
        # Rounding of float32 gradients over the step; the differences' own error is far below.
        want = (np.asarray(a) - np.asarray(b)) / (2 * step)
        assert np.linalg.norm(got - want) < 0.02 * max(np.linalg.norm(want), 1e-2)


def test_errors(unchecked_annotations):
    with pytest.raises(TypeError, match=re.compile("`Ansatz`.*`network`", re.DOTALL)):
        nn.Ansatz(1.0, form)
    with pytest.raises(TypeError, match="`form`"):
        nn.Ansatz(make(), 1.0)
    wrong = nn.Ansatz(make(), lambda p, u: jnp.sum(u))
    with pytest.raises(ValueError, match="2 outputs, u, v"):
        mpx.partials(wrong, ["u_x"], coords="xy", outputs="uv")(points()[0])


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["half", "float32"])
def test_the_cotangent_that_a_bias_shares_with_a_product_is_written_in_half(forward):
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy", order=2))

    def loss(model, x, *, derivatives):
        terms = mpx.laplacian(model, ["u"], coords="xy", outputs="uv", scaling=derivatives)
        return sum(jnp.mean(v**2) for v in jax.vmap(terms)(x).values())

    gradient = mpx.filter_grad(loss, scaling, keep_full=(False, True), forward=forward)
    model = make()
    jaxpr = jax.make_jaxpr(gradient)(model, points())
    written = [e for e in equations(jaxpr) if e.primitive.name == "written"]
    # One for each hidden bias behind a product of halves.
    assert len(written) >= len(model.hidden)
    assert {e.outvars[0].aval.dtype for e in written} == {jnp.dtype("float16")}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "apart"), [(8, False), (131_072, True)])
def test_products_of_large_streams_with_one_weight_stay_apart_on_a_gpu(count, apart):
    """XLA would stack the streams of one and cut up its result, with copies."""
    terms = mpx.laplacian(mpx.cast_to_float16(make()), coords="xy", outputs="uv")
    x = jax.ShapeDtypeStruct((count, 2), jnp.float32)
    text = program_for_gpu(jax.jit(jax.vmap(terms)), x)
    barriers = re.findall(
        r"optimization_barrier %\S+, %\S+ : tensor<\S*xf16>, tensor<\S*xf16>", text
    )
    assert bool(barriers) == apart
    # Narrow axes, here those of the two outputs, are padded before: once for all streams.
    assert not apart or re.search(r"optimization_barrier .*x8xf16>", text)
    sizes = [int(n) for line in barriers for n in re.findall(r"(\d+)x", line)]
    assert all(n % 8 == 0 for n in sizes)


@pytest.mark.parametrize(("terms", "kept_apart"), [(["u", "u_xx"], True), (["u"], False)])
def test_products_of_ordinary_layers_are_bound_as_those_of_ours(terms, kept_apart):
    """Streams of float32 stay apart on a GPU, whoever wrote the layer; a value alone is left."""
    network = eqx.nn.MLP(2, 1, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    evaluate = mpx.partials(network, terms, coords="xy", outputs="u")
    products = [
        e
        for e in equations(jax.make_jaxpr(evaluate)(jnp.ones(2)))
        if "dot_general" in e.primitive.name
    ]
    assert {e.primitive.name for e in products} == {"mixed_dot_general"}
    assert {e.params["dtype"] for e in products} == {jnp.dtype("float32")}
    assert {e.params["given"].apart for e in products} == {kept_apart}


class Tail(eqx.Module):
    """Behind its last function that is not linear, products, selections and what is constant."""

    first: jax.Array
    second: jax.Array
    third: jax.Array
    tell: Callable[..., None] | None = eqx.field(static=True, default=None)

    def __call__(self, p):
        z = self.second @ jnp.tanh(self.first @ p)
        if self.tell is not None:
            jax.debug.callback(self.tell, z)
        chosen = jnp.where(z[0] > 0, z[1], 2 * z[2]) + z[jnp.argmax(z)]
        steady = jax.lax.stop_gradient(z[3]) + jnp.sign(z[4]) / 3
        return jnp.vdot(jnp.cos(jnp.arange(16.0)), self.third @ z) + chosen * steady + z[5] / 7


def tail(tell=None):
    a, b, c = jax.random.split(jax.random.key(2), 3)
    square = lambda key: jax.random.normal(key, (16, 16))
    return Tail(jax.random.normal(a, (16, 2)), square(b), square(c), tell)


@pytest.mark.slow
def test_a_term_that_is_asked_for_alone_is_that_among_many():
    """What nobody asked for is not carried on, and what was asked for does not depend on it."""
    alone = [["u_x"], ["u_xx"], ["u_xy"], ["u", "u_xx"], ["u_xxy"]]

    @jax.jit
    def run(p):
        model = tail()
        every = mpx.partials(model, sorted({t for a in alone for t in a}), coords="xy", outputs="u")
        laplacian = mpx.laplacian(model, coords="xy", outputs="u")
        both = mpx.partials(model, ["u_xx", "u_yy"], coords="xy", outputs="u")
        apart = [mpx.partials(model, a, coords="xy", outputs="u")(p) for a in alone]
        return every(p), apart, laplacian(p), both(p)

    every, apart, laplacian, both = run(jnp.array([0.3, -0.4]))
    for terms, got in zip(alone, apart, strict=True):
        for term in terms:
            # The same operations, which XLA fuses in other ways.
            assert relative(got[term], every[term]) < 2e-6, term
    assert relative(laplacian["lap_u"], both["u_xx"] + both["u_yy"]) < 5e-6


def test_an_effect_behind_the_last_layer_sees_the_value():
    seen = []
    model = tail(lambda z: seen.append(np.asarray(z)))
    p = jnp.array([0.3, -0.4])
    terms = mpx.partials(model, ["u_x"], coords="xy", outputs="u")
    jax.jit(lambda p: terms(p)["u_x"])(p).block_until_ready()
    jax.effects_barrier()
    want = model.second @ jnp.tanh(model.first @ p)
    assert len(seen) == 1
    assert relative(seen[0], want) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("terms", [["u_x"], ["u_xx"]])
def test_no_more_operations_than_nested_forward_mode_behind_the_last_layer(terms):
    """With two linear layers behind the last activation: neither the value nor lower orders are
    taken through them, in the backward pass either, where nobody asks for them."""
    a, b, c, d = jax.random.split(jax.random.key(2), 4)
    shapes = ((64, 2), (64, 64), (64, 64), (64, 64))
    weights = list(map(jax.random.normal, (a, b, c, d), shapes))

    def net(w, p):
        h = jnp.tanh(w[1] @ jnp.tanh(w[0] @ p))
        return jnp.sum(w[3] @ (w[2] @ h))

    def ours(w, p):
        return mpx.partials(lambda p: net(w, p), terms, coords="xy", outputs="u")(p)[terms[0]]

    def nested(w, p):
        out = lambda p: net(w, p)
        for _ in terms[0][2:]:
            out = lambda p, f=out: jax.jvp(f, (p,), (jnp.array([1.0, 0.0]),))[1]
        return out(p)

    def flops(way):
        loss = lambda w, x: jnp.mean(jax.vmap(lambda p: way(w, p))(x) ** 2)
        compiled = jax.jit(jax.grad(loss)).lower(weights, jnp.ones((256, 2))).compile()
        return (compiled.cost_analysis() or {})["flops"]

    assert flops(ours) <= 1.02 * flops(nested)
