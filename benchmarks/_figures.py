"""The figures in README and documentation, drawn from `results/*.json`.

Each is an SVG file that carries the digest of what it was drawn from: the results, and the code
that draws. So whether it is up to date can be told without drawing it again.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ._tables import _breadth
from ._tables._format import ROOT, load, source


FOLDER = ROOT / "docs" / "figures"
STYLE: Any = {
    "svg.hashsalt": "mpx_pde",  # the same bytes for the same drawing
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


class Line(NamedTuple):
    color: str
    style: str = "-"


LINES = {
    "float32": Line("black"),
    "TF32": Line("tab:gray"),
    "TF32, emulated": Line("tab:gray", "--"),
    "casts by hand, float16": Line("tab:red"),
    "MPX, float16": Line("tab:orange", "--"),
    "mpx_pde, float32": Line("tab:blue", ":"),
    "mpx_pde, float16": Line("tab:blue"),
    "mpx_pde, bfloat16": Line("tab:purple"),
    "mpx_pde, forward float32, float16": Line("tab:cyan"),
    "mpx_pde, forward float32, bfloat16": Line("tab:cyan", "--"),
    "PyTorch, float32": Line("tab:green", ":"),
    "torch.amp, float16": Line("tab:green"),
    "torch.amp, bfloat16": Line("tab:olive"),
    "float32, FFT": Line("black"),
    "neuraloperator, float32": Line("tab:green", ":"),
    "neuraloperator, amp bfloat16": Line("tab:olive"),
}


def _curves(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the first seed, those that trained."""
    return [
        c for c in data["curves"] if "failed" not in c and c["seed"] == data["curves"][0]["seed"]
    ]


def error_against_time(what: str, figure: Any, data: dict[str, Any]) -> None:
    by_time, by_step = figure.subplots(1, 2, sharey=True)
    times = {t["rival"]: t["step"] for t in data["times"]}
    for curve in _curves(data):
        color, style = LINES[curve["rival"]]
        options = {"color": color, "linestyle": style}
        by_step.semilogy(curve["steps"][1:], curve["errors"][1:], **options)
        label = curve["rival"]
        if step := times.get(curve["rival"]):
            seconds = [step["median"] * n for n in curve["steps"][1:]]
            by_time.loglog(seconds, curve["errors"][1:], label=label, **options)
        else:
            by_time.plot([], label=f"{label} (no time)", **options)
    by_time.set(xlabel="seconds of training", ylabel="relative L2 error")
    by_step.set(xlabel="steps")
    by_time.xaxis.set_major_formatter("{x:g}")
    lines = by_time.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, fontsize="small")
    env = data["environment"]
    figure.suptitle(f"{what}; {env['device']}, {env['cpu_count']} cores", fontsize="medium")


def front_door(figure: Any, data: dict[str, Any]) -> None:
    """Error by step of five rivals, named at the ends of their lines."""
    # Okabe and Ito's colors, which the color-blind tell apart.
    colors = {
        "casts by hand, float16": "#d55e00",
        "MPX, float16": "#e69f00",
        "torch.amp, float16": "#009e73",
        "mpx_pde, forward float32, float16": "#0072b2",
        "float32": "#000000",
    }
    axes = figure.subplots()
    curves = {c["rival"]: c for c in _curves(data)}
    ends = sorted((curves[rival]["errors"][-1], rival) for rival in colors)
    below = 0.0
    for error, rival in ends:
        curve, color = curves[rival], colors[rival]
        axes.semilogy(curve["steps"][1:], curve["errors"][1:], color=color)
        # Names of lines that end together stand below each other.
        place = max(error, below * 1.75)
        axes.annotate(
            rival,
            (curve["steps"][-1], place),
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            va="center",
            annotation_clip=False,
        )
        below = place
    axes.set(xlabel="steps of training", ylabel="relative L2 error")
    axes.margins(x=0)


def memory_by_batch(figure: Any, data: dict[str, Any]) -> None:
    """Of a training step compiled for an H100."""
    axes = figure.subplots()
    styles = {
        "mpx_pde float32": ("float32", Line("black")),
        "MPX float16": ("MPX, float16", Line("tab:orange", "--")),
        "mpx_pde cast-float16": ("mpx_pde, float16 by casting", Line("tab:blue", ":")),
        "mpx_pde autocast-float16": ("mpx_pde, float16 by autocast", Line("tab:blue")),
    }
    for rival, (label, (color, style)) in styles.items():
        programs = [p for p in data["programs"] if p["rival"] == rival and "failed" not in p]
        batches = [p["batch"] for p in programs]
        gib = [p["temp_bytes"] / 2**30 for p in programs]
        axes.loglog(batches, gib, "o", label=label, color=color, linestyle=style, base=2)
    axes.set(xlabel="batch", ylabel="memory beyond state and batch, GiB", xticks=batches)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.legend()
    figure.suptitle("A training step of ViT-Base, compiled for an H100, not run", fontsize="medium")


def growth(figure: Any, data: dict[str, Any]) -> None:
    """Memory of a step compiled for an H100, by size."""
    styles = {
        "float32, nested": ("float32, nested jvp", Line("black", ":")),
        "float32": ("float32, mpx_pde", Line("black")),
        "float16, naive": ("float16 by hand, nested jvp", Line("tab:red")),
        "float16": ("float16, mpx_pde", Line("tab:blue")),
    }
    sweeps = dict.fromkeys(c["sweep"] for c in data["costs"])
    for sweep, axes in zip(sweeps, figure.subplots(1, len(sweeps), sharey=True), strict=True):
        for way, (label, (color, style)) in styles.items():
            costs = [
                c
                for c in data["costs"]
                if (c["target"], c["sweep"], c["way"]) == ("h100", sweep, way)
            ]
            sizes = [c[sweep] for c in costs]
            mib = [c["temp_bytes"] / 2**20 for c in costs]
            axes.loglog(sizes, mib, "o", label=label, color=color, linestyle=style, base=2, ms=3)
        axes.set(xlabel=sweep, xticks=sizes)
        axes.xaxis.set_major_formatter("{x:.0f}")
    figure.axes[0].set(ylabel="memory of a step, MiB")
    figure.axes[0].yaxis.set_major_formatter("{x:.0f}")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    title = "Gradient of a cavity's residuals, compiled for an H100, not run"
    figure.suptitle(title, fontsize="medium")


class Figure(NamedTuple):
    draw: Callable[[Any, Any], None]
    results: str  # the name of the JSON file
    size: tuple[float, float] = (8.0, 3.8)

    def digest(self, data: dict[str, Any]) -> str:
        code = Path(__file__).read_text(encoding="utf-8")
        return hashlib.sha256((json.dumps(data) + code).encode()).hexdigest()[:16]


FIGURES: dict[str, Figure] = {
    "front-door": Figure(front_door, "time_to_error-cavity-cpu", (6.4, 3.0)),
    "breadth": Figure(_breadth.draw, "breadth-cpu", (8.0, 10.0)),
    "error-against-time": Figure(
        partial(error_against_time, "Physics-informed network of a lid-driven cavity"),
        "time_to_error-cavity-cpu",
    ),
    "burgers-error-against-time": Figure(
        partial(error_against_time, "Physics-informed network of Burgers' equation"),
        "time_to_error-burgers-cpu",
    ),
    "operator-error-against-time": Figure(
        partial(error_against_time, "Fourier neural operator of decaying turbulence"),
        "time_to_error-navier_stokes-cpu",
    ),
    "growth": Figure(growth, "growth-cpu"),
    "memory-by-batch": Figure(memory_by_batch, "vit_step-h100-cpu", (5.0, 3.4)),
}


def drawn_from(path: Path) -> str | None:
    """The digest in a file."""
    if not path.exists():
        return None
    found = re.search(r"drawn from ([0-9a-f]{16})", path.read_text(encoding="utf-8"))
    return found[1] if found else None


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
    """The figures that differ from the results; with `write`, draws them anew."""
    found = []
    for name, figure in FIGURES.items():
        data, path = load(figure.results), FOLDER / f"{name}.svg"
        if drawn_from(path) != figure.digest(data):
            found.append(path)
            if write:
                save(figure, data, path)
    return found
