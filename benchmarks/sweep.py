"""Finds what is wrong in half and not told, for each function of JAX that takes a real array.

Each function of `jax.numpy`, `jax.nn`, `jax.scipy.special` and `jax.lax` is a loss, in float16 and
bfloat16, in each mode of the library, at numbers of several sizes. Value and gradient are compared
with float64. The outcome is one of:

- right: within 16 roundings of the format, relative to the norm, or nearly as close as float32;
- told: a warning, an error, a step that is not finite, or a gradient that is counted as vanished;
- silent: wrong, and nothing says so.

Inputs are exact in both formats, so what is off is the function's own arithmetic. Programs are
traced as they are in a training, and evaluated operation by operation (by `tests/by_numpy.py`), for
compiling the many small ones would take hours. What is silently wrong then is compiled, and counts
if it is so again.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx
from tests import by_numpy

from ._functions import Function, distinct, function, names, traced
from ._report import Report


HALVES = ("float16", "bfloat16")
MODES = ("cast", "autocast", "forward", "partials")
LONG = 5000
"""The length of a long sum: more terms than either format has units."""

SCALING = mpx.DynamicLossScaling()

ROUNDINGS = 16
"""Most functions round fewer times, one after the other."""

POWERS = {
    "ordinary": dict.fromkeys(HALVES, 0),
    "hundreds": dict.fromkeys(HALVES, 8),
    "near the largest": {"float16": 15, "bfloat16": 126},
    "near the smallest": {"float16": -18, "bfloat16": -115},
}
SIZES = (*POWERS, "ties", "long")
SUMS = ("reduce_", "cum", "dot_general", "scatter", "conv", "scan", "while", "sort", "fft")
"""Programs without any of these are of one entry each, and a long argument says nothing new."""

TIES = (
    np.asarray([1, 1, -1, -1, 0, 0, 1.5, 1.5], np.float32),
    np.asarray([1, -1, 1, -1, 0, 1, 1.5, 0], np.float32),
)

# Where a function is not defined, its argument is moved into its domain.
DOMAINS: tuple[Callable, ...] = (
    lambda x: x,
    lambda x: np.abs(x),
    lambda x: np.abs(x) / 4,
    lambda x: 1 + np.abs(x),
    lambda x: 2 + np.abs(x),
)


class Outcome(NamedTuple):
    """The outcome of a call: the status, what was off, and by how much."""

    status: str
    what: str = ""
    error: float = 0.0


def arrays_of(f: Function, size: str, half: str) -> tuple[np.ndarray, ...] | None:
    """Returns the arguments of a size, or `None` if the function has none of it."""
    if size in POWERS:
        return tuple(x * np.float32(2.0 ** POWERS[size][half]) for x in f.arrays())
    if f.matrix:
        return None
    if size == "ties":
        return tuple(x[: f.arrays()[0].size] for x in TIES[: 1 + f.companion])
    # `jnp.poly` has an equation for each number.
    if f.series or len({program_size(f, n) for n in (48, 96)}) > 1:
        return None
    long = tuple(np.ones(LONG, np.float32) for _ in f.arrays())
    program = traced(f.call, long) or ""
    # Outer products and convolutions with a long kernel say nothing new, and take long.
    square = f"{LONG},{LONG}" in program or (f.companion and "conv_general" in program)
    return long if any(name in program for name in SUMS) and not square else None


def program_size(f: Function, n: int) -> int:
    """Returns the number of lines of the program for arguments of `n` numbers."""
    arrays = tuple(np.ones(n, np.float32) for _ in f.arrays())
    return (traced(f.call, arrays) or "").count("\n")


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """Returns numbers of different sizes and signs, exact in each format."""
    return np.resize(np.asarray([1, -0.5, 0.75, 1.25, -1.5, 0.625, -0.875], np.float32), shape)


def parts(out: Any) -> list[Any]:
    """Returns the real arrays of a result."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(out)]
    split = lambda x: [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part for x in leaves for part in split(x)]


def combined(found: list[Any], dtype: Any) -> Any:
    """Returns one number from all floating-point results."""
    floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
    # Sums of a long result that only this benchmark takes: those of a scan, for example.
    terms = [jnp.sum(x.astype(dtype) * weights(x.shape).astype(dtype)) for x in floats]
    return sum(terms, jnp.zeros((), dtype))


def loss_of(f: Function, dtype: Any) -> Callable:
    def loss(x, *rest):
        found = parts(f.call(x, *rest))
        return combined(found, dtype), found

    return loss


class Evaluated:
    """Traces a function once for each shape, and evaluates it operation by operation, or compiles
    it."""

    def __init__(self, function: Callable, dtype: str = "float32", compiled: bool = False):
        self.function, self.wide = function, dtype == "float64"
        self.dtype, self.compiled, self.known = dtype, compiled, {}

    def __call__(self, *arrays: np.ndarray) -> Any:
        with jax.enable_x64(self.wide):
            given = [np.asarray(x, self.dtype) for x in arrays]
            if self.compiled:
                return jax.device_get(jax.jit(self.function)(*map(jnp.asarray, given)))
            shapes = tuple(x.shape for x in given)
            if shapes not in self.known:
                made = jax.make_jaxpr(self.function, return_shape=True)(*map(jnp.asarray, given))
                self.known[shapes] = made
            closed, shape = self.known[shapes]
            found = by_numpy.evaluate(closed, given)
            return jax.tree.unflatten(jax.tree.structure(shape), found)


def plain(f: Function, dtype: str, compiled: bool = False) -> Callable:
    """Builds the value and the gradient in plain JAX."""

    def run(*arrays):
        (_, found), grads = jax.value_and_grad(loss_of(f, dtype), has_aux=True)(*arrays)
        return found, grads

    return Evaluated(run, dtype, compiled)


def ours(f: Function, mode: str, half: str, compiled: bool = False) -> Callable:
    """Builds the same in a mode, with whether the step counts."""
    policy = f"params=float32,compute={half},output=float32"
    options: dict[str, Any] = {
        "cast": {},
        "autocast": {"autocast": True},
        "forward": {"forward": "float32"},
    }[mode]

    def run(scale, *arrays):
        scaling = eqx.tree_at(lambda s: s.loss_scaling, SCALING, scale)
        step = mpx.filter_value_and_grad(
            loss_of(f, jnp.float32), scaling, has_aux=True, policy=policy, **options
        )
        (_, found), scaling, finite, grads = step(*arrays)
        return found, grads, finite & (scaling.vanished_steps == 0)

    evaluated = Evaluated(run, compiled=compiled)

    def call(*arrays):
        for scale in (2.0**10, 1.0):  # as a training comes to it
            found, grads, counts = evaluated(np.asarray(scale, np.float32), *arrays)
            if counts:
                break
        return found, grads, bool(counts)

    return call


# --- Derivatives by `partials` ---------------------------------------------------------------

TERMS = ("", "a", "aa", "ab")


def through_products(f: Function, x: Any, rest: tuple) -> Callable:
    """Makes a function of two coordinates at (1, 1), whose argument comes from a product."""
    first = np.arange(x.size) % 2 == 0
    rows = jnp.stack([jnp.where(first, x.ravel(), 0), jnp.where(first, 0, x.ravel())])
    same = np.eye(x.size, dtype=np.float32) if x.size < 100 else None

    def u(p):
        h = p @ rows
        h = h if same is None else h @ same.astype(h.dtype)
        return combined(parts(f.call(h.reshape(x.shape), *rest)), h.dtype)

    return u


def plain_terms(f: Function, dtype: str, compiled: bool = False) -> Callable:
    along = lambda u, k: lambda p: jax.jvp(u, (p,), (jnp.eye(2, dtype=p.dtype)[k],))[1]

    def run(x, *rest):
        u, p = through_products(f, x, rest), jnp.ones(2, x.dtype)
        a = along(u, 0)
        return [u(p)], jnp.stack([g(p) for g in (a, along(a, 0), along(a, 1))])

    return Evaluated(run, dtype, compiled)


def our_terms(f: Function, mode: str, half: str, compiled: bool = False) -> Callable:
    def run(x, *rest):
        names = [f"u_{t}".rstrip("_") for t in TERMS]
        named = {"coords": "ab", "outputs": "u", "dtype": half}
        found = mpx.partials(through_products(f, x, rest), names, **named)(jnp.ones(2))
        return [found["u"]], jnp.stack([found[name] for name in names[1:]])

    evaluated = Evaluated(run, compiled=compiled)
    return lambda *arrays: (*evaluated(*arrays), True)


# --- Outcomes --------------------------------------------------------------------------------


def norm(x: Any) -> float:
    """Returns the norm, also of numbers whose squares overflow."""
    x = np.asarray(x, np.float64)
    top = float(np.max(np.abs(x), initial=0.0))
    return top * float(np.linalg.norm(x / top)) if 0 < top < np.inf else top


def off(got: Any, want: Any, half: str, scale: float = 0.0) -> float:
    """Returns the error in roundings of the format, relative to the norm, or to `scale` if the norm
    vanishes beside it. Numbers below the smallest normal one are zero."""
    format = jnp.finfo(half)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if want.size == 0 or np.array_equal(got, want, equal_nan=True):
        return 0.0
    known = np.isfinite(want)
    # What is infinite in the format may be infinite: the caller judges whether it is told.
    if not np.array_equal(np.isnan(got), np.isnan(want)) or not known.any():
        return np.inf
    with np.errstate(all="ignore"):
        least = float(format.smallest_normal) * np.sqrt(want.size)
        error = norm((got - want)[known])
        unit = float(format.eps) / 2
        size = norm(want[known])
        size = size if size > 1e-6 * scale else scale
        return float(max(0.0, error - least) / (unit * max(size, 1e-300)))


def errors(got: tuple, want: tuple, x: np.ndarray, half: str) -> dict[str, float]:
    """Returns the errors of values and of derivatives by `x`."""
    pairs = list(zip(got[0], want[0], strict=True))
    slope = sum(norm(y) for _, y in pairs) / max(norm(x), 1e-300)
    return {
        "value": max((off(x, y, half) for x, y in pairs), default=0.0),
        "derivative": off(got[1], want[1], half, slope),
    }


def judged(
    run: Callable, arrays: tuple, exact: tuple, single: tuple, warned: bool, half: str
) -> tuple[Outcome, bool]:
    """Returns the outcome of a call, and whether the library has warned of it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            got = run(*arrays)
        except Exception as error:  # an error is an outcome
            return Outcome("raised", type(error).__name__), warned
    warned = warned or any(issubclass(w.category, mpx.PrecisionWarning) for w in told)
    found, full = (errors(y, exact, arrays[0], half) for y in (got, single))
    bad = {k: e for k, e in found.items() if not e <= max(ROUNDINGS, 4 * full[k])}
    if not bad:
        return Outcome("right"), warned
    finite = all(np.all(np.isfinite(np.asarray(x, np.float64))) for x in (*got[0], got[1]))
    # A result that is infinite or undefined tells by itself who looks at it.
    status = "told" if warned or not got[2] else "silent" if finite else "infinite"
    return Outcome(status, " and ".join(bad), next(iter(bad.values()))), warned


def domain(f: Function, size: str, half: str, exact: Callable) -> tuple | None:
    """Returns arguments at which the function is defined, and its results in float64."""
    arrays = arrays_of(f, size, half)
    for inside in DOMAINS if arrays else ():
        moved = tuple(map(inside, arrays or ()))
        try:
            want = exact(*moved)
        except Exception:  # the function has no derivative, or not this shape
            return None
        if all(np.all(np.isfinite(x)) for x in (*want[0], want[1])):
            return moved, want
    return None


def outcomes(f: Function, modes: Any = MODES, halves: Any = HALVES) -> Iterator[tuple]:
    """Yields mode, format, size and outcome of all calls of a function."""
    for plainly, by_library in ((plain, ours), (plain_terms, our_terms)):
        chosen = [m for m in modes if (m == "partials") == (by_library is our_terms)]
        exact, single = plainly(f, "float64"), plainly(f, "float32")
        for half in halves if chosen else ():
            runs = {mode: by_library(f, mode, half) for mode in chosen}
            warned = dict.fromkeys(runs, False)
            for size in SIZES:
                found = domain(f, size, half, exact)
                if found is None:
                    continue
                arrays, want = found
                full = single(*arrays)
                for mode, run in runs.items():
                    outcome, told = judged(run, arrays, want, full, warned[mode], half)
                    if outcome.status == "silent":
                        again = by_library(f, mode, half, compiled=True)
                        full = plainly(f, "float32", compiled=True)(*arrays)
                        outcome, told = judged(again, arrays, want, full, warned[mode], half)
                    # A warning comes when a shape is traced, and long arguments have their own.
                    warned[mode] = told and size != "long"
                    yield mode, half, size, outcome


def rows_of(name: str, modes: tuple[str, ...] = MODES, halves: Any = HALVES) -> list[dict]:
    """Returns the outcomes of one function as records."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = list(outcomes(function(name), modes, halves))
    keys = "mode", "half", "size"
    return [{**dict(zip(keys, at, strict=True)), **one._asdict()} for *at, one in found]


LETTERS = {"right": "r", "told": "t", "infinite": "i", "raised": "e", "silent": "s"}


def letters(rows: list[dict]) -> dict[str, str]:
    """Returns for each mode and format the `LETTERS` of the outcomes, one for each of `SIZES`.

    A dash stands for a size that the function does not have.
    """
    known = {(r["mode"], r["half"], r["size"]): LETTERS[r["status"]] for r in rows}
    pairs = dict.fromkeys((r["mode"], r["half"]) for r in rows)
    return {f"{m} {h}": "".join(known.get((m, h, size), "-") for size in SIZES) for m, h in pairs}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--functions", nargs="+", help="names such as `jnp.sum`; by default all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--label", help="a word for the file, to keep an earlier one")
    parser.add_argument("--resume", action="store_true", help="keep the rows of earlier runs")


def run(report: Report, args: argparse.Namespace) -> None:
    report.name = f"sweep_{args.label}" if args.label else "sweep"
    if args.resume:
        report.resume("functions", "found", "before", "programs")
    for section in ("functions", "found", "before"):  # `before`: what was silent in an earlier run
        report.sections.setdefault(section, [])
    if unknown := {*(args.functions or ())} - {*names()}:
        raise SystemExit(
            f"There is no function {', '.join(sorted(unknown))}. Names are as `jnp.sum`, "
            "`nn.gelu`, `special.gammainc`, `lax.tanh`."
        )
    groups = distinct(args.functions or names())
    if not args.functions or "programs" not in report.sections:
        report.sections["programs"] = [{"all": len(groups)}]
    asked = list(groups)[: 8 if args.quick else None]
    chosen = [name for name in asked if not report.has("functions", function=name)]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for name, rows in zip(chosen, pool.map(rows_of, chosen, repeat(args.modes)), strict=True):
            report.record("functions", function=name, names=1 + len(groups[name]), **letters(rows))
            for row in rows:
                if row["status"] in ("silent", "raised"):
                    row["error"] = float(f"{row['error']:.2g}") if row["error"] < 1e300 else None
                    report.record("found", function=name, **row)
                    print(name, *row.values(), flush=True)
            report.save()
