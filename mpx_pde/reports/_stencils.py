"""Recognizes sums of moved copies of an array, and known matrices that take differences."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, SupportsInt

import jax.numpy as jnp
import numpy as np

from ..program._flat import Constant, Step
from ..program._jaxpr import aval_of
from ._known import LARGEST, Known


class Stencil(NamedTuple):
    """A sum of moved copies of an array, `root`, by their offsets along its axes. `shape` is the
    shape of the root, in the order of these axes."""

    root: int
    shape: tuple[int, ...]
    terms: Mapping[tuple[int, ...], float]

    @property
    def is_second_difference(self) -> bool:
        """Returns whether constants and linear functions vanish in it, and not all functions do."""
        return _is_second_difference(self.terms)

    @property
    def nodes(self) -> int:
        """Returns the number of nodes along the longest axis that it moves along."""
        moved = (n for n, *k in zip(self.shape, *self.terms, strict=True) if len({*k}) > 1)
        return max(moved, default=0)


def _is_second_difference(terms: Mapping[tuple[int, ...], float]) -> bool:
    weights = np.asarray(list(terms.values()))
    offsets = np.asarray(list(terms.keys()), np.float64)
    least = 1e-3 * float(np.sum(np.abs(weights)))
    if len(weights) < 3 or least == 0:
        return False
    moments = [np.sum(weights), *(weights @ offsets)]
    return bool(np.all(np.abs(moments) < least))


def stencil_of(
    step: Step, stencils: Mapping[int, Stencil], known: Sequence[Known | None]
) -> Stencil | None:
    """Returns the result of an equation as a stencil, or `None` if it is none. `known` are the
    operands that are known while tracing."""
    if step.name not in _RULES or len(step.outputs) != 1:
        return None
    shape = aval_of(step.eqn.outvars[0]).shape
    if not all(isinstance(n, int) for n in shape):
        return None
    operands = [_of(x, v, stencils) for x, v in zip(step.inputs, step.eqn.invars, strict=True)]
    return _RULES[step.name](step, operands, known)


def _of(x: Any, atom: Any, stencils: Mapping[int, Stencil]) -> Stencil | None:
    """Returns an operand as a stencil: itself, if nothing else is known of it."""
    shape, dtype = aval_of(atom).shape, aval_of(atom).dtype
    if isinstance(x, Constant) or not shape or not jnp.issubdtype(dtype, jnp.floating):
        return None
    if not all(isinstance(n, int) for n in shape):
        return None
    return stencils.get(x) or Stencil(x, shape, {(0,) * len(shape): 1.0})


# --- Rules -------------------------------------------------------------------------------------

_Operands = Sequence[Stencil | None]
_Values = Sequence[Known | None]


def _moved(stencil: Stencil | None, by: Sequence[SupportsInt]) -> Stencil | None:
    """Returns a stencil moved along each axis. Parameters of equations may be NumPy's integers."""
    if stencil is None:
        return None
    moved = {
        tuple(i + int(n) for i, n in zip(k, by, strict=True)): w for k, w in stencil.terms.items()
    }
    return stencil._replace(terms=moved)


def _placed(stencil: Stencil | None, axes: Sequence[int | None]) -> Stencil | None:
    """Returns a stencil with its axes in another order. A new axis, of one entry, is `None`."""
    if stencil is None:
        return None
    take = lambda xs, new: tuple(new if i is None else xs[i] for i in axes)
    terms = {take(k, 0): w for k, w in stencil.terms.items()}
    return Stencil(stencil.root, take(stencil.shape, 1), terms)


def _sliced(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    strides = step.eqn.params["strides"]
    plain = strides is None or all(n == 1 for n in strides)
    return _moved(operands[0], step.eqn.params["start_indices"]) if plain else None


def _sliced_at(_: Step, operands: _Operands, known: _Values) -> Stencil | None:
    starts = [x() for x in known[1:] if x is not None]
    return _moved(operands[0], starts) if len(starts) == len(known) - 1 else None


def _gathered(step: Step, operands: _Operands, known: _Values) -> Stencil | None:
    """Returns a gather of consecutive entries along one axis as a move."""
    stencil, numbers = operands[0], step.eqn.params["dimension_numbers"]
    axes = numbers.start_index_map
    if stencil is None or known[1] is None or len(axes) != 1:
        return None
    shape, sizes = aval_of(step.eqn.invars[0]).shape, step.eqn.params["slice_sizes"]
    out = aval_of(step.eqn.outvars[0]).shape
    whole = [n for i, n in enumerate(shape) if i != axes[0]]
    whole.insert(axes[0], 1)
    in_order = [i for i in range(len(shape)) if i not in numbers.offset_dims] == [*axes]
    if numbers.operand_batching_dims or tuple(sizes) != tuple(whole) or len(out) != len(shape):
        return None
    if not in_order:
        return None
    indices = known[1]().reshape(-1)
    if len(indices) < 2 or np.any(np.diff(indices) != 1):
        return None
    by = [0] * len(shape)
    by[axes[0]] = int(indices[0])
    return _moved(stencil, by)


def _padded(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    config = step.eqn.params["padding_config"]
    plain = all(inner == 0 for *_, inner in config)
    return _moved(operands[0], tuple(-low for low, *_ in config)) if plain else None


def _joined(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    """Returns the largest part of a concatenation, as that of a periodic shift."""
    axis = step.eqn.params["dimension"]
    sizes = [aval_of(v).shape[axis] for v in step.eqn.invars]
    i = int(np.argmax(sizes))
    by = [0] * len(aval_of(step.eqn.outvars[0]).shape)
    by[axis] = -sum(sizes[:i])
    return _moved(operands[i], by)


def _broadcast(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    """Returns a stencil with new axes of one entry."""
    given = aval_of(step.eqn.invars[0]).shape
    places = list(step.eqn.params["broadcast_dimensions"])
    out = aval_of(step.eqn.outvars[0]).shape
    if math.prod(out) != math.prod(given) or len(operands) != 1:
        return None
    return _placed(operands[0], [places.index(i) if i in places else None for i in range(len(out))])


def _squeezed(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    ndim = len(aval_of(step.eqn.invars[0]).shape)
    gone = {i % ndim for i in step.eqn.params["dimensions"]}
    return _placed(operands[0], [i for i in range(ndim) if i not in gone])


def _transposed(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    return _placed(operands[0], step.eqn.params["permutation"])


def _reshaped(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    """Returns a stencil whose reshape only adds or removes axes of one entry."""
    given, out = (aval_of(v).shape for v in (step.eqn.invars[0], step.eqn.outvars[0]))
    long = [i for i, n in enumerate(given) if n != 1]
    if [given[i] for i in long] != [n for n in out if n != 1] or len(operands) != 1:
        return None
    left = iter(long)
    return _placed(operands[0], [None if n == 1 else next(left) for n in out])


def _scaled(step: Step, operands: _Operands, known: _Values) -> Stencil | None:
    """Returns a stencil times a number. One that is not known may be any step size."""
    for stencil, other, atom in zip(operands, known[::-1], step.eqn.invars[::-1], strict=True):
        if stencil is not None and aval_of(atom).shape == ():
            if other is None:
                return None
            number = float(other())
            return _weighted(stencil, 1 / number if step.name == "div" and number else number)
    return None


def _weighted(stencil: Stencil, number: float) -> Stencil:
    return stencil._replace(terms={k: number * w for k, w in stencil.terms.items()})


def _added(step: Step, operands: _Operands, _: _Values) -> Stencil | None:
    x, y = operands
    if x is None or y is None or (x.root, x.shape) != (y.root, y.shape):
        return None
    y = _weighted(y, -1.0) if step.name == "sub" else y
    return x._replace(terms=_sum_of([x.terms, y.terms]))


def _sum_of(parts: Sequence[Mapping[tuple[int, ...], float]]) -> dict[tuple[int, ...], float]:
    """Returns the sum of the terms, without those that vanish."""
    terms = dict[tuple[int, ...], float]()
    for k, w in (item for part in parts for item in part.items()):
        terms[k] = terms.get(k, 0.0) + w
    return {k: w for k, w in terms.items() if not math.isclose(w, 0, abs_tol=1e-9)}


def _same(_: Step, operands: _Operands, __: _Values) -> Stencil | None:
    return operands[0]


def _negative(_: Step, operands: _Operands, __: _Values) -> Stencil | None:
    return None if operands[0] is None else _weighted(operands[0], -1.0)


def _convolved(step: Step, operands: _Operands, known: _Values) -> Stencil | None:
    """Returns a convolution with a known kernel as a sum of moved copies: of one channel, or as
    second differences of each channel."""
    stencil, kernel, params = operands[0], known[1], step.eqn.params
    steps = *params["window_strides"], *params["lhs_dilation"], params["batch_group_count"]
    if stencil is None or kernel is None or any(n != 1 for n in steps):
        return None
    if math.prod(aval_of(step.eqn.invars[1]).shape) > LARGEST:
        return None
    numbers = params["dimension_numbers"]
    values = np.asarray(kernel(), np.float64).transpose(numbers.rhs_spec)
    terms = _of_channels(values, params["rhs_dilation"], [low for low, _ in params["padding"]])
    if terms is None:
        return None

    def moved(offsets):
        by = dict(zip(numbers.lhs_spec[2:], offsets, strict=True))
        return _moved(stencil, [by.get(axis, 0) for axis in range(len(stencil.shape))])

    parts = [_weighted(x, w).terms for k, w in terms.items() if (x := moved(k)) is not None]
    # The axes of the result are in another order.
    source = dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))
    found = stencil._replace(terms=_sum_of(parts))
    return _placed(found, [source[axis] for axis in range(len(stencil.shape))])


def _of_channels(
    kernel: np.ndarray, dilation: Sequence[int], low: Sequence[int]
) -> dict[tuple[int, ...], float] | None:
    """Returns the terms of a kernel of one channel, or those of an output channel that takes second
    differences of each input channel that it reads."""
    outputs, inputs, *_ = kernel.shape
    for channel in kernel:
        each = [_kernel_terms(x, dilation, low) for x in channel if np.any(x)]
        if each and all(map(_is_second_difference, each)):
            return each[0]
    return _kernel_terms(kernel[0, 0], dilation, low) if outputs == inputs == 1 else None


def _kernel_terms(
    kernel: np.ndarray, dilation: Sequence[int], low: Sequence[int]
) -> dict[tuple[int, ...], float]:
    places = product(*map(range, kernel.shape))
    at = lambda place: tuple(i * n - b for i, n, b in zip(place, dilation, low, strict=True))
    return {at(place): float(kernel[place]) for place in places if kernel[place] != 0}


_RULES: dict[str, Callable[[Step, _Operands, _Values], Stencil | None]] = {
    "slice": _sliced,
    "dynamic_slice": _sliced_at,
    "gather": _gathered,
    "pad": _padded,
    "concatenate": _joined,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "transpose": _transposed,
    "reshape": _reshaped,
    "convert_element_type": _same,
    "copy": _same,
    "neg": _negative,
    "mul": _scaled,
    "div": _scaled,
    **dict.fromkeys(("add", "sub"), _added),
    **dict.fromkeys(("conv_general_dilated", "mixed_conv_general_dilated"), _convolved),
}
"""Operations that move, scale or add an array. A number that is not known ends a stencil: nothing
is told of what follows."""


# --- Matrices ----------------------------------------------------------------------------------


def magnified_by_matrix(step: Step, known: _Values) -> tuple[int, float]:
    """Returns the number of columns of the known matrix that an equation multiplies by, and by how
    much the matrix magnifies rounding: relative to second differences by three points, which
    magnify by the square of the number of nodes.

    It is measured: the sizes of the entries of a row, relative to the row times smooth functions.
    Most rows have to do so if they have few entries, because those at the ends of a grid do not
    cancel. Other matrices count as a whole: a Fourier transform has rows that cancel, and does not
    magnify.
    """
    contracted, batch = step.eqn.params["dimension_numbers"]
    for i, (value, other) in enumerate(zip(known[:2], known[1::-1], strict=True)):
        axes, shape = contracted[i], aval_of(step.eqn.invars[i]).shape
        if value is None or other is not None or len(axes) != 1 or batch[i]:
            continue
        if len(shape) == 2 and math.prod(shape) <= LARGEST:
            matrix = np.moveaxis(np.asarray(value()), axes[0], 1)
            return matrix.shape[1], magnification(matrix)
    return 0, 0.0


def magnification(matrix: np.ndarray) -> float:
    """Returns by how much a matrix magnifies rounding: about n² for second differences of n nodes,
    and n or less for what is no difference."""
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        return 0.0
    matrix = matrix.astype(np.float64)
    size, entries = np.sum(np.abs(matrix), axis=1), np.count_nonzero(matrix, axis=1)
    if not np.all(np.isfinite(size)) or not np.any(size):
        return 0.0
    t = (np.arange(matrix.shape[1]) + 0.5) / matrix.shape[1]
    smooth = np.sin(np.pi * t) ** 2
    left = np.max(np.abs(matrix @ np.stack([smooth, smooth * (2 * t - 1)], axis=1)), axis=1)
    if np.median(entries[size > 0]) <= matrix.shape[1] / 4:
        alike = (entries > 2) & (left > 0)
        ratio = np.where(alike, size / np.where(alike, left, 1), 0)[size > 0]
        return _OF_THREE_POINTS * float(np.quantile(ratio, 1 - _MOST))
    return _OF_THREE_POINTS * float(np.linalg.norm(size) / max(np.linalg.norm(left), 1e-300))


_MOST = 0.6
"""The share of the rows that takes differences."""

_OF_THREE_POINTS = 4.0
"""The square of the number of nodes, over this ratio for second differences by three points."""
