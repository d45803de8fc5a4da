#!/bin/sh
# Does the import of an optimizer change the arrays of the program that imports it?
#
# Expected: no, JAX makes float32 arrays unless the program asks for float64. Seen (randngd 0.1.1): its
# import sets `jax_enable_x64`, so arrays made afterwards are float64 and memory doubles, also where nothing
# of it is called. `RANDNGD_ENABLE_X64=0` in the environment leaves the option alone. Needs Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" randngd==0.1.1 jax==0.10.2
for asked in 1 0; do
    RANDNGD_ENABLE_X64=$asked JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - "$asked" <<'END'
import sys, jax.numpy as jnp
before = jnp.ones(3).dtype
import randngd
after = jnp.ones(3).dtype
print(f"RANDNGD_ENABLE_X64={sys.argv[1]}: {before} before the import, {after} after it")
assert (before, after) == ("float32", "float64" if sys.argv[1] == "1" else "float32")
END
done
