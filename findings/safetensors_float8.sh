#!/bin/sh
# Can safetensors load the float8 arrays that it saved?
#
# Expected: yes, float8 is in its format. Seen (safetensors 0.6.2, NumPy): `save` writes `float8_e4m3fn`
# from ml_dtypes, and `load` raises on the same bytes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" safetensors==0.6.2 ml-dtypes==0.5.3 numpy==2.3.3
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import ml_dtypes, numpy as np
from safetensors.numpy import load, save
data = save({"x": np.asarray([1, 2], ml_dtypes.float8_e4m3fn)})
print("saved", len(data), "bytes with", b"F8_E4M3" in data)
assert b"F8_E4M3" in data
try:
    print(load(data))
except Exception as error:
    print("load raises", type(error).__name__, error)
else:
    raise SystemExit("it loads them now")
EOF
