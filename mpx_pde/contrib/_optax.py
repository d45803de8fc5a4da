"""Loss scaling for training loops that take only an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._util._calls import called, named
from .._util._types import PyTree
from ..precision._tree import all_finite, select_tree
from ..scaling._loss import AbstractLossScaling, NoOpLossScaling, StaticLossScaling, check_scaling
from ..training._optimizer import as_transformation


class LossScalingState(NamedTuple):
    """The state of [`mpx_pde.contrib.scale_by_loss_scaling`][].

    **Attributes:**

    - `scaling`: the loss scaling, adjusted at each step.
    - `inner`: the state of the optimizer inside.
    """

    scaling: AbstractLossScaling
    inner: PyTree


def _check_scaling(scaling: Any, scale_in_params: Any) -> None:
    check_scaling(scaling)
    if hasattr(scaling, "derivatives"):
        raise TypeError(
            f"`{called()}` takes a loss scaling, but got a `Scaling` with derivative scales, which "
            "need the counts that `mpx_pde.filter_grad` takes. Pass its `loss`."
        )
    if scale_in_params is not None and not callable(scale_in_params):
        raise TypeError(
            f"`{called()}` takes a function from the parameters to the leaf that holds the scale "
            f'as `scale_in_params`, such as `lambda params: params["scale"]`, but got '
            f"{scale_in_params!r}."
        )
    moves = not isinstance(scaling, StaticLossScaling | NoOpLossScaling)
    if moves and scale_in_params is None:
        raise ValueError(
            f"`{called()}` with a {type(scaling).__name__} needs `scale_in_params`, where the loss "
            "reads the scale of the step. Or pass a `StaticLossScaling`, and multiply the loss by "
            "its scale."
        )


def _refusing(name: str, x: Any) -> Any:
    """Returns an extra argument. A function is replaced by one that raises when it is called, since
    a loop may pass functions that its optimizer does not use. Gradients of a model may be callable.
    """
    if not callable(x) or any(map(eqx.is_array, jtu.tree_leaves(x))):
        return x

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"`contrib.scale_by_loss_scaling` cannot unscale `{name}`, a function that the "
            "optimizer calls for the loss or its gradient. For a line search write the loop "
            "with `mpx_pde.filter_value_and_grad`, `mpx_pde.line_search_value` and "
            "`mpx_pde.optimizer_update`."
        )

    return refused


_SCALED = ("value", "grad")
"""The names under which Optax passes the loss and its gradient to an optimizer."""


def scale_by_loss_scaling(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    scaling: AbstractLossScaling,
    *,
    scale_in_params: Callable[[PyTree], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it unscales its gradients, and skips steps on which they are not
    finite.

    Use it in a closed loop that takes a loss and an optimizer, such as `jinns.solve`, in which you
    cannot call [`mpx_pde.filter_grad`][] and [`mpx_pde.optimizer_update`][]. The loss must be
    multiplied by the scale. There are two ways to pass the scale to it:

    - With a [`mpx_pde.StaticLossScaling`][], multiply the loss by the same number. With
        [`mpx_pde.NoOpLossScaling`][], for bfloat16, there is nothing to multiply by.
    - A scale that changes needs a leaf among the parameters, which `scale_in_params` selects. The
        loss multiplies by `jax.lax.stop_gradient` of that leaf, and this transform sets it. If the
        loop multiplies all updates by a rate, the leaf lags behind. It falls by at most a factor of
        2^20 in a step. Gradients are always unscaled by the value of the leaf.

    Among the extra arguments of `update`, `value` and `grad` are the scaled loss and its gradient,
    as the loop computes them. They are unscaled for the optimizer inside (`optax.polyak_sgd`,
    `optax.contrib.reduce_on_plateau`); other arguments are passed on unchanged. An optimizer that
    calls one of them to evaluate the loss itself, as the line search of `optax.lbfgs` does, is an
    error: it needs [`mpx_pde.line_search_value`][] in a loop of your own.

    On a step whose gradients or `value` are not finite, the updates are zero and the state inside
    does not change.

    **Arguments:**

    - `optimizer`: the optimizer that gets the unscaled gradients, in float32 or wider.
    - `scaling`: a loss scaling. It cannot be a [`mpx_pde.Scaling`][], which needs counts of
        derivatives that only [`mpx_pde.filter_grad`][] has.
    - `scale_in_params`: a function from the parameters to the leaf that holds the scale, a float32
        scalar. Needed unless the scaling is a static or no-op one.

    **Returns:**

    An Optax gradient transformation with extra arguments; its state is a
    [`mpx_pde.contrib.LossScalingState`][].

    **Raises:** `TypeError` for anything but an optimizer and a loss scaling, and if the optimizer
    calls an extra argument of `update`; `ValueError` for a scaling that changes without
    `scale_in_params`, and for a leaf that is not a float32 scalar.

    ```python
    params = {"net": jnp.ones(3), "scale": jnp.float32(2**15)}
    optimizer = mpx.contrib.scale_by_loss_scaling(
        optax.adam(1e-3), mpx.DynamicLossScaling(), scale_in_params=lambda p: p["scale"]
    )


    def loss(params):
        value = jnp.mean(params["net"].astype(jnp.float16) ** 2)
        return value.astype(jnp.float32) * jax.lax.stop_gradient(params["scale"])
    ```
    """
    call = "contrib.scale_by_loss_scaling"
    with named(call):
        inside = as_transformation(optimizer)
        _check_scaling(scaling, scale_in_params)

    def place(params):
        assert scale_in_params is not None
        leaf = scale_in_params(params)
        if jnp.shape(leaf) != () or jnp.result_type(leaf) != jnp.float32:
            raise ValueError(
                f"`{call}` needs a float32 scalar where `scale_in_params` points, such as "
                f"`jnp.float32(2**15)`, but found {leaf!r}."
            )
        return leaf

    def without_scale(tree):
        zero = jnp.float32(0)
        return tree if scale_in_params is None else eqx.tree_at(scale_in_params, tree, zero)

    def init(params: Any) -> Any:
        if scale_in_params is not None:
            place(params)
        return LossScalingState(scaling, inside.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if scale_in_params is not None and params is None:
            raise ValueError(f"`{call}` needs `params` in `update` to set the scale in them.")
        extra_args = {name: _refusing(name, x) for name, x in extra_args.items()}
        scaled = {name: extra_args.pop(name) for name in _SCALED if name in extra_args}
        if "grad" in scaled:
            scaled["grad"] = without_scale(scaled["grad"])
        with jax.numpy_dtype_promotion("standard"):
            # The leaf in the parameters may differ from our scale: it may have started with another
            # value, or a learning rate after this transform multiplied its update.
            used = state.scaling if scale_in_params is None else StaticLossScaling(place(params))
            unscaled = used.unscale((without_scale(updates), scaled))
            finite = all_finite(unscaled)
            safe, scaled = jtu.tree_map(lambda g: jnp.where(finite, g, jnp.ones_like(g)), unscaled)
            new, inner = inside.update(safe, state.inner, params, **scaled, **extra_args)
            zeros = jtu.tree_map(jnp.zeros_like, new)
            new, inner = select_tree(finite, (new, inner), (zeros, state.inner))
            after = state.scaling.adjust(finite)
            if scale_in_params is not None:
                # If it fell by more than float32's digits in one step, the updated leaf would be 0.
                step = jnp.maximum(after.loss_scaling, 2**-20 * place(params)) - place(params)
                new = eqx.tree_at(scale_in_params, new, step)
        return new, LossScalingState(after, inner)

    return optax.GradientTransformationExtraArgs(init, update)
