"""Records the derivatives that a loss takes: those in float16 without a scaling, and in what."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from .._util._calls import called


_UNSCALED = 2
"""The lowest order of derivatives that are reported if they are in float16 without scaling. First
derivatives are about as large as the gradients, for which a loss scale suffices."""

_Noted = TypeVar("_Noted")

_unscaled: ContextVar[dict[str, int] | None] = ContextVar("unscaled_derivatives", default=None)
_coordinates: ContextVar[dict[str, None] | None] = ContextVar("coordinates", default=None)


@contextmanager
def _noting(into: ContextVar[dict[str, _Noted] | None]) -> Iterator[dict[str, _Noted]]:
    found: dict[str, _Noted] = {}
    token = into.set(found)
    try:
        yield found
    finally:
        into.reset(token)


def noting_unscaled() -> AbstractContextManager[dict[str, int]]:
    """A context that yields the calls in it that take unscaled derivatives in float16 of order
    `_UNSCALED` or higher, each with its highest order."""
    return _noting(_unscaled)


def note_unscaled(order: int) -> None:
    """Records that the called function takes unscaled derivatives in float16, up to `order`."""
    orders = _unscaled.get()
    if orders is not None and order >= _UNSCALED:
        orders[called()] = max(order, orders.get(called(), 0))


def noting_coordinates() -> AbstractContextManager[dict[str, None]]:
    """A context that yields the names of the coordinates of all derivatives in it, in their
    order."""
    return _noting(_coordinates)


def note_coordinates(coords: tuple[str, ...]) -> None:
    """Records the coordinates of derivatives that are taken."""
    found = _coordinates.get()
    if found is not None:
        found.update(dict.fromkeys(coords))
