"""Flags of XLA for small programs that run once, whose compilation takes nearly all of the time."""

import importlib.metadata


def quick_flags() -> str:
    """Returns flags that turn off LLVM's optimization and, in versions of jaxlib that have another
    one, the emitter of fused kernels, which takes three times as long. They change rounding in the
    last digits alone. JAX reads `XLA_FLAGS` when it starts its backend."""
    flags = "--xla_backend_optimization_level=0"
    # XLA ends the process for a flag that it does not know.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    return flags
