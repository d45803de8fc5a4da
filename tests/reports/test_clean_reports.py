"""Tests that healthy programs have clean reports: the problems of `examples/problems`, and networks
that do not use this library."""

import importlib
import itertools

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import mpx_pde as mpx
from mpx_pde.reports._explain import explain


problems = importlib.import_module("examples.problems")
runner = importlib.import_module("examples.problems._runner")

# The first layer is float32, and it is most of a small program.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")]
pytestmark += [pytest.mark.usefixtures("standard_promotion")]


def assert_clean(gradient, *args, scaled=True):
    report = mpx.range_report(gradient)(*args)
    leaves = [x for x in jax.tree.leaves(report.result) if eqx.is_inexact_array(x)]
    assert leaves
    assert all(np.all(np.isfinite(x)) for x in leaves)
    assert report.first_nonfinite is None
    assert report.scaled is scaled
    text = explain(report, mpx.half_precision_datatype().name)
    # Small gradients may vanish, which is expected. There is nothing to fix.
    for word in ("but:", "not finite", "infinit", "NaN", "lower", "overflows first", "unknown"):
        assert word not in text, text
    assert "othing overflows" in text, text
    products = mpx.precision_report(gradient)(*args)
    assert products.rows
    assert products.loops == ()


# --- Networks of others ---------------------------------------------------------------------------


def attend(layers, p):
    embed, norm, attention, mlp = layers
    tokens = jnp.tanh(embed(p)).reshape(4, 8)
    h = jax.vmap(norm)(tokens)
    tokens = tokens + attention(h, h, h)
    return jnp.mean(jax.vmap(mlp)(jax.vmap(norm)(tokens)))


def attention(key):
    a, b, c = jax.random.split(key, 3)
    layers = eqx.nn.Linear(2, 4 * 8, key=a), eqx.nn.LayerNorm(8)
    layers += (eqx.nn.MultiheadAttention(2, 8, key=b),)
    return Partial(attend, (*layers, eqx.nn.MLP(8, "scalar", 16, 1, jax.nn.gelu, key=c)))


FIRST = [linen.Dense(12), linen.swish, linen.LayerNorm(epsilon=1e-2)]
FOREIGN = linen.Sequential([*FIRST, linen.Dense(12), jnp.tanh, linen.Dense(1), jnp.squeeze])
NETWORKS = {
    "tanh": lambda key: eqx.nn.MLP(2, "scalar", 12, 3, activation=jnp.tanh, key=key),
    "attention": attention,
    "flax": lambda key: Partial(FOREIGN.apply, FOREIGN.init(key, jnp.zeros(2))),
}

WAYS = {"half": {"keep_full": (False, True)}, "autocast": {"autocast": True}}
WAYS["forward"] = {"forward": "float32"}


def derivative_loss(model, points, *, derivatives):
    names = {"coords": "xy", "outputs": "u"}
    d = mpx.partials(model, ["u", "u_x", "u_yy"], **names, scaling=derivatives)
    d = jax.vmap(d)(points)
    return jnp.mean((d["u_x"] + 0.1 * d["u_yy"] - d["u"]) ** 2)


# The networks take turns with the ways.
@pytest.mark.parametrize(("name", "way"), list(zip(NETWORKS, itertools.cycle(WAYS))))
def test_every_healthy_network_has_a_clean_report(name, way):
    points = jax.random.uniform(jax.random.key(1), (8, 2))
    directions = mpx.DerivativeScaling.per_direction("xy")
    scaling = mpx.Scaling(mpx.DynamicLossScaling(2.0**4), directions)
    model = NETWORKS[name](jax.random.key(0))
    assert_clean(mpx.filter_grad(derivative_loss, scaling, **WAYS[way]), model, points)


# --- Problems -------------------------------------------------------------------------------------

PRECISIONS = ("bfloat16", "forward-float32-float16", "forward-float32-bfloat16")


# Order four, several fields, sampled terms, foreign networks, operators and time steps.
KINDS = ["biharmonic_plate", "emulate_kdv", "gated_network", "poisson_subdomains", "schrodinger"]
IN_TURN = zip(problems.names(), itertools.cycle(PRECISIONS), strict=False)


@pytest.mark.parametrize(("name", "precision"), [x for x in IN_TURN if x[0] in KINDS])
def test_a_healthy_problem_of_each_kind_has_a_clean_report(name, precision):
    problem = problems.load(name)
    problem = problem.quick or problem
    trainer = runner.Trainer(problem, precision, steps=runner.QUICK_STEPS)
    state, key = trainer.initial(0)
    points = jax.tree.map(lambda x: x[0], trainer.next_points(state.model, key))
    with mpx.half_precision(trainer.precision.compute):
        # With this scale no first step overflows.
        scaling = mpx.DynamicLossScaling(1.0)
        if isinstance(state.scaling, mpx.Scaling):
            scaling = mpx.Scaling(scaling, state.scaling.derivatives)
        assert_clean(trainer.gradient(problem.loss, scaling), state.model, points)
