"""What steps would take on an H100, predicted from their compiled programs."""

from typing import Any

from ._format import Result, load, markdown, older, source


OURS = "mpx_pde float16"
FULL = "mpx_pde float32"
KEEPING = "mpx_pde float16, remat=False"

# Where the error of a step is measured: the file, the field, and what records of rivals say.
# The sizes are those of a CPU, the largest of the file.
ERRORS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "cavity": (
        "pinn_step-cpu",
        "gradient_error",
        {
            "float32": {"library": "jax", "precision": "float32"},
            OURS: {"library": "mpx_pde", "method": "partials", "precision": "float16"},
            "mpx_pde float16, laplacian": {
                "library": "mpx_pde",
                "method": "laplacian",
                "precision": "float16",
            },
        },
    ),
    "fno": (
        "fno_step-cpu",
        "error_gradient",
        {
            "float32": {"rival": "plain JAX float32"},
            OURS: {"rival": "mpx_pde dft float16"},
            KEEPING: {"rival": "mpx_pde dft float16, remat=False"},
        },
    ),
    "vit": (
        "vit_step-cpu",
        "error_gradient",
        {
            "float32": {"rival": "mpx_pde float32"},
            OURS: {"rival": "mpx_pde autocast-float16"},
            "MPX float16": {"rival": "MPX float16"},
        },
    ),
}


def gradient_error(problem: str, rival: str) -> str:
    """Of the first step's gradient against float64, on a CPU, where half precision is emulated to
    the bit but sums are in another order; the largest of the sizes there."""
    name, field, rivals = ERRORS[problem.split("-")[0]]
    wanted = rivals.get(rival)
    found = [
        record[field]
        for record in load(name)["steps"]
        if wanted and wanted.items() <= record.items() and field in record
    ]
    return f"{max(found):.1e}" if found else "–"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _range(record: dict[str, Any]) -> str:
    """From memory and products alone, over arithmetic, to XLA's estimates."""
    keys = ("seconds", "seconds_with_arithmetic", "seconds_by_xla")
    return " – ".join(_ms(record[key]) for key in keys)


def _problems(data: Result) -> dict[str, dict[str, dict[str, Any]]]:
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for record in data["steps"]:
        out.setdefault(record["title"], {})[record["rival"]] = record
    return out


def speedups(data: Result, rival: str) -> list[float]:
    """Of our half-precision steps over a rival, by problem."""
    key = "seconds_with_arithmetic"
    return [steps[rival][key] / steps[OURS][key] for steps in _problems(data).values()]


def assumptions() -> str:
    data = load("predicted-h100-cpu")
    rows = [[a["rate"], a["data_sheet"], a["share"]] for a in data["assumptions"]]
    return f"{markdown(['rate', 'data sheet', 'share of it assumed'], rows)}\n"


def steps() -> str:
    data = load("predicted-h100-cpu")
    key, rows = "seconds_with_arithmetic", []
    for title, found in _problems(data).items():
        for name, r in found.items():
            shares = (
                f"{kind} {v['seconds'] / r['seconds']:.0%}" for kind, v in r["by_kind"].items()
            )
            rows.append(
                [
                    title,
                    name,
                    _range(r),
                    f"{found['float32'][key] / r[key]:.2f}",
                    f"{found['TF32'][key] / r[key]:.2f}",
                    f"{_ms(r['ideal_seconds'])} ({r[key] / r['ideal_seconds']:.1f})",
                    gradient_error(r["problem"], name),
                    f"{r['kernels']:,}",
                    f"{r['bytes'] / 1e9:.3g}",
                    ", ".join(share for share in shares if not share.endswith(" 0%")),
                ]
            )
    columns = [
        *("problem", "step", "predicted, not run: ms", "float32 over it", "TF32 over it"),
        *("ideal, ms (over it)", "gradient error", "kernels", "GB", "shares"),
    ]
    note = "Compiled for an H100, predicted, not run."
    return f"{markdown(columns, rows)}\n\n{note} {source(data)}\n"


def recomputation() -> str:
    """What keeping activations takes and gives, of the operators."""
    data = load("predicted-h100-cpu")
    key, rows = "seconds_with_arithmetic", []
    for title, found in _problems(data).items():
        if KEEPING not in found:
            continue
        for name in (OURS, KEEPING):
            r = found[name]
            rows.append(
                [
                    title,
                    f"`remat={name == OURS}`",
                    _range(r),
                    f"{found['float32'][key] / r[key]:.2f}",
                    f"{r['temp_bytes'] / 2**30:.2f}",
                    f"{found['float32']['temp_bytes'] / 2**30:.2f}",
                    gradient_error(r["problem"], name),
                ]
            )
    columns = [
        *("problem", "float16", "predicted, not run: ms", "float32 over it", "memory, GiB"),
        *("memory of float32, GiB", "gradient error"),
    ]
    return f"{markdown(columns, rows)}\n\nMemory beyond state and batch.{older(data)}\n"


def forward() -> str:
    """What a forward pass in full takes and gives, of the physics-informed steps."""
    data = load("predicted-h100-cpu")
    key, rows = "seconds_with_arithmetic", []
    for title, found in _problems(data).items():
        if FULL not in found:
            continue
        half, full = found[OURS], found[FULL]
        for name, r in found.items():
            if name in (OURS, FULL) or "forward" in name:
                work = ", ".join(
                    f"{kind} {flops / 1e9:,.0f}"
                    for kind, flops in r["operations"].items()
                    if flops > 0.01 * sum(r["operations"].values())
                )
                rows.append(
                    [
                        title,
                        name,
                        _range(r),
                        f"{r[key] / half[key]:.2f}",
                        f"{r['temp_bytes'] / 2**30:.2f}",
                        f"{r['temp_bytes'] / full['temp_bytes']:.2f}",
                        work,
                        f"{r['bytes'] / 1e9:.3g}",
                    ]
                )
    columns = [
        *("problem", "step", "predicted, not run: ms", "over half throughout", "memory, GiB"),
        *("over float32's", "products, GFLOP", "GB"),
    ]
    return f"{markdown(columns, rows)}\n\nMemory beyond state and batch.{older(data)}\n"


def kernels() -> str:
    """The largest of our half-precision steps."""
    data = load("predicted-h100-cpu")
    out = []
    for title, found in _problems(data).items():
        rows = [
            [
                f"{1e3 * r['seconds_with_arithmetic']:.3f}",
                f"{r['kernels']}",
                r["kind"],
                r["bound"],
                f"{r['bytes'] / 1e9:.2f}",
                f"`{r['line']}`" if r["line"] else "–",
            ]
            for r in found[OURS]["largest"]
        ]
        columns = ["predicted ms", "kernels", "kind", "bound by", "GB", "line"]
        out.append(f"### {title}\n\n{markdown(columns, rows)}\n")
    return "\n".join(out)


def commands() -> str:
    """What settles each prediction."""
    data = load("predicted-h100-cpu")
    rows = [[title, f"`{found[OURS]['command']}`"] for title, found in _problems(data).items()]
    return f"{markdown(['problem', 'on an H100'], rows)}\n{older(data)}\n"
