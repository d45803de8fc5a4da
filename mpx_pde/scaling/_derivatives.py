"""Derivative scaling, which keeps the derivatives that a loss asks for in range, alone or together
with a loss scaling."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from .._util._calls import called, public
from .._util._repr import by_name, described, in_a_line, number, skips
from .._util._types import BoolLike, Names, PyTree
from .._util._varying import varying_axes
from ..precision._dtypes import check_integer, half_precision_datatype
from ..precision._tree import check_flag, select_tree, with_fields
from ._checks import coords_of, term_list
from ._loss import AbstractLossScaling, DynamicLossScaling, check_scaling, counted_steps
from ._probe import COLUMNS
from ._rules import Rule, adjusted, parse_rule, parse_special
from ._seeds import power_of_two
from ._strategies import AbstractStrategy, PerDirection, PerOrder
from ._watched import Watched


class DerivativeScaling(eqx.Module):
    """Scales for the derivatives inside a loss, with a rule that adapts them after each step.

    A physics-informed loss differentiates the network in the forward pass. In float16 these
    derivatives overflow or vanish before any loss exists. So the seeds of the derivatives are
    multiplied by powers of two, the derivatives are computed in half precision, and the results are
    unscaled once, in float32, after the last order has been taken (*deferred unscaling*).

    Make one with [`per_direction`][mpx_pde.DerivativeScaling.per_direction] (the one to start
    with), [`per_order`][mpx_pde.DerivativeScaling.per_order] or
    [`per_term`][mpx_pde.DerivativeScaling.per_term]. Put it into a [`mpx_pde.Scaling`][], and pass
    the `derivatives` that the loss receives on to [`mpx_pde.partials`][].

    In bfloat16 and float32 nothing is scaled, because their range is enough.

    **The update rule.** A step in which a derivative overflowed is skipped, and the scalers of this
    derivative shrink by `factor`. A scaler grows by `factor` after `growth_interval` clean steps in
    a row, up to 1. At or below `recover_threshold` (the *recovery mode*) it grows after
    `recover_growth_interval`.

    Derivatives can also be too small for float16, such as those of a network of coordinates in
    micrometers. So a scale rises above 1, up to `max_scale`, while the histogram of the last step
    shows a derivative whose largest values lie within `margin` powers of two of float16's subnormal
    numbers, or that is zero everywhere. It does not rise if that would bring another derivative
    within `margin` of overflow, and falls back towards 1 if one is. The entry `"underflow"` of
    [`mpx_pde.derivatives.telemetry`][] counts values that are lost nevertheless.

    [`mpx_pde.initial_scaling`][] finds the scales to start with.

    The rule and its constants are from Xue et al., *A Novel Automatic Mixed Precision Approach For
    Physics Informed Training*, section 3.2, and its implementation in PhysicsNeMo-Sym. Unlike
    there, each scaler backs off for its own overflows only, never falls below `min_scale`, rises
    above 1 if necessary, and may have a cap below 1.

    **Attributes:**

    - `exponents`: log2 of the scale of each scaler, int32.
    - `tracker`: clean steps since each scaler last overflowed or completed an interval, int32.
    - `caution`: 1 while a past overflow prevents a rise for small derivatives, int32.
    - `overflows`: the number of steps in which each scaler overflowed, int32.
    - `skipped_steps`: the number of steps in which any scaler overflowed, an int32 scalar.
    - `counts`: the histograms of the last step, float32, a row for each of `row_names`; see
        [`mpx_pde.derivatives.telemetry`][].
    - `shifts`: log2 of the scale that the values in each row of `counts` carried, int32.
    - `names`, `row_names`: the names of the scalers and of the rows; static.
    """

    exponents: Int32[Array, "*batch scalers"]
    tracker: Int32[Array, "*batch scalers"]
    caution: Int32[Array, "*batch scalers"]
    overflows: Int32[Array, "*batch scalers"]
    skipped_steps: Int32[Array, "*batch"]
    shifts: Int32[Array, "*batch rows"]
    counts: Float32[Array, "*batch rows columns"]
    strategy: AbstractStrategy = eqx.field(static=True)
    rule: Rule = eqx.field(static=True)

    def __init__(self, strategy: Any = None, special: Any = None, **options: Any):
        """Builds a scaling for `per_direction`, `per_order` and `per_term`. Use one of these."""
        if not isinstance(strategy, AbstractStrategy):
            raise TypeError(
                '`DerivativeScaling` is made by `DerivativeScaling.per_direction("xt")`, '
                '`per_order(2)` or `per_term(["u_x", "u_xx"])`, and not called itself.'
            )
        self.strategy = strategy
        self.rule, start = parse_rule(options, strategy, special or {})
        self.exponents = jnp.array(start, jnp.int32)
        self.tracker = jnp.zeros(len(start), jnp.int32)
        self.caution = jnp.zeros(len(start), jnp.int32)
        self.overflows = jnp.zeros(len(start), jnp.int32)
        self.skipped_steps = jnp.zeros((), jnp.int32)
        self.shifts = jnp.zeros(len(strategy.rows), jnp.int32)
        self.counts = jnp.zeros((len(strategy.rows), COLUMNS), jnp.float32)

    @classmethod
    @public
    def per_direction(
        cls, coords: Names, *, order: int = 4, terms: Sequence[str] = (), **options: Any
    ) -> "DerivativeScaling":
        """Makes one scale `s` for each coordinate. A derivative of order k in it carries `s**k`.

        This is the one to take by default. It follows the unit of each coordinate for any terms.

        **Arguments:**

        - `coords`: the coordinates, such as `"xt"` or `["x", "t"]`.
        - `order`: the highest total order of the terms.
        - `terms`: terms with a histogram of their own, such as `["u_x", "v_x"]`. Other terms share
            one for each derivative, across outputs.
        - `init_scale`, `max_scale`, `min_scale`: numbers, or mappings from coordinates to
            numbers; by default 1, 2^15 and 2^-24. They are rounded down to powers of two.
        - `factor`, `growth_interval`, `recover_threshold`, `recover_growth_interval`, `margin`:
            see above; by default 2, 1000, 2^-6, 100 and 6.

        **Returns:** a `DerivativeScaling`.

        **Raises:** `ValueError` or `TypeError` for coordinates named twice and for invalid
        options.
        """
        names = coords_of(coords)
        order = check_integer(order, "order")
        return cls(PerDirection.of(names, order, terms), **options)

    @classmethod
    @public
    def per_order(
        cls,
        order: int,
        *,
        special: Any = (),
        terms: Sequence[str] = (),
        coords: Any = None,
        **options: Any,
    ) -> "DerivativeScaling":
        """Makes one scaler for each order of derivatives, as in section 3.1 of the paper.

        A derivative on the way to a higher one, which no term asks for, is scaled in proportion to
        the higher one. If terms of one order differ in size by more than the range of float16, give
        them rows of their own (`terms`), or the smaller ones vanish unnoticed. If the units of
        coordinates make them differ, take `per_direction`.

        **Arguments:**

        - `order`: the highest order. Its scalers are called `"order 1"` to `"order n"`.
        - `special`: terms with a scaler of their own, whatever their order: a list of names, or a
            mapping from names to a cap, or to a mapping with any of `init_scale`, `max_scale` and
            `min_scale`.
        - `terms`: as for `per_direction`.
        - `coords`: the coordinates, which tell the order of `terms`. Needed only if their names
            have more than one letter.
        - options: as for `per_direction`. The default bounds of a scaler of order k are the k-th
            powers of those bounds, because derivatives of that order differ by as much.

        **Returns:** a `DerivativeScaling`.
        """
        order = check_integer(order, "order")
        own = parse_special(special)
        known = None if coords is None else coords_of(coords)
        strategy = PerOrder.of(order, tuple(own), terms, known)
        return cls(strategy, special=own, **options)

    @classmethod
    @public
    def per_term(cls, terms: Sequence[str], **options: Any) -> "DerivativeScaling":
        """Makes one scaler for each term.

        **Arguments:**

        - `terms`: the derivatives, such as `["u_x", "u_xx"]`; `"laplacian"` for
            [`mpx_pde.laplacian`][].
        - options: as for `per_order`, with mappings from terms. The order of a term is assumed to
            be the number of letters behind its last underscore, and that of `"laplacian"` 2.

        **Returns:** a `DerivativeScaling`.
        """
        return cls(PerOrder.of(0, term_list(terms), (), None), **options)

    def __repr__(self) -> str:
        rule = self.rule
        pairs = zip(rule.lowest, rule.highest, strict=True)
        bounds = by_name(self.names, [f"2^{low} to 2^{high}" for low, high in pairs])
        scales = by_name(self.names, self.exponents, "2^")
        by_scaler = lambda x: by_name(self.names, x)
        return described(
            self,
            f"scales={scales} ({bounds}, factor {2**rule.step})",
            str(self.strategy),
            f"tracker={by_scaler(self.tracker)} of {rule.growth_interval}, "
            f"{rule.recover_growth_interval} at or below 2^{rule.recover_threshold}",
            f"margin={rule.margin}, caution={by_scaler(self.caution)}",
            f"overflows={by_scaler(self.overflows)}, skipped_steps={number(self.skipped_steps)}",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the scalers."""
        return self.strategy.names

    @property
    def row_names(self) -> tuple[str, ...]:
        """Returns the names of the rows of `counts`."""
        return self.strategy.row_names

    @property
    def scales(self) -> Float32[Array, "*batch scalers"]:
        """Returns the scale of each scaler."""
        return power_of_two(self.exponents)

    @property
    def active(self) -> bool:
        """Returns whether the current half precision needs scaling, as float16 does."""
        return half_precision_datatype() == jnp.float16

    def finite(self, counts: Any) -> Bool[Array, "*batch"]:
        """Returns whether no derivative overflowed, according to the cotangent of `counts`."""
        return ~jnp.any(self._counts(counts, "finite")[..., -1] > 0, axis=-1)

    @property
    def at_minimum(self) -> Bool[Array, "*batch scalers"]:
        """Returns for each scaler whether a derivative that it scales overflowed in the last step
        although the scaler cannot fall any further. No scale can help then.
        """
        low = jnp.broadcast_to(np.array(self.rule.lowest, np.int32), self.exponents.shape)
        return (self.exponents <= low) & self.rule.of_scalers(self.counts[..., -1] > 0)

    def _counts(self, counts: Any, method: str) -> Float32[Array, "*batch rows columns"]:
        if isinstance(counts, DerivativeScaling):
            counts = counts.counts
        if getattr(counts, "shape", None) != self.counts.shape:
            raise ValueError(
                f"`DerivativeScaling.{method}` takes the cotangent of its own `counts`, an array "
                f"of shape {self.counts.shape}, but got {in_a_line(counts)}"
                + (f" of shape {jnp.shape(counts)}." if eqx.is_array(counts) else ".")
            )
        return counts

    def adjust(self, counts: Any) -> "DerivativeScaling":
        """Returns the scaling for the next step.

        **Arguments:**

        - `counts`: the cotangent of `counts` of this scaling from a loss: the array, or the
            gradient of the whole `DerivativeScaling`.

        **Returns:**

        A `DerivativeScaling` of the same structure, shapes and dtypes.
        """
        counts = self._counts(counts, "adjust")
        now = self.exponents
        lost, state = adjusted(self.rule, counts, now, self.tracker, self.caution)
        if not self.active:
            now, state = jnp.zeros_like(now), {}
        return with_fields(
            self,
            **state,
            overflows=self.overflows + lost.astype(jnp.int32),
            skipped_steps=self.skipped_steps + jnp.any(lost).astype(jnp.int32),
            shifts=self.strategy.shifts(now),
            counts=counts,
        )

    def raised(self) -> "DerivativeScaling":
        """Returns the scaling with all scales larger by `factor`, within their caps.

        Cotangents carry the inverse of the scale. So if gradients overflow and the loss scale
        cannot fall any further, larger derivative scales help.
        """
        return self.with_exponents(self.exponents + self.rule.step)

    def with_exponents(self, exponents: Any) -> "DerivativeScaling":
        """Returns the scaling with other scales, which are clipped to the bounds of each scaler.

        **Arguments:**

        - `exponents`: log2 of the scales, an integer for all scalers or one for each scaler.

        **Raises:** `ValueError` for anything else.
        """
        array = exponents if eqx.is_array(exponents) else np.asarray(exponents)
        fits = array.shape in ((), self.exponents.shape)
        if not fits or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                "`DerivativeScaling.with_exponents` takes the log2 of the scales as an integer for "
                f"all scalers, or one for each of {', '.join(self.names)}, but got {exponents!r}."
            )
        # As float32, in which no integer wraps around before it is clipped.
        low, high = (jnp.array(b, jnp.float32) for b in (self.rule.lowest, self.rule.highest))
        new = jnp.clip(jnp.asarray(array, jnp.float32), low, high).astype(jnp.int32)
        return with_fields(self, exponents=jnp.broadcast_to(new, low.shape))


def check_derivatives(scaling: Any) -> None:
    if scaling is not None and not isinstance(scaling, DerivativeScaling):
        raise TypeError(
            f"`{called()}` takes a `DerivativeScaling` as `scaling`, as the loss receives it in "
            f"`derivatives`, or `None`, but got {in_a_line(scaling)}."
        )


class Scaling(AbstractLossScaling):
    """A loss scaling and a derivative scaling, for losses that differentiate the network.

    Pass it to [`mpx_pde.filter_grad`][] or a similar function in place of a loss scaling. The loss
    then receives the derivative scaling as the keyword argument `derivatives`, and passes it on to
    [`mpx_pde.partials`][].

    ```python
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("tx"))


    def loss(model, points, *, derivatives):
        terms = mpx.partials(model, ["u_t", "u_xx"], coords="tx", outputs="u", scaling=derivatives)
        d = jax.vmap(terms)(points)
        return jnp.mean((d["u_t"] - d["u_xx"]) ** 2)


    value_and_grad = mpx.filter_value_and_grad(loss, scaling, forward="float32")
    value, scaling, finite, grads = value_and_grad(model, points)
    ```

    The two are adjusted separately. An overflow of a derivative says nothing about the loss scale,
    so the loss scale is adjusted only on steps whose derivatives were finite. The derivative scales
    follow the derivatives alone, with one exception. Unscaling multiplies cotangents by the inverse
    of the derivative scale, so the derivative scales are raised if gradients overflow at the
    smallest loss scale.

    **Attributes:**

    - `loss`: a loss scaling.
    - `derivatives`: a [`mpx_pde.DerivativeScaling`][].
    - `skipped_steps`: the steps skipped so far, for gradients or for derivatives, an int32 scalar.
        `loss` and `derivatives` count their own.
    - `consecutive_skips`: the steps skipped since the last one that was not, an int32 scalar.
    - `taken_steps`: the steps that were not skipped so far, an int32 scalar.
    - `vanished_steps`: the steps whose gradient vanished as a whole, an int32 scalar (see
        [`mpx_pde.DynamicLossScaling`][]).
    """

    loss: AbstractLossScaling
    derivatives: DerivativeScaling
    skipped_steps: Int32[Array, "*batch"]
    consecutive_skips: Int32[Array, "*batch"]
    taken_steps: Int32[Array, "*batch"]
    vanished: Watched

    @public
    def __init__(self, loss: Any = None, derivatives: Any = None):
        """**Arguments:**

        - `loss`: a loss scaling; by default [`mpx_pde.DynamicLossScaling`][].
        - `derivatives`: a [`mpx_pde.DerivativeScaling`][].

        **Raises:** `TypeError` for anything else.
        """
        loss = DynamicLossScaling() if loss is None else loss
        if isinstance(loss, Scaling | DerivativeScaling):
            raise TypeError(
                "`Scaling` takes a plain loss scaling as `loss`, its first argument, but got a "
                f"`{type(loss).__name__}`. Write `Scaling(derivatives=…)`."
            )
        check_scaling(loss, "loss")
        if not isinstance(derivatives, DerivativeScaling):
            raise TypeError(
                "`Scaling` needs a derivative scaling as `derivatives`, such as "
                f'`mpx_pde.DerivativeScaling.per_direction("xt")`, but got '
                f"{in_a_line(derivatives)}. Without one, pass the loss scaling alone."
            )
        self.loss = loss
        self.derivatives = derivatives
        self.skipped_steps = jnp.zeros((), jnp.int32)
        self.consecutive_skips = jnp.zeros((), jnp.int32)
        # A loss scaling that was restored by its `counter` has taken steps.
        self.taken_steps = jnp.array(getattr(loss, "taken_steps", 0), jnp.int32)
        self.vanished = Watched(jnp.array(getattr(loss, "vanished_steps", 0), jnp.int32))

    def __repr__(self) -> str:
        return described(
            self, f"loss={self.loss!r}", f"derivatives={self.derivatives!r}", skips(self)
        )

    @property
    def vanished_steps(self) -> Any:
        """Returns the number of steps whose gradient vanished."""
        return self.vanished.count

    def scale(self, tree: PyTree) -> PyTree:
        """Scales a PyTree by the loss scaling."""
        return self.loss.scale(tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Unscales a PyTree by the loss scaling."""
        return self.loss.unscale(tree)

    @public
    def adjust(self, grads_finite: BoolLike, counts: Any = None) -> "Scaling":
        """Returns the scaling for the next step.

        **Arguments:**

        - `grads_finite`: whether this step's gradients were finite, a scalar bool.
        - `counts`: the cotangent of the counts of `derivatives`. Without it, only the loss scaling
            is adjusted.

        **Returns:**

        A `Scaling` of the same structure, shapes and dtypes.
        """
        finite = check_flag(grads_finite, "grads_finite")
        adjusted = self.loss.adjust(finite)
        if counts is None:
            return with_fields(self, loss=adjusted, **counted_steps(self, finite))
        usable = self.derivatives.finite(counts)
        loss = select_tree(usable, adjusted, self.loss)
        derivatives = self.derivatives.adjust(counts)
        if isinstance(adjusted, DynamicLossScaling) and self.derivatives.active:
            stuck = usable & ~finite & adjusted.at_minimum
            exponents = jnp.where(stuck, derivatives.raised().exponents, derivatives.exponents)
            derivatives = with_fields(derivatives, exponents=exponents)
        steps = counted_steps(self, finite & usable)
        return with_fields(self, loss=loss, derivatives=derivatives, **steps)


def loss_scaling_of(scaling: Any) -> Any:
    """Returns the scaling of the loss in a scaling, which may have scales of derivatives beside."""
    return scaling.loss if isinstance(scaling, Scaling) else scaling


def check_takes_derivatives(func: Callable) -> None:
    """Raises a `TypeError` unless `func` takes a keyword `derivatives`."""
    try:
        inspect.signature(func).bind_partial(derivatives=None)
    except ValueError:  # a built-in without a signature
        return
    except TypeError:
        raise TypeError(
            f"`{called()}` with a `Scaling` passes its derivative scaling to the function "
            f"as the keyword argument `derivatives`, but {getattr(func, '__name__', func)!r} takes "
            "none. Write `def loss(model, points, *, derivatives)` and hand it on to `partials`, "
            "or pass a plain loss scaling."
        ) from None


def needs_derivatives(func: Callable) -> bool:
    """Returns whether `func` needs a keyword `derivatives`."""
    try:
        x = inspect.signature(func).parameters.get("derivatives")
    except ValueError:  # a built-in without a signature
        return False
    return x is not None and x.kind is x.KEYWORD_ONLY and x.default is x.empty


def sum_counts(
    counts: Float32[Array, "*rows columns"], axis_name: Any
) -> Float32[Array, "*rows columns"]:
    """Sums the counts of all devices along the mapped axes of `axis_name`."""
    if axis_name is None:
        return counts
    for axis in axis_name if isinstance(axis_name, tuple | list) else (axis_name,):
        # If JAX tracks the values that vary between devices, the transpose of the mark on the probe
        # has summed already.
        tracked = axis in varying_axes(lax.axis_index(axis))
        if not tracked or axis in varying_axes(counts):
            counts = lax.psum(counts, axis)
    return counts
