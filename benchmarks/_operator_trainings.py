"""The Navier–Stokes operator of `examples/`, trained by every rival."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._examples import load_example
from ._rivals import require
from ._trainings import Moment, Training, timed


_operators: Any = load_example("_neural_operator")
_navier_stokes: Any = load_example("navier_stokes")

HALVES = ("float16", "bfloat16")
FACTORS = (3.0, 1.2, 1.05)
"""Errors to be reached, in units of the final error of float32."""


class Size(NamedTuple):
    """Data, network and steps."""

    samples: int
    finest: int  # grid of the data; that of the training is half as fine
    modes: int
    channels: int
    steps: int
    every: int  # steps between two moments; a multiple of those in one compiled call


SIZES = {
    "quick": Size(16, 32, 8, 8, 20, 10),
    "small": Size(400, 64, 12, 16, 600, 20),
    "full": Size(2000, 256, 32, 64, 3000, 50),
}


class Problem(NamedTuple):
    """Fields, and the size of the operator that is to learn them."""

    data: Any
    size: Size

    def error(self, predict: Callable[[np.ndarray], np.ndarray]) -> float:
        """Relative L2 error of the test samples."""
        resolution, (inputs, _) = next(iter(self.data.tests.items()))
        return _operators.test_errors(self.data, resolution, predict(inputs))["l2"]


def make_problem(size: Size) -> Problem:
    data = _navier_stokes.problem(size.samples, (2,), finest=size.finest)
    return Problem(data, size)


def _training(problem: Problem, precision: str, method: str, forward: str = "half") -> Any:
    size = problem.size
    return _operators.Training(
        problem.data,
        precision,
        forward=forward,
        steps=size.steps,
        loss="l2",
        hidden_channels=size.channels,
        modes=size.modes,
        method=method,
        activation=partial(jax.nn.gelu, approximate=False),  # that of neuraloperator
    )


def in_jax(
    problem: Problem,
    seed: int,
    *,
    precision: str,
    method: str,
    forward: str = "half",
    matmul: str = "highest",
) -> Training:
    """The training of `examples/_neural_operator.py` in one precision, by FFT or by matrices, with
    the forward pass in `forward`."""
    size = problem.size
    with jax.default_matmul_precision(matmul):
        training = _training(problem, precision, method, forward)
    indices = jnp.asarray(training.indices(seed))
    arrays = eqx.filter(training.initial(seed), eqx.is_array)

    def moment(done, seconds, arrays):
        predict = lambda inputs: np.asarray(training.predict(arrays, inputs), np.float32)
        return Moment(done, seconds, partial(problem.error, predict))

    calls, seconds = size.every // _operators.STEPS_PER_CALL, 0.0
    yield moment(0, seconds, arrays)
    for first in range(0, len(indices), calls):
        for index in indices[first : first + calls]:
            (arrays, _), taken = timed(training.run_steps, arrays, training.data, index)
            seconds += taken
        yield moment((first + calls) * _operators.STEPS_PER_CALL, seconds, arrays)


def by_neuraloperator(problem: Problem, seed: int, **options: Any) -> Training:
    """neuraloperator's FNO from the same weights, with the same batches: see `_torch/fno.py`."""
    require("neuralop")
    from ._torch.fno import train

    size, data = problem.size, problem.data
    training = _training(problem, "float32", "fft")
    model, *_ = training.initial(seed)
    moments = train(
        jax.tree.leaves(eqx.filter(model, eqx.is_array)),
        (data.inputs, data.outputs),
        training.indices(seed).reshape(training.steps, -1),
        np.asarray(training.learning_rates(np.arange(training.steps))).tolist(),
        every=size.every,
        **options,
    )
    for i, (seconds, predict) in enumerate(moments):
        yield Moment(i * size.every, seconds, partial(problem.error, predict))


def rivals(on_gpu: bool) -> dict[str, Callable[[Problem, int], Training]]:
    """By name, what trains a problem from a seed."""
    plain = partial(in_jax, precision="float32", method="fft")
    dft = partial(in_jax, method="dft")
    full = partial(dft, forward="float32")
    # On a CPU neuraloperator refuses float16: its FFT there knows float32 alone, and its own
    # casts around it are for bfloat16.
    halves = HALVES if on_gpu else ("bfloat16",)
    return {
        "float32, FFT": plain,
        **({"TF32, FFT": partial(plain, matmul="tensorfloat32")} if on_gpu else {}),
        "mpx_pde, float32": partial(dft, precision="float32"),
        **{f"mpx_pde, {h}": partial(dft, precision=h) for h in HALVES},
        **{f"mpx_pde, forward float32, {h}": partial(full, precision=h) for h in HALVES},
        "neuraloperator, float32": by_neuraloperator,
        **{f"neuraloperator, amp {h}": partial(by_neuraloperator, precision=h) for h in halves},
    }
