"""A value together with its derivatives, and how they are stored."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from .._order import rounded_cotangent
from .._varying import match_varying_axes
from ..interpret._jaxpr import aval_of, bodies_of, own_bind, scopes_of
from ._plan import Index
from ._together import any_together, spread_together


DATA, RAW, FIRST, DEEP, WILD = range(5)
"""How far a value is from the point: no product yet (`RAW`), linear in the result of the first one
(`FIRST`), beyond (`DEEP`). Coordinates and the first product are never rounded to half: errors made
there are magnified by every order of differentiation.

Where values have no streams, what is computed of data alone is `DATA`, or `RAW` where it is to stay
in full; all that meets the model is `DEEP`, but for what may be of any size, such as derivatives
(`WILD`): that has no scale, and is never rounded to half."""


WITH_STREAMS = "mpx_pde.with_streams"
"""The scope of derivatives whose forward pass is in full. They say themselves what is kept of them
in half, with scales of their own. The loss around them, which knows no streams, leaves them as they
are."""


def has_streams(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is one of derivatives whose forward pass is in full."""
    return WITH_STREAMS in scopes_of(eqn)


def takes_derivatives(eqn: JaxprEqn) -> bool:
    """Returns whether results of an equation, or of one inside of it, are derivatives."""
    inside = (inner for body in bodies_of(eqn) for inner in body.jaxpr.eqns)
    tapped = eqn.primitive.name == "derivative_tap"
    return tapped or has_streams(eqn) or any(map(takes_derivatives, inside))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Jet:
    """A value that depends on the point, and its streams; one that is missing is zero. The value
    is `None` where it enters a layer that has no use of it.

    Arrays in half are *stored*: multiplied by the scale of their stream. All others are not. The
    `stage` is set by what evaluates a program, not by rules.
    """

    primal: Any
    streams: dict[Index, Any] = dataclasses.field(default_factory=dict)
    stage: int = eqx.field(static=True, default=DEEP)

    def map(self, function: Callable[[Any, Index], Any]) -> "Jet":
        """The jet of what a function makes of each stream by its key, and of the value by `()`."""
        streams = {key: function(x, key) for key, x in self.streams.items()}
        return Jet(function(self.primal, ()), streams, self.stage)

    def only(self, keys: Collection[Index]) -> "Jet":
        """The value with those of its streams."""
        return Jet(self.primal, {k: s for k, s in self.streams.items() if k in keys}, self.stage)

    def spread(self, shape: Sequence[Any], dims: Sequence[int]) -> "Jet":
        """The jet as that of an array of a shape, as in `lax.broadcast_in_dim`."""

        return each([self], lambda arrays: spread_together(arrays, shape, dims))[0]


def each(jets: Sequence[Jet], function: Callable[[list], list]) -> list[Jet]:
    """Returns the jets of what a function makes of all arrays of some jets together."""
    found = iter(function([array for x in jets for array in (x.primal, *x.streams.values())]))
    return [Jet(next(found), {k: next(found) for k in x.streams}, x.stage) for x in jets]


Streams = dict[Index, Any]

Operand = Any
"""A [`Jet`][], or an array that does not depend on the point."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Storage:
    """How streams are computed, and how they are kept between layers.

    **Attributes:**

    - `registers`: the dtype that everything but products is computed in; what the program has in
        float64 stays float64.
    - `dtype`: what streams are kept in between layers; `None` keeps them as they were computed.
    - `scales`: by stream, the power of two that it is multiplied by where it is kept, and its
        inverse; float32, with an axis of its own for stacked streams. A stream that is missing is
        not scaled.
    - `narrows`: whether float64 is computed in narrower registers all the same.
    """

    registers: np.dtype = eqx.field(static=True)
    dtype: np.dtype | None = eqx.field(static=True, default=None)
    scales: Mapping[Index, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    narrows: bool = eqx.field(static=True, default=False)

    def is_stored(self, x: Any) -> bool:
        return self.dtype is not None and x.dtype == self.dtype != self.registers

    def width_of(self, dtype: Any) -> np.dtype:
        """Returns the dtype in which a value is computed that the program has in `dtype`: integers
        in their own, numbers in registers."""
        if not jnp.issubdtype(dtype, jnp.inexact):
            return np.dtype(dtype)
        own = self.registers if self.narrows else jnp.finfo(dtype).dtype
        wide = np.promote_types(self.registers, own)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return np.promote_types(wide, np.complex64) if is_complex else wide

    def constant(self, x: Any, dtype: Any = None) -> Any:
        """Casts an array to what a value of `dtype`, by default its own, is computed in."""
        own = dtype is None or dtype == self.registers  # NumPy takes `None` for float64
        if own and getattr(x, "dtype", None) == self.registers:
            return x
        return cast(x, self.width_of(x.dtype if dtype is None else dtype)) if is_inexact(x) else x

    def store(self, x: Any, key: Index) -> Any:
        """A stream as it is kept; what is no real floating-point array stays as it is."""
        if x is None or self.dtype in (None, self.registers) or x.dtype != self.registers:
            return x
        return self.scaled(x, key).astype(self.dtype)

    def scaled(self, x: Any, key: Index) -> Any:
        """An array in registers, multiplied by the scale of its stream."""
        return x * _along(self.scales[key][0], x) if key in self.scales else x

    def unscaled(self, x: Any, key: Index) -> Any:
        """An array that was computed from stored streams, in registers."""
        return x * _along(self.scales[key][1], x) if key in self.scales else x

    def rounding(self, jet: Jet, but: Collection[Index] = ()) -> Jet:
        """Returns a value as it is. Its cotangents are rounded as those of what is stored are, and
        written to memory as that: once, for all that a backward pass takes them for."""
        # The cotangent of what is stored is divided by the scale.
        by_scale = lambda x, key: rounded_cotangent(self.scaled(x, key), self.dtype)
        return jet.map(lambda x, key: x if key in but else self.unscaled(by_scale(x, key), key))

    def overflows(self, jets: Iterable[Jet]) -> dict[Index, Array]:
        """Which streams do not fit where they are kept, by a scale that a smaller one can mend."""
        largest: dict[tuple, Array] = {}
        for key, x in ((key, x) for jet in jets for key, x in jet.streams.items()):
            if key in self.scales and x is not None and x.dtype == self.registers != self.dtype:
                place, size = (key, x.shape), jnp.abs(x)
                largest[place] = jnp.fmax(largest[place], size) if place in largest else size
        limit = float(jnp.finfo(self.dtype).max)
        # No NaN is larger.
        beyond = [self.scaled(x, key) > limit for (key, _), x in largest.items()]
        out: dict[Index, Array] = {}
        for (key, _), does in zip(largest, any_together(beyond), strict=True):
            tell(out, key, does)
        return out

    def loaded(self, x: "Operand", dtype: Any = None) -> "Operand":
        """Returns a value that the program has in `dtype` as it is computed with."""

        def load(array, key):
            if self.is_stored(array):
                array = self.unscaled(array.astype(self.registers), key)
            return self.constant(array, dtype)

        return x.map(load) if isinstance(x, Jet) else self.constant(x, dtype)

    def computed(self, jet: Jet, dtype: Any) -> Jet:
        """Returns the result of an equation in what its value, of `dtype`, is computed in. What is
        stored stays so."""
        return jet.map(lambda x, _: x if self.is_stored(x) else self.constant(x, dtype))

    def stored(self, jet: Jet) -> Jet:
        return jet.map(self.store)


def tell(overflows: dict[Any, Any], key: Hashable, does: Any) -> None:
    """Adds to the overflows of streams that one overflows, or does not."""
    overflows[key] = overflows[key] | does if key in overflows else does


def _along(scale: Any, x: Any) -> Any:
    """A scale, or one for each entry of the leading axis, to be multiplied with `x`."""
    scale = jnp.reshape(scale, jnp.shape(scale) + (1,) * (np.ndim(x) - np.ndim(scale)))
    return scale.astype(x.dtype)


def cast(x: Any, dtype: Any) -> Any:
    """Casts an array, one of NumPy to one of NumPy."""
    return x if x.dtype == dtype else x.astype(dtype)


def total(terms: Iterable[Any]) -> Any:
    """The sum of the terms that are not `None`; `None` if there are none."""
    first, *rest = [x for x in terms if x is not None] or [None]
    return sum(rest, first)


def is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_traced(x: Any) -> bool:
    """Returns whether a leaf is an array that is not known while tracing."""
    return isinstance(x, jax.Array)


def typed(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Operands in the dtypes that the program has them in: what does not depend on the point goes
    into a loop as it meets what does."""
    return [
        cast(x, aval_of(v).dtype) if is_inexact(x) else x
        for x, v in zip(args, eqn.invars, strict=True)
    ]


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list:
    """Binds an equation to streams in place of values.

    Inside `shard_map` the seeds are the same on all devices, unlike the point.
    """
    return own_bind(eqn, match_varying_axes(*args))


def primal_of(x: Operand) -> Any:
    """A value without its streams."""
    return x.primal if isinstance(x, Jet) else x


def bind_primals(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    """Binds an equation to the values of its operands."""
    return bind(eqn, list(map(primal_of, operands)))
