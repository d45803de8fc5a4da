"""Steps beside those of other libraries: time, memory and error in one row."""

from collections.abc import Iterator

from ._format import NOT_RUN, Record, Result, Table, cell, groups


TIME = """
    ms                {seconds.median:ms.3g} || fails: `{failed}`
    temp memory, MiB  {temp_bytes:MiB.3g} || not measured
"""

# --- Physics-informed networks ---------------------------------------------------------------

SIZES = ("width", "points", "order")
LIBRARIES = {"mpx": "MPX", "jax": "plain JAX", "torch": "PyTorch"}


def _by_size(data: Result) -> dict[tuple[int, ...], list[Record]]:
    """The records of each size, the base first, with their rivals as people call them."""
    library = lambda r: LIBRARIES.get(r["library"], r["library"])
    named = ({**r, "step": f"{library(r)}, {r['method']}, {r['precision']}"} for r in data["steps"])
    return groups(named, *SIZES)


pinn_step = Table(
    "pinn_step",
    lambda data: next(iter(_by_size(data).values())),
    "step  {step}"
    + TIME
    + """
    error of the gradient  {gradient_error:.1e} || all steps skipped
    loss over float32's    {loss_over_float32:.4g}
    """,
    "{width} × {depth}, {points:,} points, order {order}.",
)


def _swept(data: Result) -> list[Record]:
    """The times of those that took more sizes than one."""
    rows: dict[str, Record] = {}
    for i, records in enumerate(_by_size(data).values()):
        for r in records:
            if "failed" not in r:
                row = rows.setdefault(r["step"], {"step": r["step"], "base": data["steps"][0]})
                row[f"size {i}"] = r["seconds"]["median"]
    return [row for row in rows.values() if len(row) > 3]


def _sizes(data: Result) -> Iterator[str]:
    """What departs from the base, one at a time."""
    base, *others = _by_size(data)
    yield from ("step  {step}", "base  {size 0:ms.3g}")
    for i, size in enumerate(others, 1):
        [changed] = [f"{k} {v:,}" for k, v, b in zip(SIZES, size, base, strict=True) if v != b]
        yield f"{changed}  {{size {i}:ms.3g}}"


pinn_sweep = Table(
    "pinn_step",
    _swept,
    _sizes,
    "Milliseconds. The base: {base.width} wide, {base.points:,} points, order {base.order}.",
)

# --- Operators and transformers --------------------------------------------------------------

GRID, BATCH = "{resolution}², {modes} modes", "batch {batch}"
ERRORS = """
    error of outputs  {error_output:.1e}
    of the gradient   {error_gradient:.1e}
    loss              {loss:.4g}
"""


def _steps(file: str, size: str) -> Table:
    columns = f"size  {size}\n" + "step  {rival}" + TIME + ERRORS
    return Table(file, lambda data: data["steps"], columns)


fno_step = _steps("fno_step", GRID)
vit_step = _steps("vit_step", BATCH)


def _compiled(file: str, size: str) -> Table:
    """Of programs compiled for an H100, GiB and the ratio to the first step of the same size."""

    def rows(data: Result) -> Iterator[Record]:
        first: dict[str, Record] = {}
        for rival, programs in groups(data["programs"], "rival").items():
            row: Record = {"rival": rival}
            for r in programs:
                if "failed" not in r:
                    first.setdefault(cell(r, size), r)
                row[cell(r, size)] = {**r, "first": first.get(cell(r, size))}
            yield row

    def columns(data: Result) -> list[str]:
        sizes = dict.fromkeys(cell(r, size) for r in data["programs"])
        told = "{{{0}.temp_bytes:GiB.2f}} ({{{0}.temp_bytes/{0}.first.temp_bytes:.2f}})"
        failed = "fails: `{{{0}.failed}}`"
        return ["step  {rival}", *(f"{at}  {told} || {failed}".format(at) for at in sizes)]

    note = f"over the first row; {NOT_RUN}, with cuBLAS for products."
    return Table(file, rows, columns, f"GiB beyond state and batch and, in brackets, {note}")


fno_memory = _compiled("fno_step-h100", GRID)
vit_batches = _compiled("vit_step-h100", BATCH)
