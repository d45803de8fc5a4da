"""Errors of layers and solvers, and what a transformer learns."""

import statistics
from collections.abc import Iterator

from ._format import NONE, Record, Result, Table, groups, listed, median


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


def _by_problem(data: Result) -> Iterator[Record]:
    """Yields the median errors of a problem over the seeds, by precision."""
    for runs in groups(data["trainings"], "problem").values():
        by_precision = groups(runs, "precision")
        medians = {name: median(of, "error") for name, of in by_precision.items()}
        yield {**runs[0], **medians, "seeds": listed(runs, "seed")}


second_order = Table(
    "second_order",
    _by_problem,
    """
    problem                              {title}
    parameters                           {parameters:,}
    float64                              {float64:.1e}
    float64, Jacobian in float32         {float64-float32:.1e}
    float32                              {float32:.1e}
    """,
    "Relative L2 errors after {steps} steps; seeds {seeds}.",
)


def _by_kind(data: Result) -> Iterator[Record]:
    """Yields the seconds of each kind of kernel, and of the step over those in float64."""
    full = next(s["seconds"] for s in data["steps"] if s["precision"] == "float64")
    for step in data["steps"]:
        residual, _, jacobian = step["precision"].partition("-")
        told = {"residual": residual, "jacobian": jacobian or residual, "full": full}
        kinds = {kind: found["seconds"] for kind, found in step["by_kind"].items()}
        kinds["rest"] = step["seconds"] - kinds["products"] - kinds["layout"]
        yield {**step, **kinds, **told}


second_order_step = Table(
    "second_order-h100",
    _by_kind,
    """
    residual               {residual}
    Jacobian               {jacobian}
    ms                     {seconds:ms.0f}
    float64 over it        {full/seconds:.1f}
    products, ms           {products:ms.0f}
    layout, ms             {layout:ms.0f}
    rest, ms               {rest:ms.0f}
    """,
    "{parameters:,} parameters, {points:,} points. Predicted for an H100, not run.",
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
