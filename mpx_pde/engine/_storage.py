"""The way in which values are computed, and kept between layers."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..products._order import rounded_cotangent
from ..program._jaxpr import aval_of
from ..program._lines import STORED
from .taylor._jets import Jet, Operand, cast, is_inexact, primal_of
from .taylor._plan import Index


RAW, FIRST, DEEP, WILD = range(4)
"""The stages of values: how far they are from the point. `RAW` is before the first product, `FIRST`
is linear in its result, and `DEEP` is beyond. Coordinates and the first product are never rounded
to half, because every order of differentiation magnifies the errors made there.

Under `autocast`, without streams, values are `DEEP`, except those that may have any size, such as
derivatives. These are `WILD`: they have no scale, and are never rounded to half."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """A value that depends on the point, as it enters or leaves a program, and its stage."""

    jet: Jet
    stage: int = eqx.field(static=True, default=DEEP)

    def map(self, function: Callable[[Any, Index], Any]) -> "Staged":
        return Staged(self.jet.map(function), self.stage)

    def only(self, keys: Collection[Index]) -> "Staged":
        return Staged(self.jet.only(keys), self.stage)


Value = Any
"""A [`Staged`][] value, or an array that does not depend on the point."""


def jet_of(x: Value) -> Operand:
    return x.jet if isinstance(x, Staged) else x


def array_of(x: Value) -> Any:
    """Returns a value without its streams."""
    return primal_of(jet_of(x))


@dataclasses.dataclass(frozen=True)
class Storage:
    """The way in which streams are computed, and kept between layers. Arrays in half are *stored*:
    multiplied by the scale of their stream. Other arrays are not.

    **Attributes:**

    - `compute`: the dtype that everything except products is computed in. Values that are float64
        in the program stay float64.
    - `dtype`: the dtype that streams are kept in between layers; `None` keeps them as computed.
    - `scales`: for each stream, the power of two that it is multiplied by when it is kept, and its
        inverse. They are float32, and have an axis for stacked streams. Other streams are unscaled.
    - `narrows`: whether float64 values are computed in a narrower dtype nevertheless.
    """

    compute: np.dtype
    dtype: np.dtype | None = None
    scales: Mapping[Index, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    narrows: bool = False

    def is_stored(self, x: Any) -> bool:
        return self.dtype is not None and x.dtype == self.dtype != self.compute

    def width_of(self, dtype: Any) -> np.dtype:
        """Returns the dtype that a value of `dtype` in the program is computed in: its own for
        integers, `compute` or a wider one for other numbers."""
        if not jnp.issubdtype(dtype, jnp.inexact):
            return np.dtype(dtype)
        own = self.compute if self.narrows else jnp.finfo(dtype).dtype
        wide = np.promote_types(self.compute, own)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return np.promote_types(wide, np.complex64) if is_complex else wide

    def constant(self, x: Any, dtype: Any = None) -> Any:
        """Casts an array to the dtype that `dtype`, by default its own, is computed in."""
        own = dtype is None or dtype == self.compute  # NumPy takes `None` for float64
        if own and getattr(x, "dtype", None) == self.compute:
            return x
        return cast(x, self.width_of(x.dtype if dtype is None else dtype)) if is_inexact(x) else x

    def store(self, x: Any, key: Index) -> Any:
        """Returns a stream as it is kept. One in another dtype than `compute` is left unchanged."""
        if x is None or self.dtype in (None, self.compute) or x.dtype != self.compute:
            return x
        with jax.named_scope(STORED) if key else nullcontext():
            return self.scaled(x, key).astype(self.dtype)

    def scaled(self, x: Any, key: Index) -> Any:
        """Returns an array in the compute dtype, multiplied by the scale of its stream."""
        return x * _along(self.scales[key][0], x) if key in self.scales else x

    def unscaled(self, x: Any, key: Index) -> Any:
        """Returns an array computed from stored streams, divided by the scale of its stream."""
        return x * _along(self.scales[key][1], x) if key in self.scales else x

    def rounding(self, jet: Jet, but: Collection[Index] = ()) -> Jet:
        """Returns a value unchanged, but rounds its cotangents like those of a stored value (except
        streams in `but`). They are written to memory once, for all uses in the backward pass."""
        # The cotangent of a stored stream is divided by its scale.
        by_scale = lambda x, key: rounded_cotangent(self.scaled(x, key), self.dtype)
        return jet.map(lambda x, key: x if key in but else self.unscaled(by_scale(x, key), key))

    def loaded(self, x: Any, dtype: Any = None) -> Any:
        """Returns a value of `dtype` in the program, cast to the dtype that it is computed in. It
        may be a jet, a [`Staged`][] one, or an array."""

        def load(array, key):
            if self.is_stored(array):
                array = self.unscaled(array.astype(self.compute), key)
            return self.constant(array, dtype)

        return x.map(load) if isinstance(x, Jet | Staged) else self.constant(x, dtype)

    def computed(self, jet: Jet, dtype: Any) -> Jet:
        """Returns a result of `dtype` in the program, cast to the dtype that it is computed in.
        Stored arrays stay stored."""
        return jet.map(lambda x, _: x if self.is_stored(x) else self.constant(x, dtype))

    def stored(self, jet: Jet) -> Jet:
        return jet.map(self.store)


def add_overflow(overflows: dict[Any, Any], key: Hashable, does: Any) -> None:
    """Records in `overflows` that the stream `key` overflows, or that it does not."""
    overflows[key] = overflows[key] | does if key in overflows else does


def _along(scale: Any, x: Any) -> Any:
    """Reshapes a scale, or one for each entry of the leading axis, so that it multiplies `x`."""
    scale = jnp.reshape(scale, jnp.shape(scale) + (1,) * (np.ndim(x) - np.ndim(scale)))
    return scale.astype(x.dtype)


def typed(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Casts inexact operands to the dtypes that they have in the program. An equation that holds a
    program, such as a loop, takes no others."""
    return [
        cast(x, aval_of(v).dtype) if is_inexact(x) else x
        for x, v in zip(args, eqn.invars, strict=True)
    ]
