"""The first step is not lost to the search for the scales that it can be taken at."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import equations, tree_equal_bits
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import mpx_pde as mpx


OPTIMIZER = optax.adam(1e-2)


class Net(eqx.Module):
    """A network of coordinates in units of 1/600: second derivatives beyond float16."""

    mlp: mpx.nn.CoordinateMLP

    def __call__(self, p):
        return 30.0 * self.mlp(600.0 * p)


def poisson(model, points, *, derivatives):
    d = jax.vmap(mpx.partials(model, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives))(
        points
    )
    return jnp.mean((1e-6 * d["u_xx"] + d["u"]) ** 2)


def start():
    model = Net(mpx.nn.CoordinateMLP(1, 1, 16, 2, key=jax.random.key(0)))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    derivatives = mpx.DerivativeScaling.per_direction("x", order=2)
    return model, state, mpx.Scaling(derivatives=derivatives)


@eqx.filter_jit
@chex.assert_max_traces(n=4)
def step(model, state, scaling, points, *, search=True):
    value, scaling, finite, grads = mpx.filter_value_and_grad(
        poisson, scaling, keep_full=(False, True), search=search
    )(model, points)
    model, state = mpx.optimizer_update(model, OPTIMIZER, state, grads, finite)
    return model, state, scaling, value, finite


def batches():
    return jax.random.uniform(jax.random.key(1), (4, 32, 1)) / 600.0


@pytest.mark.slow
def test_the_run_is_that_of_one_which_starts_at_the_right_scales():
    """Loss scale and derivative scale are both far off, and no update is lost."""
    model, state, scaling = start()
    alone = scaling
    for _ in range(60):  # the scales at which the first batch can be taken, skip by skip
        *_, alone, _, finite = step(model, state, alone, batches()[0], search=False)
        if finite:
            break
    assert finite
    assert alone.skipped_steps > 1
    assert alone.derivatives.skipped_steps > 0
    right = mpx.Scaling(
        mpx.DynamicLossScaling(alone.loss.loss_scaling),
        scaling.derivatives.with_exponents(alone.derivatives.exponents),
    )
    runs = []
    for first in (scaling, right):
        model, state, _ = start()
        scaling = first
        for points in batches():
            model, state, scaling, value, finite = step(model, state, scaling, points)
            runs.append((finite, model, state, value, scaling.loss, scaling.derivatives.exponents))
        assert runs[-4][0]  # the first
        assert scaling.taken_steps + scaling.skipped_steps == 4
    n = len(runs) // 2
    assert tree_equal_bits(jtu.tree_leaves(runs[:n]), jtu.tree_leaves(runs[n:]))


def linear(w, x):
    return jnp.sum(w * x)


HARD = jnp.array([1.0, 3000.0, -2.0])  # 2^4 is the largest scale that float16 takes it at


def test_every_transformation_searches():
    w, scaling = jnp.ones(3), mpx.DynamicLossScaling()
    whole = lambda w, x: linear(w, x[0])
    accumulated = mpx.filter_accumulated_value_and_grad(whole, scaling, 2)
    for found, finite, grads in (
        mpx.filter_grad(linear, scaling)(w, HARD),
        eqx.filter_jit(mpx.filter_grad(linear, scaling))(w, HARD),
        eqx.filter_jit(mpx.filter_value_and_grad(linear, scaling))(w, HARD)[1:],
        eqx.filter_jit(accumulated)(w, jnp.stack([HARD, HARD]))[1:],
    ):
        assert finite
        assert tree_equal_bits(grads, HARD)
        assert found.loss_scaling == 2.0**4
        assert (found.skipped_steps, found.taken_steps, found.counter) == (0, 1, 1)


def test_only_while_no_step_has_been_taken():
    f = eqx.filter_jit(lambda s, x: mpx.filter_grad(linear, s)(jnp.ones(3), x))
    scaling, finite, _ = f(mpx.DynamicLossScaling(), jnp.ones(3))
    assert finite
    scaling, finite, _ = f(scaling, HARD)
    assert not finite
    assert scaling.loss_scaling == 2.0**14
    assert scaling.skipped_steps == 1
    restored = mpx.DynamicLossScaling(counter=5)
    assert not f(restored, HARD)[1]


@pytest.mark.parametrize("jit", [False, True])
def test_what_no_scale_can_save_is_an_ordinary_skipped_step(jit):
    """An infinite loss is evaluated once; a NaN in the gradient alone at every scale."""
    wrap = eqx.filter_jit if jit else lambda f: f
    evaluated = []

    def infinite(w):
        jax.debug.callback(lambda: evaluated.append(1))
        return jnp.sum(w) * jnp.inf

    root = lambda w: jnp.sum(jnp.sqrt(w * 0.0))
    for loss in (infinite, root):
        want = mpx.DynamicLossScaling().adjust(jnp.array(False))
        scaling, finite, _ = wrap(mpx.filter_grad(loss, mpx.DynamicLossScaling()))(jnp.ones(2))
        jax.effects_barrier()
        assert not finite
        assert tree_equal_bits(scaling, want)
    assert len(evaluated) == 1


def test_derivatives_and_their_counts_are_those_of_the_first_evaluation_where_nothing_helps():
    """Of a gradient that is no number at any scale, behind derivatives that overflow at first."""
    model, _, scaling = start()

    def loss(model, points, *, derivatives):
        root = jnp.sum(jnp.sqrt(0.0 * model.mlp.hidden[0].bias))
        return poisson(model, points, derivatives=derivatives) + root.astype(jnp.float32)

    def run(search):
        gradient = mpx.filter_grad(loss, scaling, keep_full=(False, True), search=search)
        return eqx.filter_jit(gradient)(model, batches()[0])[:2]

    (once, _), (searched, finite) = run(False), run(True)
    assert not finite
    assert once.derivatives.counts.sum() > 0
    assert once.derivatives.skipped_steps == 1
    assert tree_equal_bits(searched, once)


@pytest.mark.filterwarnings("ignore:.*takes no derivative:mpx_pde.PrecisionWarning")
def test_of_a_scaling_the_loop_carries_scales_and_counts_alone():
    """A GPU takes a kernel for each."""
    derivatives = mpx.DerivativeScaling.per_direction("x", order=2)
    for scaling, scales in (
        (mpx.DynamicLossScaling(), 1),
        (mpx.Scaling(derivatives=derivatives), 4),  # of the loss, two of the derivatives; counts
    ):
        gradient = mpx.filter_grad(lambda w, x, **_: linear(w, x), scaling)
        (loop,) = (
            e
            for e in equations(jax.make_jaxpr(lambda x, f=gradient: f(HARD, x)[2])(HARD))
            if e.primitive.name == "while"
        )
        # Besides, how often; whether the gradient is finite; value and gradient.
        assert len(loop.outvars) == scales + 4


def test_the_gradient_can_still_be_differentiated():
    """In forward and in reverse mode, with respect to what the loss closes over too."""
    scaling = mpx.DynamicLossScaling()

    def outer(search, factor, x):
        loss = lambda w: jnp.sum(w**2 * (x * factor).astype(w.dtype))
        return jnp.sum(mpx.filter_grad(loss, scaling, search=search)(jnp.ones(3))[2] ** 2)

    x = jnp.array([1.0, 3000.0, -2.0])
    want = 8 * jnp.sum(x**2)  # of (2 x factor)^2 at a factor of 1
    for f in (jax.grad(outer, 1), jax.jit(jax.grad(outer, 1), static_argnums=0)):
        np.testing.assert_allclose(f(True, jnp.array(1.0), x), want, rtol=2e-3)  # float16
    tangent = jax.jvp(lambda f: outer(True, f, x), (jnp.array(1.0),), (jnp.array(1.0),))[1]
    np.testing.assert_allclose(tangent, want, rtol=2e-3)


def test_an_ensemble_searches_for_each():
    scaling = eqx.filter_vmap(lambda s: mpx.DynamicLossScaling(s))(
        jnp.array([2.0**15, 2.0**3, 2.0**15])
    )
    x = jnp.stack([HARD, HARD, jnp.ones(3)])
    f = eqx.filter_jit(eqx.filter_vmap(lambda s, x: mpx.filter_grad(linear, s)(jnp.ones(3), x)))
    scaling, finite, grads = f(scaling, x)
    assert jnp.all(finite)
    np.testing.assert_array_equal(scaling.loss_scaling, [2.0**4, 2.0**3, 2.0**15])
    np.testing.assert_array_equal(grads, x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_search_together(check_vma):
    """One device overflows; all take its scale, and a collective in the loss meets its kin."""
    mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])

    def device(w, scaling, x):
        own = lax.pcast(w, "b", to="varying") if check_vma else w
        loss = lambda w, x: linear(w, x[0]) + 0.0 * lax.psum(jnp.sum(x), "b").astype(x.dtype)
        scaling, finite, grads = mpx.filter_grad(loss, scaling, axis_name="b")(own, x)
        return scaling, finite, lax.pmean(grads, "b")

    f = jax.jit(
        jax.shard_map(
            device, mesh=mesh, in_specs=(P(), P(), P("b")), out_specs=P(), check_vma=check_vma
        )
    )
    x = jnp.ones((8, 3)).at[5].set(HARD)
    scaling, finite, grads = f(jnp.ones(3), mpx.DynamicLossScaling(), x)
    assert finite
    assert scaling.loss_scaling == 2.0**4
    np.testing.assert_allclose(grads, jnp.mean(x, axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"search": False}, mpx.DynamicLossScaling()),
        ({"policy": "params=float32,compute=bfloat16,output=float32"}, mpx.DynamicLossScaling()),
        ({}, mpx.StaticLossScaling(8.0)),
        ({"use_mixed_precision": False}, mpx.DynamicLossScaling()),
    ],
)
def test_there_is_no_loop_where_nothing_is_searched_for(options, scaling):
    f = lambda w: mpx.filter_grad(linear, scaling, **options)(w, HARD)[2]
    assert "while" not in str(jax.make_jaxpr(f)(jnp.ones(3)))
    g = lambda w: mpx.filter_grad(linear, mpx.DynamicLossScaling())(w, HARD)[2]
    assert "while" in str(jax.make_jaxpr(g)(jnp.ones(3)))


def test_auxiliary_output_is_that_of_the_step_that_was_taken():
    """Of any type, with keys and what is no array among it."""

    def loss(w, key):
        return linear(w, HARD.astype(w.dtype)), {"w": w, "key": key, "n": 3, "name": "x"}

    f = eqx.filter_jit(lambda w, key: mpx.filter_grad(loss, mpx.DynamicLossScaling(), True)(w, key))
    _, finite, _, aux = f(jnp.ones(3), jax.random.key(3))
    assert finite
    assert aux["key"] == jax.random.key(3)
    assert (aux["n"], aux["name"]) == (3, "x")
    assert aux["w"].dtype == jnp.float32


def test_what_is_no_bool_is_an_error(unchecked_annotations):
    with pytest.raises(TypeError, match=r"`filter_grad` takes a bool as `search`"):
        mpx.filter_grad(linear, mpx.DynamicLossScaling(), search="yes")
