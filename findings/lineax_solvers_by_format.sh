#!/bin/sh
# Which half does an iterative solver need?
#
# Expected: float16, which has more digits, or neither. Seen (lineax 0.1.1, a well-conditioned 3 x 3
# matrix): CG solves in float16 and fails in bfloat16; BiCGStab solves in bfloat16 and fails in float16.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.10.2 lineax==0.1.1 equinox==0.13.8
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import jax.numpy as jnp, lineax
matrix, right = jnp.asarray([[4.0, 1, 0], [1, 3, 1], [0, 1, 2]]), jnp.asarray([1.0, 2, 3])
def solves(solver, dtype):
    operator = lineax.MatrixLinearOperator(matrix.astype(dtype), lineax.positive_semidefinite_tag)
    found = lineax.linear_solve(operator, right.astype(dtype), solver(rtol=1e-2, atol=1e-2), throw=False)
    return bool(found.result == lineax.RESULTS.successful)
seen = {(s.__name__, d.__name__): solves(s, d) for s in (lineax.CG, lineax.BiCGStab) for d in (jnp.float16, jnp.bfloat16)}
print(seen)
assert list(seen.values()) == [True, False, False, True]
EOF
