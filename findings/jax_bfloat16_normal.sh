#!/bin/sh
# Has `jax.random.normal` in bfloat16 the mean 0?
#
# Expected: yes, up to rounding. Seen (JAX 0.10.2): a million draws have 128 different values, none above
# 2.6, and a mean of -0.012, twelve standard errors from 0. They are made from 7 random bits, uniform on
# [-1, 1), whose ends differ. Draw in float32 and cast.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp, numpy as np
x = np.asarray(jax.random.normal(jax.random.key(0), (2**20,), jnp.bfloat16), np.float64)
errors = x.mean() * 2**10
print(f"{len(np.unique(x))} values, mean {x.mean():.4f} ({errors:.1f} standard errors), {x.min()} to {x.max()}")
assert len(np.unique(x)) == 128
assert errors < -8 and x.max() < 2.6 < -x.min() + 0.2
EOF
