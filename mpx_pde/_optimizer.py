"""An optimizer step that a non-finite gradient cannot harm."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax import lax

from ._cast import convert, widen
from ._tree import check_flag, check_same_structure, select_tree
from ._types import BoolLike, PyTree


_CALL = "optimizer_update"


def _check_match(grads: PyTree, params: PyTree) -> None:
    check_same_structure(_CALL, "`grads`", grads, "the floating-point arrays of `model`", params)

    def check(path, g, p):
        if jnp.shape(g) != jnp.shape(p):
            raise ValueError(
                f"`{_CALL}`: the gradient at {jtu.keystr(path)} has shape {jnp.shape(g)}, but the "
                f"parameter has shape {jnp.shape(p)}. Pass the gradients of this model."
            )

    jtu.tree_map_with_path(check, grads, params)


def _covers_all_arrays(optimizer_state: PyTree, model: PyTree) -> bool:
    """Whether the optimizer was initialised on all arrays of the model, integers included."""
    everything = jtu.tree_structure(eqx.filter(model, eqx.is_array))
    if everything == jtu.tree_structure(eqx.filter(model, eqx.is_inexact_array)):
        return False
    found = []

    def is_leaf(x):
        found.append(jtu.tree_structure(x) == everything)
        return found[-1]

    jtu.tree_leaves(optimizer_state, is_leaf=is_leaf)
    return any(found)


def _like(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, weak types included, so that a step never changes what the
    next one compiles for."""

    def cast(x, y):
        if eqx.is_array(y) and eqx.is_array_like(x):
            return convert(jnp.asarray(x), y.dtype, getattr(y, "weak_type", False))
        return x

    return jtu.tree_map(cast, new, old)


def optimizer_update(
    model: PyTree,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    optimizer_state: PyTree,
    grads: PyTree,
    grads_finite: BoolLike,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Updates a model by an Optax optimizer, if the gradients are finite.

    On a step with non-finite gradients the model and the optimizer state come back bit-identical:
    no moment, no step count and no learning-rate schedule advances. Nothing non-finite enters the
    optimizer on such a step, so it runs under `jax_debug_nans`.

    Where parameters are narrower than float32, the optimizer sees gradients, parameters and state
    widened to float32, so that norms and moments are computed in float32; what comes back has the
    dtypes of what went in.

    **Arguments:**

    - `model`: any PyTree of parameters, such as an Equinox module. Its floating-point arrays are
        updated.
    - `optimizer`: an Optax gradient transformation, with or without extra arguments.
    - `optimizer_state`: as `optimizer.init` made it, from `eqx.filter(model, eqx.is_inexact_array)`
        or from `eqx.filter(model, eqx.is_array)`.
    - `grads`: the gradients, as [`mpx_pde.filter_grad`][] returned them.
    - `grads_finite`: a scalar bool, likewise.
    - `extra_args`: passed on to `optimizer.update`, such as `value=loss` for
        `optax.contrib.reduce_on_plateau`, or `value`, `grad` and `value_fn` for `optax.lbfgs`.

    **Returns:**

    `(model, optimizer_state)`, with the structure, shapes and dtypes of those passed in.

    **Raises:** at trace time, `ValueError` for gradients that do not match the model, `TypeError`
    for an `optimizer` that is none or a `grads_finite` that is no scalar bool.

    ```python
    model, optimizer_state = mpx.optimizer_update(
        model, optimizer, optimizer_state, grads, grads_finite
    )
    ```
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`{_CALL}` takes an Optax gradient transformation such as `optax.adam(1e-3)` as "
            f"`optimizer`, but got {optimizer!r}."
        )
    finite = check_flag(grads_finite, _CALL, "grads_finite")
    floating = eqx.filter(model, eqx.is_inexact_array)
    _check_match(grads, floating)
    params = floating
    if _covers_all_arrays(optimizer_state, model):
        params = eqx.filter(model, eqx.is_array)
        grads = eqx.combine(grads, jtu.tree_map(jnp.zeros_like, params))

    narrow = any(p.dtype.itemsize < 4 for p in jtu.tree_leaves(floating))

    def step(grads, extra_args):
        # All three or none: some optimizers branch on the device, and their branches must agree.
        kept = optimizer_state, params
        state, masters = widen(kept) if narrow else kept
        # Optax relies on the standard promotion of dtypes.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, new_state = optax.with_extra_args_support(optimizer).update(
                widen(grads), state, masters, **extra_args
            )
            updates = jtu.tree_map(lambda u, p: None if p is None else u, updates, floating)
            return _like(eqx.apply_updates(model, updates), model), _like(
                new_state, optimizer_state
            )

    if any(callable(x) for x in jtu.tree_leaves(extra_args)):
        # A line search evaluates the loss: on a skipped step it must not run at all.
        arrays, static = eqx.partition((model, optimizer_state), eqx.is_array)
        arrays = lax.cond(
            finite,
            lambda: eqx.filter(step(grads, extra_args), eqx.is_array),
            lambda: arrays,
        )
        return eqx.combine(arrays, static)

    # A selection, not a branch: a branch on the device waits for the host, and keeps XLA from
    # fusing and from updating donated arrays in place. Ones stand in for the gradients: clipping
    # would divide by the norm of zeros.
    def safe(x):
        if not eqx.is_inexact_array(x):
            return x
        return jnp.where(finite, x, jnp.ones_like(x))

    new = step(*jtu.tree_map(safe, (grads, extra_args)))
    return select_tree(finite, new, (model, optimizer_state))
