"""Casting a network, or autocast: trainings and steps by both."""

import statistics
from collections.abc import Iterator

from ._breadth import Ratios
from ._format import NOT_RUN, Record, Result, Table, groups, load, nothing


HALVES = ("float16", "bfloat16")
BATCH = 64


WAYS = {
    "cast, the default": "{half}",
    "`autocast=True`": "autocast-{half}",
    '`forward="float32"`': "forward-float32-{half}",
}


def _trainings(data: Result) -> Iterator[Record]:
    """Of the problems that were trained in all ways, over the seeds that all have."""
    ratios = Ratios(data)
    names = [(way, half, name.format(half=half)) for half in HALVES for way, name in WAYS.items()]
    runs = lambda p, name: {t["seed"]: ratios.ratio(t) for t in ratios.runs(p, name)}
    of = {p: {name: runs(p, name) for _, _, name in names} for p in ratios.solved}
    seeds = {p: set.intersection(*map(set, found.values())) for p, found in of.items()}
    for way, half, name in names:
        medians = {p: statistics.median(of[p][name][s] for s in seeds[p]) for p in of if seeds[p]}
        worst = max(medians, key=medians.__getitem__)
        yield {
            "way": f"{half}, {way}",
            "median": statistics.median(medians.values()),
            "within": f"{sum(x <= 1.05 for x in medians.values())} of {len(medians)}",
            "worst": f"{medians[worst]:.2f} ({ratios.titles[worst]})",
        }


trainings = Table(
    "breadth",
    _trainings,
    """
    error over float32's  {way}
    median                {median:.2f}
    at most 1.05          {within}
    worst                 {worst}
    """,
)


def _steps(data: Result) -> Iterator[Record]:
    """What both come to of a vision transformer, and in tracing."""
    runs = {r["rival"]: r for r in data["steps"] if r["batch"] == BATCH}
    programs = load("vit_step-h100-cpu")["programs"]
    compiled = {p["rival"]: p["temp_bytes"] for p in programs if p["batch"] == BATCH}
    for half in HALVES:
        ways = {way: f"mpx_pde {way}-{half}" for way in ("cast", "autocast")}
        errors = {way: f"{runs[name]['error_gradient']:.1e}" for way, name in ways.items()}
        yield {"what": f"error of a transformer's gradient, {half}", **errors}
        full = compiled["mpx_pde float32"]
        memory = {way: f"{compiled[name] / full:.2f}" for way, name in ways.items()}
        yield {"what": f"its memory over float32's, {half}, {NOT_RUN}", **memory}
    for problem, builds in groups(load("compile_time-cpu")["builds"], "problem").items():
        traced = {b["step"]: f"{b['trace']['median']:.2f}" for b in builds if "trace" in b}
        ways = {"cast": traced["mpx_pde"], "autocast": traced["mpx_pde, autocast"]}
        yield {"what": f"tracing a step of the {problem}, s", **ways}


steps = Table(
    "vit_step",
    _steps,
    """
    step      {what}
    cast      {cast}
    autocast  {autocast}
    """,
    told=nothing,
)
