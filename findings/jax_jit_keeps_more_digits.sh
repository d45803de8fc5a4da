#!/bin/sh
# Does `jit` change the result of two float16 additions on a CPU?
#
# Expected: no, as float16 has no hardware there and every operation is rounded. Seen (JAX 0.10.2): (2048
# + 1) + 1 is 2048 without `jit` and 2050 with it. The compiled program adds both in float32 and rounds
# once, so a test without `jit` can fail where the compiled step does not, and the reverse.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
one = jnp.float16(1)
add = lambda x: (x + one) + one
eager, compiled = float(add(jnp.float16(2048))), float(jax.jit(add)(jnp.float16(2048)))
print("without jit:", eager, "with jit:", compiled)
assert (eager, compiled) == (2048.0, 2050.0)
EOF
