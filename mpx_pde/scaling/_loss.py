"""Loss scaling, which keeps the gradients of a half-precision backward pass in range.

The recipe follows Micikevicius et al., *Mixed Precision Training* (2018), section 3.2.
"""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, Int32

from .._util._calls import called, named, public
from .._util._repr import described, in_a_line, number, skips
from .._util._types import BoolLike, PyTree, ScalarLike
from ..precision._cast import is_inexact, widen
from ..precision._dtypes import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    half_precision_datatype,
    largest_scale,
)
from ..precision._forward import Forward, present_forward
from ..precision._tree import check_flag, with_fields
from ._watched import Watched


def scaled_leaf(x: Any, factor: Any, operation: Callable = jnp.multiply) -> Any:
    """Returns `operation(x, factor)`, computed in float32 or wider, or `x` itself if it is not
    inexact.
    """
    if not is_inexact(x):
        return x
    wide = jnp.asarray(widen(x))
    # For a complex `x` the factor is cast to a complex number, which is exact.
    return operation(wide, jnp.asarray(factor).astype(wide.dtype))


def multiply(x: Any, factor: Any) -> Any:
    """Returns `x * factor` in the dtype of `x`, computed in float32 or wider."""
    return scaled_leaf(x, factor).astype(jnp.result_type(x)) if is_inexact(x) else x


def _positive_scalar(value: Any, name: str) -> None:
    if isinstance(value, Tracer):
        kinds = (jnp.integer, jnp.floating)
        ok = value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    else:
        try:
            ok = eqx.is_array_like(value) and np.ndim(value) == 0
            ok = ok and np.asarray(value).dtype.kind not in "bc"  # bools and complex numbers
            ok = ok and SMALLEST_SCALE <= float(value) <= LARGEST_SCALE
        except (TypeError, OverflowError):
            ok = False
    if not ok:
        raise ValueError(
            f"`{called()}` needs a positive, finite scalar (from 2^-126 to 2^126, which float32 "
            f"can divide by) as `{name}`, but got {in_a_line(value)}."
        )


def _static(value: Any, name: str) -> float:
    if isinstance(value, Tracer):
        raise ValueError(
            f"`{called()}` needs a Python number or a concrete array as `{name}`, since it is a "
            "static field, but got a traced value. Build the scaler outside of `jit`."
        )
    _positive_scalar(value, name)
    return float(value)


def _counter(value: Any) -> Int32[Array, ""]:
    value = 0 if value is None else value
    dtype = getattr(value, "dtype", np.dtype(type(value)))
    ok = np.shape(value) == () and jnp.issubdtype(dtype, jnp.integer)
    if not ok or (not isinstance(value, Tracer) and not 0 <= int(value) < 2**31):
        raise ValueError(
            f"`{called()}` needs an integer scalar as `counter`, the steps counted so far, but got "
            f"{in_a_line(value)}."
        )
    return jnp.array(value, jnp.int32)


def _power_of_two(x: float) -> float:
    """Returns the largest power of two that is not above `x`."""
    return math.ldexp(1.0, math.frexp(x)[1] - 1)


class AbstractLossScaling(eqx.Module):
    """The interface of a loss scaling, as [`mpx_pde.filter_grad`][] uses it.

    Subclass it for a rule of your own. `scale` and `unscale` must be inverse to each other.
    `adjust` returns the scaling for the next step, with the same PyTree structure, shapes and
    dtypes.
    """

    @abc.abstractmethod
    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies the floating-point leaves of `tree` by the scale, keeping their dtypes."""

    @abc.abstractmethod
    def unscale(self, tree: PyTree) -> PyTree:
        """Divides the floating-point leaves of `tree` by the scale, in float32 or wider."""

    @abc.abstractmethod
    def adjust(self, grads_finite: BoolLike) -> "AbstractLossScaling":
        """Returns the scaling for the next step, given whether this step's gradients were
        finite.
        """


class NoOpLossScaling(AbstractLossScaling):
    """No loss scaling. Use it for bfloat16, whose range is that of float32."""

    @property
    def loss_scaling(self) -> Float32[Array, ""]:
        """Returns the scale, 1."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: PyTree) -> PyTree:
        """Returns `tree`."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Returns `tree`, with leaves narrower than float32 cast to float32."""
        return widen(tree)

    @public
    def adjust(self, grads_finite: BoolLike) -> "NoOpLossScaling":
        """Returns the scaling itself."""
        check_flag(grads_finite, "grads_finite")
        return self


class _ByArray(AbstractLossScaling):
    """A loss scaling whose scale is an array."""

    loss_scaling: eqx.AbstractVar[Float32[Array, ""]]

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies the floating-point leaves of `tree` by the scale.

        Products are taken in float32 (float64 for float64) and rounded back to the dtype of the
        leaf, so the scale itself is never rounded; other leaves pass through.
        """
        return jtu.tree_map(lambda x: multiply(x, self.loss_scaling), tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides the floating-point leaves of `tree` by the scale.

        The result is float32 (float64 for float64); other leaves pass through.
        """
        return jtu.tree_map(lambda x: scaled_leaf(x, self.loss_scaling, jnp.divide), tree)


class StaticLossScaling(_ByArray):
    """A loss scale that never changes.

    **Attributes:**

    - `loss_scaling`: the scale, a float32 scalar.
    """

    loss_scaling: Float32[Array, ""]

    def __repr__(self) -> str:
        return described(self, f"loss_scaling={number(self.loss_scaling)}")

    @public
    def __init__(self, loss_scaling: ScalarLike):
        """**Arguments:**

        - `loss_scaling`: the scale, a positive number or scalar array. Powers of two are exact.

        **Raises:** `ValueError` if it is not positive, finite and scalar.
        """
        _positive_scalar(loss_scaling, "loss_scaling")
        self.loss_scaling = jnp.array(loss_scaling, jnp.float32)

    @public
    def adjust(self, grads_finite: BoolLike) -> "StaticLossScaling":
        """Returns the scaling itself."""
        check_flag(grads_finite, "grads_finite")
        return self


class DynamicLossScaling(_ByArray):
    """A loss scale that follows the gradients.

    A step with non-finite gradients divides the scale by `factor`; `period` finite steps in a row
    multiply it by `factor`. The scale is always a power of two, so that scaling and unscaling are
    exact, and stays between `min_loss_scaling` and `max_loss_scaling`.

    At the start of a training a step of the library moves it faster, by up to four powers of two:
    down until a step has been taken, and, with a float16 backward pass and a loss that is float32
    (as with `forward=` and `autocast`), up until a step has been skipped, while no entry of the
    scaled gradient reaches 1.

    It also counts steps. Log `skipped_steps`. `consecutive_skips` and `at_minimum` reveal a run
    that no scale can save, because the loss itself or a derivative inside it overflows.

    **Attributes:**

    - `loss_scaling`: the scale, a float32 scalar.
    - `counter`: finite steps since the scale last changed, an int32 scalar.
    - `skipped_steps`: steps with non-finite gradients so far, an int32 scalar.
    - `consecutive_skips`: steps with non-finite gradients since the last finite one, an int32
        scalar.
    - `taken_steps`: steps with finite gradients so far, an int32 scalar.
    - `vanished_steps`: steps whose gradient was exactly zero as a whole although the loss was not,
        an int32 scalar. If the loss itself is float16, no scale above 2^15 helps, and a gradient
        below 2^-23 as a whole counts, too: float16 holds little of what it is summed from. These
        steps count as taken. A [`mpx_pde.PrecisionWarning`][] tells of the first one, some steps
        later. A gradient that is zero for some parameters alone does not count: a step has the
        same numbers whether a branch of the model overflowed or is masked, and only
        [`mpx_pde.initial_scaling`][], which evaluates the batch in float32 too, tells them apart.
    - `min_loss_scaling`, `max_loss_scaling`, `factor`, `period`: as given; static.
    """

    loss_scaling: Float32[Array, ""]
    counter: Int32[Array, ""]
    skipped_steps: Int32[Array, ""]
    consecutive_skips: Int32[Array, ""]
    taken_steps: Int32[Array, ""]
    vanished: Watched
    min_loss_scaling: float = eqx.field(static=True)
    factor: float = eqx.field(static=True)
    period: int = eqx.field(static=True)
    max_loss_scaling: float | None = eqx.field(static=True)

    @public
    def __init__(
        self,
        loss_scaling: ScalarLike = 2**15,
        min_loss_scaling: ScalarLike = 2**-24,
        factor: ScalarLike = 2,
        period: ScalarLike = 2000,
        counter: ScalarLike | None = None,
        *,
        max_loss_scaling: ScalarLike | None = None,
    ):
        """**Arguments:**

        - `loss_scaling`: the first scale, a number or a scalar array, rounded down to a power of
            two.
        - `min_loss_scaling`: the smallest scale. The default is below 1 because the residual of a
            PDE can start at 1e4 and more.
        - `factor`: the factor by which the scale grows and shrinks, a power of two.
        - `period`: the number of finite steps in a row after which the scale grows.
        - `counter`: finite steps counted so far, for restoring; by default none.
        - `max_loss_scaling`: the largest scale. By default it is the largest power of two in the
            range of the type that the loss is computed in: 2^15 for float16, and 2^126 for bfloat16
            and for a forward pass in full precision. Only the rise at the start of a training goes
            beyond this default. A value above 2^15 keeps the gradient of a small loss, or of a mean
            over very many points, within float16.

        **Raises:** `ValueError` for a scale that is not positive, finite and scalar or lies outside
        of its bounds, a `factor` that is not a power of two above 1, a `period` below 1, or a
        `counter` that is not such an integer.
        """
        bound = lambda value, name: _power_of_two(_static(value, name))
        self.min_loss_scaling = bound(min_loss_scaling, "min_loss_scaling")
        self.factor = _static(factor, "factor")
        if self.factor <= 1 or self.factor != _power_of_two(self.factor):
            raise ValueError(
                f"`{called()}` needs a power of two above 1 as `factor`, since other factors round "
                f"every scaled value, but got {factor!r}. Use 2 or 4."
            )
        self.period = int(_static(period, "period"))
        if not 1 <= self.period < 2**31 or self.period != period:
            raise ValueError(
                f"`{called()}` needs an integer from 1 to 2^31 - 1 as `period`, but got {period!r}."
            )
        capped = max_loss_scaling is not None
        self.max_loss_scaling = bound(max_loss_scaling, "max_loss_scaling") if capped else None
        _positive_scalar(loss_scaling, "loss_scaling")
        if isinstance(loss_scaling, Tracer):
            _, exponent = jnp.frexp(loss_scaling.astype(jnp.float32))
            self.loss_scaling = jnp.ldexp(jnp.ones((), jnp.float32), exponent - 1)
        else:
            scale = _power_of_two(float(loss_scaling))
            top = math.inf if self.max_loss_scaling is None else self.max_loss_scaling
            if not self.min_loss_scaling <= scale <= top:
                raise ValueError(
                    f"`{called()}` needs a `loss_scaling` between `min_loss_scaling` "
                    f"({self.min_loss_scaling}) and `max_loss_scaling` ({max_loss_scaling}), but "
                    f"got {loss_scaling!r}."
                )
            self.loss_scaling = jnp.array(scale, jnp.float32)
        self.counter = _counter(counter)
        self.skipped_steps = jnp.array(0, jnp.int32)
        self.consecutive_skips = jnp.array(0, jnp.int32)
        self.taken_steps = jnp.array(self.counter, jnp.int32)
        self.vanished = Watched(jnp.array(0, jnp.int32))

    def __repr__(self) -> str:
        top = self.max_loss_scaling
        bounds = f"{number(self.min_loss_scaling)} to "
        bounds += "the cap of the half type" if top is None else number(top)
        return described(
            self,
            f"loss_scaling={number(self.loss_scaling)} ({bounds}, factor {self.factor:g})",
            f"counter={number(self.counter)} of {self.period}",
            skips(self),
        )

    @property
    def vanished_steps(self) -> Any:
        """Returns the number of steps whose gradient vanished."""
        return self.vanished.count

    @property
    def at_minimum(self) -> Bool[Array, "*batch"]:
        """Returns whether the last step was skipped and the scale cannot fall any further."""
        return (self.loss_scaling <= self.min_loss_scaling) & (self.consecutive_skips > 0)

    @public
    def adjust(self, grads_finite: BoolLike) -> "DynamicLossScaling":
        """Returns the scaling for the next step.

        **Arguments:**

        - `grads_finite`: whether this step's gradients were finite, a scalar bool.

        **Returns:**

        A `DynamicLossScaling` with the new scale and counters.
        """
        finite = check_flag(grads_finite, "grads_finite")
        top = self.max_loss_scaling or default_cap(present_forward(), half_precision_datatype())
        counted = self.counter + 1
        # Not `==`: a counter that was restored beyond the period fires as well.
        grow = finite & (counted >= self.period)
        grown = jnp.minimum(self.loss_scaling, top / self.factor) * self.factor
        grown = jnp.maximum(grown, self.loss_scaling)  # a scale that started above the cap
        shrunk = jnp.maximum(self.loss_scaling / self.factor, self.min_loss_scaling)
        adjusted = jnp.where(grow, grown, self.loss_scaling)
        return with_fields(
            self,
            loss_scaling=jnp.where(finite, adjusted, shrunk),
            counter=jnp.where(finite & ~grow, counted, 0),
            **counted_steps(self, finite),
        )


def default_cap(forward: Forward | None, dtype: Any) -> float:
    """Returns the largest scale of a loss that is computed in `dtype`, or under `forward`."""
    return LARGEST_SCALE if forward is not None and forward.full else largest_scale(dtype)


def counted_steps(scaling: Any, taken: Bool[Array, ""]) -> dict[str, Int32[Array, ""]]:
    """Returns the step counts of a scaling after one more step, which was taken or skipped."""
    skipped = jnp.where(taken, 0, 1)
    return {
        "skipped_steps": scaling.skipped_steps + skipped,
        "consecutive_skips": (scaling.consecutive_skips + 1) * skipped,
        "taken_steps": scaling.taken_steps + 1 - skipped,
    }


def check_scaling(scaling: Any, name: str = "scaling") -> None:
    """Raises a `TypeError` in the name of the called function unless `scaling` is a loss
    scaling."""
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            f"`{called()}` needs a loss scaling as `{name}`, such as "
            "`mpx_pde.DynamicLossScaling()`, `mpx_pde.NoOpLossScaling()` or, around derivative "
            f"scales, `mpx_pde.Scaling(derivatives=...)`, but got {in_a_line(scaling)}."
        )


def split_aux(out: Any) -> tuple[Any, Any]:
    """Splits what a function returned into `(loss, aux)`; raises a `TypeError` in the name of the
    called function if it is not such a pair."""
    if not isinstance(out, tuple) or len(out) != 2:
        # The type of an array is not used, since it is some kind of tracer while JAX traces.
        what = type(out).__name__
        if isinstance(out, Array):
            what = f"an array of dtype {out.dtype.name} and shape {out.shape}"
        raise TypeError(
            f"`{called()}` with `has_aux=True` needs a function that returns `(loss, aux)`, but it "
            f"returned {what}. Return both, or leave `has_aux` out."
        )
    return out


@public
def scaled(
    func: Callable[..., Any], scaling: AbstractLossScaling, has_aux: bool = False
) -> Callable[..., Any]:
    """Multiplies the value of a function by the loss scale.

    **Arguments:**

    - `func`: a function that returns a value, or `(value, aux)` with `has_aux=True`.
    - `scaling`: the loss scaling.
    - `has_aux`: whether there is auxiliary output, which is not scaled.

    **Returns:**

    A function of the same arguments that returns the scaled value.
    """
    check_scaling(scaling)

    def scaled_func(*args, **kwargs):
        if has_aux:
            out = func(*args, **kwargs)
            with named("scaled"):
                value, aux = split_aux(out)
            return scaling.scale(value), aux
        return scaling.scale(func(*args, **kwargs))

    return scaled_func
