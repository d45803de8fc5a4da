"""Checks what a device computes: `python -m mpx_pde.check`.

Compares products in each precision, split products, scatters, and the gradients of a PINN and of an
FNO on the default device with float64 on the host. Takes under a minute. Prints the versions, a
table and a verdict, and exits with status 1 if anything is wrong. It is meant for a new machine, a
new driver or a new version of JAX: compilers have been wrong about scatters and loops.
"""

import argparse
import contextlib
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._util._repr import table
from .derivatives import partials
from .nn import FNO, CoordinateMLP
from .precision._dtypes import half_precision
from .precision._split import SPLIT_PRODUCTS
from .products._conv import mixed_conv_general_dilated
from .products._dot import split_dot_general
from .products._einsum import mixed_einsum, mixed_matmul
from .scaling._loss import DynamicLossScaling, NoOpLossScaling
from .training import filter_value_and_grad


FLOAT32 = 2.0**-19
"""The tolerance of float32: sums of a few hundred terms, in any order."""


@dataclass(frozen=True)
class Check:
    """A comparison of a device with the host.

    **Attributes:**

    - `group`, `name`: what is compared.
    - `error`: a function that returns the error, relative to the largest number.
    - `tolerance`: the largest error of a device that computes correctly.
    """

    group: str
    name: str
    error: Callable[[], float]
    tolerance: float


@dataclass(frozen=True)
class Result:
    """What a check found: its error, or NaN and the `problem` that ended it."""

    check: Check
    error: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.check.tolerance


def on_device(fun: Callable, *args: Any) -> Any:
    """Compiles and runs a function on the default device; returns NumPy arrays."""
    return jax.tree.map(np.asarray, eqx.filter_jit(fun)(*args))


def on_host(fun: Callable, *args: Any) -> Any:
    """Runs a function in float64 on the host, if JAX has its CPU there. Returns NumPy arrays."""
    try:
        place: Any = jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        place = contextlib.nullcontext()
    with jax.enable_x64(True), place:

        def wide(x):
            return jnp.asarray(np.asarray(x, np.float64)) if eqx.is_inexact_array(x) else x

        def fixed(x):
            return jnp.asarray(np.asarray(x)) if eqx.is_array(x) else x

        args = jax.tree.map(lambda x: wide(fixed(x)), args)
        return jax.tree.map(np.asarray, eqx.filter_jit(fun)(*args))


def difference(got: Any, want: Any) -> float:
    """Returns the largest difference of two trees of arrays, relative to the largest number."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    wide = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    largest = max(float(np.max(np.abs(y))) for _, y in wide)
    return max(float(np.max(np.abs(x - y))) for x, y in wide) / largest


def compared(fun: Callable, *args: Any) -> Callable[[], float]:
    return lambda: difference(on_device(fun, *args), on_host(fun, *args))


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- Products ------------------------------------------------------------------------------------

_SHAPES = ((128, 128, 128), (33, 257, 19), (5, 64, 1))


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype(np.float64)


def _product_error(dtype: Any, out_dtype: Any) -> float:
    """Returns the error of products of rounded matrices, of their derivatives, and of a batch."""
    errors = []
    for i, (m, k, n) in enumerate(_SHAPES):
        x, y, g = _normal(i, m, k), _normal(i + 10, k, n), _normal(i + 20, m, n)
        product = partial(mixed_matmul, dtype=dtype, out_dtype=out_dtype)

        def run(x, y, g, product=product):
            return (
                product(x, y),
                jax.vjp(product, x, y)[1](g.astype(out_dtype)),
                mixed_einsum("bij,bjk->bik", x[None], y[None], dtype=dtype, out_dtype=out_dtype),
            )

        a, b = _rounded(x, dtype), _rounded(y, dtype)
        c = _rounded(_rounded(g, out_dtype), dtype)
        want = a @ b, (c @ b.T, a.T @ c), (a @ b)[None]
        got = on_device(run, x, y, g)
        errors += map(difference, jax.tree.leaves(got), jax.tree.leaves(want))
    return max(errors)


def _split_error(name: str) -> float:
    errors = []
    for i, (m, k, n) in enumerate(_SHAPES):
        x, y = _normal(i, m, k), _normal(i + 10, k, n)

        def product(x, y):
            return split_dot_general(x, y, (((1,), (0,)), ((), ())), name)

        errors.append(difference(on_device(product, x, y), x.astype(np.float64) @ y))
    return max(errors)


def _convolution_error(dtype: Any) -> float:
    x, y = _normal(0, 2, 3, 17, 16), _normal(1, 5, 3, 3, 3)

    def conv(x, y):
        return mixed_conv_general_dilated(x, y, (1, 1), "VALID", dtype=dtype, out_dtype="float32")

    a, b = _rounded(x, dtype), _rounded(y, dtype)
    windows = np.lib.stride_tricks.sliding_window_view(a, (3, 3), axis=(2, 3))
    return difference(on_device(conv, x, y), np.einsum("nchwij,ocij->nohw", windows, b))


# Of which products keep how many bits: the largest dropped product of parts.
_SPLIT_TOLERANCES = {
    "tensorfloat32": 2.0**-9,
    "bfloat16_x3": 2.0**-14,
    "tensorfloat32_x3": 2.0**-18,
    "bfloat16_x6": 2.0**-18,
    "bfloat16_x9": FLOAT32,
}


def _products() -> Iterator[Check]:
    for dtype in ("float32", "bfloat16", "float16"):
        error = partial(_product_error, dtype, "float32")
        yield Check("products", f"{dtype}, sums in float32", error, FLOAT32)
    for dtype in ("bfloat16", "float16"):
        unit = float(jnp.finfo(dtype).eps)
        yield Check(
            "products", f"{dtype}, rounded once", partial(_product_error, dtype, dtype), unit
        )
    for dtype in ("float32", "bfloat16", "float16"):
        yield Check("convolutions", dtype, partial(_convolution_error, dtype), FLOAT32)
    for name in SPLIT_PRODUCTS:
        yield Check("split products", name, partial(_split_error, name), _SPLIT_TOLERANCES[name])


# --- Scatters, scans and reductions --------------------------------------------------------------

_INDICES = np.random.default_rng(5).integers(0, 40, 1000, np.int32)
_WHOLE = np.random.default_rng(6).integers(-50, 50, (1000, 3)).astype(np.float32)
"""Whole numbers, whose sums in float32 are exact."""


def _updates(x: Any) -> Any:
    return lax.fori_loop(0, 6, lambda i, x: x.at[i + 1].set(2 * x[i] + i), x)


_SCATTERS: dict[str, Callable[[Any], Any]] = {
    "segment_sum": lambda x: jax.ops.segment_sum(x, _INDICES, 40),
    "at[].add": lambda x: jnp.zeros((40, 3), x.dtype).at[_INDICES].add(x),
    "at[].max": lambda x: jnp.full((40, 3), -99, x.dtype).at[_INDICES].max(x),
    "at[].set": lambda x: jnp.zeros((1000, 3), x.dtype).at[::-1].set(x),
    "gradient of a gather": lambda x: jax.grad(lambda t: jnp.sum(t[_INDICES] * x))(x[:40]),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "updates in a loop": _updates,
    "sum": lambda x: jnp.sum(x, axis=0),
    "scan": lambda x: lax.scan(lambda c, x: (jnp.maximum(c, 0) + x, c), x[0], x)[1],
}

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=0),
    "tanh, erf, exp, sin": lambda x: (jnp.tanh(x), lax.erf(x), jnp.exp(x), jnp.sin(x)),
    "variance": lambda x: jnp.var(x, axis=0),
    "FFT": lambda x: jnp.abs(jnp.fft.rfft(x, axis=0)),
}


def _operations() -> Iterator[Check]:
    for name, fun in _SCATTERS.items():
        yield Check("scatters and loops", name, compared(fun, _WHOLE), 0.0)
    for name, fun in _FUNCTIONS.items():
        yield Check("functions", name, compared(fun, _normal(7, 200, 33)), 2 * FLOAT32)


# --- Steps ---------------------------------------------------------------------------------------


def _pinn(model: Any, points: Any) -> Any:
    terms = partials(model, ["u", "u_t", "u_xx"], coords="tx", outputs="u")
    d = jax.vmap(terms)(points)
    return jnp.mean((d["u_t"] - 0.1 * d["u_xx"] + d["u"] ** 3) ** 2)


def _operator(model: Any, batch: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


@dataclass(frozen=True)
class Way:
    """A way to compute a gradient, and its tolerance for a network of a few layers."""

    half: str
    options: dict[str, Any]
    tolerance: float


# The roundings of a handful of layers add up to a few units of the format.
_WAYS = {
    "float32": Way("float16", {"use_mixed_precision": False}, 2.0**-14),
    "forward float32, backward bfloat16": Way("bfloat16", {"forward": "float32"}, 2.0**-4),
    "float16": Way("float16", {}, 2.0**-6),
    "bfloat16": Way("bfloat16", {}, 2.0**-3),
}


def _step_error(
    loss: Callable, model: Any, batch: Any, exact: Callable[[], Any], way: Way
) -> float:
    """Returns the error of a loss and of its gradient; infinity if they are not finite. `exact`
    returns both in float64."""
    scaling = DynamicLossScaling(2.0**8) if way.half == "float16" else NoOpLossScaling()
    options: dict[str, Any] = {**way.options}
    if "use_mixed_precision" not in options:
        options["keep_full"] = (False, True)
    with half_precision(way.half):
        gradient = filter_value_and_grad(loss, scaling, **options)
        value, _, finite, grads = on_device(gradient, model, batch)
    if not finite:
        return float("inf")
    want, want_grads = exact()
    parts = zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True)
    # Leaf by leaf, against the largest gradient, so that small ones matter less.
    largest = max(float(np.linalg.norm(y)) for y in jax.tree.leaves(want_grads))
    errors = [float(np.linalg.norm(np.asarray(x, np.float64) - y)) / largest for x, y in parts]
    return max(abs(float(value) - float(want)) / abs(float(want)), *errors)


def _steps() -> Iterator[Check]:
    key = jax.random.key(0)
    network = CoordinateMLP(2, "scalar", 32, 3, key=key)
    operator = FNO(1, 1, 8, 2, (8, 8), key=key)
    of_network, of_operator = _normal(8, 64, 2), _normal(9, 2, 2, 1, 16, 16)
    problems = {
        "PINN step": (_pinn, network, of_network, list(_WAYS)),
        "FNO step": (_operator, operator, of_operator, ["float32", "float16", "bfloat16"]),
    }
    for group, (loss, model, batch, ways) in problems.items():
        exact = cache(partial(on_host, eqx.filter_value_and_grad(loss), model, batch))
        for name in ways:
            error = partial(_step_error, loss, model, batch, exact, _WAYS[name])
            yield Check(group, name, error, _WAYS[name].tolerance)


# --- The report ----------------------------------------------------------------------------------


def checks() -> list[Check]:
    """Returns all checks, in the order of the table."""
    return [*_products(), *_operations(), *_steps()]


def run(check: Check) -> Result:
    """Runs a check. What it raises is its result."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # small networks have little in half
            return Result(check, check.error())
    except Exception as problem:
        lines = str(problem).strip().splitlines() or [""]
        return Result(check, float("nan"), f"{type(problem).__name__}: {lines[0][:100]}")


def header() -> str:
    """Returns the versions and the devices."""
    packages = ("mpx-pde", "jax", "jaxlib", "equinox", "optax", "numpy")
    versions = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    plugins = getattr(jax.devices()[0].client, "platform_version", "").splitlines()
    kinds = ", ".join(dict.fromkeys(d.device_kind for d in jax.devices()))
    lines = [
        f"Python {platform.python_version()}, {', '.join(versions)}",
        f"{jax.default_backend()}: {len(jax.devices())} × {kinds}; {' '.join(plugins)}",
    ]
    return "\n".join(lines)


def _line(result: Result) -> tuple[str, ...]:
    check = result.check
    verdict = "ok" if result.passed else "FAILED"
    errors = f"{result.error:.1e}", f"{check.tolerance:.1e}"
    return check.group, check.name, *errors, f"{verdict} {result.problem}".strip()


def main(argv: Sequence[str] | None = None, every: Sequence[Check] | None = None) -> int:
    """Runs the checks `every`, by default all; prints a table and a verdict.

    **Returns:** the exit status: 0 if all checks passed, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m mpx_pde.check", description=__doc__)
    parser.parse_args(argv)
    print(header(), flush=True)
    results = list(map(run, checks() if every is None else every))
    rows = [("", "", "error", "tolerance", ""), *map(_line, results)]
    print(*table(rows, left=(0, 1, 4)), sep="\n")
    failed = [result for result in results if not result.passed]
    if not failed:
        print(f"All {len(results)} checks passed: this device computes what it should.")
        return 0
    names = "; ".join(f"{x.check.group}, {x.check.name}" for x in failed)
    print(
        f"{len(failed)} of {len(results)} checks FAILED: {names}. Do not train here with these "
        "versions. Try another version of jaxlib or of the driver, and report it to JAX."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
