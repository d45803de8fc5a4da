"""A ladder of precisions that a training run climbs when rounding requires it."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import equinox as eqx
from jax.core import Tracer

from .._util._calls import called, public
from .._util._repr import in_a_line
from ..precision._dtypes import check_integer, check_positive, is_integer
from ..precision._forward import RUNGS, check_rung, options_of
from ..precision._tree import with_fields
from ..scaling._loss import AbstractLossScaling
from ._floor import PrecisionFloor, precision_floor


class PrecisionLadder(eqx.Module):
    """A ladder of precisions. Training starts in a low precision, its first rung, and climbs to the
    next rung when rounding dominates.

    Every `interval` steps the ladder asks [`mpx_pde.precision_floor`][] how much one rung up would
    change. It climbs when that is at least `tolerance` of the loss or of its gradient. Parameters,
    optimizer state and scaling stay as they are. The step is compiled once for each rung.

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

    A ladder is immutable: `update` returns another one. The number of its rung is a Python integer
    in the PyTree: [`equinox.filter_jit`][] compiles anew for each number, and
    [`equinox.tree_serialise_leaves`][] saves it.

    **Attributes:**

    - `index`: the number of the present rung, a Python integer.
    - `rungs`, `tolerance`, `interval`, `say`: as given; static.
    """

    index: int
    rungs: tuple[str, ...] = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)
    interval: int = eqx.field(static=True)
    say: Callable[[str], Any] | None = eqx.field(static=True)

    @public
    def __init__(
        self,
        rungs: Sequence[str] = ("half", "float32"),
        *,
        tolerance: float = 0.1,
        interval: int = 500,
        say: Callable[[str], Any] | None = print,
    ):
        """**Arguments:**

        - `rungs`: the precisions, lowest first: values of `forward` of [`mpx_pde.filter_grad`][],
            and `"full"`, which is `use_mixed_precision=False`, the precision of the parameters in
            the backward pass too. They are ordered by the error of the forward pass: `"half"`,
            `"tensorfloat32"`, `"bfloat16_x3"`, `"tensorfloat32_x3"`, `"bfloat16_x6"`,
            `"bfloat16_x9"`, `"float32"`, `"full"`, `"float64"`.
        - `tolerance`: the share of rounding in the loss or its gradient at which to climb.
        - `interval`: the number of steps between measurements. A measurement costs about three
            gradients.
        - `say`: a function that is called with one line of text at each climb; `None` for silence.

        **Raises:** `ValueError` for unknown rungs, rungs that go down, float64 without 64-bit
        types, a `tolerance` that is not positive and an `interval` below 1; `TypeError` for a
        `say` that cannot be called.
        """
        if isinstance(rungs, str) or not isinstance(rungs, Sequence) or not rungs:
            raise ValueError(
                f"`{called()}` takes its rungs as a tuple of names, such as ('half', 'float32'), "
                f"but got {in_a_line(rungs)}."
            )
        rungs = tuple(check_rung(rung, "rungs") for rung in rungs)
        for low, high in pairwise(rungs):
            if RUNGS.index(high) <= RUNGS.index(low):
                raise ValueError(
                    f"`{called()}` climbs, but {high!r}, which follows {low!r}, is not above it. "
                    f"In ascending order: {tuple(sorted(set(rungs), key=RUNGS.index))}."
                )
        tolerance = check_positive(tolerance, "tolerance")
        interval = check_integer(interval, "interval")
        if say is not None and not callable(say):
            raise TypeError(
                f"`{called()}` takes a function of a line of text as `say`, such as `print`, or "
                f"`None` for silence, but got {in_a_line(say)}."
            )
        self.index = 0
        self.rungs, self.tolerance, self.interval = rungs, tolerance, interval
        self.say = say

    @property
    def rung(self) -> str:
        """Returns the name of the present rung."""
        if not is_integer(self.index):
            raise TypeError(
                "`PrecisionLadder` decides which program is compiled, so its rung cannot be a "
                "value of that program. Compile with `equinox.filter_jit`, or pass `ladder.rung` "
                "as a static argument. If a checkpoint made an array of it, make it an integer "
                "again: `equinox.tree_at(lambda x: x.index, ladder, int(ladder.index))`."
            )
        if self.index not in range(len(self.rungs)):
            raise ValueError(
                f"`PrecisionLadder` is on rung {self.index}, but has only {', '.join(self.rungs)}: "
                "it was restored from a ladder with more. Build it with the same `rungs`."
            )
        return self.rungs[self.index]

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options that select this rung in the gradient transformations: `forward`, or
        `use_mixed_precision=False`.
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
        """Measures [`mpx_pde.precision_floor`][] on this rung against the next one. At the top it
        compares with the default of that function.
        """
        of_the_rung = sorted({"forward", "use_mixed_precision"} & options.keys())
        if of_the_rung:
            raise ValueError(
                f"`PrecisionLadder` measures the precision of its rung, {self.rung!r}, but got "
                f"{' and '.join(f'`{name}={options[name]!r}`' for name in of_the_rung)}. Leave it "
                "out, and pass `**ladder.options` to the gradient transformation of the step."
            )
        above = {} if self.at_top else {"against": self.rungs[self.index + 1]}
        chosen = {"tolerance": self.tolerance, **above, **self.options, **options}
        return precision_floor(func, scaling, has_aux, **chosen)

    @public
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

        - `step`: the number of the step, a Python integer. The floor is measured at multiples of
            `interval` other than 0.
        - `func`, `scaling`, `has_aux`: as for [`mpx_pde.filter_grad`][], with the values that the
            step uses.
        - `options`: the options of the step other than `ladder.options`, and those of
            [`mpx_pde.precision_floor`][] (`in_axes`, `micro_batches`). `axis_name` is
            ignored, because the arguments hold the data of all devices.

        **Returns:**

        A function of the arguments of `func` that returns a ladder. It is one rung up if rounding
        is at least `tolerance` of the loss or of its gradient, and the same ladder otherwise. An
        overflow is not a reason to climb.

        **Raises:** at the first step and at each measurement, as [`mpx_pde.precision_floor`][], and
        `ValueError` for options that name a precision, since the rung decides on it; `TypeError`
        for a `step` that is not a Python integer and inside of `jax.jit`.
        """
        if not is_integer(step):
            raise TypeError(
                f"`{called()}` takes the number of the step as a Python integer, but got "
                f"{in_a_line(step)}."
            )
        if self.at_top or step % self.interval:
            return lambda *args, **kwargs: self
        # One micro-batch, since the noise is not needed here.
        chosen = {name: x for name, x in options.items() if name != "axis_name"}
        # Built at the first step too, so that wrong options raise before the training has run.
        measure = self.floor(func, scaling, has_aux, **{"micro_batches": 1, **chosen})

        def updated(*args: Any, **kwargs: Any) -> PrecisionLadder:
            if step == 0:
                return self
            floor = measure(*args, **kwargs)
            if isinstance(floor.finite, Tracer):
                raise TypeError(
                    "`PrecisionLadder.update` decides by the values of the floor, so it cannot be "
                    "called inside of `jax.jit`. Call it between the steps, with arrays."
                )
            if not floor.reached:
                return self
            if self.say is not None:
                self.say(f"Step {step}, {floor.precision}: {floor.verdict}")
            return with_fields(self, index=self.index + 1)

        return updated
