"""Casting a network, or autocast: trainings by both."""

import statistics
from collections.abc import Iterator

from ._breadth import Ratios
from ._format import Record, Result, Table


HALVES = ("float16", "bfloat16")


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
    error relative to float32  {way}
    median                {median:.2f}
    at most 1.05          {within}
    worst                 {worst}
    """,
)
