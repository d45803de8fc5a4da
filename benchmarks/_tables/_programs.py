"""What compiled programs tell: operations, memory, products, collectives."""

import math
import statistics
from collections.abc import Iterable, Iterator
from functools import partial

from ._format import NOT_RUN, Record, Result, Table, groups, load, source


# --- The library's step beside that by hand --------------------------------------------------


def over_by_hand(data: Result) -> Iterator[Record]:
    """The libraries' steps, each with the same by hand."""
    for steps in groups(data["programs"], "problem", "size", "target", "dtype").values():
        [hand] = [p for p in steps if p["step"] == "by hand"]
        for p in steps:
            target = {"cpu": "CPU"}.get(p["target"], f"{p['target']}, not run")
            if p["step"] not in ("by hand", "float32"):
                yield {**p, "hand": hand, "target": target}


overhead = Table(
    "overhead",
    over_by_hand,
    """
    problem         {problem} {size}
    compiled for    {target}
    step            {step}
    floating-point operations  {flops/hand.flops:.4f} || not told
    kernels         {kernels/hand.kernels:.4f}
    bytes accessed  {bytes_accessed/hand.bytes_accessed:.4f} || not told
    temp memory     {temp_bytes/hand.temp_bytes:.4f} || none
    """,
)

compile_time = Table(
    "compile_time",
    "builds",
    """
    network            {problem}
    step               {step}
    trace, s           {trace.median:.2f} || {failed}
    lower, s           {lower.median:.2f}
    compile, s         {compile.median:.2f}
    trace over by hand  {trace_over_by_hand:.2f}
    equations          {equations:,}
    first loss against float32  {loss_error:.1e}
    """,
)

# --- Several devices -------------------------------------------------------------------------


def _scaled(data: Result) -> Iterator[Record]:
    """The steps on several devices of both platforms."""
    for platform in (data, load("weak_scaling-v5e-cpu")):
        for step in platform["steps"]:
            if step["devices"] > 1:
                name = {"cavity": "cavity", "fno": "FNO"}[step["problem"]]
                yield {**step, "network": name, "sums": step["sum_dtype"] or "float32"}


def _both(data: Result) -> str:
    return "\n".join(["", "", *(f"- {source(d)}" for d in (data, load("weak_scaling-v5e-cpu")))])


_of_devices = partial(
    Table,
    "weak_scaling-h100",
    note="Compiled for devices that are not there, not run.",
    told=_both,
)


def _sent(data: Result) -> Iterator[Record]:
    """Of the cavity on four devices, what each kind of collective sends."""
    for step in _scaled(data):
        if (step["problem"], step["devices"]) == ("cavity", 4):
            sent: dict[str, list[str]] = {}
            for key, traffic in step["collectives"].items():
                kind, dtype = key.split()
                if dtype != "pred":
                    sent.setdefault(kind, []).append(f"{traffic['bytes'] / 2**10:,.0f} {dtype}")
            yield {**step, **{kind: " + ".join(parts) for kind, parts in sent.items()}}


collectives = _of_devices(
    _sent,
    """
    compiled for         {target}
    layout               {layout}
    precision            {precision}
    sums in              {sums}
    all-gather, KiB      {all-gather}
    reduce-scatter, KiB  {reduce-scatter}
    all-reduce, KiB      {all-reduce}
    """,
)


def _by_target(data: Result) -> Iterator[Record]:
    """Each step on all targets."""
    for steps in groups(_scaled(data), "network", "layout", "precision", "sums").values():
        yield {**steps[0], **{step["target"]: step for step in steps}}


def _targets(data: Result) -> list[str]:
    """What is sent, and temporary memory and arguments over those of one device."""
    over = "{{{0}.temp_over_one:.2f}} + {{{0}.argument_over_one:.2f}}"
    told = "{0}  {{{0}.wire_bytes:KiB,.0f}} KiB; " + over
    heads = ["network  {network}", "layout  {layout}", "precision  {precision}", "sums in  {sums}"]
    return heads + [told.format(target) for target in groups(_scaled(data), "target")]


weak_scaling = _of_devices(_by_target, _targets)

# --- Memory ----------------------------------------------------------------------------------


def _exponent(sizes: list[int], costs: list[float]) -> float:
    """The slope of costs over sizes, both in logarithms: 1 is linear growth."""
    return statistics.linear_regression(*([math.log(n) for n in x] for x in (sizes, costs))).slope


def _sweeps(data: Result) -> Iterator[Record]:
    """Memory and kernels on an H100 and flops, which a CPU tells, by size; and their exponents."""
    costs = groups(data["costs"], "target", "sweep", "way")
    for target, sweep, way in costs:
        if target == "h100":
            h100, cpu = costs["h100", sweep, way], costs["cpu", sweep, way]
            of = lambda records, name: [record[name] for record in records]
            sizes, memory, flops = of(h100, sweep), of(h100, "temp_bytes"), of(cpu, "flops")
            yield {
                "size": f"{sweep} {_dots(sizes, '{:,}')}",
                "way": way,
                "memory": _dots((n / 2**20 for n in memory), "{:,.0f}"),
                "memory_slope": _exponent(sizes, memory),
                "kernels": _dots(of(h100, "kernels"), "{:,}"),
                "flops": _dots((n / 1e9 for n in flops), "{:,.1f}"),
                "flops_slope": _exponent(sizes, flops),
                "base": "{width} × {depth}, {points:,} points".format(**data["costs"][1]),
            }


def _dots(values: Iterable[float], form: str) -> str:
    return " · ".join(map(form.format, values))


growth = Table(
    "growth",
    _sweeps,
    """
    size              {size}
    step              {way}
    temp memory, MiB  {memory}
    exponent          {memory_slope:.2f}
    kernels           {kernels}
    GFLOP             {flops}
    exponent          {flops_slope:.2f}
    """,
    "The base: {base}. Memory and kernels " + NOT_RUN + ".",
)


def _of_vit(data: Result) -> Iterator[Record]:
    """The steps of this library, of one size."""
    programs = [p for p in data["programs"] if p["batch"] == 64]
    for p in programs:
        if p["rival"].startswith("mpx_pde"):
            products = p["products"].items()
            single = sum(n for name, n in products if name.endswith("f32 × f32"))
            counts = {"count": sum(n for _, n in products), "single": single}
            precision = p["rival"].removeprefix("mpx_pde ")
            yield {**p, **counts, "precision": precision, "full": programs[0]}


vit_memory = Table(
    "vit_step-h100",
    _of_vit,
    """
    training                    {precision}
    temp memory, GiB            {temp_bytes:GiB.2f}
    over float32                {temp_bytes/full.temp_bytes:.2f}
    products                    {count}
    of these float32 × float32  {single}
    """,
    "ViT-Base ({blocks} blocks), batch {batch}, one training step with AdamW, " + NOT_RUN + ".",
)


def _of_operator(data: Result) -> Iterator[Record]:
    """The steps of this library, of one size."""
    size = {"resolution": 128, "modes": 32}
    programs = [p for p in data["programs"] if size.items() <= p.items()]
    for p in programs:
        if p["rival"].startswith("mpx_pde"):
            _, method, precision = p["rival"].split(" ", 2)
            method = {"fft": "FFT", "dft": "matrices"}[method]
            told = {"method": method, "precision": precision, "products": ", ".join(p["products"])}
            yield {**p, **told, "first": programs[0]}


spectral_models = Table(
    "fno_step-h100",
    _of_operator,
    """
    precision         {precision}
    transform         {method}
    temp memory, GiB  {temp_bytes:GiB.2f}
    of the first      {temp_bytes/first.temp_bytes:.2f}
    products          {products}
    FFTs              {ffts}
    """,
    "Four blocks, {resolution}², {modes} modes, {channels} channels, a batch of {batch}; "
    + NOT_RUN
    + ".",
)
