"""How far second-order steps get, by precision."""

from typing import Any

from ._format import load, markdown, source


MARKS = (40, 80, 120, 160, 200, 240)  # steps


def table() -> str:
    """The error after some steps, in the order of the trainings."""
    data = load("second_order-cpu")
    rows = [
        [t["forward"], t["jacobian"], str(t["seed"]), *(_at(t, step) for step in MARKS)]
        for t in data["trainings"]
    ]
    columns = ["residual", "Jacobian", "seed", *(f"step {step}" for step in MARKS)]
    return f"{markdown(columns, rows)}\n\n{source(data)}\n"


def _at(training: dict[str, Any], step: int) -> str:
    found = dict(zip(training["steps"], training["errors"], strict=True)).get(step)
    return "–" if found is None else f"{found:.1e}"
