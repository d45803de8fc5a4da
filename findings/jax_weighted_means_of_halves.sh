#!/bin/sh
# Which means of float16 arrays does JAX take in float32?
#
# Expected: all. Seen (JAX 0.10.2, CPU): of 5,000 values of 100, `mean`, `average`, `median` and `var` are
# right. `nanmean`, `average` with weights, and `trapezoid` over an interval of length 1 are infinite, because
# the sum is rounded to float16 before it is divided.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax.numpy as jnp
x = jnp.full(5000, 100, jnp.float16)
finite = {"mean": jnp.mean(x), "average": jnp.average(x), "median": jnp.median(x), "var": jnp.var(x)}
infinite = {
    "nanmean": jnp.nanmean(x),
    "weighted average": jnp.average(x, weights=jnp.ones_like(x)),
    "trapezoid": jnp.trapezoid(x, dx=1 / 5000),
}
print({name: float(value) for name, value in {**finite, **infinite}.items()})
assert [float(value) for value in finite.values()] == [100, 100, 100, 0]
assert all(jnp.isinf(value) for value in infinite.values())
EOF
