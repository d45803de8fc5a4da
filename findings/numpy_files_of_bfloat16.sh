#!/bin/sh
# Does `numpy.save` keep a bfloat16 array?
#
# Expected: it does, or it raises. Seen (NumPy 2.3.3, ml_dtypes 0.5.3): it saves without a word, and
# `numpy.load` returns two opaque bytes a number (`|V2`), which no arithmetic accepts. The bits are right:
# a `view` restores them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" ml-dtypes==0.5.3 numpy==2.3.3
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import io, ml_dtypes, numpy as np
x = np.asarray([1, 2.5], ml_dtypes.bfloat16)
file = io.BytesIO()
np.save(file, x)
file.seek(0)
y = np.load(file)
print("saved", x.dtype, "loaded", y.dtype)
assert y.dtype == np.dtype("V2")
assert (y.view(ml_dtypes.bfloat16) == x).all()
EOF
