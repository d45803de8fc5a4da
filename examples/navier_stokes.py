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


SAMPLES, QUICK_SAMPLES = 400, 120
TEST_SAMPLES = 100
STEPS, QUICK_STEPS = 1000, 200
MODES, QUICK_MODES = 16, 12
RESOLUTION, QUICK_RESOLUTION = 32, 16  # of the training; tested on twice as many points too


def problem(
    samples: int = SAMPLES, strides: Sequence[int] = (2, 1), *, finest: int = 2 * RESOLUTION
) -> operators.Problem:
    """Pairs of initial and final vorticity, `samples` of them for the training, subsampled by
    the first of `strides`."""
    initial, final = navier_stokes_data(samples + TEST_SAMPLES, finest, seed=0)
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
    steps: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    loss: str = "h1",
    out: str | Path | None = "outputs/navier_stokes",
    quick: bool = False,
    **network: Any,
) -> dict[str, operators.Result]:
    """Trains in each precision, prints a table and draws `navier-stokes.png` in the folder `out`.

    `steps` is rounded up to whole tens; `out=None` draws nothing; `network` goes to `Training`.
    """
    sizes = (
        (QUICK_SAMPLES, QUICK_STEPS, QUICK_RESOLUTION) if quick else (SAMPLES, STEPS, RESOLUTION)
    )
    return operators.run(
        problem(samples or sizes[0], finest=2 * sizes[2]),
        precisions,
        steps=sizes[1] if steps is None else steps,
        modes=sizes[2] // 2,
        seed=seed,
        loss=loss,
        out=out,
        **network,
    )


if __name__ == "__main__":
    operators.command_line(main, "navier_stokes", "Navier–Stokes in mixed precision")
