"""Tests that functions of JAX which fail in half precision are told, and that they do fail."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, line_here, relative
from jax import lax

import mpx_pde as mpx
from mpx_pde.reports._fragile import FRAGILE, fragile_calls


pytestmark = pytest.mark.usefixtures("standard_promotion")

LARGE = np.asarray([300.0, 416.0, 640.0, 1000.0], np.float32)  # exact in float16

# Functions of an array, with arguments where they fail, which half types hold exactly.
FAIL = {
    "asinh": (jnp.arcsinh, LARGE),
    "acosh": (jnp.arccosh, LARGE),
    "atan2": (lambda x: jnp.arctan2(x, 0.5 * x[::-1]), LARGE),
    "hypot": (lambda x: jnp.hypot(x, 0.5 * x[::-1]), LARGE),
    "geomspace": (lambda x: jnp.geomspace(x, x, 5), LARGE * np.float32(2.0**-124)),
    "sinc": (jnp.sinc, LARGE + np.float32(0.5)),
    "soft_sign": (jax.nn.soft_sign, LARGE),
    "betaln": (lambda x: jax.scipy.special.betaln(x, 0.5 * x[::-1]), LARGE),
    "standardize": (jax.nn.standardize, LARGE),
    "erfcx": (jax.scipy.special.erfcx, LARGE / 64),
    "bessel_i0e": (jax.scipy.special.i0e, LARGE / 16),
    "bessel_i1e": (jax.scipy.special.i1e, LARGE / 16),
    "rel_entr": (lambda x: jax.scipy.special.kl_div(x, 1.03125 * x), LARGE / 2**10),
}


# Functions that are in each other's derivative.
TOGETHER = {"bessel_i0e": ["bessel_i1e"], "bessel_i1e": ["bessel_i0e"]}


def loss_of(f):
    return lambda x: jnp.sum(f(x).astype("float32") * jnp.arange(1.0, x.size + 1))


SLOW = {"betaln", "bessel_i0e", "bessel_i1e", "erfcx", "geomspace"}  # series


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in FAIL]
)
def test_functions_that_fail_in_half_are_told_and_do_fail(name):
    f, x = FAIL[name]
    half = "bfloat16" if name == "geomspace" else "float16"
    run = jax.value_and_grad(loss_of(f))
    closed = jax.make_jaxpr(run)(x.astype(half))
    fails = name in FRAGILE  # in this version of JAX
    told = {call.name for call in fragile_calls(closed)}
    assert told == ({name, *TOGETHER.get(name, ())} if fails else set())
    assert all("test_fragile.py:" in call.line for call in fragile_calls(closed))
    with jax.enable_x64(True):
        want = run(np.asarray(x, np.float64))
    errors = map(relative, run(jnp.asarray(x, half)), want)
    # 16 roundings are the tolerance of the sweep over JAX's functions.
    assert (max(errors) > 16 * float(jnp.finfo(half).eps) / 2) == fails
    assert fragile_calls(jax.make_jaxpr(run)(x)) == []


def test_a_gradient_warns_of_them_inside_of_loops_too():
    def loss(w, x):
        turned = lambda h, _: (jnp.arctan2(h, 1 + h * h), None)
        return jnp.mean((lax.scan(turned, x @ w, length=3)[0]).astype("float32") ** 2)

    given = jnp.ones((8, 8)), jnp.ones((4, 8))
    run = lambda **options: eqx.filter_jit(
        mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)
    )
    with pytest.warns(mpx.PrecisionWarning, match="`atan2`") as told:
        run()(*given)
    assert_tells(str(told[0].message), "float16", f"test_fragile.py:{line_here(-9)}", "256")
    assert_tells(str(told[0].message), "astype(jnp.float32)", "autocast=True", "forward='float32'")
    for mend in ({"autocast": True}, {"forward": "float32"}):
        run(**mend)(*given)  # warnings are errors
