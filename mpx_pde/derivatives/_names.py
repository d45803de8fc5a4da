"""Names of coordinates, outputs and derivatives, and the numbers of options."""

import math
from collections.abc import Iterable, Sequence
from typing import Any


def names_of(value: Any, call: str, what: str) -> tuple[str, ...]:
    """Returns `"xt"` or `["x", "t"]` as a tuple of distinct names."""
    names = tuple(value) if isinstance(value, str | Sequence) else None
    if not names or not all(isinstance(n, str) and n for n in names):
        raise TypeError(
            f"`{call}` takes {what} as a string with a letter for each, such as 'xt', or as a list "
            f"of names, but got {value!r}."
        )
    if any(c.isspace() or c in ",;" for n in names for c in n):
        raise ValueError(
            f"`{call}` takes {what} as a string with a letter for each and nothing in between, "
            f"such as 'xt', or as a list of names, but got {value!r}. Leave out what separates "
            "them."
        )
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"`{call}` got {', '.join(map(repr, twice))} twice in {what}: {value!r}.")
    return names


def term_list(terms: Any, call: str, empty: bool = False) -> tuple[str, ...]:
    """Returns the names of derivatives as a tuple; raises an error if one is named twice."""
    if isinstance(terms, str) or not isinstance(terms, Iterable):
        raise TypeError(
            f"`{call}` takes terms as a list of names such as ['u_x', 'u_xx'], but got {terms!r}."
        )
    terms = tuple(terms)
    bad = [t for t in terms if not isinstance(t, str) or not (t == "laplacian" or "_" in t[1:-1])]
    if bad or not (terms or empty):
        raise ValueError(
            f"`{call}` needs names of derivatives, an output, an underscore and coordinates, such "
            f"as 'u_x' or 'u_xx', but got {bad or terms!r}."
        )
    twice = sorted({t for t in terms if terms.count(t) > 1})
    if twice:
        raise ValueError(f"`{call}` got the term {twice[0]!r} twice. Name each once.")
    return terms


def split_names(text: str, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Returns the indices of the names that `text` is a sequence of, or `None` if it is not such a
    sequence.
    """
    if not text:
        return ()
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(name):
            rest = split_names(text[len(name) :], names)
            if rest is not None:
                return (names.index(name), *rest)
    return None


def exponent_of(value: Any, call: str, name: str) -> int:
    """Returns the exponent of a positive number, rounded down to a power of two."""
    try:
        ok = math.isfinite(value) and value > 0
    except TypeError:
        ok = False
    if not ok:
        raise ValueError(f"`{call}` needs a positive, finite number as `{name}`, got {value!r}.")
    return math.frexp(float(value))[1] - 1
