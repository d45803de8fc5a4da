#!/bin/sh
# What is the softmax of 70,000 equal float16 numbers?
#
# Expected: 1/70000 each, about 1.4e-5, which float16 has; `softmax` subtracts the maximum so that
# nothing overflows. Seen (JAX 0.10.2, CPU): zeros, without NaN or infinity. The sum of exponentials is
# rounded to float16 before the division, and 70,000 is above 65,504.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
p = jax.nn.softmax(jnp.zeros(70_000, jnp.float16))
print("largest probability:", p.max(), "in float32:", jax.nn.softmax(jnp.zeros(70_000)).max())
assert p.max() == 0
assert jax.nn.softmax(jnp.zeros(60_000, jnp.float16)).max() > 0
EOF
