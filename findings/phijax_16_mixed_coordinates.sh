#!/bin/sh
# Does a network of PhiJAX tell points apart in its mixed precision?
#
# Expected: yes. Its parameters, points and outputs are float32, and its documentation says that its mixed
# modes keep coordinate derivatives in float32. Seen (PhiJAX 0.2.0b5, CPU): `16-mixed` casts the points to
# float16 where they enter the network. Of 1,001 points between 0.99 and 1 it has 12 different values and
# 6 different slopes, all float32; `bf16-mixed` has 2 of each. Needs Python 3.12 or newer.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" phijax==0.2.0b5
JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'END'
import jax, jax.numpy as jnp, numpy as np
from phijax.models import build_mlp
x = jnp.linspace(0.99, 1.0, 1001)
seen = {}
for mode in ("32-true", "16-mixed", "bf16-mixed"):
    network = build_mlp(jax.random.key(0), 1, 1, hidden=(64, 64), activation="tanh", precision=mode)
    u = lambda x: network.apply(network.state, x[None])[0]
    found = [np.asarray(jax.vmap(f)(x)) for f in (u, jax.grad(u))]
    assert all(y.dtype == np.float32 for y in found)
    seen[mode] = [len(np.unique(y)) for y in found]
    print(f"{mode}: {seen[mode][0]} values and {seen[mode][1]} slopes at {len(x)} points")
assert min(seen["32-true"]) > 900
assert max(seen["16-mixed"]) < 30 and max(seen["bf16-mixed"]) < 5
END
