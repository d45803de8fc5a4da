"""Tests Taylor arithmetic by itself, in float64: rules against JAX's nested forward mode and
`jax.experimental.jet`. The evaluator is a loop over equations, without any precision."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TOLERANCES, relative
from jax import lax
from jax.experimental.jet import jet

import mpx_pde as mpx
from mpx_pde.engine.taylor._algebra import Algebra
from mpx_pde.engine.taylor._jets import Jet
from mpx_pde.engine.taylor._moments import with_moments
from mpx_pde.engine.taylor._plan import make_plan, sum_key
from mpx_pde.engine.taylor._rules import Rules, aligned
from mpx_pde.engine.taylor._univariate import CLOSED, closed_derivatives
from mpx_pde.program._flat import flatten, read
from mpx_pde.program._jaxpr import own_bind


# Derivatives of order four sum terms a few hundred times as large as the result.
TOLERANCE = 2**8 * TOLERANCES["float64"]
WEIGHT = np.random.default_rng(0).normal(size=(3, 3))


@pytest.fixture(autouse=True)
def _in_float64():
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jax.enable_x64(True), promotion[0], promotion[1]:
        yield


def test_taylor_arithmetic_imports_no_precision():
    folder = Path(mpx.__file__).parent / "engine" / "taylor"
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                assert node.level == 3, (file.name, node.module)
                assert node.module.split(".")[0] in ("_util", "program"), (file.name, node.module)


def evaluated(fun, x, rules, streams, by_deviations=False):
    """Returns the value of a function at `x` with its streams."""
    closed = jax.make_jaxpr(fun)(x)
    flat = flatten(closed, forward_mode=True)
    flat = with_moments(flat, flat.inputs, by_deviations=by_deviations)
    env = {k: c.value for k, c in flat.constants.items()} | {flat.inputs[0]: Jet(x, streams)}
    for step in flat.steps:
        operands = aligned(step.eqn, [read(x, env) for x in step.inputs])
        bind = lambda *args, eqn=step.eqn: own_bind(eqn, args)
        if not any(isinstance(x, Jet) for x in operands):
            out = bind(*operands)
        elif (rule := rules.find(step.eqn, operands)) is not None:
            out = rule.apply(rules, step.eqn, operands)
        else:
            out = rules.algebra.nested(bind, operands)
        env.update(zip(step.outputs, out, strict=True))
    (out,) = (read(x, env) for x in flat.outputs)
    return out


def layer_norm(x):
    y = (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 1e-3)
    return jnp.tanh(y @ WEIGHT)


FUNCTIONS = {
    "arithmetic": lambda x: x[0] * x[1] / (1 + x[2] ** 2) - 3 * x,
    "a division by what is shared": lambda x: x / (2 + jnp.sum(x * x)),
    "roots and powers": lambda x: jnp.sqrt(2 + x**3) * jnp.power(3 + x, 1.7) ** x[0],
    "functions of one variable": lambda x: jnp.sin(jnp.exp(x)) + jax.nn.gelu(x) * jnp.log1p(x),
    "a norm": layer_norm,
    "a softmax": lambda x: jax.nn.softmax(3 * x) @ WEIGHT,
    "moves and choices": lambda x: jnp.where(x > 0.4, jnp.flip(x), jnp.maximum(x, x[0] ** 2))[1:],
    "scatters and sorts": lambda x: jnp.sort(jnp.zeros(5).at[jnp.array([3, 1])].set(x[:2] ** 2)),
    "without a rule": lambda x: jnp.cumprod(jnp.sin(x)),
    "an angle": lambda x: jnp.arctan2(x - 0.4, x[::-1] - 1),
    "an angle to an axis": lambda x: jnp.arctan2(x, 0.3) - jnp.arctan2(-0.3, x),
    "remainders": lambda x: jnp.mod(3 * x, 0.7) * jnp.fmod(x, x[::-1] * x),
    "windows": lambda x: (
        lax.cummax(x**2) * lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME")
    ),
    "a derivative of its own": lambda x: jnp.logaddexp(x, 0.3) + jax.nn.relu(x - 0.4) ** 2,
}
X = np.array([0.3, 0.7, 0.5])
DIRECTIONS = np.array([[1.0, 0.5, -0.2], [0.0, 1.0, 0.4]])


def nested(fun, directions):
    for d in directions:
        fun = lambda x, f=fun, d=d: jax.jvp(f, (x,), (jnp.asarray(d),))[1]
    return fun


@pytest.mark.parametrize("name", FUNCTIONS)
def test_streams_are_nested_derivatives(name):
    fun, x = FUNCTIONS[name], jnp.asarray(X)
    plan = make_plan([(0, 0, 1), (1, 1), (0, 1, 1)], [[(0, 0), (1, 1)]], (None, None))

    def run(x):
        seeds = {(i,): jnp.asarray(d) for i, d in enumerate(DIRECTIONS)}
        out = evaluated(fun, x, Rules(Algebra(plan, [[2.0, -0.5]])), seeds)
        wanted = {key: nested(fun, DIRECTIONS[list(key)])(x) for key in plan.indices}
        second = [nested(fun, DIRECTIONS[[i, i]])(x) for i in (0, 1)]
        wanted[sum_key(0)] = 2.0 * second[0] - 0.5 * second[1]
        return out, fun(x), wanted

    out, value, wanted = jax.jit(run)(x)
    assert relative(out.primal, value) <= TOLERANCE
    for key, want in wanted.items():
        got = out.streams.get(key, jnp.zeros_like(want))
        # A derivative that vanishes has only the rounding of its terms.
        assert np.linalg.norm(got - want) <= TOLERANCE * (1 + np.linalg.norm(want)), key


@pytest.mark.slow
def test_an_angle_in_each_quadrant_up_to_order_five():
    vector = lambda p: jnp.stack([p[0] * p[0] + p[0], p[1] + p[0] * p[1]])
    fun = lambda p: jnp.arctan2(*vector(p)[::-1])
    points = [(x, y) for x in (-0.7, 0.0, 5.0) for y in (-2.0, 0.0, 0.3) if (x, y) != (0, 0)]
    rules = Rules(Algebra(make_plan([(0,) * 5, (0, 1, 1)], [], (None, None))))
    seeds = {(i,): row for i, row in enumerate(jnp.eye(2))}

    @jax.jit
    @jax.vmap
    def run(point):
        out = evaluated(fun, point, rules, seeds)
        wanted = {key: nested(fun, np.eye(2)[list(key)])(point) for key in out.streams}
        slope = jnp.linalg.norm(jax.jacobian(vector)(point)) / jnp.linalg.norm(vector(point))
        return out, {**wanted, (): fun(point)}, slope

    out, wanted, slopes = run(jnp.asarray(points))
    assert wanted.keys() > {(0,) * 5, (0, 1, 1)}
    for key, want in wanted.items():
        got = out.streams[key] if key else out.primal
        # There are about k! terms of order k, the powers of relative derivatives of the vector.
        assert np.all(abs(got - want) <= TOLERANCE * (1 + slopes ** len(key))), key


def test_stacked_directions_are_those_one_by_one():
    fun, x = layer_norm, jnp.asarray(X)
    rules = Rules(Algebra(make_plan([(0, 0)], [[(0, 0, 0)]], (2,)), [[np.array([1.5, -2.0])]]))

    def run(x):
        out = evaluated(fun, x, rules, {(0,): jnp.asarray(DIRECTIONS)})
        second, third = ([nested(fun, [d] * n)(x) for d in DIRECTIONS] for n in (2, 3))
        return out, jnp.stack(second), 1.5 * third[0] - 2.0 * third[1]

    out, second, third = jax.jit(run)(x)
    assert relative(out.streams[0, 0], second) <= TOLERANCE
    assert relative(out.streams[sum_key(0)], third) <= TOLERANCE


@pytest.mark.parametrize("by_deviations", [pytest.param(False, marks=pytest.mark.slow), True])
def test_streams_of_a_norm_have_derivatives(by_deviations):
    """Also derivatives of derivatives, for a Hessian of a loss."""
    rules = Rules(Algebra(make_plan([(0, 0), (0, 1)], [], (None, None))))
    seeds = {(i,): jnp.asarray(d) for i, d in enumerate(DIRECTIONS)}

    def streams(x):
        out = evaluated(layer_norm, x, rules, seeds, by_deviations)
        return sum(jnp.sum(jnp.sin(s)) for s in (out.primal, *out.streams.values()))

    def want(x):
        keys = [[], [0], [1], [0, 0], [0, 1]]
        terms = (nested(layer_norm, DIRECTIONS[key])(x) for key in keys)
        return sum(jnp.sum(jnp.sin(s)) for s in terms)

    def derivatives(loss, x):
        return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),)))(x)

    for got, exact in zip(derivatives(streams, X), derivatives(want, X), strict=True):
        assert relative(got, exact) <= 10 * TOLERANCE  # of one and two orders more


PARAMETERS = {"logaddexp": 0.4, "pow": 1.7, "integer_pow": -3}
PRIMITIVES = {
    "logaddexp": lambda x: jnp.logaddexp(x, 0.4),
    "pow": lambda x: jnp.power(x, 1.7),
    "integer_pow": lambda x: lax.integer_pow(x, -3),
}
FOR_JET = {"tanh", "logistic", "erf", "sin", "cos", "sinh", "cosh", "exp", "log", "integer_pow"}


DOMAINS = {**dict.fromkeys(("asin", "acos", "atanh"), (-0.8, 0.7)), "acosh": (1.2, 4.0)}
DOMAINS |= {"atan": (-9.0, 9.0), "asinh": (-9.0, 9.0), "tan": (-1.4, 1.2)}


@pytest.mark.parametrize("name", CLOSED)
def test_derivatives_in_closed_form(name):
    x = jnp.linspace(*DOMAINS.get(name, (0.2, 2.0)), 5)
    fun = PRIMITIVES.get(name) or getattr(lax, name, None) or getattr(jnp, name)

    @jax.jit
    def run(x):
        derivatives = closed_derivatives(name, 5, x, PARAMETERS.get(name))
        derivatives = [jnp.zeros(5) if f is None else f * jnp.ones(5) for f in derivatives]
        if name in FOR_JET:
            series = [jnp.ones(5), *[jnp.zeros(5)] * 4]
            value, found = jet(fun, (x,), (series,))
            return derivatives, [value, *found]
        return derivatives, [fun(x)] + [nested(fun, [np.ones(5)] * k)(x) for k in range(1, 6)]

    for got, want in zip(*run(x), strict=True):
        assert np.linalg.norm(got - want) <= TOLERANCE * (1 + np.linalg.norm(want))
