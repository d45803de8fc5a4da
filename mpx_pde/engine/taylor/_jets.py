"""Values with their derivatives."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._util._varying import match_varying_axes
from ...program._jaxpr import own_bind
from ._plan import Index
from ._together import spread_together, sum_together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Jet:
    """A value that depends on the point, and its streams. A missing stream is zero."""

    primal: Any
    streams: dict[Index, Any] = dataclasses.field(default_factory=dict)

    def map(self, function: Callable[[Any, Index], Any]) -> "Jet":
        """Applies a function to each stream and its key, and to the value and `()`."""
        streams = {key: function(x, key) for key, x in self.streams.items()}
        return Jet(function(self.primal, ()), streams)

    def only(self, keys: Collection[Index]) -> "Jet":
        """Returns the value with only the streams at these keys."""
        return Jet(self.primal, {k: s for k, s in self.streams.items() if k in keys})

    def spread(self, shape: Sequence[Any], dims: Sequence[int]) -> "Jet":
        """Broadcasts the value and its streams to a shape, as in `lax.broadcast_in_dim`."""

        return each([self], lambda arrays: spread_together(arrays, shape, dims))[0]


def each(jets: Sequence[Jet], function: Callable[[list], list]) -> list[Jet]:
    """Applies a function to all arrays of some jets together, and returns the new jets."""
    found = iter(function([array for x in jets for array in (x.primal, *x.streams.values())]))
    return [Jet(next(found), {k: next(found) for k in x.streams}) for x in jets]


Streams = dict[Index, Any]

Operand = Any
"""A [`Jet`][], or an array that does not depend on the point."""


def summed(jets: Sequence[Jet], axes: Sequence[int]) -> list[Jet]:
    """Returns the sums of values of one shape over the same axes, in one pass over all values."""
    behind = [i - np.ndim(jets[0].primal) for i in axes]
    return each(jets, lambda arrays: sum_together(arrays, behind))


def added(x: Jet, y: Jet, factor: int | float) -> Jet:
    """Returns `x + factor * y`, where `y` has no streams that `x` does not have."""
    plus = lambda a, b: a - b if factor == -1 else a + factor * b
    streams = {k: plus(s, y.streams[k]) if k in y.streams else s for k, s in x.streams.items()}
    return Jet(plus(x.primal, y.primal), streams)


def spread(x: Operand, shape: tuple[Any, ...]) -> Operand:
    """Returns a value, broadcast to a shape if it depends on the point."""
    if not isinstance(x, Jet) or np.shape(x.primal) == shape:
        return x
    return x.spread(shape, range(len(shape) - np.ndim(x.primal), len(shape)))


def cast(x: Any, dtype: Any) -> Any:
    """Casts an array. A NumPy array stays one."""
    return x if x.dtype == dtype else x.astype(dtype)


def total(terms: Iterable[Any]) -> Any:
    """Returns the sum of the terms that are not `None`; `None` if there are none."""
    first, *rest = [x for x in terms if x is not None] or [None]
    return sum(rest, first)


def is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_traced(x: Any) -> bool:
    """Returns whether a leaf is an array that is not known while tracing."""
    return isinstance(x, jax.Array)


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list:
    """Binds an equation to streams in place of values.

    Inside `shard_map`, the seeds are the same on all devices, but the point is not.
    """
    return own_bind(eqn, match_varying_axes(*args))


def primal_of(x: Operand) -> Any:
    """Returns a value without its streams."""
    return x.primal if isinstance(x, Jet) else x


def bind_primals(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    """Binds an equation to the values of its operands."""
    return bind(eqn, list(map(primal_of, operands)))
