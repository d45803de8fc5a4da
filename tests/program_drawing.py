"""Random programs: Python source with one statement per line, and how it is drawn.

The templates of statements are in `program_operations`, the functions that they call in
`program_functions`.
"""

import ast
import contextlib
import dataclasses
import functools as ft
import re
import warnings

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import program_functions as functions
import program_operations as operations


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
        namespace = {**vars(functions), "np": np, "r": rounder}
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
            space = {**vars(functions), "np": np, "w": self.weights, **point}
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

    def __init__(self, rng, kind, inputs, near=0.0):
        self.rng, self.kind, self.inputs, self.near = rng, kind, inputs, near
        self.weights, self.lines = [], []
        shown = {k: v[0] for k, v in inputs.items()} if kind == "point" else inputs
        self.space = {**vars(functions), "np": np, "w": []}
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
            if key == "t":
                return self.threshold(chosen)
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

    def threshold(self, chosen):
        """Draws a number to compare with the first operand. A share of them, `near`, lies within
        one rounding to half of an entry, where float32 still decides."""
        entries = np.ravel(self.value(next(chosen[k] for k in "xavms" if k in chosen)))
        entry = float(entries[self.rng.integers(entries.size)])
        if self.rng.random() >= self.near:
            return f"{self.rng.choice([0.1, 0.5, 0.9, 1.2]) * entry:.2f}"
        offset = float(self.rng.choice([-1, 1]) * self.rng.uniform(0.1, 1.0))
        offset *= float(self.rng.choice([2.0**-8, 2.0**-11]))
        return repr(float(np.float32(entry * (1 + offset))))

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
        "table": functions.TABLE,
    }


def near_ties(o):
    """Returns the share of thresholds near an entry, so that a hundredth of all programs has one.
    Where values are half, nothing decides there."""
    half = o.get("half") and "forward" not in o.get("gradient", {})
    return 0.0 if half else 0.1


def draw_program(rng, mode, o):
    """Draws a program, or returns `None` if the draw fails."""
    families = operations.FAMILIES
    names = list(families)
    odds = np.array([families[k][0] for k in names], float)
    drawing = Drawing(rng, mode.kind, inputs_of(rng, mode.kind, o), near_ties(o))
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
