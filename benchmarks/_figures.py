"""The figures in README and documentation, drawn from `results/*.json`.

Each SVG file contains a digest of the results and of the code that drew it. The digest shows
whether a figure is up to date without drawing it again.
"""

import hashlib
import json
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ._tables import _breadth
from ._tables._format import ROOT, groups, load, source


FOLDER = ROOT / "docs" / "figures"
STYLE: Any = {"font.size": 9, "lines.linewidth": 1.6, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
STYLE["svg.hashsalt"] = "mpx_pde"  # the same bytes for the same drawing


# Colors by their place in matplotlib's cycle: C0 is blue, C1 orange, C2 green, C3 red, C4 purple,
# C7 gray, C8 olive, C9 cyan.
LINES = (
    {"float32": "k", "TF32": "C7", "TF32, emulated": "C7--"}
    | {"casts by hand, float16": "C3", "MPX, float16": "C1--"}
    | {"mpx_pde, float32": "C0:", "mpx_pde, float16": "C0", "mpx_pde, bfloat16": "C4"}
    | {"mpx_pde, forward float32, float16": "C9", "mpx_pde, forward float32, bfloat16": "C9--"}
    | {"PyTorch, float32": "C2:", "torch.amp, float16": "C2", "torch.amp, bfloat16": "C8"}
)


def _curves(data: Any) -> list[tuple[str, list[int], list[float]]]:
    """Returns rival, steps and errors for the trainings of the first seed that did not fail.

    Leaves out the moment before the first step.
    """
    seed = data["curves"][0]["seed"]
    kept = [c for c in data["curves"] if "failed" not in c and c["seed"] == seed]
    return [(c["rival"], c["steps"][1:], c["errors"][1:]) for c in kept]


def error_against_time(what: str, figure: Any, data: Any) -> None:
    by_time, by_step = figure.subplots(1, 2, sharey=True)
    times = {t["rival"]: t["step"] for t in data["times"]}
    for rival, steps, errors in _curves(data):
        by_step.semilogy(steps, errors, LINES[rival])
        if step := times.get(rival):
            seconds = [step["median"] * n for n in steps]
            by_time.loglog(seconds, errors, LINES[rival], label=rival)
        else:
            by_time.plot([], LINES[rival], label=f"{rival} (no time)")
    by_time.set(xlabel="seconds of training", ylabel="relative L2 error")
    by_step.set(xlabel="steps")
    by_time.xaxis.set_major_formatter("{x:g}")
    lines = by_time.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, fontsize="small")
    env = data["environment"]
    told = f"{env['device']}, {env['cpu_count']} cores"
    figure.suptitle(f"Physics-informed network of {what}; {told}", fontsize="medium")


def front_door(figure: Any, data: Any) -> None:
    """Draws the errors of five rivals by step, with their names at the ends of their lines."""
    # Okabe and Ito's colors, which color-blind readers can tell apart.
    colors = {"casts by hand, float16": "#d55e00", "MPX, float16": "#e69f00"}
    colors |= {"torch.amp, float16": "#009e73", "mpx_pde, forward float32, float16": "#0072b2"}
    colors["float32"] = "#000000"
    axes, place = figure.subplots(), 0.0
    shown = [curve for curve in _curves(data) if curve[0] in colors]
    for rival, steps, errors in sorted(shown, key=lambda curve: curve[2][-1]):
        axes.semilogy(steps, errors, color=colors[rival])
        # Place the names of lines that end together below each other.
        place = max(errors[-1], place * 1.75)
        end = {"xytext": (6, 0), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(rival, (steps[-1], place), **end, color=colors[rival], va="center")
    axes.set(xlabel="steps of training", ylabel="relative L2 error")
    axes.margins(x=0)


def errors_by_step(figure: Any, data: Any, most: int | None = None) -> None:
    """Draws the errors of Levenberg–Marquardt from one seed: one panel for each of the first `most`
    problems, one line for each precision."""
    styles = {"float64": "k", "float64-float32": "C0--", "float32": "C1"}
    labels = {"float64-float32": "float64, Jacobian in float32"}
    shown = (t for t in data["trainings"] if t["seed"] == data["trainings"][0]["seed"])
    found = list(groups(shown, "problem").values())[:most]
    panels = figure.subplots(-(-len(found) // 4), 4, sharex=True, squeeze=False).flatten()
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    for panel, runs in zip(panels, found, strict=False):
        alike = {run["precision"]: run for run in runs if run["steps"] == runs[0]["steps"]}
        for name in filter(alike.__contains__, styles):
            steps, _, errors = zip(*alike[name]["curve"], strict=True)
            panel.semilogy(steps, errors, styles[name], label=labels.get(name, name))
        panel.set_title(textwrap.fill(runs[0]["title"], 24), fontsize="small")
    figure.supylabel("relative L2 error, by steps", fontsize="medium")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


class Figure(NamedTuple):
    draw: Callable[[Any, Any], None]
    results: str  # the name of the JSON file
    size: tuple[float, float] = (8.0, 3.8)

    def digest(self, data: dict[str, Any]) -> str:
        code = Path(__file__).read_text(encoding="utf-8")
        return hashlib.sha256((json.dumps(data) + code).encode()).hexdigest()[:16]


CAVITY, BURGERS = "time_to_error-cavity-cpu", "time_to_error-burgers-cpu"
FIGURES: dict[str, Figure] = {
    "front-door": Figure(front_door, CAVITY, (6.4, 3.0)),
    "breadth": Figure(_breadth.draw, "breadth-cpu", (8.0, 10.0)),
    "error-against-time": Figure(partial(error_against_time, "a lid-driven cavity"), CAVITY),
    "burgers-error-against-time": Figure(partial(error_against_time, "Burgers' equation"), BURGERS),
    "second-order": Figure(errors_by_step, "second_order-cpu", (8.0, 8.0)),
    "second-order-front": Figure(partial(errors_by_step, most=4), "second_order-cpu", (8.0, 2.6)),
}


def save(figure: Figure, data: dict[str, Any], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        told = f"drawn from {figure.digest(data)}: {source(data)}"
        canvas.savefig(path, metadata={"Description": told, "Date": None})


def stale(write: bool) -> list[Path]:
    """Returns the figures that differ from the results; with `write`, redraws them."""
    found = []
    for name, figure in FIGURES.items():
        data = load(figure.results)
        path = FOLDER / f"{name}.svg"
        drawn = path.read_text(encoding="utf-8") if path.exists() else ""
        if f"drawn from {figure.digest(data)}" not in drawn:
            found.append(path)
            if write:
                save(figure, data, path)
    return found
