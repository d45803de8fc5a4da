#!/bin/sh
# Is `ldexp` exact?
#
# Expected: yes, it changes the exponent alone. Seen (JAX 0.10.2, CPU): a float32 subnormal comes back
# as if it had not been scaled: `ldexp(2^-140, 100)` is 7.2e-43, not 9.1e-13. NumPy is exact. JAX 0.12
# returns 0 instead.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2 scipy==1.17.1
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax.numpy as jnp, numpy as np
x = np.float32(2.0**-140)
jax_says, numpy_says = float(jnp.ldexp(jnp.asarray(x), 100)), float(np.ldexp(x, 100))
print("JAX:", jax_says, "NumPy:", numpy_says)
assert numpy_says == 2.0**-40
assert jax_says == float(x)
EOF
