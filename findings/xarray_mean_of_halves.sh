#!/bin/sh
# What is the mean of a float16 array in xarray?
#
# Expected: NumPy's, which is taken in float32. Seen (xarray 2025.9.0, NumPy 2.3.3): 5,000 values of 100
# have an infinite mean, because missing values are skipped by default, and the sum of the others is taken
# in float16. With `skipna=False` the mean is 100. NumPy's `nanmean` and `var` are infinite too, its `mean`
# is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" xarray==2025.9.0 numpy==2.3.3
PYTHONPATH=$folder "$python" -s -W ignore - <<'EOF'
import numpy as np, xarray as xr
values = np.full(5000, 100, np.float16)
field = xr.DataArray(values)
print("mean", field.mean().item(), "skipna=False", field.mean(skipna=False).item())
print("NumPy: mean", values.mean(), "nanmean", np.nanmean(values), "var", values.var())
assert np.isinf(field.mean().item()) and field.mean(skipna=False).item() == 100
assert values.mean() == 100 and np.isinf(np.nanmean(values)) and np.isinf(values.var())
EOF
