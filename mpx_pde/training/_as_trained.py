"""The model that a training has seen."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._cast import cast_except
from .._dtypes import half_precision_datatype
from .._forward import check_forward
from .._types import ForwardLike, PolicyLike, PyTree
from ._policy import parse_policy


def as_trained(
    model: PyTree,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    forward: ForwardLike = "half",
) -> PyTree:
    """The model as its training saw it: the parameters rounded to half precision, in float32.

    A step in half precision casts the float32 masters first, so it is the rounded ones that the
    loss was made small for. Evaluating the masters tests other numbers than those that were
    trained: in between lie 5 to 40 % of the error of a well-trained network. So evaluate both, and
    take the better; they are the same model.

    ```python
    error = evaluate(model)
    error_as_trained = evaluate(mpx.as_trained(model))
    ```

    What the step does not round is not rounded here: arrays in a [`mpx_pde.FullPrecision`][], such
    as first layers and the random matrices of Fourier features, what `keep_full` keeps, and all of
    them where the forward pass is in full. [`mpx_pde.autocast`][] rounds inside of each product
    what that product needs: evaluate `mpx.autocast(model)` instead.

    **Arguments:**

    - `model`: the float32 masters, any PyTree.
    - `policy`, `keep_full`, `forward`: as for the [`mpx_pde.filter_grad`][] of the training. Of a
        tuple `keep_full` the first entry is that of the model.

    **Returns:**

    A PyTree of the same structure, shapes and dtypes.

    **Raises:** `ValueError` or `TypeError` for arguments that [`mpx_pde.filter_grad`][] would not
    take either.
    """
    call = "as_trained"
    parsed = parse_policy(policy, call)
    dtype = half_precision_datatype() if parsed is None else jnp.dtype(parsed.compute_dtype)
    if check_forward(forward, call) != "half":
        return model
    keep = keep_full[0] if isinstance(keep_full, tuple) and keep_full else keep_full
    keep = keep if isinstance(keep, bool) else (keep,)
    (rounded,) = cast_except(keep, (model,), dtype, call)
    return jtu.tree_map(_like, rounded, model)


def _like(rounded: Any, master: Any) -> Any:
    return rounded.astype(master.dtype) if eqx.is_inexact_array(master) else master
