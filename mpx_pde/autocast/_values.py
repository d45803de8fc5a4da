"""A value with its two precisions, each made when it is first asked for."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from .._varying import varies
from ._rules import OPAQUE, Kind, Policy


FULL = np.dtype("float32")


class Value:
    """An array, what is known of it, and its casts so far.

    A cast is made at most once. Casting back and forth gives the array that was there first.

    To JAX it is a PyTree of one array, with its kind as static data: so what is known of an array
    goes with it through whatever traces a function.
    """

    __slots__ = ("casts", "kind", "native")

    def __init__(self, array: Any, kind: Kind, casts: dict[np.dtype, Any] | None = None):
        self.kind = kind
        self.native = array
        """The array as it was made."""
        self.casts = {} if casts is None else casts

    def get(self, dtype: Any) -> Any:
        if not self.kind.governed or self.native.dtype == dtype:
            return self.native
        out = self.casts.get(dtype)
        if out is None:
            out = _cast(self.native, self.kind, dtype)
            self.casts[dtype] = out
        return out

    def array(self, policy: Policy) -> Any:
        """The array as it goes into a product or a container."""
        return self.get(self.dtype(policy)) if self.kind.governed else self.native

    def packed(self, policy: Policy) -> "Value":
        """The value as it goes into a container, which gets one array."""
        return Value(self.array(policy), self.kind)

    def dtype(self, policy: Policy) -> np.dtype:
        return policy.dtype if self.kind.half and not self.kind.master else FULL

    def as_kind(self, kind: Kind) -> "Value":
        """The same casts, seen as another kind."""
        return Value(self.native, kind, self.casts)

    def in_program(self, aval: Any, policy: Policy) -> Any:
        """The array in the dtype that the program has there."""
        return self.get(aval.dtype) if self.kind.governed else self.array(policy)


jtu.register_pytree_node(
    Value, lambda x: ((x.native,), x.kind), lambda kind, arrays: Value(*arrays, kind)
)


def _cast(array: Any, kind: Kind, dtype: np.dtype) -> Any:
    if kind.const is not None and np.shape(array) == () and not varies(jax.typeof(array)):
        # A constant stays one.
        return np.asarray(kind.const, dtype)
    return lax.convert_element_type(array, dtype)


def constant(x: Any, aval: Any, policy: Policy) -> Value:
    """A literal or a constant of a jaxpr: a master, and known if it is a concrete scalar."""
    if not policy.governs(aval):
        return Value(x, OPAQUE)
    if isinstance(x, int | float):  # be it one with a dtype, as JAX's literals are
        x = np.asarray(x, aval.dtype)
    half = aval.dtype == policy.dtype
    known = getattr(aval, "shape", None) == () and isinstance(x, np.ndarray | np.generic)
    const = float(x) if known else None
    if const is not None and math.isnan(const):
        const = None  # equal to nothing, so no good in a key
    return Value(x, Kind(half=half, master=not half or const is not None, const=const))


def received(x: Any, aval: Any, policy: Policy, master: bool) -> Value:
    """An array in the program's dtype, such as an argument of the function."""
    if not policy.governs(aval):
        return Value(x, OPAQUE)
    half = aval.dtype == policy.dtype
    return Value(x, Kind(half=half, master=master and not half))


def computed(x: Any, aval: Any, policy: Policy) -> Value:
    """What an operation returned, in whichever of the two dtypes."""
    if not policy.governs(aval):
        return Value(x, OPAQUE)
    return Value(x, Kind(half=jnp.dtype(x.dtype) == policy.dtype))
