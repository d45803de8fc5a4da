"""Master weights in half precision, with updates that count even below half a rounding step.

Rounded to the nearest, a bfloat16 parameter forgets every update below 2^-9 of it, and training
stalls. Zamirai et al., *Revisiting BFloat16 Training* (arXiv 2010.06192), propose two remedies,
which are implemented here. Stochastic rounding is right on average. Kahan's summation carries what
rounding took off. With either, half-precision arrays of the optimizer state are rounded at random.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from .._util._calls import called
from .._util._types import PyTree
from .._util._varying import varying_axes
from ..precision._cast import is_inexact, rounded_to, widen
from ..precision._dtypes import check_choice, is_half
from ..precision._tree import check_key, first_difference


MASTERS = ("nearest", "stochastic", "kahan")


class Compensated(eqx.Module):
    """An optimizer state, together with the rounding errors of the parameters so far.

    **Attributes:**

    - `state`: the state of the optimizer.
    - `residue`: an array of the same shape and dtype for each half-precision parameter, and `None`
        for the others.
    """

    state: PyTree
    residue: PyTree


def _is_narrow(x: Any) -> bool:
    return eqx.is_inexact_array(x) and is_half(x.dtype)


def parse_master(master: Any, model: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the optimizer state, with residues if `master` needs them, and the state of the
    optimizer alone. Raises a `ValueError` in the name of the called function if `master` does not
    fit the model or the state.
    """
    check_choice(master, MASTERS, "master")
    if master != "nearest" and not any(_is_narrow(x) for x in jtu.tree_leaves(model)):
        raise ValueError(
            f"`{called()}` with `master={master!r}` needs half-precision parameters, but `model` "
            "has none. Cast it by `mpx_pde.cast_tree(model, 'bfloat16')` before training, or leave "
            "`master` out."
        )
    if master == "kahan":
        state = compensated(state, model)
        wanted = eqx.filter_eval_shape(compensated, None, model).residue
        difference = first_difference(wanted, state.residue)
        if difference is not None:
            raise ValueError(
                f"`{called()}` got an `optimizer_state` with the residues of another model: "
                f"{difference}. Pass what the step before returned, or begin anew by "
                "`mpx_pde.compensated(optimizer_state.state, model)`."
            )
        return state, state.state
    if isinstance(state, Compensated):
        raise ValueError(
            f"`{called()}` got an `optimizer_state` with residues, which `master={master!r}` would "
            "forget. Pass `master='kahan'`, or the state inside: `optimizer_state.state`."
        )
    return state, state


def compensated(optimizer_state: PyTree, model: PyTree) -> Compensated:
    """Returns the optimizer state that [`mpx_pde.optimizer_update`][] with `master="kahan"`
    carries.

    That function adds the residues itself to a state without them, at the cost of a second
    compilation. It cannot do so inside of `lax.scan`, whose carry keeps its structure: there, start
    with this.

    **Arguments:**

    - `optimizer_state`: the state that `optimizer.init` made.
    - `model`: the model with its half-precision parameters.

    **Returns:**

    A PyTree with the state and, for each half-precision parameter, a residue of zeros of its shape
    and dtype. A state that has residues already is returned unchanged.
    """
    if isinstance(optimizer_state, Compensated):
        return optimizer_state
    residue = jtu.tree_map(jnp.zeros_like, eqx.filter(model, _is_narrow))
    return Compensated(optimizer_state, residue)


def round_stochastically(
    x: Float32[Array, "*shape"], dtype: Any, key: PRNGKeyArray
) -> Float[Array, "*shape"]:
    """Rounds to one of the two neighbors in a half type, at random: up with a probability equal to
    the fraction of the way to the upper one.

    The mean over keys is `x` itself, for float16's subnormal numbers too. Values beyond the largest
    number of the type are rounded to the nearest.

    **Arguments:**

    - `x`: float32.
    - `dtype`: float16 or bfloat16.
    - `key`: a `jax.random.key`.

    **Returns:**

    An array of `dtype`.
    """
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(x)
    step = jnp.maximum(exponent - 1, info.minexp) - info.nmant
    # Take as many random bits as the fraction has, so that x / 2^step + u fits into float32's bits.
    bits = 23 - info.nmant
    drawn = jax.random.bits(key, x.shape, jnp.uint16) >> (16 - bits)
    u = jnp.ldexp(drawn.astype(jnp.float32), -bits)
    # Scale by two factors: 2^-step alone overflows for bfloat16's subnormal numbers.
    fraction = jnp.ldexp(jnp.ldexp(x, -step // 2), -step - (-step // 2))
    rounded = jnp.ldexp(jnp.floor(fraction + u), step)
    largest = jnp.asarray(info.max, jnp.float32)
    inside = jnp.abs(x) <= largest
    return jnp.where(inside, jnp.clip(rounded, -largest, largest), x).astype(dtype)


def _overflows(new: Float32[Array, "*shape"], dtype: Any) -> Bool[Array, "*shape"]:
    """Returns where finite numbers are rounded to infinities in a half type."""
    info = jnp.finfo(dtype)
    most = float(info.max) + 2.0 ** int(info.maxexp - info.nmant - 2)  # halfway to the next number
    # Not by a cast and `isinf`: XLA may leave out the cast.
    return jnp.isfinite(new) & (jnp.abs(new) >= most)


@dataclass(frozen=True)
class Noise:
    """The random numbers of one step.

    Inside `jax.shard_map`, copies of an array must be rounded alike, and the parts of a split array
    independently.

    **Attributes:**

    - `key`: the key of the step, the same on all devices.
    - `by_bits`: whether each array adds its own bits to the key, for a key that varies little.
    """

    key: PRNGKeyArray
    by_bits: bool

    @classmethod
    def of(cls, key: PRNGKeyArray | None, state: PyTree) -> "Noise":
        """Takes the caller's key, or makes one from the step counts of the optimizer. Only these
        differ after a step that moved nothing."""
        if key is not None:
            check_key(key)
            return cls(key, by_bits=False)

        def is_count(x):
            return eqx.is_array(x) and x.size == 1 and jnp.issubdtype(x.dtype, jnp.integer)

        counts = [x.astype(jnp.uint32).reshape(()) for x in jtu.tree_leaves(state) if is_count(x)]
        total = sum(((2 * i + 1) * x for i, x in enumerate(counts)), start=jnp.uint32(0))
        return cls(jax.random.fold_in(jax.random.key(0), total), by_bits=True)

    def rounded(
        self, x: Float32[Array, "*shape"], dtype: Any, key: PRNGKeyArray
    ) -> Float[Array, "*shape"]:
        """Rounds an array at random, by a key derived from `key`."""
        for axis in sorted(varying_axes(x)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        if self.by_bits:
            # The sum of integers is the same however an array is split over devices.
            words = lax.bitcast_convert_type(x, jnp.uint32)
            key = jax.random.fold_in(key, jnp.sum(words, dtype=jnp.uint32))
        return round_stochastically(x, dtype, key)


def applied(
    old: tuple[PyTree, PyTree], updates: PyTree, state: PyTree, noise: Noise | None
) -> tuple[PyTree, PyTree]:
    """Applies updates to the model. Returns model and optimizer state after the step.

    An entry of a half-precision parameter that an update would make infinite stays as it is.

    **Arguments:**

    - `old`: model and optimizer state before the step. If the state has residues, updates are added
        by Kahan's summation.
    - `updates`: the updates of the parameters, in float32.
    - `state`: the state of the optimizer after the step.
    - `noise`: random numbers for stochastic rounding; `None` to round to the nearest.
    """
    model, before = old
    if isinstance(before, Compensated):
        assert noise is not None
        model, residue = _add_compensated(model, updates, before.residue)
        # Moving averages have no residue, and would stand still if rounded to the nearest.
        return model, Compensated(_rounded_tree(state, before.state, noise), residue)

    def stays(x, p):
        return jnp.where(_overflows(x, p.dtype), widen(p), x) if _is_narrow(p) else x

    new = jtu.tree_map(stays, eqx.apply_updates(widen(model), updates), model), state
    return new if noise is None else _rounded_tree(new, old, noise)


def _rounded_tree(tree: PyTree, like: PyTree, noise: Noise) -> PyTree:
    """Rounds each leaf of `tree` that is half precision in `like` to that half type, at random."""
    structure = jtu.tree_structure(tree)
    keys = structure.unflatten(jax.random.split(noise.key, structure.num_leaves))

    def leaf(x, y, key):
        random = _is_narrow(y) and is_inexact(x)
        return noise.rounded(widen(jnp.asarray(x)), y.dtype, key) if random else x

    return jtu.tree_map(leaf, tree, like, keys)


def _add_compensated(model: PyTree, updates: PyTree, residue: PyTree) -> tuple[PyTree, PyTree]:
    """Adds an update to each half-precision parameter by Kahan's summation, and to others by a
    plain sum. Returns `(model, residue)`."""

    leaves, structure = jtu.tree_flatten(model)
    updates, residue = map(structure.flatten_up_to, (updates, residue))
    pairs = [
        (p, r) if u is None else (p + u, None) if r is None else _carried(p, u, r)
        for p, u, r in zip(leaves, updates, residue, strict=True)
    ]
    model, residue = map(structure.unflatten, zip(*pairs, strict=True))
    return model, residue


def _carried(p: Array, update: Array, residue: Array) -> tuple[Array, Array]:
    old = p.astype(jnp.float32)
    due = update.astype(jnp.float32) + residue.astype(jnp.float32)
    # Not two casts: of a sum that is not rounded there is no residue.
    new = rounded_to(old + due, p.dtype)
    rest = due - (new - old)
    # An infinity has no remainder.
    rest = jnp.where(jnp.isfinite(rest), rest, 0.0).astype(p.dtype)
    stays = _overflows(old + due, p.dtype)
    return jnp.where(stays, p, new.astype(p.dtype)), jnp.where(stays, residue, rest)
