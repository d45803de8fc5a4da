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
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ACCEPTED = RESULTS / "accepted_older.json"

# --- What each benchmark measures ------------------------------------------------------------


def _library(*names: str) -> tuple[str, ...]:
    return tuple(f"mpx_pde/{name}.py" for name in names)


def _examples(*names: str) -> tuple[str, ...]:
    return tuple(f"examples/{name}.py" for name in names)


def _benchmarks(*names: str) -> tuple[str, ...]:
    return tuple(f"benchmarks/{name}.py" for name in names)


PRODUCTS = _library("_dtypes", "_cast", "_dot", "_bilinear", "_split", "_varying")
STEP = (
    *PRODUCTS,
    *_library("_tree", "_loss_scaling", "_search", "_options", "_gradient", "_grad", "_optimizer"),
)
DERIVATIVES = (
    *PRODUCTS,
    *_library("derivatives/*", "propagation/*", "_jaxpr", "_flat", "_forward", "_order"),
    *_library("_primitives"),
    *_library("nn/_mlp", "nn/_ansatz", "nn/_activations"),
)
OPERATORS = (
    *PRODUCTS,
    *_library(
        "nn/_fno", "nn/_pointwise", "nn/_spectral*", "nn/_dft", "nn/_arithmetic", "nn/_stabilizers"
    ),
    *_library("nn/_activations", "_order"),
)
AUTOCAST = _library(
    "autocast/*", "_jaxpr", "_primitives", "_conv", "_reverse", "checkpoint_policies"
)
COMPILER = _benchmarks("_deviceless")
CLOCK = _benchmarks("_report")
ROOFLINE = _benchmarks("_roofline", "_chips", "_hlo")
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
VIT = (*STEP, *AUTOCAST, *_examples("vit"))
SHARDED = (
    *(*STEP, *DERIVATIVES, *OPERATORS, *_library("_collectives")),
    *(*_examples("sharded", "_darcy_data"), *COMPILER),
)

# By the name in the file of results, as glob patterns. The file of the benchmark itself and its
# own helpers are among them, `__init__.py` never is.
MEASURED: dict[str, tuple[str, ...]] = {
    "breadth": (
        *(*PINNS, *OPERATOR_TRAININGS, *DARCY, *NAVIER_STOKES, *CAVITY),
        *_examples("problems/*", "burgers", "_burgers_exact", "allen_cahn", "_spectral_reference"),
        *_examples("helmholtz", "high_dimensions", "heat_sink", "_heat_sink_reference"),
        *_benchmarks("breadth", "_problems", "_tf32"),
    ),
    "cavity_memory": (*DERIVATIVES, *COMPILER, *_benchmarks("cavity_memory", "_cavity")),
    "compile_time": (
        *(
            *STEP,
            *DERIVATIVES,
            *OPERATORS,
            *AUTOCAST,
            *CLOCK,
            *_examples("vit", "_operator_losses"),
        ),
        *_benchmarks("compile_time", "overhead", "_steps"),
    ),
    "derivatives": (*DERIVATIVES, *CLOCK, *_benchmarks("derivatives")),
    "float8": _benchmarks("float8"),
    "fno_step": (
        *(*STEP, *OPERATORS, *CLOCK, *COMPILER),
        *_benchmarks("fno_step", "_measured", "_torch/fno", "_torch/steps"),
        *ROOFLINE,
    ),
    "frequencies": (*PRODUCTS, *_benchmarks("frequencies")),
    "gallery": (
        *(*PINNS, *OPERATOR_TRAININGS, *DARCY),
        *_examples("problems/_runner", "problems/_operators", "problems/references"),
        *_examples("problems/geometry", "burgers", "_burgers_exact"),
        *_examples(*(f"problems/{name}" for name in GALLERY)),
        *_benchmarks("gallery", "_gallery", "_problems", "_tf32"),
    ),
    "growth": (*DERIVATIVES, *COMPILER, *_benchmarks("growth", "_cavity", "_pinn_steps")),
    "networks": (*DERIVATIVES, *COMPILER, *CLOCK, *_benchmarks("networks", "_networks")),
    "operators": (*OPERATOR_TRAININGS, *DARCY, *NAVIER_STOKES, *_benchmarks("operators")),
    "overhead": (*STEP, *COMPILER, *CLOCK, *_benchmarks("overhead", "_steps")),
    "pinn_step": (
        *(*STEP, *DERIVATIVES, *CLOCK),
        *_benchmarks("pinn_step", "_pinn_steps", "_cavity", "_steps", "overhead"),
        *_benchmarks("_measured", "_torch/cavity", "_torch/steps"),
        *ROOFLINE,
    ),
    "predicted": (
        *(*STEP, *DERIVATIVES, *OPERATORS, *AUTOCAST, *COMPILER, *_examples("vit")),
        *(*ROOFLINE, *_benchmarks("predicted", "_predicted_cases")),
        *_benchmarks("_pinn_steps", "_cavity", "_steps", "overhead", "fno_step", "vit_step"),
        *_benchmarks("_measured", "vit_memory"),
    ),
    "products": _benchmarks("products"),
    "second_order": (
        *(
            *STEP,
            *DERIVATIVES,
            *_library("_conjugate", "_second_order"),
            *_examples("second_order"),
        ),
        *_benchmarks("second_order"),
    ),
    "spectral": (*OPERATORS, *COMPILER, *CLOCK, *_benchmarks("spectral")),
    "time_to_error-burgers": (
        *(*PINNS, *_examples("burgers", "_burgers_exact")),
        *_benchmarks("time_to_error", "_trainings", "_pinn_trainings", "_burgers_trainings"),
        *_benchmarks("_tf32"),
    ),
    "time_to_error-cavity": (
        *(*PINNS, *CAVITY),
        *_benchmarks("time_to_error", "_trainings", "_pinn_trainings", "_cavity_trainings"),
        *_benchmarks("_cavity", "_tf32"),
        *_benchmarks("_torch/pinn", "_torch/cavity", "_torch/steps", "_torch/muon"),
    ),
    "time_to_error-navier_stokes": (
        *(*OPERATOR_TRAININGS, *NAVIER_STOKES),
        *_benchmarks("time_to_error", "_trainings", "_operator_trainings"),
        *_benchmarks("_torch/fno", "_torch/steps"),
    ),
    "vit": (*VIT, *_benchmarks("vit")),
    "vit_memory": (*VIT, *COMPILER, *_benchmarks("vit_memory")),
    "vit_step": (
        *(*VIT, *COMPILER, *CLOCK),
        *_benchmarks("vit_step", "vit_memory", "_measured", "_torch/vit", "_torch/steps"),
        *ROOFLINE,
    ),
    "weak_scaling": (*SHARDED, *_benchmarks("weak_scaling")),
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
        {"environment", "Report", "_cell", "_version", "_processor"}
    ),
}


def patterns(name: str) -> tuple[str, ...]:
    """Of a benchmark, by the name in its file: `time_to_error-cavity`, or `fno_step-h100`."""
    return MEASURED[name] if name in MEASURED else MEASURED[name.split("-", 1)[0]]


# --- Digests ---------------------------------------------------------------------------------


def _is_text(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


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


def sources(
    name: str,
    find: Callable[[str], Iterable[str]] = lambda pattern: (
        path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)
    ),
    read: Callable[[str], str] = lambda path: (ROOT / path).read_text(encoding="utf-8"),
) -> dict[str, str]:
    """The digests of all that the benchmark `name` measures, by path.

    `find` lists the paths that fit a pattern, and `read` gives the text of one.
    """
    paths = {path for pattern in patterns(name) for path in find(pattern)}
    paths = {path for path in paths if not path.endswith("__init__.py")}
    return {path: digest(read(path), _without(path)) for path in sorted(paths)}


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
        if not new and entry is not None:
            lines.append(f"accepted as older, but up to date: {name}")
        elif new and (entry is None or entry["changed"] != new):
            known = {} if entry is None else entry["changed"]
            paths = ", ".join(p for p, d in new.items() if p not in known or known[p] != d)
            again = "" if entry is None else " again, since it was accepted,"
            told = paths or "less than what it was accepted for"
            lines.append(f"older than the code: {name}; changed{again} {told}")
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
