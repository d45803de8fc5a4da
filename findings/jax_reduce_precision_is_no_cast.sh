#!/bin/sh
# Does `lax.reduce_precision(x, 5, 10)` round like a cast to float16 and back?
#
# Expected: yes; 5 exponent bits and 10 mantissa bits are float16. Seen (JAX 0.10.2, CPU): it flushes
# float16's subnormal numbers to zero, 9.5e-7 to 0, and a cast keeps them. Between 6e-8 and 6.1e-5 they
# differ by everything.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax.numpy as jnp
from jax import lax
x = jnp.float32([2.0**-13, 2.0**-15, 2.0**-20])
cast, reduced = x.astype(jnp.float16).astype(jnp.float32), lax.reduce_precision(x, 5, 10)
print("cast:", cast, "reduce_precision:", reduced)
assert (cast == x).all()
assert reduced[0] == x[0] and (reduced[1:] == 0).all()
EOF
