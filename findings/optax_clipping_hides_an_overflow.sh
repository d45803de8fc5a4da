#!/bin/sh
# Does `apply_if_finite` count a float16 gradient whose norm overflows?
#
# Expected: yes; its square is infinite. Seen (Optax 0.2.8): `clip_by_global_norm` divides by the infinite
# norm, so the update is zero, which is finite. No step is counted as bad, and nothing is learned.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax.numpy as jnp, optax
gradient = jnp.asarray([300.0, 400.0], jnp.float16)
optimizer = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 5)
update, state = optimizer.update(gradient, optimizer.init(jnp.zeros(2, jnp.float16)))
print("norm:", optax.global_norm(gradient), "update:", update, "counted:", state.total_notfinite)
assert jnp.isinf(optax.global_norm(gradient))
assert (update == 0).all() and state.total_notfinite == 0
EOF
