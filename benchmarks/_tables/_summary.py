"""A summary: what each mode costs in accuracy, and what it saves."""

from collections.abc import Iterator

from ._accuracy import operator_variants
from ._breadth import NEAR, SEEDS, medians, overall
from ._format import NOT_RUN, Record, Result, Table, load
from ._steps import FULL, GPU, OURS, SPLIT, beside, seconds_over


# The modes, with their names in the trainings and in the steps on a GPU.
MODES = {
    '`forward="float32"`, float16': ("forward-float32-float16", f"{OURS}, forward float32"),
    '`forward="float32"`, bfloat16': ("forward-float32-bfloat16", None),
    '`forward="bfloat16_x3"`, bfloat16': ("forward-bfloat16_x3-bfloat16", SPLIT),
    "float16 throughout": ("float16", OURS),
    "bfloat16 throughout": ("bfloat16", None),
    "float16 cast by hand": ("naive-float16", None),
    "control: float32, rounded once": ("float32-rounded", None),
}
STEP = "cavity-512"  # the measured step of a physics-informed network
_RECOMMENDED = (
    '`forward="float32"`, float16',
    '`forward="bfloat16_x3"`, bfloat16',
    "float16 throughout",
)


def _modes(data: Result) -> Iterator[Record]:
    trained = {row["name"]: row for row in overall(data)}
    steps = beside(load(GPU), STEP)
    for mode, (training, step) in MODES.items():
        row = {"mode": mode, "median": None, **trained.get(training, {})}
        if step is not None:
            row |= {"step": steps[step], "full": steps[FULL], "tf32": steps["TF32"]}
        yield row


OVER = (
    "{full.seconds.median/step.seconds.median:.1f} ({tf32.seconds.median/step.seconds.median:.1f})"
)
modes = Table(
    "breadth",
    _modes,
    f"""
    mode  {{mode}}
    error relative to float32 (90 %)  {{median}} ({{spread}}) || not measured
    problems ≤ {NEAR}   {{near}} of {{problems}}
    worst (training)  {{worst}} ({{worst_training}})
    speedup over float32 (TF32)  {OVER}
    memory  {{step.temp_bytes/full.temp_bytes:.2f}}
    """,
    told=False,
)


def _recommended(data: Result) -> Iterator[Record]:
    """Yields the steps of a measured physics-informed network beside plain JAX in float32."""
    trained = {row["name"]: row for row in overall(data)}
    steps = beside(load(GPU), STEP)
    for mode in _RECOMMENDED:
        training, step = MODES[mode]
        row = {"mode": mode, "step": steps[step], "plain": steps["float32"], **trained[training]}
        yield {**row, "tf32": steps["TF32"]}


recommended = Table(
    "breadth",
    _recommended,
    """
    mode  {mode}
    faster than float32  {plain.seconds.median/step.seconds.median:.1f} ×
    faster than TF32  {tf32.seconds.median/step.seconds.median:.1f} ×
    memory, relative to float32  {step.temp_bytes/plain.temp_bytes:.2f}
    error, relative to float32 (90 % of trainings)  {median} ({spread})
    """,
    told=False,
)


def headline() -> str:
    """Returns the table of modes, and below it a list of further claims with their figures."""
    predicted, networks = load("predicted-h100"), load("networks")
    operators = " and ".join(
        f"{row['over l2']:.2f}"
        for row in operator_variants(load("operators"))
        if row["name"] == "float16"
    )
    fno = beside(predicted, "fno-128")
    saved = fno[OURS]["temp_bytes"] / fno[FULL]["temp_bytes"]
    rivals = ("hessian", "nested jvp", "folx")
    hessian, nested, folx = (seconds_over(networks, "laplacian 2", name) for name in rivals)
    count = len({r["network"] for r in networks["costs"] if r["problem"] == "laplacian 2"})
    split = sorted(medians(load("breadth"), "forward-bfloat16_x3-bfloat16").values())
    row = next(_recommended(load("breadth")))
    faster = row["plain"]["seconds"]["median"] / row["step"]["seconds"]["median"]
    smaller = row["step"]["temp_bytes"] / row["plain"]["temp_bytes"]
    lines = [
        f"Errors: the median of each problem over seeds {', '.join(map(str, SEEDS))}.",
        f"Speedup and memory: a PINN step measured on an {load(GPU)['environment']['device']}, "
        "relative to `partials` in float32 (plain JAX in TF32). Relative to plain JAX in float32, "
        f"the first row is {faster:.1f} times as fast in {smaller:.2f} of the memory. Narrower "
        "networks are predicted to gain less, and a CPU gains nothing.",
        '`forward="bfloat16_x3"` with a bfloat16 backward pass, emulated on a CPU: the medians of '
        f"{len(split)} problems are {split[0]:.2f} to {split[-1]:.2f} times float32's error.",
        f"Neural operators in float16: {operators} times float32's error; {saved:.2f} of its "
        f"memory, {NOT_RUN}.",
        f"`partials` in float32: a Laplacian takes {hessian:.2f} of the time of `jax.hessian`, "
        f"{nested:.2f} of nested `jvp`'s and {folx:.2f} of folx's ({count} networks, this CPU).",
    ]
    return modes() + "\n" + "".join(f"- {line}\n" for line in lines)
