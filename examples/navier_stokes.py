"""Decaying turbulence by a Fourier neural operator, in float32, float16 and bfloat16.

The operator maps the vorticity of a two-dimensional flow on the torus,

    ω_t + v·∇ω = ν Δω,    ν = 10^−3,

from a random initial field to the field at T = 1, when its vortices have turned by about half a
circle. It is trained on a grid of 32² points, and tested there and on 64².

    python examples/navier_stokes.py                            # all three precisions
    python examples/navier_stokes.py --quick                    # all three, under a minute
    python examples/navier_stokes.py --precision float16 --seed 1 --loss l2

The errors of the three precisions agree to one percent (`docs/operators.md` has measurements). On a
CPU half precision takes longer than float32, since XLA converts to float32 and back there;
the speed and the memory are a matter for GPUs and TPUs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _neural_operator as operators
from _navier_stokes_data import navier_stokes_data


def problem(samples: int, strides: Sequence[int] = (2, 1), *, finest: int) -> operators.Problem:
    """Pairs of initial and final vorticity, `samples` of them for the training, subsampled by
    the first of `strides`."""
    initial, final = navier_stokes_data(samples + operators.TEST_SAMPLES, finest, seed=0)
    return operators.make_problem(
        initial,
        final,
        train_samples=samples,
        strides=strides,
        name="navier-stokes",
        title="Navier–Stokes",
        periodic=True,
        labels=("vorticity at 0", "vorticity at 1"),
    )


def main(
    precisions: Sequence[str] = operators.PRECISIONS,
    *,
    out: str | Path | None = "outputs/navier_stokes",
    **options: Any,
) -> dict[str, operators.Result]:
    """Trains in each precision; the other options are those of `_neural_operator.run`."""
    return operators.run(problem, precisions, out=out, **options)


if __name__ == "__main__":
    operators.command_line(main, "navier_stokes", "Navier–Stokes in mixed precision")
