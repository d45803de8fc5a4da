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
    "network": ("foreign_step-cpu", "error_gradient"),
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
    kind, _, network = problem.partition("-")
    name, field = ERRORS[kind]
    of_network = {"network": network, "rival": rival} if kind == "network" else None
    if (wanted := RECORDED.get((kind, rival), of_network)) is None:
        return NONE
    records = [r for r in load(name)["steps"] if wanted.items() <= r.items()]
    found = [r[field] for r in records if field in r]
    return f"{max(found):.1e}" if found else NONE


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


def beside(data: Result, problem: str) -> dict[str, Record]:
    """Returns the steps of a problem by their names."""
    return {r["rival"]: r for r in data["steps"] if r["problem"] == problem}


# From memory and products alone, over arithmetic, to XLA's estimates.
RANGE = "{seconds:ms.3g} – {seconds_with_arithmetic:ms.3g} – {seconds_by_xla:ms.3g}"

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

TIME = "seconds_with_arithmetic"
OVER = f"""
    float32 over it  {{beside.float32.{TIME}/{TIME}:.1f}}
    TF32 over it     {{beside.TF32.{TIME}/{TIME}:.1f}}
    memory, GiB      {{temp_bytes:GiB.2f}}
    gradient error   {{error}}
"""

everything = _table(
    _records,
    f"""
    problem  {{title}}
    step     {{rival}}
    predicted, not run: ms  {RANGE}
    {OVER}
    over ours in float32    {{{TIME}/full.{TIME}:.2f}}
    memory over float32's   {{temp_bytes/full.temp_bytes:.2f}}
    ideal, ms               {{ideal_seconds:ms.3g}}
    kernels  {{kernels:,}}
    GB       {{bytes:G.3g}}
    products, GFLOP         {{work}}
    shares   {{shares}}
    """,
)

SHOWN = {
    "cavity-512": (
        *("float32", "TF32", FULL, OURS),
        *(f"{OURS}, forward {name}" for name in ("bfloat16_x3", "float32")),
    ),
    "fno-256": ("float32", FULL, OURS),
    "vit-base": ("float32", OURS, "MPX float16"),
}

steps = _table(
    lambda data: [r for r in _records(data) if r["rival"] in SHOWN.get(r["problem"], ())],
    f"""
    step  {{title}}: {{rival}}
    ms    {{{TIME}:ms.3g}}
    {OVER}
    """,
    f"Memory beyond state and batch; {NOT_RUN}, times predicted.",
)

RECOMMENDED = "mpx_pde bfloat16, forward bfloat16_x3"

networks = _table(
    lambda data: [
        r
        for r in _records(data)
        if r["problem"].startswith("network-") and r["rival"] == RECOMMENDED
    ],
    f"""
    network           {{title}}
    ms                {{{TIME}:ms.3g}}
    float32 over it   {{beside.float32.{TIME}/{TIME}:.1f}}
    TF32 over it      {{beside.TF32.{TIME}/{TIME}:.1f}}
    memory of JAX's   {{temp_bytes/beside.float32.temp_bytes:.2f}}
    gradient error    {{error}}
    """,
    f"Memory beyond state and batch; {NOT_RUN}, times predicted.",
)

kernels = _table(
    lambda data: [
        {**kernel, "title": r["title"]}
        for r in data["steps"]
        if r["rival"] == OURS
        for kernel in r["largest"]
    ],
    """
    problem       {title}
    predicted ms  {seconds_with_arithmetic:ms.3f}
    kernels       {kernels}
    kind          {kind}
    bound by      {bound}
    GB            {bytes:G.2f}
    line          {line}
    """,
)

# What settles each prediction.
commands = _table(
    lambda data: [r for r in data["steps"] if r["rival"] == OURS],
    """
    problem     {title}
    on an H100  `{command}`
    """,
    told=nothing,
)
