"""A value together with its derivatives, and how they are stored."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._cast import widen
from ._plan import Index


RAW, FIRST, DEEP = range(3)
"""How far a value is from the point: no product yet, linear in the result of the first one, beyond.
Coordinates and the first product are never rounded to half: errors made there are magnified by
every order of differentiation."""


@partial(
    jax.tree_util.register_dataclass, data_fields=["primal", "streams"], meta_fields=["stage"]
)
@dataclasses.dataclass(frozen=True)
class Jet:
    """A value that depends on the point, and its streams; one that is missing is zero.

    Arrays in half are *stored*: multiplied by the scale of their stream. All others are not.
    """

    primal: Any
    streams: dict[Index, Any]
    stage: int


@dataclasses.dataclass(frozen=True)
class Storage:
    """How streams are kept between layers.

    **Attributes:**

    - `dtype`: the half type, or `None` for a network that is not in half precision.
    - `scales`: by stream, the power of two that it is multiplied by in half, and its inverse;
        float32, with an axis of its own for stacked streams. A stream that is missing is not
        scaled.
    """

    dtype: np.dtype | None
    scales: Mapping[Index, tuple[Array, Array]] = dataclasses.field(default_factory=dict)

    def is_stored(self, x: Any) -> bool:
        return self.dtype is not None and x.dtype == self.dtype

    def load(self, x: Any, key: Index) -> Any:
        """A stored stream as it is, in float32."""
        return self.unscaled(widen(x), key) if self.is_stored(x) else x

    def store(self, x: Any, key: Index) -> Any:
        """A stream in half; what is not float32 stays as it is."""
        if self.dtype is None or x.dtype != jnp.float32:
            return x
        if key in self.scales:
            x = x * _along(self.scales[key][0], x)
        return x.astype(self.dtype)

    def unscaled(self, x: Any, key: Index) -> Any:
        """A float32 array that was computed from stored streams."""
        return x * _along(self.scales[key][1], x) if key in self.scales else x

    def loaded(self, jet: Jet) -> Jet:
        streams = {key: self.load(x, key) for key, x in jet.streams.items()}
        return Jet(self.load(jet.primal, ()), streams, jet.stage)

    def stored(self, jet: Jet) -> Jet:
        streams = {key: self.store(x, key) for key, x in jet.streams.items()}
        return Jet(self.store(jet.primal, ()), streams, jet.stage)


def _along(scale: Any, x: Any) -> Any:
    """A scale, or one for each entry of the leading axis, to be multiplied with `x`."""
    return jnp.reshape(scale, jnp.shape(scale) + (1,) * (np.ndim(x) - np.ndim(scale)))


def zeros_of(jet: Jet, size: int | None = None) -> Any:
    shape = jnp.shape(jet.primal)
    return jnp.zeros(shape if size is None else (size, *shape), jet.primal.dtype)


def is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
