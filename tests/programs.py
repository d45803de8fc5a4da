"""Judges random programs, in the style of users, against plain JAX in float64.

```
python -m tests.programs --seconds 600 --seed 0 --mode partials laplacian
```

A program is Python source with one statement per line, drawn from templates in
`program_operations`. `program_modes` lists the requests to the library. The tolerance is the
program's own condition: the change of the oracle when inputs, weights, and results of all
statements and operations, also of derivatives, are multiplied by 1 ± one rounding.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools as ft
import os
import re
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from pathlib import Path


if "jax" not in sys.modules:
    # Programs are small and run once, so their compilation takes most of the time.
    flags = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
sys.path.insert(0, str(Path(__file__).parent))

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import program_operations as operations
from program_modes import MODES
from program_rounding import Rounding, format_of, rounded

import mpx_pde as mpx


DRAWS = 5
"""The number of perturbations of a program. The largest change counts."""

FACTOR = 3.0
"""The tolerance relative to the largest change. Five random draws may all cancel by some factor, a
sum rounds more than once inside, and an engine may add its terms in another order."""

PLAIN = 4.0
"""An error within this factor of plain JAX's is never a failure of the library. Plain JAX runs in
float32 or, if the library is asked to cast a program, with a cast by hand."""

DECIDES = 0.25
"""A tolerance above this share of a leaf decides nothing. For example, `mod` of rounded data may be
any number, and five draws of it may be far from a sixth."""


# --- Programs ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with a list of weights `w` and other arguments `inputs`, by name."""

    kind: str
    inputs: dict
    weights: tuple
    lines: tuple
    result: str

    def uses(self, text):
        return set(re.findall(r"\b(?:v\d+|q|x|a|z|t|y|table)\b", text))

    def indices(self, text):
        return {int(i) for i in re.findall(r"\bw\[(\d+)\]", text)}

    @ft.cached_property
    def modelled(self):
        """Returns the names of values that depend on the weights."""
        found = set()
        for name, text in self.lines:
            if self.indices(text) or self.uses(text) & found:
                found.add(name)
        return found

    @property
    def _names(self):
        return [name for name, _ in self.lines]

    def _first_product(self, text):
        """Returns whether it is the first product with the point, which is float32 by contract."""
        product = re.fullmatch(r"(\w+ @ w\[\d+\]|w\[\d+\] @ \w+)( \+ w\[\d+\])?", text)
        return bool(product) and not self.uses(text) & self.modelled

    def source(self, rounding=False):
        """Returns Python source. With `rounding`, each result goes through a function `r`."""
        names = ", ".join(["w", *self.inputs])
        out = [f"def {self.kind}({names}):"]
        if rounding:
            out.append("    w = [r(k, 'half') for k in w]")
            out += [f"    {name} = r({name}, 'full')" for name in self.inputs]
        for name, text in self.lines:
            if rounding:
                half = name in self.modelled
                if half and self.kind == "loss":
                    text = _Entering(set(self.inputs) | set(self._names), self.modelled).of(text)
                kind = "half" if half and not self._first_product(text) else "full"
                text = f"r({text}, '{kind}')"
            out.append(f"    {name} = {text}")
        return "\n".join([*out, f"    return {self.result}"])

    def function(self, rounder=None, wide=False):
        source = self.source(rounder is not None)
        if rounder is not None and not wide:
            source = re.sub(r"\bj?np\.float32\b", lambda m: m[0].replace("32", "64"), source)
        namespace = {**vars(operations), "np": np, "r": rounder}
        exec(source, namespace)
        return namespace[self.kind]

    def pruned(self):
        """Removes the statements and weights that the result does not need."""
        needed, lines = self.uses(self.result), []
        for name, text in reversed(self.lines):
            if name in needed:
                needed |= self.uses(text)
                lines.insert(0, (name, text))
        used = sorted(set().union(*[self.indices(text) for _, text in lines]))
        new = {k: i for i, k in enumerate(used)}
        renumber = lambda text: re.sub(r"\bw\[(\d+)\]", lambda m: f"w[{new[int(m[1])]}]", text)
        return dataclasses.replace(
            self,
            lines=tuple((name, renumber(text)) for name, text in lines),
            weights=tuple(self.weights[k] for k in used),
        )

    def values(self):
        """Returns all values in float64, by name."""
        point = {k: v[0] for k, v in self.inputs.items()} if self.kind == "point" else self.inputs
        with standard(), jax.enable_x64(True):
            space = {**vars(operations), "np": np, "w": self.weights, **point}
            for name, text in self.lines:
                space[name] = computed(text, space)
        return {k: space[k] for k in [*point, *(name for name, _ in self.lines)]}


class _Entering(ast.NodeTransformer):
    """Rounds values of data alone to half at the places where they meet values of the model."""

    values = (ast.Name, ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript)

    def __init__(self, names, modelled):
        self.data, self.modelled = names - modelled, modelled | {"w"}

    def of(self, text):
        return ast.unparse(self.visit(ast.parse(text, mode="eval")))

    def _is_data(self, node):
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return bool(names & self.data) and not names & self.modelled

    def visit(self, node):
        of_update = isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "at"
        if isinstance(node, self.values) and self._is_data(node) and not of_update:
            arguments = [ast.Name("r"), node, ast.Constant("half")]
            return ast.Call(arguments[0], arguments[1:], [])
        return super().visit(node)

    def visit_Call(self, node):
        """Treats the arguments of a function that is mapped over data as data."""
        call = node.func if isinstance(node.func, ast.Call) else node
        if call.args and isinstance(call.args[0], ast.Lambda):
            given = node.args if call is not node else node.args[1:]
            if given and all(self._is_data(x) for x in given):
                mapped = call.args[0]
                self.data |= {x.arg for x in mapped.args.args}
                mapped.body = self.visit(mapped.body)
                return node
        return self.generic_visit(node)

    def visit_Lambda(self, node):
        before = self.modelled
        self.modelled = before | {x.arg for x in node.args.args}
        node.body = self.visit(node.body)
        self.modelled = before
        return node


@contextlib.contextmanager
def standard():
    """Restores JAX's defaults and ignores warnings. The suite is stricter."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def computed(text, space):
    """Returns the value of an expression."""
    arrays = {k: space[k] for k in space.keys() & set(re.findall(r"\w+", text)) if _holds(space[k])}
    return by_numpy.called(lambda arrays: eval(text, {**space, **arrays}), arrays)


def _holds(x):
    return isinstance(x, np.ndarray | np.generic | list | tuple)


def short(x, digits):
    """Rounds to a few digits, so that numbers are exact in float32 and print short."""
    return np.float64(np.float32(np.round(x, digits)))


# --- Drawing -------------------------------------------------------------------------------------


class Drawing:
    """A program that is being drawn, statement by statement, with the values so far."""

    def __init__(self, rng, kind, inputs):
        self.rng, self.kind, self.inputs = rng, kind, inputs
        self.weights, self.lines = [], []
        shown = {k: v[0] for k, v in inputs.items()} if kind == "point" else inputs
        self.space = {**vars(operations), "np": np, "w": []}
        self.space |= shown
        self.pool = [k for k in shown if k not in ("table", "y", "a", "z")]
        if kind == "point":
            size = shown["q"].size
            self.pool += [f"q[{i}]" for i in rng.permutation(size)[:3]]

    def value(self, name):
        return eval(name, self.space)

    def pick(self, fits):
        found = [p for p in self.pool if fits(jnp.shape(self.value(p)))]
        if not found:
            return None
        # Mostly picks a recent value.
        age = min(int(self.rng.geometric(0.35)) - 1, len(found) - 1)
        if self.rng.random() < 0.2:
            age = int(self.rng.integers(len(found)))
        return found[-1 - age]

    def filled(self, template):
        """Fills a template with operands. Returns `None` if the pool has none that fit."""
        chosen, sizes, new = {}, {}, []
        fits = {
            "x": lambda s: True,
            "a": lambda s: len(s) > 0,
            "s": lambda s: s == (),
            "v": lambda s: len(s) == 1 and s[0] > 1,
            "m": lambda s: len(s) == 2,
        }

        def fill(match):
            key = match[1]
            if key == "c":
                return str(self.rng.choice([0.3, 0.7, 1.3, 2.0, 3.0, 0.05]))
            if key == "i":
                return str(int(self.rng.integers(sizes["n"])))
            if key in ("n", "l"):
                return str(sizes[key])
            if key.startswith("W:"):
                shape = tuple(int(eval(d, {}, sizes)) for d in key[2:].split(","))
                new.append(self.weight(shape))
                return f"w[{len(self.weights) + len(new) - 1}]"
            if key not in chosen:
                same = key in ("b", "u")
                name = self.pick((lambda s: s == sizes["shape"]) if same else fits[key])
                if name is None:
                    raise LookupError(key)
                chosen[key] = name
                shape = jnp.shape(self.value(name))
                if "shape" not in sizes and key != "s":
                    sizes.update(shape=shape, n=shape[0] if shape else 1, l=(shape or (1,))[-1])
            return chosen[key]

        # Operands come first, because sizes depend on them.
        marks = re.findall(r"\{([^}]*)\}", template)
        try:
            for key in "xavmsbu":
                if key in marks:
                    fill(re.match(r"(.*)", key))
            text = re.sub(r"\{([^}]*)\}", fill, template)
        except (LookupError, KeyError):
            return None
        return text, new

    def weight(self, shape):
        fan = shape[-2] if len(shape) > 1 else 4
        x = self.rng.normal(size=shape) / np.sqrt(fan) * self.rng.choice([1.0, 1.0, 1.5, 0.5])
        return short(x, 2)

    def add(self, template):
        filled = self.filled(template)
        if filled is None:
            return False
        text, new = filled
        space = {**self.space, "w": [*self.space["w"], *new]}
        try:
            x = computed(text, space)
        except (TypeError, ValueError, IndexError):
            return False
        if x.dtype.kind != "f" or x.ndim > 2 or x.size > 160:
            return False
        size = float(np.max(np.abs(x))) if x.size else 0.0
        most = 1e4 if self.rng.random() < 0.03 else 30.0
        if not np.all(np.isfinite(x)) or not 1e-3 < size < most or x.size < 1:
            return False
        name = f"v{len(self.lines)}"
        self.lines.append((name, text))
        self.weights += new
        self.space |= {"w": space["w"], name: x}
        self.pool.append(name)
        return True

    def program(self, result):
        given = tuple(self.weights), tuple(self.lines), result
        return Program(self.kind, self.inputs, *given).pruned()


def inputs_of(rng, kind, o):
    if kind == "point":
        q = rng.uniform(0.1, 0.9, (o["points"], o["size"])) * rng.choice([1, 1, -1], o["size"])
        if rng.random() < 0.05:
            q[:, 0] = 0.0
        return {"q": short(q, 3)}
    times = np.sort(rng.uniform(0, 1, 8))
    if rng.random() < 0.5:  # close to each other
        times = rng.uniform(0.2, 0.9) + 1e-3 * np.cumsum(rng.uniform(0.5, 1.5, 8))
    return {
        "x": short(rng.normal(size=(8, 4)), 2),
        "a": short(1e4 + rng.normal(size=(8, 4)), 2),
        "z": short(1e-3 * rng.uniform(0.5, 2.0, (8, 3)), 6),
        "t": short(times, 5),
        "y": short(rng.normal(size=8), 2),
        "table": operations.TABLE,
    }


def draw_program(rng, mode, o):
    """Draws a program, or returns `None` if the draw fails."""
    families = operations.FAMILIES
    names = list(families)
    odds = np.array([families[k][0] for k in names], float)
    drawing = Drawing(rng, mode.kind, inputs_of(rng, mode.kind, o))
    if mode.kind == "loss":
        for _ in range(int(rng.integers(1, 4))):
            drawing.add(str(rng.choice(operations.PREPARATIONS)))
    length = int(rng.choice([2, 3, 4, 6, 8, 12, 30], p=[0.15, 0.2, 0.2, 0.2, 0.1, 0.1, 0.05]))
    wide = operations.WIDE if mode.wide and mode.kind == "point" else []
    for _ in range(8 * length):
        family = families[str(rng.choice(names, p=odds / odds.sum()))][1]
        if mode.kind == "loss" and (not drawing.weights or rng.random() < 0.1):
            family = operations.MODELS if rng.random() < 0.6 else family
        drawing.add(str(rng.choice(wide if wide and rng.random() < 0.1 else family)))
        if len(drawing.lines) >= length:
            break
    return finished(rng, drawing, mode, o)


def finished(rng, drawing, mode, o):
    """Adds a last statement that returns a result of the shape that the mode needs."""
    ends = {
        ("point", 0): ["{x} * 1.0"],
        ("point", 1): ["jnp.sum({x})", "{x}[0]", "{x} @ {W:n}", "jnp.sum(jnp.sin({x}))"],
        ("point", 2): ["jnp.mean({x})", "jnp.sum({x} * {x})"],
        ("loss", 0): ["({x} - 0.3) ** 2"],
        ("loss", 1): ["jnp.mean(({x} - 0.3) ** 2)", "huber({x} @ {W:n,3})", "jnp.mean({x} ** 2)"],
        ("loss", 2): [
            "jnp.mean(({x} @ {W:l} - 0.5) ** 2)",
            "jnp.mean(jnp.sum({x}, -1) ** 2)",
            "jnp.mean(jnp.abs({x} - 0.1))",
        ],
    }
    if not drawing.lines:
        return None
    last = drawing.lines[-1][0]
    x = drawing.space[last]
    outputs, drawing.pool = o.get("outputs", 1), [last]
    if mode.kind == "loss" and x.shape == (8,) and rng.random() < 0.7:
        drawing.add(f"jnp.mean(({last} - y) ** 2)")
    elif outputs > 1:
        several = ["jnp.mean({x})", "jnp.sum(jnp.sin({x}))"][:outputs]
        drawing.add(f"jnp.stack([{', '.join(several)}])")
    elif x.ndim or mode.kind == "loss":
        drawing.add(str(rng.choice(ends[mode.kind, x.ndim])))
    result = drawing.lines[-1][0]
    if jnp.shape(drawing.space[result]) != (() if outputs == 1 else (outputs,)):
        return None
    program = drawing.program(result)
    text = " ".join(text for _, text in program.lines)
    if mode.kind == "point" and not re.search(r"\bq\b", text):
        return None
    needs = mode.kind == "loss" or o["how"] == "grad" or "gradient" in o or o.get("half")
    return program if program.weights or not needs else None


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
        cast = lambda x: jnp.asarray(np.asarray(x), dtype)
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


def _exact(case):
    """Returns the oracle and its value in each draw, stacked along a leading axis, by leaf."""
    mode, o, program = MODES[case.mode], case.options, case.program
    units = mode.units(o)
    rng = np.random.default_rng(_hash(program))
    found = {}
    with standard(), jax.enable_x64(True):
        args = case.inputs(jnp.float64)
        f = program.function(rounded, mode.wide and program.kind == "point")
        before, operations.rounded = operations.rounded, rounded
        try:
            run = lambda w, inputs: _ask(mode.exact, f, w, inputs, o)
            closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
        finally:
            operations.rounded = before
        evaluate = ft.partial(by_numpy.evaluate, closed, jax.tree.leaves(args))
        exact = evaluate()
        for pair in dict.fromkeys(units.values()):
            draws = [exact, *(evaluate(Rounding(rng, *pair)) for _ in range(DRAWS))]
            words = {word for word, units_of in units.items() if units_of == pair}
            values = jax.tree.unflatten(jax.tree.structure(shape), zip(*draws, strict=True))
            for name, xs in values.items():
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
        exact = _exact(case)
    except Exception as error:
        return Verdict("redraw", message=f"oracle: {type(error).__name__}: {error}")
    # A term at a singularity says nothing about the others.
    exact = {k: x for k, x in exact.items() if np.all(np.isfinite(x))}
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
    return _compared(case, exact, got)


def _compared(case, exact, got):
    units = MODES[case.mode].units(case.options)
    sizes = Counter()
    word = lambda name: name.partition("/")[0]
    for name, x in exact.items():
        sizes[word(name)] += float(np.sum(x[0] ** 2))
    plain, rows = None, []
    for name, x in exact.items():
        full, half = units[re.match(r"[a-z]+", name)[0]]
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
    lines += ["from program_operations import *", "from program_modes import MODES", ""]
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
