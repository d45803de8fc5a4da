"""What compiled programs tell: operations, memory, products, collectives."""

from collections.abc import Iterator
from functools import partial

from ._format import Record, Result, Table, groups, load, source


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


def _builds(data: Result) -> Iterator[Record]:
    """Each step with the seconds of all its stages, and those of the first step of its network."""
    spent = lambda build: sum(
        build.get(s, {}).get("median", 0) for s in ("trace", "lower", "compile")
    )
    for builds in groups(data["builds"], "problem").values():
        for build in builds:
            yield {**build, "all": spent(build), "first": spent(builds[0])}


def _compiled_by_step(data: Result) -> Iterator[Record]:
    """Yields each step, with what it takes for each network relative to float32."""
    for step, builds in groups(_builds(data), "step").items():
        yield {"step": step} | {b["problem"]: {**b, "ok": b["all"] or None} for b in builds}


compile_time = Table(
    "compile_time",
    _compiled_by_step,
    lambda data: [
        "step  {step}",
        *(f"{name}  {{{name}.ok/{name}.first:.2f}}" for name in groups(data["builds"], "problem")),
    ],
    "Tracing, lowering and compiling, relative to float32.",
)

compile_time_all = Table(
    "compile_time",
    _builds,
    """
    network            {problem}
    step               {step}
    trace, s           {trace.median:.2f} || {failed}
    lower, s           {lower.median:.2f}
    compile, s         {compile.median:.2f}
    all three, relative to float32  {all/first:.2f}
    first loss, relative difference from float32  {loss_error:.1e}
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


_COLLECTIVES = """
    layout               {layout}
    precision            {precision}
    sums in              {sums}
    all-gather, KiB      {all-gather}
    reduce-scatter, KiB  {reduce-scatter}
    all-reduce, KiB      {all-reduce}
"""
collectives_all = _of_devices(_sent, "compiled for  {target}" + _COLLECTIVES)
collectives = Table(
    "weak_scaling-h100",
    lambda data: (step for step in _sent(data) if step["target"] == "4 × H100"),
    _COLLECTIVES,
    "Compiled for four H100s, not run.",
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
