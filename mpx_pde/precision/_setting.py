"""Hands a function what the code around it asks for, where no argument can be passed because the
user's code lies in between.

It is one record. The only other context that changes a result is the meaning of *half precision*,
which users set.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Setting:
    """A record of what the code around a function of this library asks for.

    **Attributes:**

    - `asked`: how half precision was asked for, and which: `("cast", "float16")`, or by
        `"autocast"`; `None` if it was not.
    - `products`: a default precision of products that half precision overrides, or who insists on
        float32.
    - `forward`: the precisions of the loss that is being traced; `None` outside of one.
    - `without_halves`: whether layers with a half `dtype` compute in that of their weights.
    - `marks`: whether derivative terms are marked with their names.
    """

    asked: tuple[str, str] | None = None
    products: str = ""
    forward: Any = None
    without_halves: bool = False
    marks: bool = False


# A user context is part of the keys of jit's caches.
_context = jax.make_user_context(Setting())


def setting() -> Setting:
    """Returns what is asked for at present."""
    return _context.value


@contextmanager
def setting_with(**changes: Any) -> Iterator[None]:
    """A context manager that changes these attributes of the present [`Setting`][]."""
    with _context(dataclasses.replace(_context.value, **changes)):
        yield
