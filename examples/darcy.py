"""Darcy flow by a Fourier neural operator, in float32, float16 and bfloat16.

The operator maps the coefficient a of

    −∇·(a ∇u) = 1   on the unit square,   u = 0 on its boundary

to the pressure u. The coefficient is that of a medium of two materials (Li et al., 2021): it jumps
between 3 and 12 along the zeros of a Gaussian random field. The problem is not periodic, so the
operator pads the domain. It is trained on a grid of 32² points, and tested there and on 64².

    python examples/darcy.py                            # all three precisions
    python examples/darcy.py --quick                    # all three, under a minute
    python examples/darcy.py --precision float16 --seed 1 --loss l2

The errors of the three precisions agree to one percent (`docs/operators.md` has measurements). On a
CPU half precision takes longer than float32, since XLA converts to float32 and back there;
the speed and the memory are a matter for GPUs and TPUs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _neural_operator as operators
from _darcy_data import darcy_data


def problem(samples: int, strides: Sequence[int] = (2, 1), *, finest: int) -> operators.Problem:
    """Pairs of coefficients and solutions, `samples` of them for the training, subsampled by
    the first of `strides`."""
    a, u = darcy_data(samples + operators.TEST_SAMPLES, finest, seed=0)
    return operators.make_problem(
        a,
        u,
        train_samples=samples,
        strides=strides,
        name="darcy",
        title="Darcy flow",
        periodic=False,
        labels=("coefficient a", "pressure u"),
    )


def main(
    precisions: Sequence[str] = operators.PRECISIONS,
    *,
    out: str | Path | None = "outputs/darcy",
    **options: Any,
) -> dict[str, operators.Result]:
    """Trains in each precision; the other options are those of `_neural_operator.run`."""
    return operators.run(problem, precisions, out=out, **options)


if __name__ == "__main__":
    operators.command_line(main, "darcy", "Darcy flow in mixed precision")
