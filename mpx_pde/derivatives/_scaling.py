"""Loss scaling and derivative scaling together."""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from .._loss_scaling import AbstractLossScaling, DynamicLossScaling, check_scaling, counted_steps
from .._repr import described, in_a_line, skips
from .._tree import check_flag, select_tree, with_fields
from .._types import BoolLike, PyTree
from .._varying import varying_axes
from ._state import DerivativeScaling


class Scaling(AbstractLossScaling):
    """A loss scaling and a derivative scaling, for losses that differentiate the network.

    Give it to [`mpx_pde.filter_grad`][] and its kin in place of a loss scaling: the loss then
    receives the derivative scaling as the keyword argument `derivatives`, to be passed on to
    [`mpx_pde.partials`][].

    ```python
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xt"))


    def loss(model, points, *, derivatives):
        terms = mpx.partials(model, ["u_t", "u_xx"], coords="xt", outputs="u", scaling=derivatives)
        d = jax.vmap(terms)(points)
        return jnp.mean((d["u_t"] - d["u_xx"]) ** 2)


    scaling, finite, grads = mpx.filter_grad(loss, scaling, keep_full=(False, True))(model, points)
    ```

    The two are kept apart: an overflow of a derivative says nothing of the loss scale, so the loss
    scale is adjusted only on steps whose derivatives were finite, and the derivative scales follow
    the derivatives alone. With one exception: unscaling multiplies cotangents by the inverse of
    the derivative scale, so when gradients overflow at the smallest loss scale, the derivative
    scales are raised.

    **Attributes:**

    - `loss`: a loss scaling.
    - `derivatives`: a [`mpx_pde.DerivativeScaling`][].
    - `skipped_steps`: steps skipped so far, whether for gradients or for derivatives, an int32
        scalar. `loss` and `derivatives` count their own.
    - `consecutive_skips`: such steps since the last that was not, an int32 scalar.
    - `taken_steps`: steps that were not skipped so far, an int32 scalar.
    """

    loss: AbstractLossScaling
    derivatives: DerivativeScaling
    skipped_steps: Int32[Array, "*batch"]
    consecutive_skips: Int32[Array, "*batch"]
    taken_steps: Int32[Array, "*batch"]

    def __init__(self, loss: Any = None, derivatives: Any = None):
        """**Arguments:**

        - `loss`: a loss scaling; by default [`mpx_pde.DynamicLossScaling`][].
        - `derivatives`: a [`mpx_pde.DerivativeScaling`][].

        **Raises:** `TypeError` for anything else.
        """
        loss = DynamicLossScaling() if loss is None else loss
        if isinstance(loss, Scaling):
            raise TypeError("`Scaling` takes a plain loss scaling as `loss`, but got a `Scaling`.")
        if isinstance(loss, DerivativeScaling):
            raise TypeError(
                "`Scaling` takes a loss scaling as `loss`, its first argument, but got a "
                "`DerivativeScaling`. Write `Scaling(derivatives=…)`."
            )
        check_scaling(loss, "Scaling", "loss")
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

    def __repr__(self) -> str:
        return described(
            self, f"loss={self.loss!r}", f"derivatives={self.derivatives!r}", skips(self)
        )

    def scale(self, tree: PyTree) -> PyTree:
        """Scales a PyTree by the loss scaling."""
        return self.loss.scale(tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Unscales a PyTree by the loss scaling."""
        return self.loss.unscale(tree)

    def adjust(self, grads_finite: BoolLike, counts: Any = None) -> "Scaling":
        """Returns the scaling for the next step.

        **Arguments:**

        - `grads_finite`: whether this step's gradients were finite, a scalar bool.
        - `counts`: the cotangent of the counts of `derivatives`; without it only the loss scaling
            is adjusted.

        **Returns:**

        A `Scaling` of the same structure, shapes and dtypes.
        """
        finite = check_flag(grads_finite, "Scaling.adjust", "grads_finite")
        adjusted = self.loss.adjust(finite)
        if counts is None:
            return with_fields(self, loss=adjusted, **counted_steps(self, finite))
        usable = self.derivatives.finite(counts)
        loss = select_tree(usable, adjusted, self.loss)
        derivatives = self.derivatives.adjust(counts)
        if isinstance(adjusted, DynamicLossScaling) and self.derivatives.active:
            stuck: Bool[Array, ""] = usable & ~finite & adjusted.at_minimum
            derivatives = select_tree(jnp.asarray(stuck), derivatives.raised(), derivatives)
        steps = counted_steps(self, finite & usable)
        return with_fields(self, loss=loss, derivatives=derivatives, **steps)


def check_takes_derivatives(func: Callable, call: str) -> None:
    """Raises a `TypeError` in the name of `call` unless `func` takes a keyword `derivatives`."""
    try:
        inspect.signature(func).bind_partial(derivatives=None)
    except ValueError:  # a built-in that does not tell
        return
    except TypeError:
        raise TypeError(
            f"`{call}` with a `Scaling` passes its derivative scaling to the function as the "
            f"keyword argument `derivatives`, but {getattr(func, '__name__', func)!r} takes none. "
            "Write `def loss(model, points, *, derivatives)` and hand it on to `partials`, or pass "
            "a plain loss scaling."
        ) from None


def sum_counts(
    counts: Float32[Array, "*rows columns"], axis_name: Any
) -> Float32[Array, "*rows columns"]:
    """Sums the counts of all devices along mapped axes."""
    if axis_name is None:
        return counts
    for axis in axis_name if isinstance(axis_name, tuple | list) else (axis_name,):
        # Where JAX tracks what varies between devices, the transpose of the mark on the probe has
        # summed already.
        tracked = axis in varying_axes(lax.axis_index(axis))
        if not tracked or axis in varying_axes(counts):
            counts = lax.psum(counts, axis)
    return counts
