"""What does half precision do? Operations of the installed versions in half, and here.

Every row runs: nothing is remembered. The column *in half* has what JAX, Optax and others do with
float16 (or bfloat16, where a row says so) on this device. Beside it is what the same function does
under `mpx_pde.autocast` in that format, or its gradient under `forward="float32"`. Run it on each
release of JAX, and compare the files:

    python -m benchmarks halves                     # writes results/halves-jax0_10-cpu.json
"""

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.io
from jax.experimental import checkify, sparse

import mpx_pde as mpx

from ._report import Report


F16, BF16 = jnp.float16, jnp.bfloat16
autocast: Any = mpx.autocast
MANY = 5000


class Row(NamedTuple):
    """An operation, what it does in half, and what it does in a mode of this library."""

    group: str
    what: str
    plain: Callable[[], Any]
    ours: Callable[[], Any] | None = None
    mode: str = "autocast"


def told(x: Any) -> str:
    """Describes a result in a few characters."""
    if isinstance(x, str):
        return x
    x = np.asarray(x)
    if x.ndim:
        return ", ".join(map(told, x[:4]))
    if x.dtype == bool or np.issubdtype(x.dtype, np.integer):
        return str(x)
    x = float(x)
    if not np.isfinite(x):
        return {np.inf: "∞", -np.inf: "−∞"}.get(x, "NaN")
    text = f"{x:.0f}" if x == round(x) and abs(x) < 1e5 else f"{x:.3g}"
    return "0" if x == 0 else text.replace("-", "−")


def done(call: Callable[[], Any] | None) -> str | None:
    """Returns what a call does; of an exception, its class."""
    if call is None:
        return None
    try:
        with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore")
            return told(jax.device_get(call()))
    except Exception as error:  # an exception is a result
        return f"raises {type(error).__name__}"


def both(group: str, what: str, fun: Callable, x: Any, dtype: Any = F16) -> Row:
    """A row of a function of one array: in half, and under autocast from float32."""
    x = np.asarray(x, np.float32)
    ours = lambda: autocast(fun, jnp.dtype(dtype).name)(jnp.asarray(x))
    return Row(group, what, lambda: fun(jnp.asarray(x, dtype)), ours)


def gradient(group: str, what: str, fun: Callable, x: Any) -> Row:
    """A row of a gradient: in float16, and behind a forward pass in float32."""
    x = np.asarray(x, np.float32)
    loss = lambda x: jnp.sum(fun(x).astype(jnp.float32))
    in_full = lambda: mpx.filter_grad(loss, mpx.NoOpLossScaling(), forward="float32")
    ours = lambda: in_full()(jnp.asarray(x))[2]
    return Row(group, what, lambda: jax.grad(loss)(jnp.asarray(x, F16)), ours, 'forward="float32"')


# --- Sums ------------------------------------------------------------------------------------


def sums() -> list[Row]:
    ones, zeros = np.ones(MANY), np.zeros(MANY, np.int32)
    row = partial(both, f"{MANY:,} ones")
    by = np.stack([zeros, np.arange(MANY)], axis=1)
    bcoo = lambda x: sparse.BCOO((x, jnp.asarray(by)), shape=(1, MANY)) @ jnp.ones(MANY, x.dtype)
    table = jnp.asarray(zeros)
    return [
        row("`einsum('i->')`", lambda x: jnp.einsum("i->", x), ones),
        row("`cumsum`, the last", lambda x: jnp.cumsum(x)[-1], ones),
        row(
            "`reduce_window`",
            lambda x: jax.lax.reduce_window(
                x, jnp.zeros((), x.dtype), jax.lax.add, (MANY,), (1,), "VALID"
            )[0],
            ones,
        ),
        row("`convolve`", lambda x: jnp.convolve(x, jnp.ones(MANY, x.dtype), "valid")[0], ones),
        row("a product", lambda x: x @ jnp.ones(MANY, x.dtype), ones),
        row("`segment_sum`", lambda x: jax.ops.segment_sum(x, table, 1)[0], ones),
        row("`.at[].add`", lambda x: jnp.zeros(1, x.dtype).at[table].add(x)[0], ones),
        row("`bincount` with weights", lambda x: jnp.bincount(table, x, length=1)[0], ones),
        row("a BCOO product", lambda x: bcoo(x)[0], ones),
        gradient(f"{MANY:,} ones", "the gradient of a gather", lambda w: w[table], [1.0]),
        *(
            Row(
                f"{first:,} and seven ones", f"`psum`, {dtype}", partial(over_devices, dtype, first)
            )
            for dtype, first in {"float16": 2048, "bfloat16": 256}.items()
        ),
    ]


PSUM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), "d")
add = jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
print(float(jax.jit(add)(jnp.asarray([{}] + 7 * [1.0], "{}"))[0]))
"""


def over_devices(dtype: str, first: float) -> float:
    """Adds one number on each of eight devices of a CPU, in a process of its own."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PSUM.format(first, dtype)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


# --- Functions -------------------------------------------------------------------------------


def all_halves() -> np.ndarray:
    """Returns all finite float16 numbers."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return x[np.isfinite(x)]


def wrong(fun: Callable, exact: Callable) -> tuple[int, float]:
    """Counts the float16 arguments whose result is not the rounded exact one, and returns the
    largest relative error of a normal result."""
    x = all_halves()
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
        rounded = want.astype(np.float16)
        got = np.asarray(jax.jit(fun)(jnp.asarray(x)))
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        fine = (np.abs(want) > 2.0**-14) & (np.abs(want) < 65504)
        off = np.abs(got.astype(np.float64) - want)[fine] / np.abs(want[fine])
    return int((~same).sum()), float(off.max())


def functions() -> list[Row]:
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    known = {
        "`tanh`": (jnp.tanh, np.tanh),
        "`exp`": (jnp.exp, np.exp),
        "`sigmoid`": (jax.nn.sigmoid, sigmoid),
        "`silu`": (jax.nn.silu, lambda x: x * sigmoid(x)),
        "`x**3`": (lambda x: x**3, lambda x: x**3),
        "`exp2`": (jnp.exp2, np.exp2),
    }
    rows = []
    for name, (fun, exact) in known.items():

        def count(fun=fun, exact=exact, cast=False):
            wide = lambda x: autocast(fun, "float16")(x.astype(jnp.float32)).astype(F16)
            n, off = wrong(wide if cast else fun, exact)
            return f"{n:,} wrong, off by up to {off:.2g}"

        rows.append(Row("63,488 arguments", name, count, partial(count, cast=True)))
    at = lambda name, fun, x: gradient("gradients", f"`{name}` at {x}", fun, float(x))
    rows += [at("gelu", jax.nn.gelu, x) for x in (147, 148)]
    return [*rows, at("squareplus", jax.nn.squareplus, 32760), at("sinc", jnp.sinc, 20856)]


# --- Draws, norms, optimizers ----------------------------------------------------------------


def draws() -> list[Row]:
    def normal(dtype):
        x = np.asarray(jax.random.normal(jax.random.key(0), (2**20,), dtype), np.float64)
        return f"{len(np.unique(x)):,} values, mean {x.mean():.4f}, largest {x.max():.2f}"

    ours = lambda: normal(jnp.float32)
    return [
        Row(
            "draws",
            f"`random.normal`, {d.__name__}",
            partial(normal, d),
            ours,
            "float32, as layers draw",
        )
        for d in (BF16, F16)
    ]


def reductions() -> list[Row]:
    row = partial(both, "large values")
    return [
        row("`optax.safe_norm` of 300s", lambda x: optax.safe_norm(x, 0), np.full(8, 300.0)),
        row("`linalg.norm` of 300s", jnp.linalg.norm, np.full(8, 300.0)),
        row("`var` of ±300", jnp.var, np.tile([300.0, -300.0], 8)),
        row(
            "`cosine_similarity` of 300s",
            lambda x: optax.cosine_similarity(x, x),
            np.full(8, 300.0),
        ),
        row("`standardize` of 300, 600", jax.nn.standardize, [300.0, 600.0, 300.0, 600.0]),
        row("`cross` of 300s", lambda x: jnp.cross(x, x), np.full(3, 300.0)),
        row("`median` of two 60,000s", jnp.median, [60000.0, 60000.0]),
        row("`logsumexp` of 1, 2", lambda x: jax.nn.logsumexp(x), [1.0, 2.0]),
        row("`mean` of 60,000s", jnp.mean, np.full(64, 60000.0)),
    ]


def optimizers() -> list[Row]:
    def adam(gradient, dtype=F16):
        optimizer = optax.adam(1e-3)
        params = jnp.ones((), dtype)
        updates, _ = optimizer.update(jnp.asarray(gradient, dtype), optimizer.init(params), params)
        return updates

    def ours(gradient):
        with jax.numpy_dtype_promotion("standard"):
            params, optimizer = jnp.float32(1.0), optax.adam(1e-3)
            new, _ = mpx.optimizer_update(
                params, optimizer, optimizer.init(params), jnp.float32(gradient), jnp.bool_(True)
            )
        return new - params

    def clipped(dtype):
        clip: Any = optax.clip_by_global_norm(1.0)
        return clip.update(jnp.asarray([300.0, 400.0], dtype), clip.init(None))[0]

    def averaged(dtype):
        return jax.lax.fori_loop(
            0,
            10_000,
            lambda _, m: (0.999 * m + 0.001 * jnp.ones((), dtype)).astype(dtype),
            jnp.zeros((), dtype),
        )

    rows = [
        Row(
            "optimizers",
            f"adam's first update, gradient {g:g}",
            partial(adam, g),
            partial(ours, g),
            "float32 state",
        )
        for g in (1e-3, 0.0, 300.0)
    ]
    rows.append(
        Row(
            "optimizers",
            "`clip_by_global_norm` of 300, 400",
            partial(clipped, F16),
            partial(clipped, jnp.float32),
            "float32 gradients",
        )
    )
    rows += [
        Row(
            "optimizers",
            f"an EMA of ones, 0.999, {d.__name__}",
            partial(averaged, d),
            partial(averaged, jnp.float32),
            "float32 state",
        )
        for d in (F16, BF16)
    ]
    return rows


# --- Products --------------------------------------------------------------------------------


def products() -> list[Row]:
    key = jax.random.split(jax.random.key(0))
    a, b = (np.asarray(jax.random.normal(k, (256, 256)), np.float32) for k in key)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    off = lambda c: (
        f"{np.linalg.norm(np.asarray(c, np.float64) - exact) / np.linalg.norm(exact):.1e}"
    )

    def preset(name):
        algorithm = getattr(jax.lax.DotAlgorithmPreset, name)
        return off(jax.jit(lambda a, b: jnp.matmul(a, b, precision=algorithm))(a, b))

    def ours(name):
        return off(autocast(jnp.matmul, name)(jnp.asarray(a), jnp.asarray(b)))

    here = {
        "BF16_BF16_F32": "bfloat16",
        "BF16_BF16_F32_X3": "bfloat16_x3",
        "BF16_BF16_F32_X6": "bfloat16_x6",
        "BF16_BF16_F32_X9": "bfloat16_x9",
        "TF32_TF32_F32": "tensorfloat32",
        "F16_F16_F16": "float16",
    }
    rows = [
        Row(
            "float32 products, error",
            f"`{n}`",
            partial(preset, n),
            partial(ours, d),
            f"autocast, {d}",
        )
        for n, d in here.items()
    ]

    def fastest():
        with jax.default_matmul_precision("fastest"):
            return off(jnp.asarray(a) @ jnp.asarray(b))

    return [*rows, Row("float32 products, error", '`default_matmul_precision("fastest")`', fastest)]


# --- Formats ---------------------------------------------------------------------------------


def formats() -> list[Row]:
    def between(dtype, bits):
        """Rounds a float64 just above the middle of two halves: up, if it is rounded once."""
        with jax.enable_x64(True):
            x = jnp.asarray(1 + 2.0**-bits + 2.0**-40, jnp.float64)
            y = float(jax.jit(lambda x: x.astype(dtype).astype(jnp.float64))(x))
        return "once" if y > 1 else "twice"

    tiny = np.float32(2.0**-140)
    small = np.float32(2.0**-20)
    return [
        Row("formats", "float64 → float16 rounds", partial(between, F16, 11)),
        Row("formats", "float64 → bfloat16 rounds", partial(between, BF16, 8)),
        Row(
            "formats",
            "`ldexp(2^-140, 100)`, exact 9.09e-13",
            lambda: jnp.ldexp(jnp.asarray(tiny), 100),
        ),
        Row(
            "formats",
            "`astype(float16)` of 2^-20, exact 9.54e-07",
            lambda: jnp.asarray(small).astype(F16).astype(jnp.float32),
        ),
        Row(
            "formats",
            "`reduce_precision(5, 10)` of 2^-20",
            lambda: jax.lax.reduce_precision(jnp.asarray(small), 5, 10),
        ),
        Row(
            "formats",
            "float16 `arange(4096)`, different values",
            lambda: len(np.unique(np.asarray(jnp.arange(4096, dtype=F16)))),
        ),
    ]


def transforms() -> list[Row]:
    x = np.ones((8, 8), np.float32)
    rows = []
    for name in ("fft", "ifft", "fft2", "fftn", "irfft", "rfft", "rfft2", "ihfft"):
        fun = getattr(jnp.fft, name)
        at = x if name.endswith(("2", "n")) else x[0]
        kind = lambda fun=fun, at=at: str(fun(jnp.asarray(at, F16)).dtype)
        cast = lambda fun=fun, at=at: str(autocast(fun, "float16")(jnp.asarray(at)).dtype)
        rows.append(Row("transforms of float16", f"`{name}`", kind, cast))
    return rows


# --- Checks ----------------------------------------------------------------------------------


def check_rows() -> list[Row]:
    square = lambda x: x * x

    def by_checkify():
        error, _ = checkify.checkify(jax.jit(square), errors=checkify.float_checks)(
            jnp.asarray(300, F16)
        )
        return "reports" if error.get() else "reports nothing"

    def by_debug(name):
        with getattr(jax, name)(True):
            try:
                jax.block_until_ready(jax.jit(square)(jnp.asarray(300, F16)))
            except FloatingPointError:
                return "raises"
        return "passes"

    def ours():
        report = mpx.range_report(square)(jnp.float32(300.0))
        return "reports" if "overflow" in str(report).lower() else "reports nothing"

    return [
        Row("an overflow, 300²", "`checkify.float_checks`", by_checkify, ours, "`range_report`"),
        Row("an overflow, 300²", "`debug_infs`", partial(by_debug, "debug_infs")),
        Row("an overflow, 300²", "`debug_nans`", partial(by_debug, "debug_nans")),
    ]


# --- Solvers ---------------------------------------------------------------------------------


def solvers() -> list[Row]:
    try:
        import diffrax
        import lineax
        import optimistix
    except ImportError:
        return []
    matrix = np.asarray([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
    right = np.asarray([1.0, 2.0, 3.0])
    exact = np.linalg.solve(matrix, right)

    def linear(name, dtype):
        solver = getattr(lineax, name)(rtol=1e-2, atol=1e-2)
        operator = lineax.MatrixLinearOperator(
            jnp.asarray(matrix, dtype), lineax.positive_semidefinite_tag
        )
        x = lineax.linear_solve(operator, jnp.asarray(right, dtype), solver).value
        off = np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)
        return f"error {off:.0e}"

    def minimum(name, dtype):
        solver = getattr(optimistix, name)(rtol=1e-3, atol=1e-3)
        bowl = lambda x, _: jnp.sum(
            (x - jnp.asarray([1.0, 2.0], x.dtype)) ** 2 * jnp.asarray([1.0, 10.0], x.dtype)
        )
        found = optimistix.minimise(bowl, solver, jnp.zeros(2, dtype), throw=False)
        success = found.result == optimistix.RESULTS.successful
        off = np.abs(np.asarray(found.value, np.float64) - [1, 2]).max()
        return f"{'success' if success else 'failure'}, off by {off:.1g}"

    def squares(name, dtype):
        solver = getattr(optimistix, name)(rtol=1e-3, atol=1e-3)
        residual = lambda x, _: x - jnp.asarray([1.0, 2.0], x.dtype)
        found = optimistix.least_squares(residual, solver, jnp.zeros(2, dtype), throw=False)
        off = np.abs(np.asarray(found.value, np.float64) - [1, 2]).max()
        return f"off by {off:.1g}"

    def ode():
        term = diffrax.ODETerm(lambda t, y, args: -y)
        y0 = jnp.ones((), F16)
        found: Any = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.1, y0)
        return str(found.ys.dtype)

    rows = [
        Row("solvers", f"lineax `{n}`, {d.__name__}", partial(linear, n, d))
        for n in ("CG", "BiCGStab", "GMRES")
        for d in (F16, BF16)
    ]
    rows += [
        Row("solvers", f"optimistix `BFGS`, {d.__name__}", partial(minimum, "BFGS", d))
        for d in (F16, BF16)
    ]
    rows += [
        Row("solvers", f"optimistix `{n}`, float16", partial(squares, n, F16))
        for n in ("LevenbergMarquardt", "Dogleg")
    ]
    return [*rows, Row("solvers", "diffrax `Euler` from float16 returns", ode)]


# --- Files -----------------------------------------------------------------------------------


def files() -> list[Row]:
    def through(save: Callable, load: Callable | None, dtype: Any) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "x")
            save(path, np.ones(2, dtype))
            if load is None:  # Equinox asks for what it is to return
                like: Any = jax.ShapeDtypeStruct((2,), dtype)
                back: Any = eqx.tree_deserialise_leaves(path, like)
                return f"returns {back.dtype}"
            return f"returns {np.asarray(load(path)).dtype}"

    def mat(path):
        return scipy.io.loadmat(path)["x"]

    def netcdf(path, x):
        with scipy.io.netcdf_file(path, "w") as file:
            file.createDimension("n", len(x))
            file.createVariable("x", x.dtype, ("n",))[:] = x

    kinds: dict[str, tuple[Callable, Callable | None]] = {
        "a MAT file": (lambda p, x: scipy.io.savemat(p, {"x": x}, appendmat=False), mat),
        "NetCDF by SciPy": (netcdf, lambda path: path),
        "`numpy.save`": (lambda p, x: np.save(f"{p}.npy", x), lambda p: np.load(f"{p}.npy")),
        "Equinox": (
            lambda p, x: eqx.tree_serialise_leaves(p, jnp.asarray(x)),
            None,
        ),
    }
    formats = {"float16": np.float16, "bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn}
    return [
        Row("files", f"{name} in {kind}", partial(through, save, load, dtype))
        for kind, (save, load) in kinds.items()
        for name, dtype in formats.items()
    ]


GROUPS = (
    sums,
    functions,
    draws,
    reductions,
    optimizers,
    products,
    formats,
    transforms,
    check_rows,
    solvers,
    files,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--groups", nargs="+", help="by default all: " + ", ".join(g.__name__ for g in GROUPS)
    )


def run(report: Report, args: argparse.Namespace) -> None:
    report.name = f"halves-jax{'_'.join(version('jax').split('.')[:2])}"
    for group in GROUPS:
        if args.groups is None or group.__name__ in args.groups:
            for row in group():
                mode = row.mode if row.ours else None
                found = {"in_half": done(row.plain), "here": done(row.ours), "mode": mode}
                report.record("rows", group=row.group, what=row.what, **found)
                print(
                    f"{row.group} | {row.what} | {found['in_half']} | {found['here']} ({mode})",
                    flush=True,
                )
