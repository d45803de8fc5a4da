#!/bin/sh
# Does a CPU do what a `DotAlgorithmPreset` says, or refuse?
#
# Expected: one of the two. Seen (JAX 0.10.2): `BF16_BF16_F32` is accepted and ignored (error 3e-7, that of
# float32, not 3e-3), `F16_F16_F16` is honored (4e-4), and `TF32_TF32_F32` raises. So a test of a bfloat16
# product on a CPU passes and tests nothing.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp, numpy as np
from jax.lax import DotAlgorithmPreset as Preset
a, b = (np.asarray(jax.random.normal(jax.random.key(i), (256, 256))) for i in (0, 1))
exact = a.astype(np.float64) @ b.astype(np.float64)
def off(preset):
    c = jax.jit(lambda a, b: jnp.matmul(a, b, precision=preset))(a, b)
    return float(np.linalg.norm(c - exact) / np.linalg.norm(exact))
seen = {p.name: off(p) for p in (Preset.BF16_BF16_F32, Preset.F16_F16_F16)}
try:
    off(Preset.TF32_TF32_F32)
except ValueError as error:
    seen["TF32_TF32_F32"] = "raises"
print(seen)
assert seen["BF16_BF16_F32"] < 1e-6 < 1e-4 < seen["F16_F16_F16"]
assert seen["TF32_TF32_F32"] == "raises"
EOF
