"""Settings of the whole suite: eight virtual CPU devices, JAX at its strictest, and annotations
that are checked."""

import ctypes
import gc
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path


# Read when JAX starts its backend, so before JAX is imported. Nearly all of the suite's time is the
# compilation of small programs, most of it LLVM's optimization of them, which changes no result
# that the tests look at; for a GPU it stays as it is.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import equinox as eqx
import hypothesis
import jax
import jaxtyping
import pytest


# A silent upcast (a lost input cast) is an error, and so is a silent broadcast.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, and none written to disk. A first example compiles, so there is
# no deadline.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")

# Every annotation of the package is checked, shapes and dtypes included. Not in `__init__`, where
# the hook would leave a name of its own.
_package = importlib.util.find_spec("mpx_pde")
_modules = [m.name for m in pkgutil.iter_modules(_package.submodule_search_locations, "mpx_pde.")]
with jaxtyping.install_import_hook(_modules, "beartype.beartype"):
    import mpx_pde as mpx


@pytest.fixture
def unchecked_annotations():
    """For tests of wrong arguments, to which the hook would object before the package does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def standard_promotion():
    """JAX as its users have it, for code of others."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def half_precision_as_it_was():
    """The half-precision setting is global: each test leaves it as it found it."""
    before = mpx.half_precision_datatype()
    yield
    mpx.set_half_precision_datatype(before)


_ROOM = 3 * 2**29
"""Bytes of memory by which a process may grow before it drops its compiled programs."""

_largest = pytest.StashKey[int]()


def _memory() -> int:
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown(item):
    """JAX keeps what it has compiled, which is most of the memory of a worker."""
    stash = item.config.stash
    if _memory() > stash.setdefault(_largest, _ROOM):
        eqx.clear_caches()
        jax.clear_caches()
        gc.collect()
        # glibc keeps what is freed until it is told not to.
        if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)
        # Not all of it does.
        stash[_largest] = max(_ROOM, _memory() + _ROOM // 2)
