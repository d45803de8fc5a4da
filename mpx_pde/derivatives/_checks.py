"""Checks of the arguments of derivative functions, and the parsing of names."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._repr import in_a_line
from ._names import split_names
from ._state import DerivativeScaling


class Term(NamedTuple):
    """A derivative: its name, its output, and its directions (sorted)."""

    name: str
    output: int
    dirs: tuple[int, ...]


def parse_terms(
    terms: Any, coords: tuple[str, ...], outputs: tuple[str, ...], call: str
) -> tuple[Term, ...]:
    if isinstance(terms, str) or not isinstance(terms, Iterable):
        raise TypeError(
            f"`{call}` takes terms as a list of names such as ['u', 'u_x', 'u_xx'], but got "
            f"{terms!r}."
        )
    parsed: dict[str, Term] = {}
    for name in terms:
        if not isinstance(name, str):
            raise TypeError(f"`{call}` takes names of terms such as 'u_xx', but got {name!r}.")
        if name in parsed:
            raise ValueError(f"`{call}` got the term {name!r} twice. Name each once.")
        output, _, suffix = (name, "", "") if name in outputs else name.rpartition("_")
        if output not in outputs:
            raise ValueError(
                f"`{call}` does not know the output {output or name!r} of the term {name!r}. The "
                f"outputs are {', '.join(outputs)}; a term is one of them, or one of them with an "
                f"underscore and coordinates, such as 'u_xx'.{_as_one_name(output, outputs)}"
            )
        dirs = split_names(suffix, coords)
        if dirs is None or (name not in outputs and not dirs):
            raise ValueError(
                f"`{call}` cannot read {suffix!r} in the term {name!r} as a sequence of "
                f"coordinates. The coordinates are {', '.join(coords)}."
            )
        parsed[name] = Term(name, outputs.index(output), tuple(sorted(dirs)))
    return tuple(parsed.values())


def _as_one_name(name: str, outputs: tuple[str, ...]) -> str:
    spelled = name and name == "".join(outputs)
    return f" For one output of that name write `outputs=[{name!r}]`." if spelled else ""


def check_fun(fun: Any, call: str) -> None:
    if not callable(fun):
        raise TypeError(
            f"`{call}` takes a function of one point, such as a network, but got {fun!r}."
        )


def check_network(fun: Any, call: str) -> None:
    """Checks that a function takes one point."""
    check_fun(fun, call)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(None)
    except TypeError:
        at = ", ".join(f"point[{i}]" for i in range(max(2, len(signature.parameters))))
        raise TypeError(
            f"`{call}` takes a function of one point, an array of all coordinates, but got one "
            f"that takes {signature}. Wrap it: `lambda point: fun({at})`."
        ) from None


def check_alone(others: tuple[Any, ...], coords: tuple[str, ...], call: str) -> None:
    """Checks that a point was passed as one array."""
    if others:
        raise TypeError(
            f"`{call}` takes one point, an array of the {len(coords)} coordinates "
            f"{', '.join(coords)}, but got {1 + len(others)} arguments. Pass `jnp.stack([...])` of "
            "them."
        )


def check_derivatives(scaling: Any, call: str) -> None:
    if scaling is not None and not isinstance(scaling, DerivativeScaling):
        raise TypeError(
            f"`{call}` takes a `DerivativeScaling` as `scaling`, as the loss receives it in "
            f"`derivatives`, or `None`, but got {in_a_line(scaling)}."
        )


def check_point(point: Any, coords: tuple[str, ...], dtype: Any, call: str) -> Float[Array, " n"]:
    if not (eqx.is_array_like(point) or isinstance(point, list | tuple)):
        raise TypeError(
            f"`{call}` takes one point, an array of the {len(coords)} coordinates "
            f"{', '.join(coords)}, but got {in_a_line(point)}. Pass `jnp.stack([...])` of them."
        )
    point = jnp.asarray(point)
    if point.shape != (len(coords),):
        raise ValueError(
            f"`{call}` takes one point, an array of the {len(coords)} coordinates "
            f"{', '.join(coords)}, but got shape {point.shape}. For many points use `jax.vmap`."
        )
    if not jnp.issubdtype(point.dtype, jnp.floating):
        raise TypeError(f"`{call}` takes a floating-point point, but got {point.dtype.name}.")
    return point if dtype is None else point.astype(dtype)


def check_factor(factor: Any, name: str, call: str) -> Any:
    """Checks that the factor of a derivative in a sum is one real number."""
    dtype = getattr(factor, "dtype", np.dtype(type(factor)))
    if np.shape(factor) != () or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        got = f"shape {np.shape(factor)} and {dtype}" if hasattr(factor, "dtype") else repr(factor)
        raise ValueError(
            f"`{call}` multiplies derivatives by factors that are numbers, scalar arrays or "
            f"functions of the point that return one, but got {got} in the operator {name!r}."
        )
    return factor


def as_network(fun: Callable, outputs: tuple[str, ...], call: str) -> Callable:
    """Wraps `fun` so that its output is an array of shape `[outputs]`."""

    def network(point):
        out = fun(point)
        shape = getattr(out, "shape", None)
        if shape != (len(outputs),) and not (shape == () and len(outputs) == 1):
            what = f"shape {shape}" if shape is not None else f"{type(out).__name__}"
            raise ValueError(
                f"`{call}` expects {len(outputs)} outputs, {', '.join(outputs)}, but the "
                f"network returned {what} for one point. It must return an array with an entry for "
                "each of `outputs`" + (", or a scalar." if len(outputs) == 1 else ".")
            )
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(f"`{call}` needs real floating-point outputs, got {out.dtype.name}.")
        return out.reshape(len(outputs))

    return network


def rows_of(
    scales: DerivativeScaling | None, terms: Iterable[Term], coords: tuple[str, ...], call: str
) -> dict[str, int]:
    """Maps the name of each term to the row that counts it and says by how much it is scaled.
    Raises a `ValueError` if the scaling does not know the term or a coordinate in it.
    """
    if scales is None:
        return {}
    terms, strategy = tuple(terms), scales.strategy
    used = sorted({i for t in terms for i in t.dirs})
    strategy.check_coords([coords[i] for i in used], call)
    return {
        t.name: strategy.row_of(t.name, [coords[i] for i in t.dirs], call) for t in terms if t.dirs
    }
