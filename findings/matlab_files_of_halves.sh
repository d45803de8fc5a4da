#!/bin/sh
# What does SciPy make of halves in a MAT file?
#
# Expected: an error, as MATLAB's file format has no half, or float32. Seen (SciPy 1.16.2): float64, for
# float16, bfloat16 and float8 alike, without a word: the file is four to eight times as large, and the
# format is lost.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" scipy==1.16.2 ml-dtypes==0.5.3 numpy==2.3.3
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import io, ml_dtypes, numpy as np, scipy.io
def back(dtype):
    file = io.BytesIO()
    scipy.io.savemat(file, {"x": np.asarray([1, 2.5], dtype)})
    return str(scipy.io.loadmat(file)["x"].dtype)
seen = {np.dtype(d).name: back(d) for d in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32)}
print(seen)
assert list(seen.values()) == ["float64"] * 3 + ["float32"]
EOF
