"""Reports derivative scales as plain arrays and as a figure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._util._repr import in_a_line
from ._derivatives import DerivativeScaling, Scaling
from ._probe import HIGHEST, LOWEST
from ._rules import SMALLEST_NORMAL


def telemetry(scaling: Any) -> dict[str, Any]:
    """Returns the values to log after a step: scales, overflows, and the range of each derivative.

    It also works inside `jax.jit`, where the entries are traced arrays.

    **Arguments:**

    - `scaling`: a [`mpx_pde.Scaling`][] or a [`mpx_pde.DerivativeScaling`][], as the step returned
        it. If it is the stacked state of an ensemble, all entries have its leading axes.

    **Returns:**

    A dict with

    - `"scale"`: by the name of the scaler, its scale for the next step, float32;
    - `"overflows"`: by the same names, the number of steps in which it overflowed so far, int32;
    - `"skipped_steps"`: the number of steps in which any scaler overflowed, int32;
    - `"counts"`: by the name of the row (a term, or all derivatives that are scaled alike), the
        number of values of the last step with each of the exponents in `"exponents"`, float32;
    - `"exponents"`: `floor(log2(abs(x)))` of the *unscaled* derivatives for each entry of
        `"counts"`, int32; the first and the last one include all exponents beyond;
    - `"zeros"`, `"nonfinite"`: by the same names, how many values were zero, infinite or NaN;
    - `"at_minimum"`: by the name of the scaler, whether a derivative overflowed in the last step
        that no smaller scale can save;
    - `"underflow"`: by the name of the row, the part of the last step's values that was zero or
        below the range in which float16 has all of its digits, float32;
    - `"shift"`: by the name of the row, log2 of the scale that the values carried, int32;
    - `"vanished_steps"`: with a [`mpx_pde.Scaling`][], the number of steps whose gradient vanished
        as a whole, int32 (see [`mpx_pde.DynamicLossScaling`][]).
    """
    derivatives = scaling.derivatives if isinstance(scaling, Scaling) else scaling
    if not isinstance(derivatives, DerivativeScaling):
        raise TypeError(
            f"`telemetry` takes a `Scaling` or a `DerivativeScaling`, but got {in_a_line(scaling)}."
        )
    rows, names = derivatives.row_names, derivatives.names
    buckets = np.arange(LOWEST, HIGHEST + 1, dtype=np.int32)
    counts, shifts = derivatives.counts, derivatives.shifts
    # Zeros come first, and the buckets of subnormal values after them.
    below = jnp.sum(counts[..., : 1 + SMALLEST_NORMAL - LOWEST], axis=-1)
    below = below / jnp.maximum(jnp.sum(counts, axis=-1), 1)
    buckets = jnp.expand_dims(buckets, range(shifts.ndim - 1))
    whole = {"vanished_steps": scaling.vanished_steps} if isinstance(scaling, Scaling) else {}
    return whole | {
        "scale": {n: derivatives.scales[..., i] for i, n in enumerate(names)},
        "overflows": {n: derivatives.overflows[..., i] for i, n in enumerate(names)},
        "skipped_steps": derivatives.skipped_steps,
        "at_minimum": {n: derivatives.at_minimum[..., i] for i, n in enumerate(names)},
        "counts": {n: counts[..., i, 1:-1] for i, n in enumerate(rows)},
        "exponents": {n: buckets - shifts[..., i, None] for i, n in enumerate(rows)},
        "zeros": {n: counts[..., i, 0] for i, n in enumerate(rows)},
        "nonfinite": {n: counts[..., i, -1] for i, n in enumerate(rows)},
        "underflow": {n: below[..., i] for i, n in enumerate(rows)},
        "shift": {n: shifts[..., i] for i, n in enumerate(rows)},
    }


def plot(history: Sequence[Mapping[str, Any]], *, steps: Sequence[int] | None = None) -> Any:
    """Draws the dynamic range of every derivative with the limits of float16, and the scales over
    time (figure 2 of Xue et al.).

    **Arguments:**

    - `history`: the results of [`mpx_pde.derivatives.telemetry`][], step by step.
    - `steps`: the numbers of these steps; by default 0, 1, ….

    **Returns:**

    A matplotlib figure. On the left is the distribution of log2 of each unscaled derivative over
    the whole history, with the range of float16 at its last scale. On the right are the scales.

    **Raises:** `ImportError` without matplotlib, `ValueError` if `history` is no list of steps.
    """
    if not isinstance(history, Sequence) or not history:
        raise ValueError(
            "`plot` takes a list of what `telemetry` returned, for one step or more, as `history`, "
            f"but got {in_a_line(history)}."
        )
    from matplotlib.figure import Figure

    steps = range(len(history)) if steps is None else steps
    last = history[-1]
    seen = [n for n in last["counts"] if any(np.sum(h["counts"][n]) > 0 for h in history)]
    figure = Figure(figsize=(11, 1.5 + 0.7 * max(len(seen), 3)), layout="constrained")
    ranges, scales = figure.subplots(1, 2)
    for i, name in enumerate(seen):
        total: Counter[int] = Counter()
        for h in history:
            at, count = np.asarray(h["exponents"][name]), np.asarray(h["counts"][name])
            total.update(dict(zip(at.tolist(), count.tolist(), strict=True)))
        exponents = np.array(sorted(total))
        heights = np.array([total[e] for e in exponents])
        heights = 0.8 * heights / max(heights.max(), 1.0)
        ranges.bar(exponents, heights, bottom=i, width=1.0, align="edge")
        shift = int(last["shift"][name])
        ranges.plot([-24 - shift, 16 - shift], [i - 0.06] * 2, color="black", linewidth=2)
    ranges.axvspan(-24, 16, color="tab:green", alpha=0.12, label="float16")
    ranges.axvline(-14, color="tab:green", linestyle=":", label="smallest normal")
    ranges.set_yticks([i + 0.2 for i in range(len(seen))], seen)
    ranges.set_xlabel("log2 of the derivative (black: float16 at the last scale)")
    ranges.legend(loc="upper right", fontsize="small")
    for name in last["scale"]:
        values = np.log2([float(h["scale"][name]) for h in history])
        scales.step(list(steps), values, where="post", label=name)
    scales.set_xlabel("step")
    scales.set_ylabel("log2 of the scale")
    scales.legend(fontsize="small")
    return figure
