"""Errors of layers and solvers, and what a transformer learns."""

import statistics
from collections.abc import Iterator

from ._format import NONE, Record, Result, Table, groups, listed


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
    """Yields the means over the seeds."""
    for precision, runs in groups(data["trainings"], "precision").items():
        fields = ("accuracy", "loss", "test_loss", "skipped_steps", "temp_bytes")
        means = {name: statistics.mean(run[name] for run in runs) for name in fields}
        skipped = NONE if precision == "float32" else f"{means['skipped_steps']:.0f}"
        yield {**runs[0], **means, "skipped": skipped} | {"seeds": listed(runs, "seed")}


vit = Table(
    "vit",
    _vit,
    """
    training          {precision}
    test accuracy     {accuracy:.1%}
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
        *("residual  {forward}", "Jacobian  {jacobian}"),
        *(f"step {n}  {{at.{n}:.1e}}" for n in (80, 160, 240)),
        "relative to a Jacobian in full  {ratio:.2f} ({worst:.2f})",
    ],
    "Medians over {seeds} seeds.",
)


def _pairs(data: Result) -> Iterator[Record]:
    for pair in data["pairs"]:
        yield {**pair, "backward": pair["precision"].rpartition("-")[2]}


curvature = Table(
    "curvature",
    _pairs,
    """
    problem                {title}
    backward pass          {backward}
    up to iteration        {last}
    error of the gradient  {gradient:.1e}
    of the pair (worst)    {pair:.1e} ({worst_pair:.0e})
    of the curvature       {curvature:.1e}
    """,
    "Medians over 100 iterations, relative to float32 at the same iterates.",
)
