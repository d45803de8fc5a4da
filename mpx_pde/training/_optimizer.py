"""An optimizer step that skips non-finite gradients."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax import lax
from jaxtyping import PRNGKeyArray

from .._util._calls import called, public
from .._util._notes import noting
from .._util._repr import in_a_line
from .._util._types import BoolLike, MasterLike, PyTree
from .._util._wrapper import says_how
from ..precision._cast import convert, is_fixed, widen
from ..precision._dtypes import is_half
from ..precision._tree import (
    check_flag,
    check_same_structure,
    first_difference,
    is_key,
    select_tree,
)
from ..program._flat import flatten
from ..program._warnings import tensorfloat32_by_default, traced, warn_of_tensorfloat32, warn_user
from ._masters import Noise, applied, parse_master
from ._moments import warn_of_squares


def as_transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` as one that takes extra arguments. Raises a `TypeError` in the name of
    the called function if it is not an optimizer."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`{called()}` takes an Optax gradient transformation such as `optax.adam(1e-3)` as "
            f"`optimizer`, but got {in_a_line(optimizer)}."
        )
    return optax.with_extra_args_support(optimizer)


def _checked_gradients(grads: PyTree, params: PyTree) -> PyTree:
    """Returns the gradients in the form that the optimizer takes. Raises a `ValueError` if they do
    not belong to `params`.
    """
    if isinstance(params, optax.LookaheadParams):
        # Only the fast parameters have gradients.
        params = params.fast
        grads = grads.fast if isinstance(grads, optax.LookaheadParams) else grads
    if type(grads) is tuple and type(params) is not tuple:
        raise ValueError(
            f"`{called()}` takes the gradients as `grads`, but got a tuple of {len(grads)}. Unpack "
            "it: `scaling, grads_finite, grads = mpx_pde.filter_grad(loss, scaling)(model, batch)`."
        )
    fix = " Of a part that is trained, pass that part, and `eqx.combine` it with the rest."
    floating = "the floating-point arrays of `model`"
    check_same_structure("`grads`", grads, floating, params, fix)

    def check(path, g, p):
        if jnp.shape(g) != jnp.shape(p):
            raise ValueError(
                f"`{called()}`: the gradient at {jtu.keystr(path)} has shape {jnp.shape(g)}, but "
                f"the parameter has shape {jnp.shape(p)}. Pass the gradients of this model."
            )

    jtu.tree_map_with_path(check, grads, params)
    return grads


def _initial(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree | None:
    """Returns the types of the state that `optimizer` starts with, or `None` if it does not take
    `params`.
    """
    try:
        return eqx.filter_eval_shape(optimizer.init, params)
    except (TypeError, ValueError):  # such as a mask that was made for other parameters
        return None


_LACKS = (
    "`optimizer_update` passes its keyword arguments on to the optimizer: "
    "`optimizer_update(..., value=loss)`. A line search also takes `grad=grads` and, as "
    "`value_fn`, a function that `mpx_pde.line_search_value` makes."
)


@contextmanager
def _naming_a_state_of_another(optimizer: Any, view: "_View") -> Iterator[None]:
    """Turns an error of the optimizer into one about its state, if that state belongs to another
    optimizer or other parameters.
    """
    try:
        yield
    except Exception as e:
        types = _initial(optimizer, view.params)
        # A state may be wider than the parameters.
        wide = widen((types, view.state))
        difference = None if types is None else first_difference(*wide)
        if difference is None:
            raise
        raise ValueError(
            f"`{called()}` got an `optimizer_state` that `optimizer` did not make for this model: "
            f"{difference}. Pass what `optimizer.init(eqx.filter(model, eqx.is_inexact_array))` "
            "returned, or the step before."
        ) from e


def _operations(update: Callable, args: tuple) -> Counter[tuple[str, frozenset[int]]]:
    """Counts the operations of an optimizer by their names and by the arrays that their operands
    depend on. Dtypes are ignored.
    """
    closed, *_ = eqx.filter_make_jaxpr(update)(*args)
    flat, counts = flatten(closed, forward_mode=False), Counter[tuple[str, frozenset[int]]]()
    on = dict.fromkeys(flat.constants, frozenset[int]())
    on |= {k: frozenset({i}) for i, k in enumerate(flat.inputs)}
    for step in flat.steps:
        here = frozenset[int]().union(*(on[x] for x in step.variables))
        on |= dict.fromkeys(step.outputs, here)
        if step.name != "convert_element_type":
            counts[step.name, here] += 1
    return counts


def _warn_of_dtypes(update: Callable, narrow: tuple, wide: tuple) -> None:
    """Issues a warning if an optimizer applies other operations to half arrays than to wide ones,
    for example because of a mask that looks at dtypes.
    """
    try:
        of_half = _operations(update, narrow)
    except Exception:  # half arrays may not work at all, for example in a QR decomposition
        return
    try:
        same = of_half == _operations(update, wide)
    except (TypeError, ValueError):  # for example, if the state was made with another mask
        same = False
    if not same:
        warn_user(
            f"`{called()}` widens half parameters to float32 for `optimizer`, which does something "
            "else with these. If its masks or labels are by dtype, give Optax the PyTree that your "
            "function returns for the parameters in place of the function. If it is meant, filter "
            "`mpx_pde.PrecisionWarning`."
        )


@dataclass(frozen=True)
class _View:
    """The parameters, state and gradients that the optimizer sees."""

    params: PyTree
    state: PyTree
    grads: PyTree
    restore: Callable[[PyTree], PyTree]
    """A function from the state that the optimizer returned to the whole optimizer state."""


def _view(optimizer: optax.GradientTransformation, state: PyTree, model: PyTree, grads: PyTree):
    floating = eqx.filter(model, eqx.is_inexact_array)
    plain = _View(floating, state, grads, lambda new: new)
    everything = eqx.filter(model, eqx.is_array)
    structure = jtu.tree_structure(state)
    if jtu.tree_structure(everything) == jtu.tree_structure(floating):
        return plain
    initial = _initial(optimizer, floating)
    if jtu.tree_structure(initial) == structure:
        return plain

    # The state was made from all arrays. Optax cannot handle integers (clipping, conditional
    # updates, norms), so float32 zeros stand in for them.
    def stand_in(x):
        return x if eqx.is_inexact_array(x) else jnp.zeros(x.shape, jnp.float32)

    whole = jtu.tree_map(stand_in, everything)
    types = _initial(optimizer, whole)
    if jtu.tree_structure(types) == structure:
        zeros = jtu.tree_map(jnp.zeros_like, whole)
        return _View(whole, _floats_as(state, types), eqx.combine(grads, zeros), lambda new: new)

    # Here a mask or label by dtype tells parameters from other arrays. The optimizer sees only the
    # parameters, and the state of the rest is put back.
    is_none = lambda x: x is None
    keep = lambda new, old: None if new is None else old
    try:
        merged = jtu.tree_map(keep, initial, state, is_leaf=is_none)
    except ValueError:  # the state belongs to something else; Optax raises the error
        return plain

    def restore(new):
        choose = lambda like, new, old: old if like is None else new
        return jtu.tree_map(choose, initial, new, state, is_leaf=is_none)

    return _View(floating, merged, grads, restore)


def _check_hyperparameters(state: PyTree) -> None:
    """Raises a `ValueError` for injected hyperparameters that are rounded to half precision. There
    0.999 becomes 1 in bfloat16 and 1e-8 becomes 0 in float16, so the step would be NaN.
    """
    holds = lambda x: isinstance(getattr(x, "hyperparams", None), dict)
    states = [x for x in jtu.tree_leaves(state, is_leaf=holds) if holds(x)]
    arrays = [(n, x) for s in states for n, x in s.hyperparams.items() if eqx.is_array(x)]
    half = [f"{n} ({x.dtype.name})" for n, x in arrays if is_half(x.dtype)]
    if half:
        raise ValueError(
            f"`{called()}` got an `optimizer_state` with hyperparameters in half precision, "
            f"{', '.join(half)}. `optax.inject_hyperparams` rounds them to the dtype of the "
            "parameters: pass it `hyperparam_dtype=jnp.float32`, and make the state anew."
        )


def _unless_fixed(params: PyTree, updates: PyTree) -> PyTree:
    return jtu.tree_map(lambda _: None, updates) if is_fixed(params) else updates


def _floats_as(state: PyTree, types: PyTree) -> PyTree:
    """Casts each integer array of `state` to its dtype in `types` if that is floating-point."""

    def leaf(x, like):
        floats = eqx.is_array(x) and jnp.issubdtype(like.dtype, jnp.inexact)
        if not floats or eqx.is_inexact_array(x):
            return x
        return jnp.zeros(x.shape, like.dtype) if is_key(x) else x.astype(like.dtype)

    return jtu.tree_map(leaf, state, types)


def _like(new: PyTree, old: PyTree) -> PyTree:
    """Casts `new` to the dtypes of `old`, weak types included, so that the next step is not
    compiled anew.
    """

    def cast(x, y):
        if is_key(y):  # zeros stood in for it, unless it is the optimizer's own
            return x if is_key(x) else y
        if eqx.is_array(y) and eqx.is_array_like(x):
            dtype = jax.dtypes.canonicalize_dtype(y.dtype)
            return convert(jnp.asarray(x), dtype, getattr(y, "weak_type", False))
        return x

    return jtu.tree_map(cast, new, old)


@public
@says_how(
    "`model, opt_state = "
    "mpx_pde.optimizer_update(model, optimizer, opt_state, grads, grads_finite)`."
)
def optimizer_update(
    model: PyTree,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    optimizer_state: PyTree,
    grads: PyTree,
    grads_finite: BoolLike,
    *,
    master: MasterLike = "nearest",
    key: PRNGKeyArray | None = None,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Updates a model by an Optax optimizer, if the gradients are finite.

    On a step with non-finite gradients the model and the optimizer state are returned
    bit-identical: no moment, no step count and no learning-rate schedule advances. Nothing
    non-finite enters the optimizer on such a step, so it runs under `jax_debug_nans`.

    If any parameters are narrower than float32, gradients, parameters and state are widened to
    float32 for the optimizer, which therefore computes norms and moments in float32. The results
    are cast back to the original dtypes. Masks and labels by dtype must be PyTrees, not functions.
    An entry of a half-precision parameter that its update would take beyond the range of the type,
    65504 for float16, is not updated: it would be infinite from then on. A state may be wider than
    the parameters, and must be where it holds squares of gradients and the parameters are float16:
    start with `optimizer.init(mpx.cast_to_float32(params))`. A warning tells of it.

    **Arguments:**

    - `model`: any PyTree of parameters, such as an Equinox module. Its floating-point arrays are
        updated.
    - `optimizer`: an Optax gradient transformation, with or without extra arguments.
    - `optimizer_state`: the state that `optimizer.init` made from
        `eqx.filter(model, eqx.is_inexact_array)` or from `eqx.filter(model, eqx.is_array)`. In the
        second case the optimizer sees zeros of float32 in place of integers and bools, and these
        are never updated.
    - `grads`: the gradients, as [`mpx_pde.filter_grad`][] returned them. For the
        `optax.LookaheadParams` of `optax.lookahead`, pass the gradients of its fast parameters.
    - `grads_finite`: the scalar bool that [`mpx_pde.filter_grad`][] returned.
    - `master`: how half-precision parameters take their updates, which are computed in float32.
        `"nearest"` rounds the sum, and so forgets every update below half a rounding step (2^-9 of
        a bfloat16 parameter): train float32 masters with it. `"stochastic"` rounds up or down at
        random, right on average. `"kahan"` carries what rounding took off the parameters in an
        array of their size and dtype ([`mpx_pde.compensated`][] makes it). Either of these two
        halves the memory of masters (Zamirai et al., *Revisiting BFloat16 Training*). They also
        round the half-precision arrays of the optimizer state at random, because moving averages
        would stand still otherwise.
    - `key`: a `jax.random.key` of this step for random rounding, the same on all devices. By
        default one is made for each array from its own bits and the step counts of the optimizer,
        so that a run can be repeated. An optimizer that counts no steps, such as `optax.sgd` at a
        constant rate, needs a key if batches do not change. Otherwise, after a step that moved
        nothing, the next one would be rounded alike. Inside `jax.shard_map` copies of an array are
        rounded alike, and the parts of a split array independently (by one key only where JAX
        tracks what varies).
    - `extra_args`: passed on to `optimizer.update`, such as `value=loss` for
        `optax.contrib.reduce_on_plateau`, or `value`, `grad` and `value_fn` for `optax.lbfgs`.

    **Returns:**

    `(model, optimizer_state)`, with the structure, shapes and dtypes of those passed in. With
    `master="kahan"`, a state without residues is returned with them.

    **Raises:** at trace time, `ValueError` for gradients that do not match the model, for a state
    of another optimizer or model or with injected hyperparameters in half precision, for an unknown
    `master`, and for one other than `"nearest"` if the model has no half-precision parameters;
    `TypeError` for an `optimizer` that is not one, a `grads_finite` that is not a scalar bool, a
    `key` that is not one, and a misspelled `master` or `key`.

    ```python
    model, optimizer_state = mpx.optimizer_update(
        model, optimizer, optimizer_state, grads, grads_finite
    )
    ```
    """
    optimizer = as_transformation(optimizer)
    finite = check_flag(grads_finite, "grads_finite")
    for name in extra_args:
        # Optax silently drops arguments that an optimizer does not know.
        if meant := difflib.get_close_matches(name, ("master", "key"), cutoff=0.8):
            raise TypeError(f"`{called()}` got the keyword argument {name!r}. Write `{meant[0]}`.")
    optimizer_state, inner = parse_master(master, model, optimizer_state)
    floating = eqx.filter(model, eqx.is_inexact_array)
    grads = _checked_gradients(grads, floating)
    _check_hyperparameters(inner)
    with jax.numpy_dtype_promotion("standard"):
        view = _view(optimizer, inner, model, grads)

    narrow = any(p.dtype.itemsize < 4 for p in jtu.tree_leaves(floating))
    # `is_leaf`, since a module or `jax.tree_util.Partial` is callable only as a whole.
    searches = any(callable(x) for x in jtu.tree_leaves(extra_args, is_leaf=callable))
    looks = narrow and not searches and traced((model, grads))

    def step(grads, extra_args):
        # Widen all three or none: some optimizers branch on the device, and branches must agree.
        before = view.state, view.params
        # Widen leaf by leaf: a half array inside of a `FullPrecision` is narrow as well.
        grads, wide = jtu.tree_map(widen, (grads, before))
        state, masters = wide if narrow else before
        # Optax relies on the standard promotion of dtypes.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            update = partial(optimizer.update, **extra_args)
            if looks:
                _warn_of_dtypes(update, (view.grads, *before), (grads, state, masters))
                warn_of_squares(update, grads, view.state, masters)
            lacks = noting(_LACKS, TypeError, about="required keyword-only argument")
            with lacks, _naming_a_state_of_another(optimizer, view):
                updates, new_state = update(grads, state, masters)
            updates = jtu.tree_map(lambda u, p: None if p is None else u, updates, floating)
            updates = jtu.tree_map(_unless_fixed, floating, updates, is_leaf=is_fixed)
            old = model, optimizer_state
            noise = None if master == "nearest" else Noise.of(key, inner)
            return _like(applied(old, updates, view.restore(new_state), noise), old)

    if searches:
        if tensorfloat32_by_default():
            warn_of_tensorfloat32("a line search and the products of its optimizer")
        # A line search evaluates the loss: on a skipped step it must not run at all.
        arrays, static = eqx.partition((model, optimizer_state), eqx.is_array)

        def taken():
            return eqx.filter(step(view.grads, extra_args), eqx.is_array)

        return eqx.combine(lax.cond(finite, taken, lambda: arrays), static)

    # A selection, not a branch: a branch on the device waits for the host, and keeps XLA from
    # fusing and from updating donated arrays in place. Ones stand in for the gradients: clipping
    # would divide by the norm of zeros.

    def safe(x):
        return jnp.where(finite, x, jnp.ones_like(x)) if eqx.is_inexact_array(x) else x

    new = step(*jtu.tree_map(safe, (view.grads, extra_args)))
    with _naming_a_state_of_another(optimizer, view):
        return select_tree(finite, new, (model, optimizer_state))
