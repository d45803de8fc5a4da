#!/bin/sh
# Have higher derivatives of a softmax digits where one share is nearly 1?
#
# Expected: some, as the values have seven, since exponents are taken relative to the largest. Seen
# (JAX 0.10.2, CPU, float32): the shares 4e-8 and 1 - 4e-8 at exponents t (0.3, 24.6, 41.7) and
# t = 1. The second derivative of the largest is 0 or 1.6e-5 for -1.1e-5, the third -3e-2 or -5e-3
# for 1.9e-4, by forward and reverse mode; those of `log_softmax` and `logsumexp` have no digit,
# either. All are differences of powers of the largest slope. In float64 seven digits are left.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
slopes = np.array([0.3, 24.6, 41.7])


def exact(order):
    """Returns the derivative at 1 of 1 / (1 + x) = 1 - x + x² - ... for the sum x of two small
    exponentials, and so of its logarithm -x + x² / 2, to nine digits."""
    return -sum(a**order * np.exp(a) for a in slopes[:2] - slopes[2])


def nth(f, mode, n):
    for _ in range(n):
        f = mode(f)
    return f


functions = {
    "softmax": lambda t, s: jax.nn.softmax(t * s)[2],
    "log_softmax": lambda t, s: jax.nn.log_softmax(t * s)[2],
    "logsumexp": lambda t, s: -jax.nn.logsumexp(t * s),
}
for name, f in functions.items():
    for mode in (jax.jacfwd, jax.grad):
        for order in (2, 3):
            want, errors = exact(order), {}
            for dtype in ("float32", "float64"):
                s = jnp.asarray(slopes, dtype)
                got = float(nth(lambda t: f(t, s), mode, order)(jnp.ones((), dtype)))
                errors[dtype] = abs(got / want - 1)
                print(f"{name}, order {order} by {mode.__name__}, {dtype}: {got:.7e} for {want:.7e}")
            assert errors["float32"] > 0.9
            assert 1e-9 < errors["float64"] < 1e-3
EOF
