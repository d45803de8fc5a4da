#!/bin/sh
# Does `jnp.interp` interpolate in bfloat16?
#
# Expected: yes, as in float16; it compares, subtracts and divides. Seen (JAX 0.10.2): a ValueError
# while tracing, "data type <class 'ml_dtypes.bfloat16'> not inexact". It asks NumPy for the rounding
# of the dtype of the nodes, and NumPy knows none of the extended types. So bfloat16 queries between
# float16 or float32 nodes work, and one table in bfloat16 breaks a network that is cast.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax.numpy as jnp
nodes = jnp.linspace(0, 1, 5)
for x, table in (("float16", "float16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
    try:
        out = jnp.interp(jnp.asarray(0.3, x), nodes.astype(table), (2 * nodes).astype(table))
        print(f"x in {x}, nodes in {table}: {out} ({out.dtype})")
        assert table != "bfloat16"
    except ValueError as error:
        print(f"x in {x}, nodes in {table}: ValueError: {error}")
        assert table == "bfloat16"
EOF
