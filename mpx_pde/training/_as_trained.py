"""Evaluation of a model as its training saw it."""

import equinox as eqx
import jax.tree_util as jtu

from .._types import ForwardLike, PolicyLike, PyTree
from ._options import parse_options


def as_trained(
    model: PyTree,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    forward: ForwardLike = "half",
) -> PyTree:
    """Rounds the parameters of a model to half precision, as its training saw them, and returns
    them in float32.

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
    keep = keep_full[0] if isinstance(keep_full, tuple) and keep_full else keep_full
    keep = keep if isinstance(keep, bool) else (keep,)
    options = parse_options("as_trained", False, True, policy, keep, False, forward)
    (rounded,), _ = options.cast((model,), {})
    like = lambda x, master: x.astype(master.dtype) if eqx.is_inexact_array(master) else master
    return jtu.tree_map(like, rounded, model)
