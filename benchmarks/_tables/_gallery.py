"""The page with a picture of each problem, its equation and its error."""

import ast
from typing import Any

from ..gallery import PICTURES
from ._format import ROOT, Result, load, taken
from ._outside import beside, judged_by


REPOSITORY = "https://github.com/mpx-pde/mpx_pde/blob/main"
FAMILIES = {"PINN": "Physics-informed networks", "3D": "In three dimensions"}
FAMILIES |= {"operator": "Neural operators", "emulator": "Learned time steps"}


def equation(name: str) -> str:
    """Returns the first paragraph of a problem's file in one line, which describes the problem."""
    path = ROOT / "examples" / "problems" / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n", 1)[0].split())


def entry(training: dict[str, Any]) -> str:
    name, title = training["problem"], training["title"]
    shown = PICTURES[name].told()
    several = " (mean over the fields)" * (len(training["errors"]) > 2)
    of = " of a rollout" if "rollout" in training["errors"] else several
    error = f"{training['error']:.1e}{beside(judged_by(training))}"
    lines = [
        f"#### {title}",
        equation(name),
        f"![reference, prediction, error](figures/gallery/{name}.webp)",
        f"{shown}Error{of}: {error}, {training['steps']:,} steps. "
        f"[`{name}.py`]({REPOSITORY}/examples/problems/{name}.py)",
    ]
    return "\n\n".join(lines)


def gallery(data: Result | None = None) -> str:
    data = load("gallery") if data is None else data
    parts = []
    for family, heading in FAMILIES.items():
        found = [t for t in data["trainings"] if t["family"] == family]
        if found:
            parts += [f"### {heading}", *map(entry, found)]
    return "\n\n".join([*parts, f"{taken(data).capitalize()}."]) + "\n"
