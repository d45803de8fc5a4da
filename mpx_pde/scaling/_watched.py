"""A count on the device that a warning tells when it rises above zero."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..program._warnings import warn_user


_AT_FIRST = 64
"""The number of counts that are looked at however soon they come."""

_SECONDS = 0.25
"""The time between looks after that. A look takes about 10 µs, or 50 µs on a GPU."""


class _Watch:
    """Looks at the counts that JAX returns to the host, without waiting for the device.

    A callback in the step would be simpler. But JAX neither keeps a program with a callback in its
    compilation cache nor exports it, and on a GPU its condition makes the device wait for the host.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew, as in a new process."""
        self.pending: Array | None = None
        self.looks = 0
        self.next = 0.0
        self.warned = False
        self.paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Looks at nothing in its body, which evaluates another program than that of a step."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def see(self, count: Any, text: str) -> None:
        """Looks at a count if it is known, or at the one that came before."""
        if self.paused or not isinstance(count, jax.Array) or isinstance(count, Tracer):
            return
        before, self.pending = self.pending, count
        operands: tuple[Any, ...] = (before, count)
        now = time.monotonic()
        if self.looks >= _AT_FIRST and now < self.next:
            return
        # A step that donates its arguments leaves nothing of the count before: wait for this one.
        donated = before is not None and before.is_deleted()
        for x in operands:
            if x is None or x.is_deleted() or not (donated or x.is_ready()):
                continue
            parts = [shard.data for shard in x.addressable_shards]
            # The parts of a donated array may be gone although the array itself is not marked.
            if any(part.is_deleted() for part in parts):
                continue
            self.looks, self.next = self.looks + 1, now + _SECONDS
            with jax.transfer_guard("allow"):
                largest = max((np.max(np.asarray(part), initial=0) for part in parts), default=0)
            tell, self.warned = largest > 0 and not self.warned, bool(largest > 0)
            if tell:
                self.pending = None
                warn_user(text.format(largest))


watch = _Watch()


class Watched:
    """An int32 array that counts steps in which a gradient vanished.

    It is a PyTree with one leaf. The host looks at the count when JAX hands it back, and issues a
    [`mpx_pde.PrecisionWarning`][] once it is above zero.
    """

    __slots__ = ("count",)

    text = (
        "The gradient has vanished as a whole in {} steps so far: it is zero although the loss is "
        "not, or below 1.2e-7 with a loss that is float16 itself, where no larger scale helps. "
        "Something overflows in the forward pass, and its derivative ends in 1/∞, or values are "
        "below the range of the half type, or the gradient is zero in float32 too. "
        "`mpx_pde.explain_nonfinite(mpx_pde.filter_grad(loss, scaling, **options))(model, batch)`, "
        "with the options of the step, names the line. "
        "`autocast=True` or `forward='float32'` keeps such operations in float32. The scaling "
        "counts these steps in `vanished_steps`. If it is meant, filter `mpx_pde.PrecisionWarning`."
    )

    def __init__(self, count: Any):
        self.count = count

    def __repr__(self) -> str:
        return f"Watched({self.count!r})"

    def __add__(self, more: Any) -> "Watched":
        return Watched(self.count + jnp.asarray(more, jnp.int32))


def _flatten(watched: Watched) -> tuple[tuple, None]:
    return ((jtu.GetAttrKey("count"), watched.count),), None


def _unflatten(_: None, children: Any) -> Watched:
    (count,) = children
    watch.see(count, Watched.text)
    return Watched(count)


jtu.register_pytree_with_keys(
    Watched, _flatten, _unflatten, lambda watched: ((watched.count,), None)
)
