"""Derivatives in float16 whose seeds no derivative scaling scales, told to the gradient
transformation around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


LEAST = 2
"""The order from which on derivatives without scaling are told. First derivatives are about as
large as the gradients, which a loss scale alone serves."""

_found: ContextVar[dict[str, int] | None] = ContextVar("unscaled_derivatives", default=None)


@contextmanager
def noting_unscaled() -> Iterator[dict[str, int]]:
    """Yields the calls in its context that take derivatives in float16 without a scaling, and the
    highest order of each."""
    found: dict[str, int] = {}
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def note_unscaled(call: str, order: int) -> None:
    """Notes derivatives up to an order that are evaluated in float16 and that nothing scales."""
    found = _found.get()
    if found is not None and order >= LEAST:
        found[call] = max(order, found.get(call, 0))
