"""The base class of modules that wrap a function, and helpers for functions."""

import abc
import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import equinox as eqx

from ._calls import called
from ._repr import in_a_line


class AbstractWrapper(eqx.Module):
    """A callable module around a function `fun`, which binds as a method if `fun` would.

    Pass instances through [`equinox.module_update_wrapper`][] to give them the name and signature
    of `fun`.
    """

    fun: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def __wrapped__(self):
        return self.fun

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else eqx.Partial(self, instance)


def check_callable(fun: Any) -> None:
    """Raises a `TypeError` in the name of the called function unless `fun` can be called."""
    if not callable(fun):
        raise TypeError(
            f"`{called()}` takes a function or a callable module, but got {in_a_line(fun)}. Pass "
            f"the arguments to what it returns, as in `{called()}(fun)(*args)`."
        )


_Function = TypeVar("_Function", bound=Callable)


def check_bound(fun: Callable, example: str, args: tuple, kwargs: dict) -> None:
    """Raises a `TypeError` with the code to write if a call of the public function `fun` lacks
    arguments or has too many."""
    signature = inspect.signature(fun)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        meant = ""
        for name in kwargs.keys() - signature.parameters:
            for other in difflib.get_close_matches(name, signature.parameters, 1):
                meant += f" Is {name!r} meant to be {other!r}?"
        message = f"`{fun.__name__}` got arguments that do not fit: {error}.{meant} Write {example}"
        raise TypeError(message) from None


def says_how(example: str) -> Callable[[_Function], _Function]:
    """Makes a public function tell in a `TypeError` how to call it: `example` is that code and
    what else there is to say."""

    def decorate(fun: _Function) -> _Function:
        @wraps(fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_bound(fun, example, args, kwargs)
            return fun(*args, **kwargs)

        return cast(_Function, checked)

    return decorate


def unfit_signature(fun: Any, count: int) -> inspect.Signature | None:
    """Returns the signature of a function if it cannot be called with `count` arguments. Returns
    `None` if it can, or if the signature is not known, as for many builtins.
    """
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return signature
    return None


def of_some(fun: Callable, args: Sequence[Any], places: Sequence[int]) -> Callable:
    """Turns a function of `args` into a function of only those at the `places`."""

    def some(*parts: Any) -> Any:
        every = list(args)
        for i, x in zip(places, parts, strict=True):
            every[i] = x
        return fun(*every)

    return some
