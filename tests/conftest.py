"""Settings of the whole suite: eight virtual CPU devices, and JAX at its strictest."""

import os


# Read when JAX starts its backend, so before JAX is imported.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax  # noqa: E402


# A silent upcast (a lost input cast) is an error, and so is a silent broadcast.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
