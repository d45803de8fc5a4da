"""The refusal of `argnums` by all gradient transformations, and `as_trained`, which rounds a model
as training with their options does."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import equinox as eqx
import jax.tree_util as jtu

from .._util._calls import public
from .._util._types import ForwardLike, PolicyLike, PyTree
from .._util._wrapper import check_bound
from ..modes._choice import mode_of


_Function = TypeVar("_Function", bound=Callable)


def refuses_argnums(transformation: _Function) -> _Function:
    """Makes a gradient transformation raise a `TypeError` with the code to write for `argnums`, and
    for arguments that are missing."""
    call = transformation.__name__
    parameters = inspect.signature(transformation).parameters.values()
    needed = ["loss", *[x.name for x in parameters if x.default is x.empty][1:]]
    example = (
        f"`mpx_pde.{call}({', '.join(needed)})(model, batch)`, with `scaling = "
        "mpx_pde.DynamicLossScaling()`, or `mpx_pde.Scaling(derivatives=...)` for a loss that "
        "takes derivatives of the network."
    )

    @wraps(transformation)
    def checked(*args: Any, **kwargs: Any) -> Any:
        argnums = kwargs.pop("argnums", None)
        if argnums is None or argnums == 0:
            check_bound(transformation, example, args, kwargs)
            return transformation(*args, **kwargs)
        moved, given, first = _moved(argnums)
        raise TypeError(
            f"`{call}` differentiates with respect to the first positional argument, as Equinox "
            f"does, and takes no `argnums`, but got {argnums!r}. Write:\n"
            f"    moved = lambda {first}: loss({moved})\n"
            f"    mpx_pde.{call}(moved, scaling, ...)({given})\n"
            "Entries of `keep_full` are for the arguments in this order."
        )

    return cast(_Function, checked)


def _moved(argnums: Any) -> tuple[str, str, str]:
    """Returns the arguments of a loss, those of the call and those of the function between them,
    as code, if what `argnums` selects is passed first."""
    chosen = argnums if isinstance(argnums, tuple | list) else (argnums,)
    if not chosen or not all(isinstance(i, int) and i >= 0 for i in chosen):
        return "*given, *rest", "(model, other), batch", "given, *rest"
    single = not isinstance(argnums, tuple | list)
    names = "abcdefghijklmnopqrstuvwxyz"[: max(chosen) + 1] + "*"
    places = {i: "given" if single else f"given[{k}]" for k, i in enumerate(chosen)}
    others = [x for i, x in enumerate(names[:-1]) if i not in places]
    inside = [places.get(i, x) for i, x in enumerate(names[:-1])]
    picked = ", ".join(names[i] for i in chosen)
    picked = picked if single else f"({picked}{',' * (len(chosen) == 1)})"
    join = lambda *parts: ", ".join((*parts, "*rest"))
    return join(*inside), join(picked, *others), join("given", *others)


@public
def as_trained(
    model: PyTree,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    forward: ForwardLike = "half",
) -> PyTree:
    """Rounds the parameters of a model to half precision, as its training did, and returns them in
    float32.

    A step in half precision casts the float32 masters first, so training minimizes the loss of the
    rounded parameters. The masters are other numbers than those that were trained: the difference
    amounts to 5 to 40 % of the error of a well-trained network. So evaluate both, and take the
    better; they are the same model.

    ```python
    error = evaluate(model)
    error_as_trained = evaluate(mpx.as_trained(model))
    ```

    Arrays that the step does not round are not rounded here: those in a
    [`mpx_pde.FullPrecision`][], such as first layers and the random matrices of Fourier features,
    those that `keep_full` keeps, and all arrays if the forward pass is in full precision.
    [`mpx_pde.autocast`][] rounds the operands inside of each product: evaluate
    `mpx.autocast(model)` instead.

    **Arguments:**

    - `model`: the float32 masters, any PyTree.
    - `policy`, `keep_full`, `forward`: as passed to [`mpx_pde.filter_grad`][] in the training. If
        `keep_full` is a tuple, its first entry applies to the model.

    **Returns:**

    A PyTree of the same structure, shapes and dtypes.

    **Raises:** `ValueError` or `TypeError` for arguments that [`mpx_pde.filter_grad`][] rejects
    too.
    """
    keep = keep_full[0] if isinstance(keep_full, tuple) and keep_full else keep_full
    keep = keep if isinstance(keep, bool) else (keep,)
    mode = mode_of(policy=policy, keep_full=keep, forward=forward)
    (rounded,), _ = mode.cast((model,), {})

    def like(x, master):
        return x.astype(master.dtype) if eqx.is_inexact_array(master) else master

    return jtu.tree_map(like, rounded, model)
