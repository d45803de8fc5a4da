"""What steps would take on an H100, predicted from their compiled programs."""

from collections.abc import Iterator
from functools import partial

from ._format import NONE, NOT_RUN, Record, Result, Table, groups, load, nothing


OURS = "mpx_pde float16"
FULL = "mpx_pde float32"
LAPLACIAN = "mpx_pde float16, laplacian"
KEEPING = "mpx_pde float16, remat=False"

# Where the error of a step is measured, and what the records of rivals say there.
ERRORS = {
    "cavity": ("pinn_step-cpu", "gradient_error"),
    "fno": ("fno_step-cpu", "error_gradient"),
    "vit": ("vit_step-cpu", "error_gradient"),
}
RECORDED: dict[tuple[str, str], dict[str, str]] = {
    ("cavity", "float32"): {"library": "jax", "precision": "float32"},
    ("cavity", OURS): {"library": "mpx_pde", "method": "partials", "precision": "float16"},
    ("cavity", LAPLACIAN): {"library": "mpx_pde", "method": "laplacian", "precision": "float16"},
    ("fno", "float32"): {"rival": "plain JAX float32"},
    ("fno", OURS): {"rival": "mpx_pde dft float16"},
    ("fno", KEEPING): {"rival": "mpx_pde dft float16, remat=False"},
    ("vit", "float32"): {"rival": "mpx_pde float32"},
    ("vit", OURS): {"rival": "mpx_pde autocast-float16"},
    ("vit", "MPX float16"): {"rival": "MPX float16"},
}


def gradient_error(problem: str, rival: str) -> str:
    """Of the first step's gradient against float64, on a CPU, where half precision is emulated to
    the bit but sums are in another order; the largest of the sizes there."""
    kind, _, _ = problem.partition("-")
    name, field = ERRORS[kind]
    if (wanted := RECORDED.get((kind, rival))) is None:
        return NONE
    records = [r for r in load(name)["steps"] if wanted.items() <= r.items()]
    return f"{max(r[field] for r in records if field in r):.1e}"


def _records(data: Result) -> Iterator[Record]:
    """The steps, each with those of the same problem beside it."""
    for found in groups(data["steps"], "title").values():
        beside = {record["rival"]: record for record in found}
        for r in found:
            shares = (
                f"{kind} {v['seconds'] / r['seconds']:.0%}" for kind, v in r["by_kind"].items()
            )
            products = r["operations"].items()
            least = 0.01 * sum(n for _, n in products)
            yield {
                **r,
                "beside": beside,
                "full": beside.get(FULL, beside["float32"]),
                "error": gradient_error(r["problem"], r["rival"]),
                "shares": ", ".join(share for share in shares if not share.endswith(" 0%")),
                "work": ", ".join(f"{kind} {n / 1e9:,.0f}" for kind, n in products if n > least),
            }


def speedups(data: Result, rival: str) -> list[float]:
    """Of our half-precision steps over a rival, by problem."""
    key = "seconds_with_arithmetic"
    ours = (r for r in _records(data) if r["rival"] == OURS)
    return [r["beside"][rival][key] / r[key] for r in ours]


def saved(data: Result, problem: str) -> float:
    """The memory of our half-precision step over that in float32."""
    [ours] = [r for r in _records(data) if (r["problem"], r["rival"]) == (problem, OURS)]
    return ours["temp_bytes"] / ours["full"]["temp_bytes"]


# From memory and products alone, over arithmetic, to XLA's estimates.
RANGE = "{seconds:ms.3g} – {seconds_with_arithmetic:ms.3g} – {seconds_by_xla:ms.3g}"
MEMORY = "Memory beyond state and batch."

_table = partial(Table, "predicted-h100")

assumptions = _table(
    "assumptions",
    """
    rate                 {rate}
    data sheet           {data_sheet}
    share of it assumed  {share}
    """,
    told=nothing,
)

steps = _table(
    _records,
    f"""
    problem  {{title}}
    step     {{rival}}
    predicted, not run: ms  {RANGE}
    float32 over it         {{beside.float32.seconds_with_arithmetic/seconds_with_arithmetic:.2f}}
    TF32 over it            {{beside.TF32.seconds_with_arithmetic/seconds_with_arithmetic:.2f}}
    ideal, ms (over it)     {{ideal_seconds:ms.3g}} ({{seconds_with_arithmetic/ideal_seconds:.1f}})
    gradient error          {{error}}
    kernels  {{kernels:,}}
    GB       {{bytes:G.3g}}
    shares   {{shares}}
    """,
    "Compiled for an H100, predicted, not run.",
)

# What keeping activations takes and gives, of the operators.
recomputation = _table(
    lambda data: [
        {**r, "remat": r["rival"] == OURS}
        for r in _records(data)
        if KEEPING in r["beside"] and r["rival"] in (OURS, KEEPING)
    ],
    f"""
    problem  {{title}}
    float16  `remat={{remat}}`
    predicted, not run: ms  {RANGE}
    float32 over it         {{beside.float32.seconds_with_arithmetic/seconds_with_arithmetic:.2f}}
    memory, GiB             {{temp_bytes:GiB.2f}}
    memory of float32, GiB  {{beside.float32.temp_bytes:GiB.2f}}
    gradient error          {{error}}
    """,
    MEMORY,
    told=nothing,
)

# What a forward pass in full takes and gives.
forward = _table(
    lambda data: [
        r
        for r in _records(data)
        if r["rival"] in (OURS, r["full"]["rival"]) or "forward" in r["rival"]
    ],
    f"""
    problem  {{title}}
    step     {{rival}}
    predicted, not run: ms  {RANGE}
    over half throughout    {{seconds_with_arithmetic/beside.{OURS}.seconds_with_arithmetic:.2f}}
    memory, GiB             {{temp_bytes:GiB.2f}}
    over float32's          {{temp_bytes/full.temp_bytes:.2f}}
    products, GFLOP         {{work}}
    GB                      {{bytes:G.3g}}
    """,
    MEMORY,
    told=nothing,
)

# The cavity's largest step, by how its derivatives are taken.
memory = _table(
    lambda data: [
        r for r in _records(data) if r["problem"] == "cavity-512" and r["rival"] != "TF32"
    ],
    f"""
    step                  {{rival}}
    memory, GiB           {{temp_bytes:GiB.2f}}
    over ours in float32  {{temp_bytes/beside.{FULL}.temp_bytes:.2f}}
    over nested float32   {{temp_bytes/beside.float32.temp_bytes:.2f}}
    kernels               {{kernels:,}}
    """,
    "{title}; beyond state and batch; " + NOT_RUN + ".",
    told=nothing,
)

_largest = _table(
    "largest",
    """
    predicted ms  {seconds_with_arithmetic:ms.3f}
    kernels       {kernels}
    kind          {kind}
    bound by      {bound}
    GB            {bytes:G.2f}
    line          {place}
    """,
    told=nothing,
)


def kernels(data: Result | None = None) -> str:
    """The largest of our half-precision steps."""
    parts = []
    for step in (load("predicted-h100-cpu") if data is None else data)["steps"]:
        if step["rival"] == OURS:
            largest = [
                {**r, "place": f"`{r['line']}`" if r["line"] else NONE} for r in step["largest"]
            ]
            table = _largest({"largest": largest})
            parts.append(f"### {step['title']}\n\n{table}")
    return "\n".join(parts)


# What settles each prediction.
commands = _table(
    lambda data: [r for r in data["steps"] if r["rival"] == OURS],
    """
    problem     {title}
    on an H100  `{command}`
    """,
    told=nothing,
)
