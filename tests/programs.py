"""Judges random programs, in the style of users, against plain JAX in float64.

```
python -m tests.programs --seconds 600 --seed 0 --mode partials laplacian
```

A program is Python source with one statement per line, drawn from templates in
`program_drawing`. `program_modes` lists the requests to the library. The tolerance is the
program's own condition: the change of the oracle when inputs, weights, and results of all
statements and operations, also of derivatives, are multiplied by 1 ± one rounding.
"""

import argparse
import dataclasses
import functools as ft
import os
import re
import sys
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

from compilation import quick_flags


if "jax" not in sys.modules:
    flags = f"{quick_flags()} --xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import program_functions as functions
from program_drawing import Program, draw_program, standard
from program_modes import MODES
from program_rounding import Rounding, format_of, rounded

import mpx_pde as mpx


DRAWS = 5
"""The number of perturbations of a program. The largest change counts."""

MORE_DRAWS = 40
"""The number of perturbations before a program is called wrong."""

FACTOR = 3.0
"""The tolerance relative to the largest change. Five random draws may all cancel by some factor, a
sum rounds more than once inside, and an engine may add its terms in another order."""

PLAIN = 4.0
"""An error within this factor of plain JAX's is never a failure of the library. Plain JAX runs in
float32 or, if the library is asked to cast a program, with a cast by hand."""

DECIDES = 0.25
"""A tolerance above this share of a leaf decides nothing. For example, `mod` of rounded data may be
any number, and five draws of it may be far from a sixth."""


# --- Judging -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    mode: str
    program: Program
    options: dict

    @property
    def compiled(self):
        """Returns whether XLA runs the library. NumPy evaluates the traced program otherwise."""
        return _hash(self.program) % 8 == 0

    def inputs(self, dtype):
        o, half = self.options, self.options.get("half")
        weights = self.program.weights
        if half and "gradient" not in o:  # cast before the library is called
            weights = [np.float64(np.asarray(x).astype(jnp.dtype(half))) for x in weights]
        cast = lambda x: jax.device_put(np.asarray(x, dtype))
        return [cast(x) for x in weights], [cast(x) for x in self.program.inputs.values()]


@dataclasses.dataclass(frozen=True)
class Verdict:
    status: str
    ratio: float = 0.0
    leaf: str = ""
    error: float = 0.0
    tolerance: float = 0.0
    plain: float = float("nan")
    message: str = ""

    @property
    def failed(self):
        return self.status in ("wrong", "raised")


def _exact(case, draws):
    """Returns the oracle and its value in each draw, stacked along a leading axis, by leaf."""
    mode, o, program = MODES[case.mode], case.options, case.program
    units = mode.units(o)
    rng = np.random.default_rng(_hash(program))
    found = {}
    with standard(), jax.enable_x64(True):
        args = case.inputs(jnp.float64)
        f = program.function(rounded, mode.wide and program.kind == "point")
        before, functions.rounded = functions.rounded, rounded
        try:
            run = lambda w, inputs: _ask(mode.exact, f, w, inputs, o)
            closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
        finally:
            functions.rounded = before
        evaluate = ft.partial(by_numpy.evaluate, closed, jax.tree.leaves(args))
        exact = evaluate()
        for pair in dict.fromkeys(units.values()):
            values = [exact, *(evaluate(Rounding(rng, *pair)) for _ in range(draws))]
            words = {word for word, units_of in units.items() if units_of == pair}
            leaves = jax.tree.unflatten(jax.tree.structure(shape), zip(*values, strict=True))
            for name, xs in leaves.items():
                if re.match(r"[a-z]+", name)[0] in words:
                    found[name] = np.stack([np.float64(x) for x in xs])
    return found


def _hash(program):
    return zlib.crc32(program.source().encode())


def _ask(run, f, w, inputs, o):
    """Calls a function from the table of modes."""
    return run(f, w, *inputs, o=o)


def _dtype(case):
    return jnp.float64 if MODES[case.mode].wide and case.program.kind == "point" else jnp.float32


def _plain(case, dtype=None):
    """Runs plain JAX in float32, or in `dtype` for the arrays that a user would cast."""
    mode = MODES[case.mode]
    with standard(), jax.enable_x64(mode.wide):
        w, inputs = case.inputs(_dtype(case))
        if dtype:
            w = mpx.cast_tree(w, dtype)
            kept = case.program.kind == "point" or case.options["gradient"].get("keep_full")
            inputs = inputs if kept else mpx.cast_tree(inputs, dtype)
        run = lambda w, inputs: _ask(mode.exact, case.program.function(), w, inputs, case.options)
        return {k: np.float64(x) for k, x in by_numpy.called(run, w, inputs).items()}


def _plain_turned(case):
    """Runs plain JAX, or a cast by hand, with derivative directions in each cyclic order."""
    o = case.options
    cast = o["half"] if case.mode == "cast" else None
    orders = [len(dirs) for s in o.get("sums", {}).values() for dirs, _ in s]
    turns = range(max([1, *orders]))
    return [_plain(dataclasses.replace(case, options={**o, "turn": k}), cast) for k in turns]


def _library(case):
    mode = MODES[case.mode]
    with standard(), jax.enable_x64(mode.wide):
        w, inputs = case.inputs(_dtype(case))
        run = lambda w, inputs: _ask(mode.library, case.program.function(), w, inputs, case.options)
        found = run(w, inputs) if case.compiled else by_numpy.called(run, w, inputs)
        return {k: np.asarray(x) for k, x in found.items()}


def _told(error):
    return isinstance(error, (ValueError, TypeError)) and re.search(r"`[a-z_]+`", str(error))


def judge(case):
    """Returns the verdict on a case. It is `"redraw"` if the oracle has no answer."""
    try:
        exact = _finite(_exact(case, DRAWS))
    except Exception as error:
        return Verdict("redraw", message=f"oracle: {type(error).__name__}: {error}")
    if not exact:
        return Verdict("redraw", message="not finite")
    try:
        got = _library(case)
    except Exception as error:
        try:
            _plain(case)
        except Exception:
            return Verdict("redraw", message="plain JAX raises")
        shown = f"{type(error).__name__}: {str(error)[:400]}"
        if case.options.get("half"):
            try:
                _plain(case, case.options["half"])
            except Exception:
                return Verdict("told", message="plain JAX in half raises")
        if _told(error):
            return Verdict("told", message=shown)
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict("raised", message=f"{shown} ({Path(where.filename).name}:{where.lineno})")
    if not got.pop("finite", True):
        return Verdict("told", message="grads_finite is False")
    verdict = _compared(case, exact, got)
    if verdict.status == "wrong":
        exact = _finite(_exact(case, MORE_DRAWS))
        verdict = _compared(case, exact, got) if exact else Verdict("redraw", message="not finite")
    return verdict


def _finite(exact):
    """Returns the leaves that are finite. A term at a singularity says nothing about the others."""
    return {k: x for k, x in exact.items() if np.all(np.isfinite(x))}


def _compared(case, exact, got):
    units = MODES[case.mode].units(case.options)
    sizes = Counter()
    word = lambda name: name.partition("/")[0]
    for name, x in exact.items():
        sizes[word(name)] += float(np.sum(x[0] ** 2))
    plain, rows = None, []
    for name, x in exact.items():
        full, half, *_ = units[re.match(r"[a-z]+", name)[0]]
        size = float(np.linalg.norm(x[0]))
        group = np.sqrt(sizes[word(name)])
        y = got[name]
        assert y.shape == x[0].shape, (name, y.shape, x[0].shape)
        stored = format_of(y.dtype)
        change = max(float(np.linalg.norm(z - x[0])) for z in x[1:])
        tolerance = FACTOR * change + 4 * max(full.unit, stored.unit) * group
        tolerance += half.unit * group / 2 + 4 * stored.least * np.sqrt(y.size)
        error, missed = float(np.linalg.norm(y.astype(np.float64) - x[0])), np.nan
        if not error <= tolerance:
            try:
                plain = _plain_turned(case) if plain is None else plain
            except Exception as raised:
                return Verdict("redraw", message=f"plain JAX raises {raised}")
            missed = max(float(np.linalg.norm(p[name] - x[0])) for p in plain)
            if np.isfinite(missed):
                tolerance = max(tolerance, PLAIN * missed)
            elif not np.isfinite(error):
                return Verdict("redraw", message="plain float32 is not finite")
            beyond = np.max(np.abs(x[0])) > 1e3 and case.options.get("half") == "float16"
            if beyond and not np.isfinite(error):
                return Verdict("told", message="beyond float16")
        ratio = np.nan_to_num(error / tolerance, nan=np.inf, posinf=np.inf)
        rows.append((ratio, name, error, tolerance, missed / (size or 1), size))
    ratio, name, error, tolerance, missed, size = max(rows)
    relative = (error / (size or 1), tolerance / (size or 1), missed)
    if any(r > 1 and (t <= DECIDES * s or r > 4) for r, _, _, t, _, s in rows):
        return Verdict("wrong", ratio, name, *relative)
    # A leaf whose condition leaves no correct digit decides nothing.
    decided = ratio <= 1 and any(t <= DECIDES * s for _, _, _, t, _, s in rows if s)
    return Verdict("ok" if decided else "undecidable", ratio, name, *relative)


# --- Shrinking -----------------------------------------------------------------------------------


def _simpler(case):
    """Yields cases with fewer statements, terms or transformations."""
    program, o = case.program, case.options
    values = program.values()
    shape = lambda name: jnp.shape(eval(name, {}, dict(values)))
    if o["how"] not in ("call", "grad", "vmap"):
        yield dataclasses.replace(case, options={**o, "how": "vmap" if "sums" in o else "call"})
    lines, wanted = program.lines, shape(program.result)
    for k, (name, _) in enumerate(lines[:-1]):
        if wanted in ((), shape(name)):
            end = "{}" if wanted == shape(name) else "jnp.sum({} ** 2)"
            cut = *lines[: k + 1], ("v999", end.format(name))
            yield _with(case, lines=cut, result="v999")
    points = [f"q[{i}]" for i in range(values["q"].size)] if "q" in values else []
    for k in reversed(range(len(lines))):
        name, text = lines[k]
        for other in (*points, *program.inputs, *(n for n, _ in lines[:k])):
            if shape(other) == shape(name) and re.search(rf"\b{re.escape(other)}(?!\w)", text):
                swap = lambda t, a=name, b=other: re.sub(rf"\b{a}\b", b, t)
                rest = tuple((n, swap(t)) for n, t in lines[k + 1 :])
                yield _with(case, lines=lines[:k] + rest, result=swap(program.result))
    if len(o.get("sums", ())) > 1:
        for gone in o["sums"]:
            if gone not in o["operators"]:
                left = {k: v for k, v in o["sums"].items() if k != gone}
                yield dataclasses.replace(case, options={**o, "sums": left})


def _with(case, **changes):
    return dataclasses.replace(case, program=dataclasses.replace(case.program, **changes).pruned())


def shrunk(case, verdict, seconds=45.0):
    """Returns a smaller case that fails in the same way, and its verdict."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for smaller in _simpler(case):
            if time.monotonic() > end:
                break
            if not re.search(r"^v\d+$|^q", smaller.program.result) or not smaller.program.lines:
                continue
            new = judge(smaller)
            if new.status == verdict.status and (new.ratio > 2 or new.status == "raised"):
                case, verdict, found = smaller, new, True
                break
    return case, verdict


def signature(case, verdict):
    """Returns the identity of a failure: its kind and the operations of its statements."""
    texts = [re.sub(r"\b(v\d+|q|w\[\d+\]|\d+\.?\d*)\b\]?", "_", t) for _, t in case.program.lines]
    kind = verdict.message.split(":")[0] if verdict.status == "raised" else "wrong"
    return kind, tuple(sorted(texts))


def shown(case, verdict, seed):
    """Returns a failure as code that runs."""
    program, mode = case.program, MODES[case.mode]
    dtype = "float64" if mode.wide and case.program.kind == "point" else "float32"
    digits = ft.partial(np.array2string, separator=", ", threshold=sys.maxsize, max_line_width=100)
    literal = lambda x: f"jnp.array({digits(np.asarray(x, dtype))}, '{dtype}')"
    text = program.source()
    used = program.uses(text.split("\n", 1)[1])
    lines = [f"# {case.mode}, {seed}: {verdict.status} {verdict.leaf} {verdict.message}".rstrip()]
    if verdict.status == "wrong":
        lines.append(
            f"# relative to the leaf: error {verdict.error:.1e}, tolerance "
            f"{verdict.tolerance:.1e}, plain float32 {verdict.plain:.1e}"
        )
    lines.append("# Run it in the folder `tests`, with JAX's own settings.")
    lines += ["from program_functions import *", "from program_modes import MODES", ""]
    lines += ["jax.config.update('jax_enable_x64', True)"] if mode.wide else []
    lines += [f"w = [{', '.join(map(literal, program.weights))}]"]
    for name, x in program.inputs.items():
        value = literal(x) if name in used else "jnp.zeros(())"
        known = f"jnp.array(TABLE, '{dtype}')"
        lines.append(f"{name} = {known if name == 'table' and name in used else value}")
    call = f"({program.kind}, w, {', '.join(program.inputs)}, o={case.options!r})"
    lines += ["", text, "", f"print(MODES[{case.mode!r}].library{call})"]
    return "\n".join([*lines, f"print(MODES[{case.mode!r}].exact{call})"])


# --- Running -------------------------------------------------------------------------------------


def drawn(name, seed, k):
    """Returns program `k` of a seed for a mode, always the same, its verdict, and the redraws."""
    mode = MODES[name]
    for attempt in range(20):
        rng = np.random.default_rng([seed, k, attempt, zlib.crc32(name.encode())])
        with standard():
            o = mode.options(rng)
            with jax.enable_x64(True):
                program = draw_program(rng, mode, o)
        if program is None:
            continue
        case = Case(name, program, o)
        verdict = judge(case)
        if verdict.status != "redraw":
            return case, verdict, attempt
    return None, Verdict("redraw"), 20


def run(names, seed, *, seconds=None, count=None, start=0, shrink=True, say=print):
    """Judges programs in turn, one of each mode, and returns counts and failures by mode."""
    begin, k = time.monotonic(), start
    counts = {name: Counter() for name in names}
    worst, failures = dict.fromkeys(names, 0.0), {}
    going = lambda: seconds is None or time.monotonic() < begin + seconds
    while (count is None or k < start + count) and going():
        for name in names:
            case, verdict, redrawn = drawn(name, seed, k)
            counts[name].update({verdict.status: 1, "programs": 1, "redrawn": redrawn})
            if verdict.failed:
                if shrink:
                    case, verdict = shrunk(case, verdict)
                key = signature(case, verdict)
                failures.setdefault(key, []).append((case, verdict, f"seed {seed} program {k}"))
                if len(failures[key]) == 1:
                    say(shown(*failures[key][0]) + "\n", flush=True)
            elif verdict.status == "ok":
                worst[name] = max(worst[name], verdict.ratio)
        k += 1
        if k % 100 == 0:
            jax.clear_caches()
            say(f"after {time.monotonic() - begin:.0f} s\n{table(counts, worst)}\n", flush=True)
    return counts, worst, failures


def table(counts, worst):
    head = ("mode", "programs", "ok", "undecidable", "told", "wrong", "raised", "redrawn")
    shown = "{:18}{:>10}{:>6}{:>13}{:>6}{:>7}{:>8}{:>9}".format
    rows = [shown(*head) + "  ratio"]
    for name, c in counts.items():
        rows.append(shown(name, *(c[h] for h in head[1:])) + f"{worst[name]:7.2f}")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--count", type=int, default=None, help="programs of each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first program")
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    if args.seconds is None and args.count is None:
        args.seconds = 60.0
    given = {"seconds": args.seconds, "count": args.count, "start": args.start}
    counts, worst, failures = run(args.mode, args.seed, **given, shrink=not args.no_shrink)
    print(table(counts, worst))
    by = Counter({key: len(cases) for key, cases in failures.items()})
    for (kind, texts), n in by.most_common():
        print(f"{n:4} × {kind}: {'; '.join(texts)[:160]}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
