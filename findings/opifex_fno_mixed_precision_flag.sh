#!/bin/sh
# Does `use_mixed_precision=True` put an operator of opifex into half precision?
#
# Expected: yes, some of its products become bfloat16 or float16. Seen (opifex 0.2.10): its Fourier neural
# operator stores the option and reads it nowhere. The traced programs with and without it are the same
# text, and neither has a half array. Needs Python 3.12 or newer, and a gigabyte for its dependencies.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" opifex==0.2.10 jax==0.11.1 flax==0.12.12
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'END'
import jax, jax.numpy as jnp
from flax import nnx
from opifex.neural.operators.fno.base import FourierNeuralOperator
sizes = {"in_channels": 1, "out_channels": 1, "hidden_channels": 8, "modes": 4, "num_layers": 2}
programs = []
for mixed in (False, True):
    operator = FourierNeuralOperator(**sizes, use_mixed_precision=mixed, rngs=nnx.Rngs(0))
    graph, state = nnx.split(operator)
    run = lambda state, x: nnx.merge(graph, state)(x)
    programs.append(str(jax.make_jaxpr(run)(state, jnp.ones((2, 1, 16, 16)))))
    print(f"use_mixed_precision={mixed}: {len(programs[-1])} characters, half arrays: {'f16' in programs[-1]}")
assert programs[0] == programs[1]
assert "f16" not in programs[1]
END
