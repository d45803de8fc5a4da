#!/bin/sh
# How does NumPy sum bfloat16 arrays?
#
# Expected: as it sums float16 ones. Seen (NumPy 2.3.3, ml_dtypes 0.5.3): 5,000 ones in float16 have the
# sum 5,000, by pairs, and the mean 1, by float32. In bfloat16 the sum stands still at 256, where adding 1
# changes nothing, and the mean is 0.0513, although the scalar product with the same ones is 5,000.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" ml-dtypes==0.5.3 numpy==2.3.3
PYTHONPATH=$folder "$python" -s - <<'EOF'
import ml_dtypes, numpy as np
half, brain = np.ones(5000, np.float16), np.ones(5000, ml_dtypes.bfloat16)
print("float16:", half.sum(), half.mean(), half @ half)
print("bfloat16:", brain.sum(), brain.mean(), brain @ brain)
assert half.sum() == 5000 and half.mean() == 1
assert brain.sum() == 256 and round(float(brain.mean()), 3) == 0.051 and brain @ brain == 5000
EOF
