"""Records the derivatives that a loss takes: those in float16 without a scaling, and in what."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .._util._calls import called


_UNSCALED = 2
"""The lowest order of derivatives that are reported if they are in float16 without scaling. First
derivatives are about as large as the gradients, for which a loss scale suffices."""

_unscaled: ContextVar[dict[str, int] | None] = ContextVar("unscaled_derivatives", default=None)


@contextmanager
def noting_unscaled() -> Iterator[dict[str, int]]:
    """Yields the calls in its context that take unscaled derivatives in float16 of order
    `_UNSCALED` or higher, each with its highest order."""
    orders: dict[str, int] = {}
    token = _unscaled.set(orders)
    try:
        yield orders
    finally:
        _unscaled.reset(token)


def note_unscaled(order: int) -> None:
    """Records that the called function takes unscaled derivatives in float16, up to `order`."""
    orders = _unscaled.get()
    if orders is not None and order >= _UNSCALED:
        orders[called()] = max(order, orders.get(called(), 0))


_coordinates: ContextVar[dict[str, None] | None] = ContextVar("coordinates", default=None)


@contextmanager
def noting_coordinates() -> Iterator[dict[str, None]]:
    """Yields the names of the coordinates of all derivatives in its context, in their order."""
    found: dict[str, None] = {}
    token = _coordinates.set(found)
    try:
        yield found
    finally:
        _coordinates.reset(token)


def note_coordinates(coords: tuple[str, ...]) -> None:
    """Records the coordinates of derivatives that are taken."""
    found = _coordinates.get()
    if found is not None:
        found.update(dict.fromkeys(coords))
