#!/bin/sh
# Can zarr-python open a bfloat16 array that TensorStore wrote?
#
# Expected: yes, both write Zarr. Seen (TensorStore 0.1.76, zarr 3.1.3): TensorStore writes bfloat16 in the
# formats 2 and 3, and zarr-python raises for either, because the data type is an extension that it does not
# know. float16 passes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" tensorstore==0.1.76 zarr==3.1.3 \
    numpy==2.3.3 ml-dtypes==0.5.3
PYTHONPATH=$folder "$python" -s -W ignore - <<'EOF'
import tempfile
import numpy as np, tensorstore as ts, zarr
opened = {}
for driver in ("zarr", "zarr3"):
    for dtype in ("float16", "bfloat16"):
        path = tempfile.mkdtemp()
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": path}}
        store = ts.open(spec, create=True, dtype=ts.dtype(dtype), shape=[2]).result()
        store.write(np.asarray([1, 2.5], store.dtype.numpy_dtype)).result()
        try:
            opened[driver, dtype] = str(zarr.open_array(path, mode="r")[:])
        except ValueError as error:
            opened[driver, dtype] = f"raises {error}"
        print(driver, dtype, opened[driver, dtype])
assert [x.startswith("raises") for x in opened.values()] == [False, True, False, True]
EOF
