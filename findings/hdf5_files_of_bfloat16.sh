#!/bin/sh
# Does HDF5 keep the name of a number format?
#
# Expected: h5py keeps float16 and refuses bfloat16, which HDF5 does not know. Seen (h5py 3.14.0): both are
# written without a word. float16 comes back; bfloat16 comes back as opaque bytes, and the file says
# nowhere what they were.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" h5py==3.14.0 ml-dtypes==0.5.3 numpy==2.3.3
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import h5py, ml_dtypes, numpy as np
with h5py.File("x", "w", driver="core", backing_store=False) as file:
    for name, dtype in (("half", np.float16), ("brain", ml_dtypes.bfloat16)):
        file[name] = np.asarray([1, 2.5], dtype)
    seen = {name: str(file[name].dtype) for name in file}
print(seen)
assert seen == {"half": "float16", "brain": "|V2"}
EOF
