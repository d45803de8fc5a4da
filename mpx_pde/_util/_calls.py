"""The public function that the user has called, whose name is in every message below it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


# Changes nothing but the texts of errors, notes and warnings.
_present: ContextVar[str] = ContextVar("mpx_pde_call", default="mpx_pde")


@contextmanager
def named(call: str) -> Iterator[None]:
    """A context manager in which messages name the public function `call`."""
    token = _present.set(call)
    try:
        yield
    finally:
        _present.reset(token)


def present_call() -> str:
    """Returns the name of the public function that messages name at present."""
    return _present.get()
