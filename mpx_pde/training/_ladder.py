"""A ladder of precisions that a training climbs as rounding demands."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import equinox as eqx
from jax.core import Tracer

from .._dtypes import check_integer, check_positive, is_integer
from .._forward import RUNGS, check_rung, options_of
from .._loss_scaling import AbstractLossScaling
from .._tree import with_fields
from ._floor import PrecisionFloor, precision_floor


_CALL = "PrecisionLadder"


class PrecisionLadder(eqx.Module):
    """A training that starts in a low precision and climbs when rounding is what is left.

    Every `interval` steps it asks [`mpx_pde.precision_floor`][] what going one rung up would
    change, and climbs when that is `tolerance` of the loss or of its gradient. Parameters,
    optimizer state and scaling stay as they are; the step is compiled once for each rung.

    ```python
    ladder = mpx.PrecisionLadder(("half", "float32", "full"))


    @eqx.filter_jit
    def step(ladder, model, opt_state, scaling, batch):
        gradient = mpx.filter_value_and_grad(loss, scaling, **ladder.options)
        value, scaling, finite, grads = gradient(model, batch)
        return *mpx.optimizer_update(model, optimizer, opt_state, grads, finite), scaling


    for i, batch in enumerate(batches):
        model, opt_state, scaling = step(ladder, model, opt_state, scaling, batch)
        ladder = ladder.update(i, loss, scaling)(model, batch)
    ```

    A ladder is a value: `update` returns another one. The number of its rung is a Python number in
    the PyTree, which [`equinox.filter_jit`][] compiles for and
    [`equinox.tree_serialise_leaves`][] saves.

    **Attributes:**

    - `index`: the number of the present rung, a Python integer.
    - `rungs`, `tolerance`, `interval`, `say`: as given; static.
    """

    index: int
    rungs: tuple[str, ...] = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)
    interval: int = eqx.field(static=True)
    say: Callable[[str], Any] | None = eqx.field(static=True)

    def __init__(
        self,
        rungs: Sequence[str] = ("half", "float32"),
        *,
        tolerance: float = 0.1,
        interval: int = 500,
        say: Callable[[str], Any] | None = print,
    ):
        """**Arguments:**

        - `rungs`: the precisions, from below: what `forward` of [`mpx_pde.filter_grad`][] takes,
            and `"full"`, which is `use_mixed_precision=False`, the precision of the parameters in
            the backward pass too. The order is that of the errors of the forward pass: `"half"`,
            `"tensorfloat32"`, `"bfloat16_x3"`, `"tensorfloat32_x3"`, `"bfloat16_x6"`,
            `"bfloat16_x9"`, `"float32"`, `"full"`, `"float64"`.
        - `tolerance`: the share of rounding in the loss or its gradient from which on to climb.
        - `interval`: after how many steps to measure. A measurement costs about three gradients.
        - `say`: what is told of a climb, in one line; `None` for silence.

        **Raises:** `ValueError` for unknown rungs, rungs that go down, float64 without 64-bit
        types, a `tolerance` that is not positive and an `interval` below 1; `TypeError` for a
        `say` that cannot be called.
        """
        if isinstance(rungs, str) or not isinstance(rungs, Sequence) or not rungs:
            raise ValueError(
                f"`{_CALL}` takes its rungs as a tuple of names, such as ('half', 'float32'), but "
                f"got {rungs!r}."
            )
        rungs = tuple(check_rung(rung, _CALL, "rungs") for rung in rungs)
        for low, high in pairwise(rungs):
            if RUNGS.index(high) <= RUNGS.index(low):
                raise ValueError(
                    f"`{_CALL}` climbs, but after {low!r} comes {high!r}, which is not above it. "
                    f"From below the order is {tuple(sorted(set(rungs), key=RUNGS.index))}."
                )
        tolerance = check_positive(tolerance, _CALL, "tolerance")
        interval = check_integer(interval, _CALL, "interval")
        if say is not None and not callable(say):
            raise TypeError(
                f"`{_CALL}` takes a function of a line of text as `say`, such as `print`, or "
                f"`None` for silence, but got {say!r}."
            )
        self.index = 0
        self.rungs, self.tolerance, self.interval = rungs, tolerance, interval
        self.say = say

    @property
    def rung(self) -> str:
        """Returns the name of the present rung."""
        if not is_integer(self.index):
            raise TypeError(
                f"`{_CALL}` decides which program is compiled, so its rung cannot be a value of "
                "that program. Compile with `equinox.filter_jit`, or pass `ladder.rung` as a "
                "static argument."
            )
        if self.index not in range(len(self.rungs)):
            raise ValueError(
                f"`{_CALL}` stands on rung {self.index}, but has {', '.join(self.rungs)} alone: it "
                "was restored from one of more. Build it with the same `rungs`."
            )
        return self.rungs[self.index]

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options with which the gradient transformations work on this rung: `forward`,
        or `use_mixed_precision=False`.
        """
        return options_of(self.rung)

    @property
    def at_top(self) -> bool:
        """Returns whether there is no rung above."""
        return self.rungs.index(self.rung) == len(self.rungs) - 1

    def floor(
        self,
        func: Callable[..., Any],
        scaling: AbstractLossScaling | None,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., PrecisionFloor]:
        """Measures [`mpx_pde.precision_floor`][] on this rung, against the next one; at the top,
        against what that function compares with by default.
        """
        of_the_rung = sorted({"forward", "use_mixed_precision"} & options.keys())
        if of_the_rung:
            raise ValueError(
                f"`{_CALL}` measures the precision of its rung, {self.rung!r}, but got "
                f"{' and '.join(f'`{name}={options[name]!r}`' for name in of_the_rung)}. Leave it "
                "out, and pass `**ladder.options` to the gradient transformation of the step."
            )
        above = {} if self.at_top else {"against": self.rungs[self.index + 1]}
        given = {"tolerance": self.tolerance, **above, **self.options, **options}
        return precision_floor(func, scaling, has_aux, **given)

    def update(
        self,
        step: int,
        func: Callable[..., Any],
        scaling: AbstractLossScaling | None,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., "PrecisionLadder"]:
        """Returns the ladder for the next step. Not for use inside of `jax.jit`.

        **Arguments:**

        - `step`: the number of the step, a Python integer. At multiples of `interval` other than 0
            the floor is measured.
        - `func`, `scaling`, `has_aux`: as for [`mpx_pde.filter_grad`][], and as in the step.
        - `options`: those of the step besides `ladder.options`, and of
            [`mpx_pde.precision_floor`][] (`in_axes`, `micro_batches`). `axis_name` is
            ignored: the arguments are those of all devices.

        **Returns:**

        A function of the arguments of `func` that returns a ladder: one rung up where rounding is
        at least `tolerance` of the loss or of its gradient, and the same one otherwise. An
        overflow is not a reason to climb.

        **Raises:** at the first step and wherever it measures, as [`mpx_pde.precision_floor`][],
        and `ValueError` for options that name a precision, which is that of the rung; `TypeError`
        for a `step` that is not a Python integer and inside of `jax.jit`.
        """
        if not is_integer(step):
            raise TypeError(
                f"`{_CALL}.update` takes the number of the step as a Python integer, but got "
                f"{step!r}."
            )
        if self.at_top or step % self.interval:
            return lambda *args, **kwargs: self
        # The noise is not needed here.
        given = {name: x for name, x in options.items() if name != "axis_name"}
        # At the first step too: what is wrong with the options is told before a training has run.
        measure = self.floor(func, scaling, has_aux, **{"micro_batches": 1, **given})

        def updated(*args: Any, **kwargs: Any) -> PrecisionLadder:
            if step == 0:
                return self
            floor = measure(*args, **kwargs)
            if isinstance(floor.finite, Tracer):
                raise TypeError(
                    f"`{_CALL}.update` decides by the values of the floor, so it cannot be called "
                    "inside of `jax.jit`. Call it between the steps, with arrays."
                )
            if not floor.reached:
                return self
            if self.say is not None:
                self.say(f"Step {step}, {floor.precision}: {floor.verdict}")
            return with_fields(self, index=self.index + 1)

        return updated
