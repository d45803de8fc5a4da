"""An error for runs that only skip steps."""

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import PyTree
from .._util._wrapper import says_how
from ..precision._dtypes import check_integer
from ..scaling._derivatives import Scaling, loss_scaling_of
from ..scaling._loss import AbstractLossScaling, check_scaling


_ADVICE = (
    "Parameters and optimizer state are those of the last finite step. "
    "`mpx_pde.explain_nonfinite(mpx_pde.filter_grad(loss, scaling, **options))(model, batch)`, "
    "with the options of the step, names the line."
)
_REASONS = (
    "non-finite gradients at a loss scale that can still fall: look for NaNs in the data, "
    "or allow for more skips.",
    "non-finite gradients at the smallest loss scale. No loss scale can help: the loss or its data "
    "are non-finite in themselves, or the network leaves float16 where the loss does not. If a "
    "derivative in the loss overflows, pass a `mpx_pde.Scaling(derivatives=...)`. If a layer does, "
    "such as one with a constant above 65504, keep it in float32 (`mpx_pde.FullPrecision`). Or "
    "take bfloat16.",
    "non-finite derivatives of the network at scales that can still fall: look for NaNs in the "
    "data, or allow for more skips.",
)
_NO_SCALE = (
    "non-finite derivatives of the network at the smallest scale of {}. No derivative scale can "
    "help: the data or parameters hold NaNs, or a layer leaves float16, such as one with a "
    "constant above 65504. Keep that layer in float32 (`mpx_pde.FullPrecision`)."
)
_LOSS, _MINIMUM, _DERIVATIVES = range(len(_REASONS))


@public
@says_how("`mpx_pde.error_if_stuck(scaling, scaling, max_consecutive_skips=100)`.")
def error_if_stuck(
    tree: PyTree, scaling: AbstractLossScaling, *, max_consecutive_skips: int
) -> PyTree:
    """Raises at run time when too many steps in a row were skipped.

    One skipped step is normal, and ten in a row may be needed to find the scale of a badly scaled
    loss. A run that skips a hundred in a row is lost, but costs as much as a good one. The check is
    an `equinox.error_if`: it works inside `jax.jit`, and raises once the step has run. Call it
    outside of the step, so that donated buffers are safe; it then waits once for the device:

    ```python
    model, opt_state, scaling = step(model, opt_state, scaling, batch)
    scaling = mpx.error_if_stuck(scaling, scaling, max_consecutive_skips=100)
    ```

    To react in another way, test `scaling.consecutive_skips` yourself: this function compares that
    number with the limit.

    **Arguments:**

    - `tree`: any PyTree with at least one array; use the returned PyTree in its place.
    - `scaling`: a [`mpx_pde.DynamicLossScaling`][] or a [`mpx_pde.Scaling`][] as the gradient
        transformation returned it, or the stacked scalings of an ensemble.
        (`mpx.DynamicLossScaling(1, 1, max_loss_scaling=1)` counts steps, and scales nothing.)
    - `max_consecutive_skips`: the number of skipped steps in a row that raises, at least 1.

    **Returns:** `tree`.

    **Raises:** at run time, an error that names the cause: the loss, the data or the derivatives.
    At trace time, `TypeError` for a scaling that does not count steps and for a `tree` without
    arrays, and `ValueError` for a number below 1.
    """
    check_scaling(scaling)
    skips = getattr(scaling, "consecutive_skips", None)
    if skips is None:
        raise TypeError(
            f"`{called()}` needs a scaling that counts skipped steps, but got "
            f"{type(scaling).__name__}. `mpx_pde.DynamicLossScaling(1, 1, max_loss_scaling=1)` "
            "counts, and scales nothing."
        )
    if not any(map(eqx.is_array, jtu.tree_leaves(tree))):
        raise TypeError(
            f"`{called()}` needs a `tree` with an array, to which the check is tied and which is "
            f"used in its place afterwards, such as the scaling itself, but got {in_a_line(tree)}."
        )
    limit = check_integer(max_consecutive_skips, "max_consecutive_skips")
    loss = loss_scaling_of(scaling)
    reasons = [*_REASONS]
    reason = jnp.where(getattr(loss, "at_minimum", False), _MINIMUM, _LOSS)
    if isinstance(scaling, Scaling):
        # The scaling holds the counts of the last step.
        lost = ~scaling.derivatives.finite(scaling.derivatives)
        reason = jnp.where(lost, _DERIVATIVES, reason)
        fixed = scaling.derivatives.at_minimum
        of_scaler = len(_REASONS) + jnp.argmax(fixed, axis=-1)
        reason = jnp.where(jnp.any(fixed, axis=-1), of_scaler, reason)
        reasons += [_NO_SCALE.format(repr(name)) for name in scaling.derivatives.names]
    messages = [
        f"`{called()}`: {limit} steps in a row were skipped, the last for {why} {_ADVICE}"
        for why in reasons
    ]
    stuck = skips >= limit
    # Any member of an ensemble may be stuck.
    reason = jnp.max(jnp.where(stuck, reason, 0))
    return eqx.branched_error_if(tree, jnp.any(stuck), reason, messages)
