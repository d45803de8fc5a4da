"""What references were checked against, and how far off they are themselves."""

from collections.abc import Iterator
from functools import cache

from ._format import Record, Result, Table, load


@cache
def _own() -> dict[str, float]:
    """Returns the error of each numerical reference, by problem."""
    checks = load("outside")["checks"]
    numerical = (c for c in checks if c["kind"] != "published" or c["problem"] == COARSE)
    return {c["problem"]: c["error"] for c in numerical}


COARSE = "cavity_64"


def judged_by(training: Record) -> str:
    """Returns the reference of a training: its problem, or the finite volumes that judged the
    cavity before its reference was published values."""
    return (
        COARSE if "against Ghia et al." in (training.get("errors") or {}) else training["problem"]
    )


def own_error(problem: str) -> float | None:
    """Returns the error of a problem's reference; `None` if it is exact or published."""
    return _own().get(problem)


def beside(problem: str) -> str:
    """Returns the error of a problem's reference in brackets, to print beside what it judges."""
    error = own_error(problem)
    return "" if error is None else f" (reference: {error:.0e})"


def _published(data: Result) -> Iterator[Record]:
    for check in data["checks"]:
        if check["kind"] == "published":
            own = None if check["problem"] == COARSE else own_error(check["problem"])
            yield {**check, "own": own}


def _selves(data: Result) -> list[Record]:
    known = {check["problem"] for check in data["checks"] if check["kind"] == "published"}
    return [c for c in data["checks"] if c["kind"] != "published" and c["problem"] not in known]


published = Table(
    "outside",
    _published,
    """
    solution                      {title}
    published by                  {against}
    compared at                   {at}
    difference                    {error:.1e}
    ours, by itself or a bound    {own:.1e}
    """,
)
selves = Table(
    "outside",
    _selves,
    """
    reference        {title}
    of               {at}
    against          {against}
    difference       {error:.1e}
    """,
)
