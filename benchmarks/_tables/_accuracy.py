"""Errors of products, layers, transforms and solvers, and what a transformer learns."""

import statistics
from collections.abc import Iterator

from ._format import NONE, Record, Result, Table, groups, listed


def _algorithms(data: Result) -> Iterator[Record]:
    """Of each algorithm the records of all problems, by their position."""
    for runs in groups(data["products"], "algorithm").values():
        yield {str(i): run for i, run in enumerate(runs)}


products = Table(
    "products",
    _algorithms,
    lambda data: [
        "algorithm  `{0.algorithm}`",
        "products   {0.products}",
        *(
            f"{problem}  {{{i}.emulated_error:.1e}}"
            for i, problem in enumerate(groups(data["products"], "problem"))
        ),
        "ms on a GPU  {0.seconds.median:ms.3f} || not measured",
    ],
    "Emulated.",
)

float8 = Table(
    "float8",
    "errors",
    """
    format  {format}
    u       {u:.1e}
    u_x     {u_x:.1e}
    u_xx    {u_xx:.1e}
    gradient of the residual  {gradient:.1e}
    """,
    "Relative errors against float64.",
)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


frequencies = Table(
    "frequencies",
    lambda data: [
        {"method": m["method"], **{k: _percent(error) for k, error in m["error"].items()}}
        for m in data["methods"]
    ],
    lambda data: ["\t  {method}", *(f"{k}  {{{k}}}" for k in data["methods"][0]["error"])],
)

# Times are of the quarter of rounds that other programs on the machine disturbed least.
spectral_layers = Table(
    "spectral",
    "layers",
    """
    grid                    {size}²
    modes                   {modes}
    channels × batch        {channels} × {batch}
    FFT time over matrices  {seconds_fft.lower/seconds_dft.lower:.1f}
    weights' gradient only  {seconds_weights_fft.lower/seconds_weights_dft.lower:.1f}
    `auto`                  {auto}
    temp memory, MiB        {temp_bytes_dft:MiB.1f} / {temp_bytes_fft:MiB.1f}
    error, matrices         {error_dft:.1e}
    error, FFT              {error_fft:.1e}
    matrices, float16       {error_float16:.1e}
    matrices, bfloat16      {error_bfloat16:.1e}
    """,
)


def _vit(data: Result) -> Iterator[Record]:
    """Means over the seeds."""
    for precision, runs in groups(data["trainings"], "precision").items():
        fields = ("accuracy", "loss", "test_loss", "skipped_steps", "temp_bytes")
        means = {name: statistics.mean(run[name] for run in runs) for name in fields}
        by_seed = " ".join(f"{run['accuracy']:.1%}" for run in runs)
        skipped = NONE if precision == "float32" else f"{means['skipped_steps']:.0f}"
        yield {**runs[0], **means, "by_seed": by_seed, "skipped": skipped} | {
            "seeds": listed(runs, "seed")
        }


vit = Table(
    "vit",
    _vit,
    """
    training          {precision}
    test accuracy     {accuracy:.1%}
    by seed           {by_seed}
    loss              {loss:.4f}
    test loss         {test_loss:.3f}
    skipped steps     {skipped}
    temp memory, MiB  {temp_bytes:MiB.1f}
    """,
    "{steps:,} steps, means over seeds {seeds}.",
)


def _marks(data: Result) -> Iterator[Record]:
    """Medians over the seeds of the error after some steps, and the last one over that of a
    Jacobian in the precision of the residual, from the same seed."""
    last = lambda run: run["errors"][-1]
    by_precision = groups(data["trainings"], "forward", "jacobian")
    for (forward, _), runs in by_precision.items():
        full = {run["seed"]: last(run) for run in by_precision[forward, forward]}
        ratios = [last(run) / full[run["seed"]] for run in runs]
        errors = zip(*(run["errors"] for run in runs), strict=True)
        told = {"ratio": statistics.median(ratios), "worst": max(ratios), "seeds": len(runs)}
        medians = map(statistics.median, errors)
        yield {**runs[0], **told, "at": dict(zip(map(str, runs[0]["steps"]), medians, strict=True))}


second_order = Table(
    "second_order",
    _marks,
    lambda _: [
        *("residual  {forward}", "Jacobian  {jacobian}", "seeds  {seeds}"),
        *(f"step {n}  {{at.{n}:.1e}}" for n in (40, 80, 120, 160, 200, 240)),
        "over a Jacobian in full  {ratio:.2f} ({worst:.2f})",
    ],
)
