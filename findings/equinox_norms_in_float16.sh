#!/bin/sh
# Which norms of Equinox survive float16 inputs of some hundreds?
#
# Expected: all or none. Seen (Equinox 0.13.8, JAX 0.10.2, CPU): LayerNorm, RMSNorm and GroupNorm compute in
# float32 and return 1.7 for the largest of 64 inputs from -300 to 300. BatchNorm computes in the dtype of
# its input. The variance, 3e4, is in range, but squares of 300 are not: they are infinite, and so all outputs are 0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2 equinox==0.13.8
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import equinox as eqx, jax, jax.numpy as jnp
half, x = jnp.float16, jnp.linspace(-300, 300, 64).astype("float16")
norms = eqx.nn.LayerNorm(64, dtype=half), eqx.nn.RMSNorm(64, dtype=half), eqx.nn.GroupNorm(1, 1, dtype=half)
most = {type(norm).__name__: float(jnp.max(norm(x[None] if norm is norms[2] else x))) for norm in norms}
norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="batch", dtype=half)
out, _ = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x[:, None], state)
most["BatchNorm"] = float(jnp.max(out))
print(most)
assert all(abs(most[name] - 1.705) < 0.01 for name in ("LayerNorm", "RMSNorm", "GroupNorm"))
assert most["BatchNorm"] == 0
EOF
