#!/bin/sh
# Which weights does the ONNX converter to float16 write?
#
# Expected: rounded ones. Seen (onnxconverter-common 1.16.0, onnx 1.19.0): weights below 1e-7 become 1e-7,
# so 1e-9 grows by a hundred and 6e-8, which float16 holds, is changed too, and weights above 10,000 become
# 10,000, though float16 holds 65,504. It warns of the largest and smallest ones, as truncated. The bounds
# are the arguments `min_positive_val` and `max_finite_val`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" onnxconverter-common==1.16.0 \
    onnx==1.19.0 numpy==2.3.3 packaging
PYTHONPATH=$folder "$python" -s -W ignore - <<'EOF'
import numpy as np, onnx
from onnx import helper, numpy_helper
from onnxconverter_common import float16
weights = np.asarray([1e-9, -1e-9, 6e-8, 2e4, 0, 1e-3], np.float32)
array = lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [6])
product = helper.make_node("Mul", ["x", "w"], ["y"])
graph = helper.make_graph([product], "g", [array("x")], [array("y")], [numpy_helper.from_array(weights, "w")])
half = float16.convert_float_to_float16(helper.make_model(graph))
got = numpy_helper.to_array(half.graph.initializer[0])
print("weights", weights, "float16", got)
assert got.dtype == np.float16
assert np.array_equal(got, np.asarray([1e-7, -1e-7, 1e-7, 1e4, 0, 1e-3], np.float16))
EOF
