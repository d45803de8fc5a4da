"""Checks the arguments of derivative functions and parses the names of derivatives."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._util._calls import called
from .._util._repr import in_a_line
from .._util._wrapper import unfit_signature


@dataclass(frozen=True)
class Term:
    """A derivative: its name, its output, and its directions (sorted)."""

    name: str
    output: int
    dirs: tuple[int, ...]


def parse_terms(terms: Any, coords: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[Term, ...]:
    parsed = []
    for name in _listed(terms):
        if not isinstance(name, str):
            raise TypeError(
                f"`{called()}` takes names of terms such as 'u_xx', but got {in_a_line(name)}."
            )
        output, _, suffix = name.rpartition("_")
        if name in outputs:
            if output in outputs and split_names(suffix, coords):
                raise ValueError(
                    f"`{called()}` can read the term {name!r} as an output and as a derivative of "
                    f"{output!r}. Call the output something else."
                )
            output, suffix = name, ""
        if output not in outputs:
            joined = f" For one output of that name write `outputs=[{output!r}]`."
            hint = joined if output == "".join(outputs) else ""
            if output == "lap" and suffix in outputs:
                hint = f" `laplacian` returns {name!r} without being asked for it."
            raise ValueError(
                f"`{called()}` does not know the output {output or name!r} of the term {name!r}. "
                f"The outputs are {', '.join(outputs)}; a term is one of them, or one of them with "
                f"an underscore and coordinates, such as 'u_xx'.{hint}"
            )
        dirs = split_names(suffix, coords)
        if dirs is None or (name not in outputs and not dirs):
            raise ValueError(
                f"`{called()}` cannot read {suffix!r} in the term {name!r} as a sequence of "
                f"coordinates. The coordinates are {', '.join(coords)}."
            )
        parsed.append(Term(name, outputs.index(output), tuple(sorted(dirs))))
    return tuple(parsed)


def _listed(terms: Any) -> tuple[Any, ...]:
    """Returns the terms of a list, or one term, as a tuple. Raises an error for anything else and
    for duplicates."""
    if isinstance(terms, str):
        return (terms,)
    if not isinstance(terms, Iterable):
        raise TypeError(
            f"`{called()}` takes terms as a list of names such as ['u_x', 'u_xx'], but got "
            f"{in_a_line(terms)}."
        )
    terms = tuple(terms)
    check_distinct(terms)
    return terms


def check_distinct(names: Sequence[Any]) -> None:
    """Raises a `ValueError` if a name occurs twice, since one result would replace the other."""
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"`{called()}` got the term {twice[0]!r} twice. Name each once.")


def check_fun(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"`{called()}` takes a function of one point, such as a network, but got "
            f"{in_a_line(fun)}."
        )


def check_network(fun: Any) -> None:
    """Checks that a function takes one point."""
    check_fun(fun)
    signature = unfit_signature(fun, 1)
    if signature is not None:
        at = ", ".join(f"point[{i}]" for i in range(max(2, len(signature.parameters))))
        raise TypeError(
            f"`{called()}` takes a function of one point, an array of all coordinates, but got one "
            f"that takes {signature}. Wrap it: `lambda point: fun({at})`."
        )


def check_point(
    point: Any, others: tuple[Any, ...], coords: tuple[str, ...], dtype: Any
) -> Float[Array, " n"]:
    """Checks that one point was passed, as one array, and returns it."""
    wanted = (
        f"`{called()}` takes one point, an array of the {len(coords)} coordinates "
        f"{', '.join(coords)}, but got"
    )
    if others or not (eqx.is_array_like(point) or isinstance(point, list | tuple)):
        got = f"{1 + len(others)} arguments" if others else in_a_line(point)
        raise TypeError(f"{wanted} {got}. Pass `jnp.stack([...])` of them.")
    point = jnp.asarray(point)
    if point.shape != (len(coords),):
        raise ValueError(f"{wanted} shape {point.shape}. For many points use `jax.vmap`.")
    if not jnp.issubdtype(point.dtype, jnp.floating):
        raise TypeError(f"`{called()}` takes a floating-point point, but got {point.dtype.name}.")
    return point if dtype is None else point.astype(dtype)


def check_factor(factor: Any, name: str) -> Any:
    """Checks that the factor of a derivative in a sum is one real number."""
    dtype = getattr(factor, "dtype", np.dtype(type(factor)))
    if np.shape(factor) != () or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        got = f"shape {np.shape(factor)} and {dtype}" if hasattr(factor, "dtype") else repr(factor)
        fix = " Take the derivatives with a complex factor as terms, and add them in the loss."
        raise ValueError(
            f"`{called()}` multiplies derivatives by factors that are real numbers, scalar arrays "
            f"or functions of the point that return one, but got {got} in the operator {name!r}."
            + (fix if jnp.issubdtype(dtype, jnp.complexfloating) else "")
        )
    return factor


def as_network(fun: Callable, outputs: tuple[str, ...]) -> Callable:
    """Wraps `fun` so that its output is an array of shape `[outputs]`."""

    def network(point):
        out = fun(point)
        shape = getattr(out, "shape", None)
        if shape != (len(outputs),) and not (shape == () and len(outputs) == 1):
            what = f"shape {shape}" if shape is not None else f"{type(out).__name__}"
            raise ValueError(
                f"`{called()}` expects an entry for each of `outputs`, {', '.join(outputs)}, but "
                f"the network returned {what} for one point. It must return an array of shape "
                f"({len(outputs)},)" + (" or a scalar." if len(outputs) == 1 else ".")
            )
        if not jnp.issubdtype(out.dtype, jnp.inexact):
            raise TypeError(
                f"`{called()}` needs floating-point or complex outputs, but the network returned "
                f"{out.dtype.name}. Cast them to float32."
            )
        return out.reshape(len(outputs))

    return network


def names_of(value: Any, what: str) -> tuple[str, ...]:
    """Returns names such as `"xt"` or `["x", "t"]` as a tuple, after checking that they differ."""
    names = tuple(value) if isinstance(value, str | Sequence) else ()

    def fits(n):
        return isinstance(n, str) and n and not any(c.isspace() or c in ",;" for c in n)

    if not names or not all(map(fits, names)):
        raise TypeError(
            f"`{called()}` takes {what} as a string with a letter for each and nothing in between, "
            f"such as 'xt', or as a list of names, but got {value!r}."
        )
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(
            f"`{called()}` got {', '.join(map(repr, twice))} twice in {what}: {value!r}."
        )
    return names


def coords_of(value: Any) -> tuple[str, ...]:
    """Returns the names of coordinates as a tuple, after checking that a sequence of them written
    without spaces can be read in one way only."""
    names = names_of(value, "the coordinates")
    text = _read_twice(names)
    if text is not None:
        raise ValueError(
            f"`{called()}` can read {text!r} as two different sequences of the coordinates "
            f"{', '.join(names)}. Call one of them something else."
        )
    return names


def _read_twice(names: tuple[str, ...]) -> str | None:
    """Returns a text that is more than one sequence of names; `None` if there is none.

    Two sequences are written side by side until they end together (Sardinas and Patterson, 1953).
    """
    # What one sequence is ahead of the other, and the text of the longer one.
    ahead = {b[len(a) :]: b for a in names for b in names if a != b and b.startswith(a)}
    left = list(ahead)
    while left:
        rest = left.pop(0)
        for name in names:
            if name == rest:
                return ahead[rest]
            longer, shorter = (name, rest) if len(name) > len(rest) else (rest, name)
            new = longer[len(shorter) :]
            if longer.startswith(shorter) and new not in ahead:
                ahead[new] = ahead[rest] + (new if longer is name else "")
                left.append(new)
    return None


def term_list(terms: Any, empty: bool = False) -> tuple[str, ...]:
    """Returns the names of derivatives as a tuple. Raises an error for others and duplicates."""
    terms = _listed(terms)
    bad = [t for t in terms if not isinstance(t, str) or not (t == "laplacian" or "_" in t[1:-1])]
    if bad or not (terms or empty):
        raise ValueError(
            f"`{called()}` needs names of derivatives, an output, an underscore and coordinates, "
            f"such as 'u_x' or 'u_xx', but got {bad or terms!r}."
        )
    return terms


def split_names(text: str, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Splits `text` into a sequence of names and returns their indices. Returns `None` if it is not
    such a sequence.
    """
    if not text:
        return ()
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(name):
            rest = split_names(text[len(name) :], names)
            if rest is not None:
                return (names.index(name), *rest)
    return None


def exponent_of(value: Any, name: str) -> int:
    """Returns the exponent of the largest power of two that is not above a positive number."""
    try:
        ok = math.isfinite(value) and value > 0
    except TypeError:
        ok = False
    if not ok:
        raise ValueError(
            f"`{called()}` needs a positive, finite number as `{name}`, but got {in_a_line(value)}."
        )
    return math.frexp(float(value))[1] - 1
