#!/bin/sh
# Which sums of float16 ones are right, and which stop at 2,048?
#
# Expected: all or none. Seen (JAX 0.10.2, CPU): `sum`, `cumsum` and `convolve` of 5,000 ones return
# 5,000. `segment_sum`, `.at[].add` and the gradient of a gather return 2,048, because a scatter adds
# in float16.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
ones, at = jnp.ones(5000, jnp.float16), jnp.zeros(5000, int)
seen = {
    "sum": ones.sum(),
    "cumsum": jnp.cumsum(ones)[-1],
    "convolve": jnp.convolve(ones, ones, "valid")[0],
    "segment_sum": jax.ops.segment_sum(ones, at, 1)[0],
    ".at[].add": jnp.zeros(1, jnp.float16).at[at].add(ones)[0],
    "gradient of a gather": jax.grad(lambda w: w[at].sum())(jnp.ones(1, jnp.float16))[0],
}
seen = {name: float(x) for name, x in seen.items()}
print(seen)
assert list(seen.values()) == [5000.0] * 3 + [2048.0] * 3
EOF
