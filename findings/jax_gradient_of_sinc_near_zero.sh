#!/bin/sh
# Is the gradient of `jnp.sinc` finite near zero, in float32?
#
# Expected: yes; JAX treats zero with care (its gradient there is 0), and sinc is smooth. Seen (JAX
# 0.10.2, CPU): at 1e-20 the gradient is -inf, because the quotient rule divides by x squared, which
# underflows. A coordinate that is almost zero is enough.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
at = lambda x: float(jax.grad(jnp.sinc)(jnp.float32(x)))
print({x: at(x) for x in (0.0, 1e-20, 1e-3)})
assert at(0.0) == 0.0
assert at(1e-20) == -float("inf")
assert abs(at(1e-3) + 3.29e-3) < 1e-4
EOF
