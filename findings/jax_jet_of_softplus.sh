#!/bin/sh
# Which activations does `jax.experimental.jet` differentiate?
#
# Expected: all that `grad` does, or the simple ones. Seen (JAX 0.10.2): `gelu`, `silu` and `sigmoid`
# work; `relu`, `softplus` and `sinc` raise an UnexpectedTracerError, which blames a side effect in
# the user's function. The cause is their custom derivative. Under `jax.checkpoint` nothing works.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
from jax.experimental.jet import jet
def kind(f):
    try:
        first, second = jet(f, (0.5,), ((1.0, 0.0),))[1]
    except Exception as error:
        return type(error).__name__
    return abs(second - jax.grad(jax.grad(f))(0.5)) < 1e-5 and "right"
functions = {f.__name__: f for f in (jax.nn.gelu, jax.nn.silu, jax.nn.sigmoid, jax.nn.relu, jax.nn.softplus, jnp.sinc)}
seen = {name: kind(f) for name, f in functions.items()} | {"checkpoint": kind(jax.checkpoint(jnp.sin))}
print(seen)
assert list(seen.values()) == ["right"] * 3 + ["UnexpectedTracerError"] * 3 + ["KeyError"]
EOF
