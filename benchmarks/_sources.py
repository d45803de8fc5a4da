"""Which code a result was measured with, and whether it is still the code that there is.

Each file of results holds a digest of every source file that matters to it. A digest is of the
syntax tree, without what changes no result: comments, docstrings, formatting, annotations of
functions, imports that nothing else uses, the command lines, tables and pictures of the examples.

A result that is older than its code fails `python -m benchmarks tables --check`, unless it is
accepted as older, with a reason, in `results/accepted_older.json`.
"""

import argparse
import ast
import hashlib
import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ACCEPTED = RESULTS / "accepted_older.json"

# --- What each benchmark measures ------------------------------------------------------------


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


_library, _examples = partial(_in, "mpx_pde"), partial(_in, "examples")
_benchmarks = partial(_in, "benchmarks")


PRODUCTS = _library("_dtypes", "_cast", "_dot", "_bilinear", "_split", "_varying")
TRAINING = ("_search", "_options", "_gradient", "_grad", "_optimizer")
STEP = (
    *PRODUCTS,
    *_library("_tree", "_loss_scaling", *(f"training/{name}" for name in TRAINING)),
)
DERIVATIVES = (
    *PRODUCTS,
    *_library(
        "derivatives/*", "propagation/*", "interpret/_jaxpr", "interpret/_rebind", "interpret/_flat"
    ),
    *_library("_forward", "_order", "_derivative_of", "interpret/_primitives"),
    *_library("nn/_mlp", "nn/_ansatz", "nn/_activations"),
)
OPERATORS = (
    *PRODUCTS,
    *_library(
        "nn/_fno", "nn/_pointwise", "nn/_spectral*", "nn/_dft", "nn/_arithmetic", "nn/_stabilizers"
    ),
    *_library("nn/_activations", "_order", "_forward", "_derivative_of"),
)
AUTOCAST = _library(
    *("autocast/*", "_conv", "checkpoint_policies"),
    *(f"interpret/{n}" for n in ("_jaxpr", "_rebind", "_primitives", "_tables", "_reverse")),
)
SECOND_ORDER = _library(*(f"training/{n}" for n in ("_conjugate", "_residuals", "_second_order")))
COMPILER = _benchmarks("_deviceless", "_hlo")
CLOCK = _benchmarks("_report")
PINNS = (*STEP, *DERIVATIVES, *_examples("_pinn"))
DARCY = _examples("darcy", "_darcy_data")
NAVIER_STOKES = _examples("navier_stokes", "_navier_stokes_data")
OPERATOR_TRAININGS = (*STEP, *OPERATORS, *_examples("_neural_operator", "_operator_losses"))
GALLERY = (  # in the order of the page
    *("burgers_1d", "klein_gordon", "kdv", "schrodinger", "sine_gordon", "wave_heterogeneous"),
    *("poisson_holes", "poisson_subdomains", "biharmonic_plate", "kovasznay", "heat_varying"),
    *("burgers_2d", "gray_scott", "finned_block_3d"),
    *("operator_darcy", "emulate_burgers", "emulate_ks"),
)
CAVITY = _examples("lid_driven_cavity", "_cavity_reference", "_newton")
ALLEN_CAHN = _examples("allen_cahn", "_spectral_reference")
BURGERS = _examples("burgers", "_burgers_exact")
HEAT_SINK = _examples("heat_sink", "_heat_sink_reference", "_newton")
BREADTH = (
    *(*PINNS, *OPERATOR_TRAININGS, *DARCY, *NAVIER_STOKES, *CAVITY, *BURGERS, *ALLEN_CAHN),
    *(*HEAT_SINK, *_examples("problems/*", "helmholtz", "high_dimensions")),
)

# By the name in the file of results, as glob patterns. What a benchmark imports, or loads by a name
# that it writes out, is found without them: they list the library, the compiler, the clock, and the
# examples that are chosen by an option.
MEASURED: dict[str, tuple[str, ...]] = {
    "breadth": BREADTH,
    "breadth_step": (*BREADTH, *COMPILER),
    "compile_time": (*STEP, *DERIVATIVES, *OPERATORS, *AUTOCAST, *CLOCK),
    "float8": (),
    "fno_step": (*STEP, *OPERATORS, *CLOCK, *COMPILER),
    "frequencies": PRODUCTS,
    "gallery": (
        *(*PINNS, *OPERATOR_TRAININGS, *DARCY),
        *_examples("problems/_problem", "problems/_runner"),
        *_examples("problems/_operators", "problems/references"),
        *(*BURGERS, *_examples("problems/geometry")),
        *_examples(*(f"problems/{name}" for name in GALLERY)),
    ),
    "growth": (*DERIVATIVES, *COMPILER),
    "networks": (*DERIVATIVES, *COMPILER, *CLOCK),
    "operators": (*OPERATOR_TRAININGS, *DARCY, *NAVIER_STOKES),
    "overhead": (*STEP, *COMPILER),
    "pinn_step": (*STEP, *DERIVATIVES, *CLOCK),
    "predicted": (*STEP, *DERIVATIVES, *OPERATORS, *AUTOCAST, *COMPILER),
    "products": (),
    "second_order": (*STEP, *DERIVATIVES, *SECOND_ORDER),
    "spectral": (*OPERATORS, *CLOCK),
    "time_to_error-burgers": (*PINNS, *BURGERS),
    "time_to_error-cavity": (*PINNS, *CAVITY),
    "time_to_error-navier_stokes": (*OPERATOR_TRAININGS, *NAVIER_STOKES),
    "vit": (*STEP, *AUTOCAST),
    "vit_step": (*STEP, *AUTOCAST, *COMPILER, *CLOCK),
    "weak_scaling": (
        *(*STEP, *DERIVATIVES, *OPERATORS, *_library("training/_collectives")),
        *COMPILER,
    ),
}

# What runs, finds and tells, and measures nothing, or is on a list where it does.
HELPERS = frozenset(
    {"_report", "_examples", "_rivals", "_sources", "_deviceless"}
    | {"_command_line", "_progress", "_cache"}
)
# Of what these import they take a function that needs nothing of the rest.
APART = {
    "predicted": _benchmarks("_torch/cavity", "_torch/fno", "_torch/vit", "_measured"),
}

# What no result depends on: definitions by the folder or the file that they stand in.
NOT_MEASURED: dict[str, frozenset[str]] = {
    "examples/": frozenset(
        {"main", "run", "arguments", "command_line", "table", "draw", "plot", "draw_fields"}
    ),
    "benchmarks/": frozenset({"add_arguments"}),
    # What `weak_scaling` compiles is a step.
    "examples/sharded.py": frozenset(
        {"train", "STEPS", "QUICK_STEPS", "BATCH", "QUICK_BATCH", "WIDTH", "QUICK_WIDTH"}
    ),
    # All but the clock.
    "benchmarks/_report.py": frozenset(
        {"environment", "Report", "NONE", "_text", "versions", "_processor"}
    ),
}


def _imports(path: Path) -> set[Path]:
    """The modules beside it that a file imports, and the examples that it loads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
            found |= {folder.with_suffix(".py"), *(folder / f"{a.name}.py" for a in node.names)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("_"):
            found.add(path.parent / f"{node.module}.py")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_example":
            loaded = getattr(node.args[0], "value", None)  # unless it is chosen by an option
            found.add(ROOT / "examples" / f"{loaded}.py")
    return {p for p in found if p.exists() and p.stem not in HELPERS}


@cache
def _needed(name: str) -> frozenset[Path]:
    """The file of a benchmark, and all that it imports and loads, at any depth."""
    todo, found = {ROOT / "benchmarks" / f"{name}.py"}, set[Path]()
    while todo:
        path = todo.pop()
        if path.exists() and path.relative_to(ROOT).as_posix() not in APART.get(name, ()):
            found.add(path)
            todo |= _imports(path) - found
    return frozenset(found)


# --- Digests ---------------------------------------------------------------------------------


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _named(node: ast.AST, name: str) -> bool:
    """Whether a decorator or condition is `name`, or `module.name`."""
    return name in (getattr(node, "id", None), getattr(node, "attr", None))


def _for_types_alone(node: Any, in_class: bool) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return any(_named(d, "overload") for d in node.decorator_list)
    if isinstance(node, ast.If):
        return _named(node.test, "TYPE_CHECKING") and not node.orelse
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Call) and _named(node.value.func, "TypeVar")
    return isinstance(node, ast.AnnAssign) and node.value is None and not in_class


def _plain(node: Any, in_class: bool = False) -> Any:
    """A syntax tree as lists and dicts. Empty fields are left out, so that one that a later
    Python adds changes nothing."""
    if isinstance(node, list):
        kept = [x for x in node if not _is_text(x) and not _for_types_alone(x, in_class)]
        return [_plain(x, in_class) for x in kept]
    if not isinstance(node, ast.AST):
        return [type(node).__name__, repr(node)]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 begins some with an empty text
        node = ast.JoinedStr([x for x in node.values if getattr(x, "value", None) != ""])
    skipped = {"ctx", "kind", "type_comment", "returns"}
    if isinstance(node, ast.arg | ast.AnnAssign):
        skipped.add("annotation")  # which of its fields a class has is told by their names
    inside = isinstance(node, ast.ClassDef)
    fields = {
        name: _plain(value, inside and name == "body")
        for name, value in ast.iter_fields(node)
        if name not in skipped and value is not None and value != []
    }
    if isinstance(node, ast.AnnAssign) and not in_class:
        return ["Assign", {"targets": [fields["target"]], "value": fields["value"]}]
    return [type(node).__name__, fields]


def _bound(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """What an import binds: the name, and where it comes from."""
    if isinstance(node, ast.Import):
        return [(a.asname or a.name.split(".")[0], a.name) for a in node.names]
    source = "." * node.level + (node.module or "")
    return [(a.asname or a.name, f"{source}:{a.name}") for a in node.names]


def _names(plain: Any) -> set[str]:
    if isinstance(plain, dict):
        return set().union(*map(_names, plain.values()))
    if isinstance(plain, list):
        if plain[:1] == ["Name"]:
            return {ast.literal_eval(plain[1]["id"][1])}
        return set().union(*map(_names, plain))
    return set()


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return set()


@cache
def digest(text: str, without: frozenset[str] = frozenset()) -> str:
    """Of a source file, less the definitions `without`."""
    imports: list[tuple[str, str]] = []
    counted = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += _bound(node)
        elif isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            continue  # the command line
        elif not (names := _defined(node)) or not names <= without:
            counted.append(node)
    plain = _plain(counted)
    used = _names(plain)
    content = [sorted({origin for name, origin in imports if name in used}), plain]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _without(path: str) -> frozenset[str]:
    return frozenset().union(*(n for at, n in NOT_MEASURED.items() if path.startswith(at)))


def measured(name: str) -> list[str]:
    """The files that a benchmark measures, by the name in its file of results, such as
    `time_to_error-cavity` or `fno_step-h100`."""
    name = name if name in MEASURED else name.split("-", 1)[0]
    found = {path for pattern in MEASURED[name] for path in ROOT.glob(pattern)}
    found |= _needed(name.split("-", 1)[0])
    paths = (path for path in found if path.name != "__init__.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def sources(name: str) -> dict[str, str]:
    """The digests of all that the benchmark `name` measures, by path."""
    read = lambda path: (ROOT / path).read_text(encoding="utf-8")
    return {path: digest(read(path), _without(path)) for path in measured(name)}


# --- What is older than its code -------------------------------------------------------------


def changed(data: Mapping[str, Any]) -> dict[str, str | None]:
    """The digests, as they are now, of the files that changed since a result was taken; `None`
    for a file that is gone."""
    before, now = data.get("sources", {}), sources(data["benchmark"])
    paths = sorted({*before, *now})
    return {path: now.get(path) for path in paths if before.get(path) != now.get(path)}


def accepted() -> dict[str, dict[str, Any]]:
    """The results that are accepted as older than the code: why, and what changed."""
    return json.loads(ACCEPTED.read_text(encoding="utf-8")) if ACCEPTED.exists() else {}


def results() -> dict[str, dict[str, Any]]:
    """All files of results by name."""
    paths = [path for path in sorted(RESULTS.glob("*.json")) if path != ACCEPTED]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def complaints() -> list[str]:
    """What is wrong with the ages of the results, a line for each."""
    lines, entries, found = [], accepted(), results()
    for name, data in found.items():
        new, entry = changed(data), entries.get(name)
        if not new and entry:
            lines.append(f"accepted as older, but up to date: {name}")
        elif new != (known := entry["changed"] if entry else {}):
            paths = ", ".join(sorted({path for path, _ in new.items() ^ known.items()}))
            again = " again, since it was accepted," if entry else ""
            lines.append(f"older than the code: {name}; changed{again} {paths}")
    lines += [f"accepted as older, but not there: {name}" for name in entries if name not in found]
    return lines


def accept(argv: list[str]) -> int:
    """`python -m benchmarks accept NAME ... --reason TEXT`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks accept",
        description="Accepts results as older than the code that they measure.",
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="such as spectral-cpu")
    parser.add_argument(
        "--reason", help="printed below each of their tables; by default that given before"
    )
    args = parser.parse_args(argv)
    entries, found = accepted(), results()
    for name in args.names:
        if name not in found:
            parser.error(f"there is no `{name}` in {RESULTS}; there are {', '.join(found)}.")
        new = changed(found[name])
        if not new:
            entries.pop(name, None)
            print(f"up to date: {name}", file=sys.stderr)
            continue
        reason = args.reason or entries.get(name, {}).get("reason")
        if not reason:
            parser.error(f"`{name}` needs a `--reason`.")
        entries[name] = {"reason": reason, "changed": new}
    text = json.dumps(dict(sorted(entries.items())), indent=1, ensure_ascii=False)
    ACCEPTED.write_text(text + "\n", encoding="utf-8")
    return 0


def advice(lines: Iterable[str]) -> str:
    """What to do about complaints."""
    names = [line.split(": ", 1)[1].split(";")[0] for line in lines]
    return (
        "Run what is older again (its command is in the file) or, where the change cannot "
        f"matter:\n  python -m benchmarks accept {shlex.join(names)} --reason '...'"
    )
