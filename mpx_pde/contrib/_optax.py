"""Loss scaling for loops that take an optimizer, and nothing else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from .._loss_scaling import AbstractLossScaling, NoOpLossScaling, StaticLossScaling, check_scaling
from .._tree import all_finite, select_tree
from .._types import PyTree
from ..training._optimizer import as_transformation


class LossScalingState(NamedTuple):
    """The state of [`mpx_pde.contrib.scale_by_loss_scaling`][].

    **Attributes:**

    - `scaling`: the loss scaling, brought up to date at each step.
    - `inner`: the state of the optimizer inside.
    """

    scaling: AbstractLossScaling
    inner: PyTree


def _check_scaling(scaling: Any, scale_in_params: Any, call: str) -> None:
    check_scaling(scaling, call)
    if hasattr(scaling, "derivatives"):
        raise TypeError(
            f"`{call}` takes a loss scaling, but got a `Scaling` with derivative scales, which "
            "need the counts that `mpx_pde.filter_grad` takes. Pass its `loss`."
        )
    if scale_in_params is not None and not callable(scale_in_params):
        raise TypeError(
            f"`{call}` takes a function from the parameters to the leaf that holds the scale as "
            f'`scale_in_params`, such as `lambda params: params["scale"]`, but got '
            f"{scale_in_params!r}."
        )
    moves = not isinstance(scaling, StaticLossScaling | NoOpLossScaling)
    if moves and scale_in_params is None:
        raise ValueError(
            f"`{call}` needs `scale_in_params`, where the loss finds the scale of the step, with "
            f"a {type(scaling).__name__}. Or take a `StaticLossScaling`, and multiply the loss by "
            "its number."
        )


def _refusing(name: str, x: Any) -> Any:
    """Returns an extra argument; in place of a function, one that raises where it is called. A loop
    may hand on functions that its optimizer has no use for. Gradients of a model may be callable.
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
"""Names that Optax gives the loss and its gradient as extra arguments of an optimizer."""


def scale_by_loss_scaling(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    scaling: AbstractLossScaling,
    *,
    scale_in_params: Callable[[PyTree], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it unscales its gradients, and skips the steps at which they are
    not finite.

    For a closed loop that takes a loss and an optimizer, such as `jinns.solve`, where
    [`mpx_pde.filter_grad`][] and [`mpx_pde.optimizer_update`][] have no place. The loss must be
    multiplied by the scale; there are two ways to let it know.

    - A [`mpx_pde.StaticLossScaling`][]: multiply the loss by the same number. With
        [`mpx_pde.NoOpLossScaling`][], for bfloat16, there is nothing to multiply by.
    - A scale that moves needs a place among the parameters: `scale_in_params` says where. The loss
        multiplies by that leaf, behind `jax.lax.stop_gradient`, and this transform sets it. Where
        the loop multiplies all updates by a rate the leaf lags behind, and it falls by at most a
        factor of 2^20 in a step; gradients are unscaled by what it holds.

    Of the extra arguments of `update`, `value` and `grad` are the scaled loss and its gradient, as
    the loop has them, and are unscaled for the optimizer inside (`optax.polyak_sgd`,
    `optax.contrib.reduce_on_plateau`); others are handed on as they are. An optimizer that calls a
    function among them to evaluate the loss itself, as the line search of `optax.lbfgs` does, is an
    error: it needs [`mpx_pde.line_search_value`][] in a loop of your own.

    On a step with gradients, or a `value`, that are not finite the updates are zero and the state
    inside stays as it was.

    **Arguments:**

    - `optimizer`: what gets the unscaled gradients, in float32 or wider.
    - `scaling`: a loss scaling. A [`mpx_pde.Scaling`][] needs counts of derivatives, which only
        [`mpx_pde.filter_grad`][] has.
    - `scale_in_params`: a function from the parameters to the leaf in them that holds the scale, a
        float32 scalar. Needed unless the scaling is static or none.

    **Returns:**

    An Optax gradient transformation with extra arguments; its state is a
    [`mpx_pde.contrib.LossScalingState`][].

    **Raises:** `TypeError` for anything but an optimizer and a loss scaling, and where the
    optimizer calls an extra argument of `update`; `ValueError` for a scaling that moves without
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
    inside = as_transformation(optimizer, call)
    _check_scaling(scaling, scale_in_params, call)

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
            # What stands in the parameters is another number than ours where it began as one, or
            # where a learning rate behind us multiplied its update.
            used = state.scaling if scale_in_params is None else StaticLossScaling(place(params))
            unscaled = used.unscale((without_scale(updates), scaled))
            finite = all_finite(unscaled)
            safe, scaled = jtu.tree_map(lambda g: jnp.where(finite, g, jnp.ones_like(g)), unscaled)
            new, inner = inside.update(safe, state.inner, params, **scaled, **extra_args)
            zeros = jtu.tree_map(jnp.zeros_like, new)
            new, inner = select_tree(finite, (new, inner), (zeros, state.inner))
            after = state.scaling.adjust(finite)
            if scale_in_params is not None:
                # A sum that falls by more than float32's digits in one step would be zero.
                step = jnp.maximum(after.loss_scaling, 2**-20 * place(params)) - place(params)
                new = eqx.tree_at(scale_in_params, new, step)
        return new, LossScalingState(after, inner)

    return optax.GradientTransformationExtraArgs(init, update)
