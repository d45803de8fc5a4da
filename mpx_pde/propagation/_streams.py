"""A value together with its derivatives, and how they are stored."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from .._varying import match_varying_axes
from ..interpret._jaxpr import own_bind
from ._plan import Index


RAW, FIRST, DEEP = range(3)
"""How far a value is from the point: no product yet, linear in the result of the first one, beyond.
Coordinates and the first product are never rounded to half: errors made there are magnified by
every order of differentiation."""


@partial(jax.tree_util.register_dataclass, data_fields=["primal", "streams"], meta_fields=["stage"])
@dataclasses.dataclass(frozen=True)
class Jet:
    """A value that depends on the point, and its streams; one that is missing is zero. The value
    is `None` where it enters a layer that has no use of it.

    Arrays in half are *stored*: multiplied by the scale of their stream. All others are not.
    """

    primal: Any
    streams: dict[Index, Any]
    stage: int

    def only(self, keys: Collection[Index]) -> "Jet":
        """The value with those of its streams."""
        return Jet(self.primal, {k: s for k, s in self.streams.items() if k in keys}, self.stage)


Streams = dict[Index, Any]

Operand = Any
"""A [`Jet`][], or an array that does not depend on the point."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """How streams are computed, and how they are kept between layers.

    **Attributes:**

    - `registers`: the dtype that everything but products is computed in.
    - `dtype`: what streams are kept in between layers; `None` keeps them as they were computed.
    - `scales`: by stream, the power of two that it is multiplied by where it is kept, and its
        inverse; float32, with an axis of its own for stacked streams. A stream that is missing is
        not scaled.
    - `narrows`: whether float64 is computed in narrower registers.
    """

    registers: np.dtype
    dtype: np.dtype | None = None
    scales: Mapping[Index, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    narrows: bool = True

    def is_stored(self, x: Any) -> bool:
        return self.dtype is not None and x.dtype == self.dtype != self.registers

    def constant(self, x: Any) -> Any:
        """What does not depend on the point, as it meets what does."""
        if not is_inexact(x):
            return x
        dtype = self.width_of(x.dtype)
        wider = x.dtype.itemsize > dtype.itemsize
        return x if x.dtype == dtype or (wider and not self.narrows) else x.astype(dtype)

    def width_of(self, dtype: Any) -> np.dtype:
        """The dtype that what is of another is computed in: integers in their own."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return np.dtype(np.complex64 if self.registers.itemsize <= 4 else np.complex128)
        return self.registers if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(dtype)

    def load(self, x: Any, key: Index) -> Any:
        """A stream in registers."""
        if self.is_stored(x):
            return self.unscaled(x.astype(self.registers), key)
        return self.constant(x)

    def store(self, x: Any, key: Index) -> Any:
        """A stream as it is kept; what is no real floating-point array stays as it is."""
        if x is None or self.dtype is None or self.dtype == self.registers:
            return x
        if x.dtype != self.registers:
            return x
        if key in self.scales:
            x = x * _along(self.scales[key][0], x)
        return x.astype(self.dtype)

    def unscaled(self, x: Any, key: Index) -> Any:
        """An array that was computed from stored streams, in registers."""
        return x * _along(self.scales[key][1], x) if key in self.scales else x

    def overflows(self, jet: Jet) -> dict[Index, Array]:
        """Which streams do not fit where they are kept, by a scale that a smaller one can mend."""
        if self.dtype is None:
            return {}
        largest = float(jnp.finfo(self.dtype).max)
        return {
            key: jnp.any(jnp.abs(x * _along(self.scales[key][0], x)) > largest)
            for key, x in jet.streams.items()
            if key in self.scales and x.dtype == self.registers != self.dtype
        }

    def loaded(self, jet: Jet) -> Jet:
        streams = {key: self.load(x, key) for key, x in jet.streams.items()}
        return Jet(self.load(jet.primal, ()), streams, jet.stage)

    def stored(self, jet: Jet) -> Jet:
        streams = {key: self.store(x, key) for key, x in jet.streams.items()}
        return Jet(self.store(jet.primal, ()), streams, jet.stage)


def _along(scale: Any, x: Any) -> Any:
    """A scale, or one for each entry of the leading axis, to be multiplied with `x`."""
    scale = jnp.reshape(scale, jnp.shape(scale) + (1,) * (np.ndim(x) - np.ndim(scale)))
    return scale.astype(x.dtype)


def zeros_of(jet: Jet, size: int | None = None) -> Any:
    shape = jnp.shape(jet.primal)
    return jnp.zeros(shape if size is None else (size, *shape), jet.primal.dtype)


def is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def typed(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Operands in the dtypes that the program has them in: what does not depend on the point goes
    into a loop as it meets what does."""
    return [
        x.astype(v.aval.dtype) if is_inexact(x) and x.dtype != v.aval.dtype else x
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


def stage_of(operands: Sequence[Operand]) -> int:
    """How far the farthest of several values is from the point."""
    return max(x.stage for x in operands if isinstance(x, Jet))


def after_nonlinear(*operands: Operand) -> int:
    """The stage of a function of values that is not linear."""
    stage = stage_of(operands)
    return DEEP if stage == FIRST else stage


def after_product(*operands: Operand) -> int:
    """The stage of a product of values."""
    return FIRST if stage_of(operands) == RAW else DEEP
