"""Tables of the costs of steps: against other libraries, predicted for an H100, and compiled for
several devices."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from ._format import NONE, NOT_RUN, Record, Result, Table, groups, load


HALVES = ("float16", "bfloat16")

# --- Against other libraries -----------------------------------------------------------------

TIME = """
    ms                {seconds.median:ms.3g} || fails: `{failed}`
    temp memory, MiB  {temp_bytes:MiB.3g} || not measured
"""
ERRORS = """
    error of outputs  {error_output:.1e}
    error of gradient  {error_gradient:.1e}
    loss              {loss:.4g}
"""


def _of_size(
    file: str, columns: str, note: str, size: Record, without: Sequence[str] = ()
) -> Table:
    """Builds a table of the steps of one size that worked, except rivals named by `without`."""
    rows = lambda data: [
        r
        for r in data["steps"]
        if size.items() <= r.items()
        and "failed" not in r
        and not any(words in r["rival"] for words in without)
    ]
    return Table(file, rows, "step  {rival}" + TIME + columns, note)


pinn_step = _of_size(
    "pinn_step",
    "error of gradient  {error_gradient:.1e}",
    "{width} × {depth}, {points:,} points, order {order}.",
    {"width": 64, "points": 1024, "order": 2},
    ("torch.func", "compiled", "laplacian, float16", "laplacian, bfloat16"),
)
fno_step = _of_size(
    "fno_step", ERRORS, "{resolution}², {modes} modes.", {"resolution": 64, "modes": 16}
)
vit_step = _of_size("vit_step", ERRORS, "Batch {batch}.", {"batch": 64})


def _builds(data: Result) -> Iterator[Record]:
    """Yields each step, with the time of its stages for each network and target relative to
    float32."""
    networks = groups(data["builds"], "problem", "target")
    spent = lambda b: sum(b.get(s, {}).get("median", 0) for s in ("trace", "lower", "compile"))
    for step, builds in groups(data["builds"], "step").items():
        over: dict[str, dict[str, float | None]] = {}
        for b in builds:
            network, target = b["problem"], b["target"]
            first = networks[network, target][0]
            over.setdefault(network, {})[target] = spent(b) / spent(first) or None
        if step != "float32":
            yield {"step": step, **over}


def _of_both(network: str) -> str:
    return f"{network}  {{{network}.cpu:.2f}} / {{{network}.h100:.2f}}"


compile_time = Table(
    "compile_time",
    _builds,
    lambda data: ["step  {step}", *map(_of_both, groups(data["builds"], "problem"))],
    "Processor time of tracing, lowering and compiling, relative to float32: for this CPU / for an "
    "H100.",
)

# --- Programs in plain JAX and Equinox ----------------------------------------------------------


def _programs(data: Result) -> Iterator[Record]:
    """Yields a record for each program, with its rivals, and one for the median over programs."""
    ratios: dict[str, list[float]] = {}
    for program, steps in groups(data["steps"], "program").items():
        rivals = {step["rival"]: step for step in steps}
        yield {"program": program, **rivals}
        seconds = {name: step["seconds"]["median"] for name, step in rivals.items()}
        for name, own in seconds.items():
            ratios.setdefault(name, []).append(own / seconds["float32"])
    yield {"program": "median", "over": {k: statistics.median(v) for k, v in ratios.items()}}


def _relative_time(half: str) -> str:
    return f"{{{half}.seconds.median/float32.seconds.median:.2f}} || {{over.{half}:.2f}}"


programs_step = Table(
    "programs_step",
    _programs,
    [
        "step on a CPU  {program}",
        "float32, ms  {float32.seconds.median:ms.3g} || –",
        *(f"backward {half}, relative to float32  {_relative_time(half)}" for half in HALVES),
        *(f"error of gradient, {half}  {{{half}.error_gradient:.1e}} || –" for half in HALVES),
    ],
)

# --- Derivatives of any network --------------------------------------------------------------


def _cases(data: Result) -> dict[str, dict[str, dict[str, Record]]]:
    """Returns the records by network, derivative and rival."""
    return {
        network: {
            problem: {record["rival"]: record for record in records}
            for problem, records in groups(of_network, "problem").items()
        }
        for network, of_network in groups(data["costs"], "network").items()
    }


def seconds_over(data: Result, problem: str, rival: str) -> float:
    """Returns the median over the networks of a step's time relative to a rival."""
    found = [cases.get(problem, {}) for cases in _cases(data).values()]
    seconds = lambda case, name: case[name]["seconds"]["median"]
    both = [case for case in found if {"mpx_pde", rival} <= case.keys()]
    return statistics.median(seconds(c, "mpx_pde") / seconds(c, rival) for c in both)


def _over(problem: str, rival: str = "nested jvp") -> str:
    at = f"{problem}.{{}}.seconds.median"
    return f"{{{at.format('mpx_pde')}/{at.format(rival)}:.2f}}"


networks = Table(
    "networks",
    lambda data: [
        {"network": network, **cases, **data["width"][0]}
        for network, cases in _cases(data).items()
        if any("mpx_pde" in case for case in cases.values())
    ],
    [
        "network  {network}",
        f"order 2  {_over('order 2')}",
        f"order 4  {_over('order 4')}",
        f"Laplacian  {_over('laplacian 2')}",
        f"Laplacian, relative to `jax.hessian`  {_over('laplacian 2', 'hessian')}",
        f"Laplacian, relative to folx  {_over('laplacian 2', 'folx')}",
    ],
    "Time of a step relative to nested `jvp`, in float32. A step takes the mean square of the "
    "derivative and its gradient, for networks of {width} units. Medians of 7 rounds; the rivals "
    "take turns within one process.",
)

# --- Predicted -------------------------------------------------------------------------------

OURS = "mpx_pde float16"
FULL = "mpx_pde float32"
SPLIT = "mpx_pde bfloat16, forward bfloat16_x3"

# The names of the measured steps that have the errors of the predicted ones.
MEASURED = {
    ("cavity", "float32"): "plain JAX, nested jvp, float32",
    ("cavity", OURS): "mpx_pde, partials, float16",
    ("fno", "float32"): "plain JAX float32",
    ("fno", OURS): "mpx_pde dft float16",
    ("vit", "float32"): FULL,
    ("vit", OURS): "mpx_pde autocast-float16",
    ("vit", "MPX float16"): "MPX float16",
}
FILES = {"cavity": "pinn_step", "network": "foreign_step", "fno": "fno_step", "vit": "vit_step"}


def gradient_error(problem: str, rival: str) -> str:
    """Returns the error of the first step's gradient against float64, the largest of all sizes.

    It is measured on a CPU, which emulates half precision to the bit but sums in another order.
    """
    kind, _, network = problem.partition("-")
    wanted = {"rival": MEASURED.get((kind, rival))}
    if kind == "network":
        wanted = {"network": network, "rival": rival}
    records = [r for r in load(FILES[kind])["steps"] if wanted.items() <= r.items()]
    found = [r["error_gradient"] for r in records if r.get("error_gradient")]
    return f"{max(found):.1e}" if found else NONE


def beside(data: Result, problem: str) -> dict[str, Record]:
    """Returns the steps of a problem by rival."""
    return {r["rival"]: r for r in data["steps"] if r["problem"] == problem}


def _predicted(problem: str, *rivals: str) -> list[Record]:
    """Returns steps of a problem, each with all steps of the problem beside it."""
    steps = beside(load("predicted-h100"), problem)
    told = lambda rival: {"beside": steps, "error": gradient_error(problem, rival)}
    return [{**steps[rival], **told(rival)} for rival in rivals]


assumptions = Table(
    "predicted-h100",
    "assumptions",
    """
    rate                 {rate}
    data sheet           {data_sheet}
    share of it assumed  {share}
    """,
    told=False,
)

SECONDS = "seconds_with_arithmetic"


def _times(seconds: str) -> str:
    """Returns the columns of a time and of the speedups over plain JAX."""
    return f"""
    ms               {{{seconds}:ms.3g}}
    speedup over float32  {{beside.float32.{seconds}/{seconds}:.1f}}
    speedup over TF32     {{beside.TF32.{seconds}/{seconds}:.1f}}
"""


_NOTE = f"Memory beyond state and batch; {NOT_RUN}, times predicted."

steps = Table(
    "predicted-h100",
    lambda data: [
        *_predicted("cavity-256", "float32", "TF32", OURS, f"{OURS}, forward bfloat16_x3"),
        *_predicted("fno-256", "float32", OURS, FULL),
        *_predicted("fno-512", "float32", OURS, f"{OURS}, remat=False"),
        *_predicted("vit-base", "float32", f"{OURS}, forward bfloat16_x3"),
    ],
    f"""
    step  {{title}}: {{rival}}
    {_times(SECONDS)}
    memory, GiB      {{temp_bytes:GiB.2f}}
    gradient error   {{error}}
    """,
    _NOTE,
)

# --- Measured --------------------------------------------------------------------------------

GPU = "measured-nvidia-h200"
EARLIER = "measured-nvidia-h100-80gb-hbm3"
_FORWARD = ("bfloat16_x3", "float32")
_SHOWN = {
    "cavity-512": (
        *("float32", "TF32", FULL, OURS),
        *(f"{half}, forward {f}" for f in _FORWARD for half in (OURS, "mpx_pde bfloat16")),
    ),
    "fno-256": ("float32", "TF32", FULL, OURS, f"{OURS}, forward float32"),
}
_SHOWN_EARLIER = {"vit-base": ("TF32", OURS, "MPX float16")}
_MEDIANS = (
    "Memory beyond state and batch. Medians of {seconds.rounds} rounds of five steps in a row; all "
    "steps of a problem take turns."
)


def _measured(file: str, shown: Mapping[str, Sequence[str]]) -> Table:
    """Builds a table of the steps that were measured on a GPU, by problem and rival."""

    def rows(data: Result) -> Iterator[Record]:
        for problem, rivals in shown.items():
            steps = beside(data, problem)
            yield from ({**steps[rival], "beside": steps} for rival in rivals)

    columns = f"""
    step  {{title}}: {{rival}}
    {_times("seconds.median")}
    memory, GiB     {{temp_bytes:GiB.2f}}
    gradient error  {{error_gradient:.1e}}
    """
    return Table(file, rows, columns, _MEDIANS)


measured = _measured(GPU, _SHOWN)
measured_earlier = _measured(EARLIER, _SHOWN_EARLIER)


def _networks_step(data: Result) -> Iterator[Record]:
    """Yields the steps of each network of plain Equinox with a full forward pass."""
    for problem in dict.fromkeys(r["problem"] for r in data["steps"]):
        steps = beside(data, problem)
        if problem.startswith("network-"):
            for forward in _FORWARD:
                step = steps[f"mpx_pde bfloat16, forward {forward}"]
                yield {**step, "forward": forward, "beside": steps}


networks_step = Table(
    GPU,
    _networks_step,
    f"""
    network           {{title}}
    `forward=`        {{forward}}
    {_times("seconds.median")}
    memory, relative to TF32  {{temp_bytes/beside.TF32.temp_bytes:.2f}}
    gradient error    {{error_gradient:.1e}}
    """,
    _MEDIANS,
)

# --- Several devices -------------------------------------------------------------------------


def _sent(data: Result) -> Iterator[Record]:
    """Yields the bytes that each kind of collective sends, for the cavity on four devices."""
    for step in data["steps"]:
        if (step["problem"], step["devices"]) == ("cavity", 4):
            sent: dict[str, list[str]] = {}
            for key, traffic in step["collectives"].items():
                kind, dtype = key.split()
                if dtype != "pred":
                    sent.setdefault(kind, []).append(f"{traffic['bytes'] / 2**10:,.0f} {dtype}")
            yield {**step, **{kind: " + ".join(parts) for kind, parts in sent.items()}}


collectives = Table(
    "weak_scaling-h100",
    _sent,
    """
    layout               {layout}
    precision            {precision}
    sums in              {sum_dtype} || float32
    all-gather, KiB      {all-gather}
    reduce-scatter, KiB  {reduce-scatter}
    all-reduce, KiB      {all-reduce}
    """,
    "Compiled for four H100s, not run.",
)
