"""The tables in README and documentation, generated from `results/*.json`.

A block between `<!-- results:NAME -->` and `<!-- /results -->` belongs to the function of that
name here; nothing in it is typed by hand.
"""

import re
from collections.abc import Callable
from pathlib import Path

from . import (
    _accuracy,
    _breadth,
    _casting,
    _gallery,
    _networks,
    _operators,
    _predicted,
    _programs,
    _rivals,
    _summary,
    _time_to_error,
)
from ._format import ROOT


_BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)

TABLES: dict[str, Callable[..., str]] = {
    "breadth": _breadth.summary,
    "breadth-paper": _breadth.paper,
    "breadth-problems": _breadth.by_problem(),
    "breadth-failures": _breadth.failures,
    "breadth-step": _breadth.step,
    "breadth-resolutions": _breadth.resolutions,
    "precisions-adam": _breadth.by_problem("breadth-precisions", "adam"),
    "precisions-adam-lbfgs": _breadth.by_problem("breadth-precisions", "adam+lbfgs"),
    "casting-steps": _casting.steps,
    "casting-trainings": _casting.trainings,
    "cavity-memory": _predicted.memory,
    "collectives": _programs.collectives,
    "compile-time": _programs.compile_time,
    "derivatives": _networks.coordinate_mlp,
    "float8": _accuracy.float8,
    "fno-memory": _rivals.fno_memory,
    "fno-step": _rivals.fno_step,
    "frequencies": _accuracy.frequencies,
    "gallery": _gallery.gallery,
    "growth": _programs.growth,
    "headline": _summary.headline,
    "networks": _networks.networks,
    "networks-times": _networks.times,
    "operators": _operators.precisions,
    "operators-preactivations": _operators.preactivations,
    "operators-modes": _operators.modes,
    "operators-resolutions": _operators.resolutions,
    "overhead": _programs.overhead,
    "pinn-step": _rivals.pinn_step,
    "pinn-sweep": _rivals.pinn_sweep,
    "predicted-assumptions": _predicted.assumptions,
    "predicted-commands": _predicted.commands,
    "predicted-forward": _predicted.forward,
    "predicted-kernels": _predicted.kernels,
    "predicted-recomputation": _predicted.recomputation,
    "predicted-steps": _predicted.steps,
    "products": _accuracy.products,
    "second-order": _accuracy.second_order,
    "spectral-layers": _accuracy.spectral_layers,
    "spectral-models": _programs.spectral_models,
    "time-to-error-burgers": _time_to_error.time_to_error("burgers"),
    "time-to-error-cavity": _time_to_error.time_to_error("cavity"),
    "time-to-error-navier-stokes": _time_to_error.time_to_error("navier_stokes"),
    "vit": _accuracy.vit,
    "vit-batches": _rivals.vit_batches,
    "vit-step": _rivals.vit_step,
    "vit_memory": _programs.vit_memory,
    "weak-scaling": _programs.weak_scaling,
}


def stale(write: bool) -> list[Path]:
    """The pages whose tables differ from the results; with `write`, brings them up to date."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)
        if new != text:
            found.append(path)
            if write:
                path.write_text(new, encoding="utf-8")
    return found
