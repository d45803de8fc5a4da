#!/bin/sh
# Is a cast from float64 to a half rounded once?
#
# Expected: yes, or in no case. Seen (JAX 0.10.2, CPU): to float16 once, to bfloat16 twice, through
# float32. Just above the middle of two bfloat16 numbers the second rounding is a tie, and goes down.
# NumPy with ml_dtypes does the same.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
jax.config.update("jax_enable_x64", True)
above = lambda bits: 1 + 2.0**-bits + 2.0**-40  # just above the middle of two neighbors
up = {
    "float16": float(jax.jit(lambda x: x.astype(jnp.float16))(above(11))) > 1,
    "bfloat16": float(jax.jit(lambda x: x.astype(jnp.bfloat16))(above(8))) > 1,
    "ml_dtypes bfloat16": float(np.float64(above(8)).astype(ml_dtypes.bfloat16)) > 1,
}
print("rounded up, as the nearest number is above:", up)
assert list(up.values()) == [True, False, False]
EOF
