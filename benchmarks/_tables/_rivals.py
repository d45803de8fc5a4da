"""Steps beside those of other libraries: time, memory and error in one row."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._format import NOT_RUN, load, markdown, source


Record = dict[str, Any]
NOT_MEASURED = "not measured"
NO_STEP = "all steps skipped"


def milliseconds(record: Record) -> str:
    return f"{1e3 * record['seconds']['median']:.3g}"


def mebibytes(record: Record) -> str:
    return NOT_MEASURED if record["temp_bytes"] is None else f"{record['temp_bytes'] / 2**20:.3g}"


def _rows(
    records: Iterable[Record], name: Callable[[Record], str], errors: Sequence[str], loss: str
) -> list[list[str]]:
    """Time, memory, errors and loss; of a rival that failed, how."""
    rows = []
    for r in records:
        if "failed" in r:
            rows.append([name(r), f"fails: `{r['failed']}`", *["–"] * (2 + len(errors))])
            continue
        told = [NO_STEP if r[e] is None else f"{r[e]:.1e}" for e in errors]
        rows.append([name(r), milliseconds(r), mebibytes(r), *told, f"{r[loss]:.4g}"])
    return rows


# --- Physics-informed networks ---------------------------------------------------------------


def _who(r: Record) -> str:
    library = {"mpx": "MPX", "jax": "plain JAX", "torch": "PyTorch"}.get(r["library"], r["library"])
    return f"{library}, {r['method']}, {r['precision']}"


def pinn_step() -> str:
    data = load("pinn_step-cpu")
    sizes = ("width", "points", "order", "depth")
    base = {k: data["steps"][0][k] for k in sizes}
    records = [r for r in data["steps"] if base.items() <= r.items()]
    rows = _rows(records, _who, ["gradient_error"], "loss_over_float32")
    columns = ["step", "ms", "temp memory, MiB", "error of the gradient", "loss over float32's"]
    note = "{width} × {depth}, {points:,} points, order {order}.".format(**base)
    return f"{markdown(columns, rows)}\n\n{note} {source(data)}\n"


def pinn_sweep() -> str:
    """Milliseconds by width, points and order, one at a time from the base."""
    data = load("pinn_step-cpu")
    base = {k: data["steps"][0][k] for k in ("width", "points", "order")}
    cases = [base]
    for r in data["steps"]:
        case = {k: r[k] for k in base}
        if case not in cases:
            cases.append(case)
    times: dict[str, dict[int, str]] = {}
    for r in data["steps"]:
        if "failed" not in r:
            case = cases.index({k: r[k] for k in base})
            times.setdefault(_who(r), {})[case] = milliseconds(r)
    titles = ["base"]
    for case in cases[1:]:
        [changed] = [f"{k} {v:,}" for k, v in case.items() if v != base[k]]
        titles.append(changed)
    rows = [
        [name, *(found.get(i, "–") for i in range(len(cases)))]
        for name, found in times.items()
        if len(found) > 1
    ]
    note = "Milliseconds. The base: {width} wide, {points:,} points, order {order}.".format(**base)
    return f"{markdown(['step', *titles], rows)}\n\n{note} {source(data)}\n"


# --- Operators and transformers --------------------------------------------------------------


def _steps(name: str, where: Callable[[Record], str]) -> str:
    data = load(name)
    rows = []
    for at in dict.fromkeys(where(r) for r in data["steps"]):
        records = [r for r in data["steps"] if where(r) == at]
        errors = ("error_output", "error_gradient")
        rows += [[at, *row] for row in _rows(records, lambda r: r["rival"], errors, "loss")]
    columns = ["size", "step", "ms", "temp memory, MiB"]
    columns += ["error of outputs", "of the gradient", "loss"]
    return f"{markdown(columns, rows)}\n\n{source(data)}\n"


def fno_step() -> str:
    return _steps("fno_step-cpu", lambda r: f"{r['resolution']}², {r['modes']} modes")


def vit_step() -> str:
    return _steps("vit_step-cpu", lambda r: f"batch {r['batch']}")


def _memory(name: str, where: Callable[[Record], str]) -> str:
    """Of programs compiled for an H100, GiB and the ratio to the first step of the same size."""
    data = load(name)
    sizes = list(dict.fromkeys(where(r) for r in data["programs"]))
    first: dict[str, int] = {}
    cells: dict[str, dict[str, str]] = {}
    for r in data["programs"]:
        row = cells.setdefault(r["rival"], {})
        if "failed" in r:
            row[where(r)] = f"fails: `{r['failed']}`"
            continue
        base = first.setdefault(where(r), r["temp_bytes"])
        row[where(r)] = f"{r['temp_bytes'] / 2**30:.2f} ({r['temp_bytes'] / base:.2f})"
    rows = [[rival, *(row.get(size, "–") for size in sizes)] for rival, row in cells.items()]
    return (
        f"{markdown(['step', *sizes], rows)}\n\nGiB beyond state and batch and, in brackets, over "
        f"the first row; {NOT_RUN}, with cuBLAS for products. {source(data)}\n"
    )


def fno_memory() -> str:
    return _memory("fno_step-h100-cpu", lambda r: f"{r['resolution']}², {r['modes']} modes")


def vit_batches() -> str:
    return _memory("vit_step-h100-cpu", lambda r: f"batch {r['batch']}")
