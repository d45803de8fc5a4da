#!/bin/sh
# How many of 3,000 equally likely points does `jax.random.choice` draw, and how often is an event of
# probability 0.0001 drawn, if the probabilities are halves?
#
# Expected: all points after 200,000 draws, and 0.01 % of events: probabilities are only compared. Seen
# (JAX 0.10.2, CPU): 1,024 points (float16), 128 (bfloat16), and events in 0.1 % and 0.8 %. The uniform
# number that is compared gets the dtype of the probabilities, and has 1,024 or 128 values in it. So
# points that are drawn by their residuals in half precision are always the same few, and a dropout
# by a probability that is an array never has a rate below 0.8 %.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp, numpy as np
key = jax.random.key(0)
seen = {}
for name in ("float32", "float16", "bfloat16"):
    points = jax.random.choice(key, 3000, (200_000,), p=jnp.full(3000, 1 / 3000, name))
    rare = jax.random.bernoulli(key, jnp.full(1_000_000, 1e-4, name)).mean()
    seen[name] = len(np.unique(points)), float(rare)
    print(f"{name}: {seen[name][0]} different points of 3,000, an event of 0.01 % in {rare:.2%}")
assert seen["float32"][0] == 3000 and abs(seen["float32"][1] - 1e-4) < 3e-5
assert seen["float16"][0] == 1024 and seen["float16"][1] > 5e-4
assert seen["bfloat16"][0] == 128 and seen["bfloat16"][1] > 5e-3
EOF
