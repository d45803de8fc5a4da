"""Casting a network, or autocast: trainings and steps by both."""

import statistics
from collections.abc import Iterator

from ._breadth import Ratios
from ._format import NOT_RUN, Record, Result, Table, groups, load, older


HALVES = ("float16", "bfloat16")
BATCH = 64


def _trainings(data: Result) -> Iterator[Record]:
    """Of the problems that were trained by both."""
    ratios, rows = Ratios(data), []
    names = [f"{way}{half}" for half in HALVES for way in ("", "autocast-", "forward-float32-")]
    for problem in ratios.solved:
        found = {name: ratios.of(problem, name) for name in names}
        if all(found.values()):
            medians = {name: statistics.median(of) for name, of in found.items()}
            rows.append({"problem": ratios.titles[problem], **medians})
    yield from rows
    middle = {name: statistics.median(row[name] for row in rows) for name in names}
    yield {"problem": f"**median of {len(rows)}**", **middle}


trainings = Table(
    "breadth",
    _trainings,
    """
    error over float32's   {problem}
    float16, cast          {float16:.2f}
    `autocast`             {autocast-float16:.2f}
    `forward="float32"`    {forward-float32-float16:.2f}
    bfloat16, cast         {bfloat16:.2f}
    `autocast`             {autocast-bfloat16:.2f}
    `forward="float32"`    {forward-float32-bfloat16:.2f}
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


def _ages(data: Result) -> str:
    """Of the three files. Where they come from is told beside their own tables."""
    read = (data, load("vit_step-h100-cpu"), load("compile_time-cpu"))
    return next(filter(None, map(older, read)), "").strip()


steps = Table(
    "vit_step",
    _steps,
    """
    step      {what}
    cast      {cast}
    autocast  {autocast}
    """,
    told=_ages,
)
