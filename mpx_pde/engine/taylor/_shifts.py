"""Finds exponentials that are only divided by each other, as in a softmax.

A softmax asks for shares exp(y) / Σ exp(y), which no common shift of all y changes. Where one share
is nearly 1, the derivatives of all shares are nearly 0. The rule of a quotient takes them from
powers of the derivatives of the largest y, and no digit is left. So the streams of the largest y
are subtracted from those of all y first. The logarithm of Σ exp(y) changes by the shift, so it gets
them back.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from ...program import _tables as tables
from ...program._deviations import Axes, axes_after, summed
from ...program._flat import Constant, Flat, Step, dependent, flatten, renamed, variables
from ...program._jaxpr import aval_of


shift_p = Primitive("shift_to_largest")
"""Zeros with the derivatives of the largest entries of an array over axes."""


@shift_p.def_abstract_eval
def _(x, *, axes):
    return jax.make_jaxpr(lambda x: lax.reduce_max(x, axes))(x).out_avals[0]


class _Grown(NamedTuple):
    """A value that is homogeneous in exponentials, such as their sum: its degree, and the axes of
    the exponentials that its axes stand for."""

    degree: float
    axes: Axes


class _Use(NamedTuple):
    """The use of exponentials in a program: the axes that they are summed over, and the results
    that are logarithms, with their operands."""

    over: tuple[int, ...]
    logarithms: dict[int, _Grown]


def with_shifts(flat: Flat, moving: Collection[int]) -> Flat:
    """Returns a program that computes the same values. The exponents of exponentials that depend on
    `moving` variables have derivatives relative to those of the largest, if no other derivative
    changes by this."""
    depends, made = dependent(flat, moving), flat.made
    uses: dict[int, _Use] = {}
    for step in flat.steps:
        if step.name in tables.EXPONENTIALS and depends.issuperset(step.outputs):
            real = jnp.issubdtype(aval_of(step.eqn.outvars[0]).dtype, jnp.floating)
            use = _use_of(step, flat, made) if real else None
            uses.update({} if use is None else {step.outputs[0]: use})
    if not uses:
        return flat

    numbers = itertools.count(1 + max(x for step in flat.steps for x in step.outputs))
    later: dict[int, list[tuple[Callable, int, Any]]] = {}
    steps: list[Step] = []
    for step in flat.steps:
        out = step.outputs[0] if step.outputs else -1
        if out in uses:
            over, logarithms = uses[out]
            avals = [aval_of(step.eqn.invars[0])]
            more, (y, shift) = _traced(_relative(over), step, step.variables, avals, numbers)
            steps += [*more, dataclasses.replace(step, inputs=(y,))]
            aval = aval_of(more[0].eqn.outvars[0])
            for x, of in logarithms.items():
                later.setdefault(x, []).append((_plus(of, over), shift, aval))
        else:
            steps.append(step)
        for function, shift, aval in later.get(out, ()):
            before, avals = next(numbers), [aval_of(step.eqn.outvars[0]), aval]
            more, _ = _traced(function, step, (before, shift), avals, numbers)
            steps[-1] = dataclasses.replace(steps[-1], outputs=(before,))
            more[-1] = dataclasses.replace(more[-1], outputs=step.outputs)
            steps += more
    return flat._replace(steps=tuple(steps))


def _relative(axes: tuple[int, ...]) -> Callable:
    def function(y):
        shift = shift_p.bind(y, axes=axes)
        return y - lax.expand_dims(shift, axes), shift

    return function


def _plus(of: _Grown, over: tuple[int, ...]) -> Callable:
    """Returns the function that adds a shift of exponents to the logarithm of a value."""
    # Axes of length 1 may be missing.
    there = sorted({i for i in of.axes if i is not None and i not in over})
    at = [of.axes.index(i) for i in there]

    def function(y, shift):
        shift = lax.reshape(shift, [y.shape[k] for k in at])
        shift = lax.broadcast_in_dim(shift, y.shape, at).astype(y.dtype)
        return y + (shift if of.degree == 1 else of.degree * shift)

    return function


def _traced(
    function: Callable,
    like: Step,
    operands: Sequence[int],
    avals: Sequence[Any],
    numbers: Iterator[int],
) -> tuple[list[Step], tuple[Any, ...]]:
    """Returns the equations of a function of variables, at the place of the step `like` in a
    program, and the variables that it returns."""
    with like.context():
        closed = jax.make_jaxpr(function)(*avals)
    flat = flatten(closed, forward_mode=True, numbers=numbers)
    same = dict(zip(flat.inputs, operands, strict=True))
    steps = [
        dataclasses.replace(step, inputs=renamed(step.inputs, same), calls=like.calls)
        for step in flat.steps
    ]
    return steps, renamed(flat.outputs, same)


def _use_of(exponential: Step, flat: Flat, made: Mapping[int, Step]) -> _Use | None:
    """Returns what a program makes of exponentials; `None` if a shift of their exponents would
    change a derivative in another way than that of a logarithm.

    It follows what is homogeneous: exp(y + c) = exp(c) exp(y), the degree of a product is the sum
    of those of its factors, and a quotient of two values of one degree does not depend on c.
    """
    shape = aval_of(exponential.eqn.outvars[0]).shape
    grown = {exponential.outputs[0]: _Grown(1.0, range(len(shape)))}
    over, logarithms = set[int](), dict[int, _Grown]()
    together: list[list[Axes]] = []
    for step in flat.steps:
        given = [grown[x] for x in step.variables if x in grown]
        if not given or step.name in tables.CONSTANT:
            continue
        if len(step.outputs) != 1:
            return None
        (out,), (first, *_) = step.outputs, given
        if step.name in tables.NATURAL:
            logarithms[out] = first
            together.append([first.axes])
        elif (where := summed(step)) is not None:
            over.update(k for i in where[1] if (k := first.axes[i]) is not None)
            left = [k for i, k in enumerate(first.axes) if i not in where[1]]
            grown[out] = _Grown(first.degree, left)
        elif (axes := axes_after(step, first.axes)) is not None:
            grown[out] = _Grown(first.degree, axes)
        else:
            degree = _degree_after(step, grown, made)
            if degree is None:
                return None
            found = _axes_in_result(step, grown)
            together.append(found)
            if degree:
                one_of = lambda those: next((k for k in those if k is not None), None)
                grown[out] = _Grown(degree, list(map(one_of, zip(*found, strict=True))))
    rest = [i for i, size in enumerate(shape) if i not in over and size != 1]
    place = lambda axes, i: axes.index(i) if i in axes else None
    for group, i in itertools.product(together, rest):
        places = {place(axes, i) for axes in group}
        if len(places) > 1 or None in places:
            return None
    kept = not grown.keys().isdisjoint(variables(flat.outputs))
    return _Use(tuple(sorted(over)), logarithms) if over and not kept else None


def _degree_after(
    step: Step, grown: Mapping[int, _Grown], made: Mapping[int, Step]
) -> float | None:
    """Returns the degree of the result of a step; `None` if it is not homogeneous."""
    of = {x: grown[x].degree for x in step.variables if x in grown}
    degrees = [0.0 if isinstance(x, Constant) else of.get(x, 0.0) for x in step.inputs]
    if step.name not in tables.SELECTS:
        return None if step.name in tables.PRODUCTS else step.exponent(degrees)
    cases = {d for d, x in zip(degrees[1:], step.inputs[1:], strict=True) if not _is_zero(x, made)}
    return cases.pop() if len(cases) == 1 else None


def _is_zero(x: int | Constant, made: Mapping[int, Step]) -> bool:
    while not isinstance(x, Constant):
        if x not in made or made[x].name not in tables.SAME or len(made[x].inputs) != 1:
            return False
        (x,) = made[x].inputs
    return bool(x.number == 0)


def _axes_in_result(step: Step, grown: Mapping[int, _Grown]) -> list[Axes]:
    """Returns what the axes of the result of a step stand for in each homogeneous operand."""
    shape = aval_of(step.eqn.outvars[0]).shape
    found: list[Axes] = []
    for x, v in zip(step.inputs, step.eqn.invars, strict=True):
        if not isinstance(x, Constant) and x in grown:
            # A number, or an axis of length 1, may stand beside an array.
            own = aval_of(v).shape or (None,) * len(shape)
            axes = grown[x].axes or own
            pairs = zip(axes, own, shape, strict=True)
            found.append([k if n == size else None for k, n, size in pairs])
    return found
