#!/bin/sh
# Has the error function a gradient inside of `jax.shard_map`?
#
# Expected: yes, as every function of one variable, and with it the exact GELU of transformers
# (`approximate=False`). JAX 0.10.2 computes all of them. Seen (JAX 0.12.0.1, CPU, two devices): the
# values are right, and a gradient of `lax.erf`, `lax.erfc` or the exact GELU in float32 or float64
# raises that "Primitive polynomial requires varying manual axes to match". The GELU by `tanh`,
# bfloat16 and `check_vma=False` are right. Needs Python 3.12 or later (`PYTHON=python3.12`).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --target "$folder" jax==0.12.0.1 jaxlib==0.12.0.1
XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu PYTHONPATH=$folder "$python" -s - <<'EOF'
import functools as ft
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
functions = {
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "exact GELU": ft.partial(jax.nn.gelu, approximate=False),
    "GELU by tanh": jax.nn.gelu,
}


def outcome(f, dtype, **options):
    total = lambda x: jax.lax.psum(jnp.sum(f(x)), "i")
    sharded = jax.shard_map(
        total, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec(), **options
    )
    x = jnp.linspace(-2, 2, 8, dtype=dtype)
    assert jnp.allclose(sharded(x), jnp.sum(f(x)), rtol=1e-2, atol=1e-2)  # in all formats
    try:
        grad = jax.grad(sharded)(x)
    except ValueError as e:
        return str(e).split(",")[0]
    assert jnp.allclose(grad, jax.grad(lambda x: jnp.sum(f(x)))(x), rtol=1e-2, atol=1e-2)
    return "right"


for name, f in functions.items():
    for dtype in ("float32", "bfloat16"):
        found = outcome(f, dtype)
        print(f"{name}, {dtype}: {found}; unchecked: {outcome(f, dtype, check_vma=False)}")
        fails = dtype == "float32" and "tanh" not in name
        want = "Primitive polynomial requires varying manual axes to match" if fails else "right"
        assert found == want, found
        assert outcome(f, dtype, check_vma=False) == "right"
EOF
