"""Settings of the whole suite: eight virtual CPU devices, JAX at its strictest, and checked
annotations."""

import ctypes
import gc
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path

from compilation import quick_flags


# JAX reads this when it starts its backend, so it is set before the import. The flags change no
# result that the tests look at. For a GPU they stay away.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] += f" {quick_flags()}"

import equinox as eqx
import hypothesis
import jax
import jaxtyping
import pytest


# Makes silent upcasts (lost input casts) and silent broadcasts errors.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every run uses the same examples and writes none to disk. There is no deadline, because a first
# example compiles.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")

# Checks every annotation of the package, including shapes and dtypes. `__init__` is excluded,
# because the hook would add a name to it.
_package = importlib.util.find_spec("mpx_pde")
_modules = [m.name for m in pkgutil.iter_modules(_package.submodule_search_locations, "mpx_pde.")]
_jaxtyped = jaxtyping.jaxtyped


def _outside_of_functions(**options):
    """Decorates no functions inside of others, as `jaxtyping.jaxtyped` does each time these are
    called. That takes a third of the suite's time."""
    check = _jaxtyped(**options)
    return lambda f: f if "<locals>" in f.__qualname__ else check(f)


jaxtyping.jaxtyped = _outside_of_functions
if os.environ.get("ANNOTATIONS") == "unchecked":
    _modules = []
with jaxtyping.install_import_hook(_modules, "beartype.beartype"):
    import mpx_pde as mpx


# JAX's caches hold millions of objects that live on. Looking through all of them again and again
# takes a sixth of the slow tests' time, so it is left to the hook at the end of this file.
gc.freeze()
gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)


def pytest_addoption(parser):
    parser.addoption("--one-each", action="store_true", help="only the first case of each test")


@pytest.hookimpl(trylast=True)  # of the cases that other options leave
def pytest_collection_modifyitems(config, items):
    if config.getoption("one_each"):
        first = {item.nodeid.split("[")[0]: item for item in reversed(items)}
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.fixture
def unchecked_annotations():
    """Turns the hook off for wrong arguments, which it would reject before the package does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def standard_promotion():
    """Restores JAX's default promotion, for foreign code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def half_precision_as_it_was():
    """Restores the global half-precision setting after each test."""
    before = mpx.half_precision_datatype()
    yield
    mpx.set_half_precision_datatype(before)


@pytest.fixture(autouse=True)
def no_count_of_another_test():
    """Forgets the vanished gradients of earlier tests."""
    mpx.scaling._watched.watch.forget()


_ROOM = 3 * 2**30
"""Bytes of memory by which a process may grow before it drops its compiled programs."""

_largest = pytest.StashKey[int]()


def _memory() -> int:
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown(item):
    """Drops compiled programs, most of a worker's memory, if the process has grown too much."""
    stash = item.config.stash
    if _memory() > stash.setdefault(_largest, _ROOM):
        eqx.clear_caches()
        jax.clear_caches()
        gc.collect()
        # glibc keeps freed memory until it is trimmed.
        if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)
        # Some memory is not freed.
        stash[_largest] = max(_ROOM, _memory() + _ROOM // 2)
