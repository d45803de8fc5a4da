"""Steps beside those of other libraries: time, memory and error in one row."""

from collections.abc import Iterator

from ._format import NOT_RUN, Record, Result, Table, cell, groups, load, nothing


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


_PINN = "step  {step}" + TIME + "error of the gradient  {gradient_error:.1e} || all steps skipped"

pinn_all = Table(
    "pinn_step",
    lambda data: next(iter(_by_size(data).values())),
    _PINN + "\nloss over float32's  {loss_over_float32:.4g}",
)
pinn_step = Table(
    "pinn_step",
    lambda data: [
        r
        for r in next(iter(_by_size(data).values()))
        if (r["library"] != "torch" or r["method"] == "double backward")
        and (r["method"] != "laplacian" or r["precision"] == "float32")
    ],
    _PINN,
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


def _everything(file: str, size: str) -> Table:
    columns = f"size  {size}\n" + "step  {rival}" + TIME + ERRORS
    return Table(file, lambda data: data["steps"], columns)


def _of_size(file: str, note: str, **size: int) -> Table:
    """The steps of one size that worked."""
    rows = lambda data: [
        r for r in data["steps"] if size.items() <= r.items() and "failed" not in r
    ]
    return Table(file, rows, "step  {rival}" + TIME + ERRORS, note)


fno_all = _everything("fno_step", GRID)
fno_step = _of_size("fno_step", f"{GRID}.", resolution=64, modes=16)
vit_all = _everything("vit_step", BATCH)
vit_step = _of_size("vit_step", "Batch {batch}.", batch=64)


def _on_a_cpu(data: Result) -> Iterator[Record]:
    """Yields the steps of this library, with their times by precision."""
    pinn = next(iter(_by_size(load("pinn_step-cpu")).values()))
    ours = lambda steps, name: {
        half: next(r for r in steps if r["rival"] == name.format(half) and "seconds" in r)
        for half in ("float32", "float16", "bfloat16")
    }
    named = [{**r, "rival": r["step"]} for r in pinn]
    yield {"what": "physics-informed network", **ours(named, "mpx_pde, partials, {}")}
    fno = [r for r in data["steps"] if (r["resolution"], r["modes"]) == (64, 16)]
    yield {"what": "Fourier neural operator", **ours(fno, "mpx_pde dft {}")}
    vit = [
        {**r, "rival": r["rival"].replace("autocast-", "")}
        for r in load("vit_step-cpu")["steps"]
        if r["batch"] == 64
    ]
    yield {"what": "vision transformer", **ours(vit, "mpx_pde {}")}


_MS = "seconds.median"
on_a_cpu = Table(
    "fno_step",
    _on_a_cpu,
    f"""
    a step on a CPU   {{what}}
    float32, ms       {{float32.{_MS}:ms.3g}}
    float16 over it   {{float16.{_MS}/float32.{_MS}:.2f}}
    bfloat16 over it  {{bfloat16.{_MS}/float32.{_MS}:.2f}}
    """,
    told=nothing,
)


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
