#!/bin/sh
# Is `exp2` of an integer an exact power of two?
#
# Expected: yes, as in C and NumPy; powers of two are how losses are scaled without rounding. Seen (JAX
# 0.10.2, CPU): compiled `exp2` is off by up to 3.6e-6 in float32, and by 0.2 % in float16, at integers,
# although `2.0 ** k` is exact.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp, numpy as np
k = np.arange(-100, 101, dtype=np.float32)
exact = 2.0 ** k.astype(np.float64)
off = lambda f: float(np.abs(np.asarray(jax.jit(f)(k), np.float64) / exact - 1).max())
by_exp2, by_power = off(jnp.exp2), off(lambda k: jnp.float32(2) ** k)
half = np.asarray(jnp.exp2(jnp.asarray([-10, 5, 10, 15], jnp.float16)), np.float64)
in_half = np.abs(half / 2.0 ** np.asarray([-10, 5, 10, 15]) - 1).max()
print(f"exp2: {by_exp2:.1e}, 2.0 ** k: {by_power:.1e}, exp2 in float16: {in_half:.1e}, NumPy: {np.abs(np.exp2(k) / exact - 1).max()}")
assert by_exp2 > 1e-6 and by_power == 0 and in_half > 1e-3
assert (np.exp2(k) == exact).all()
EOF
