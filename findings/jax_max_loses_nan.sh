#!/bin/sh
# Does the maximum of an array with a NaN in it tell that there is one?
#
# Expected: yes. `jnp.max` returns NaN for such an array, as NumPy does, so that a largest error, a
# maximum norm or a CFL condition shows that a field has blown up. Seen (JAX 0.10.2, CPU): only in
# small arrays. In float32 and float64 the NaN of an array of 4,096 entries is gone, and the maximum
# of a field that is NaN everywhere is minus infinity. So are `jnp.min`, `jnp.ptp`, `lax.reduce_max`
# and `jnp.linalg.norm(x, jnp.inf)`. `jnp.sum`, `jnp.argmax`, and the maximum of float16 are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax, jax.numpy as jnp
import numpy as np

for n in (1_000, 4_096, 100_000):
    field = jnp.ones(n).at[n // 2].set(jnp.nan)
    found = {
        "max": jnp.max(field),
        "min": jnp.min(field),
        "maximum norm": jnp.linalg.norm(field, jnp.inf),
        "sum": jnp.sum(field),
        "max of float16": jnp.max(field.astype(jnp.float16)),
        "NumPy's max": np.max(np.asarray(field)),
    }
    print(n, "entries:", {name: float(x) for name, x in found.items()})
    lost = {name for name, x in found.items() if not jnp.isnan(x)}
    assert lost == (set() if n < 4_096 else {"max", "min", "maximum norm"}), lost
    assert int(jnp.argmax(field)) == n // 2
nowhere = jnp.full((64, 64), jnp.nan)
print("64 × 64 NaNs:", jnp.max(nowhere), "and by columns:", jnp.max(nowhere, axis=0)[:2])
assert jnp.max(nowhere) == -jnp.inf
EOF
