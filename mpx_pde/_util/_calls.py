"""The public function that the user has called, whose name is in every message below it."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast


_Function = TypeVar("_Function", bound=Callable)


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


def public(fun: _Function) -> _Function:
    """Makes messages name a public function, method or class while it runs.

    A function that `fun` returns runs later. It enters [`named`][] with the name that [`called`][]
    gave when it was built. So does the body of a generator, which cannot be decorated.
    """
    assert not inspect.isgeneratorfunction(fun), fun
    name = fun.__qualname__.removesuffix(".__init__").removesuffix(".__call__")

    @wraps(fun)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with named(name):
            return fun(*args, **kwargs)

    return cast(_Function, inner)


def called() -> str:
    """Returns the name of the public function that messages name at present."""
    return _present.get()
