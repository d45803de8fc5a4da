"""What the derivative functions check, and how they read names."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._repr import brief
from ._names import split_names
from ._state import DerivativeScaling, weights_of


class Term(NamedTuple):
    """A derivative: of which output, in which directions (sorted), by what name."""

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
                "underscore and coordinates, such as 'u_xx'."
            )
        dirs = split_names(suffix, coords)
        if dirs is None or (name not in outputs and not dirs):
            raise ValueError(
                f"`{call}` cannot read {suffix!r} in the term {name!r} as a sequence of "
                f"coordinates. The coordinates are {', '.join(coords)}."
            )
        parsed[name] = Term(name, outputs.index(output), tuple(sorted(dirs)))
    return tuple(parsed.values())


def check_fun(fun: Any, call: str) -> None:
    if not callable(fun):
        raise TypeError(
            f"`{call}` takes a function of one point, such as a network, but got {fun!r}."
        )


def check_derivatives(scaling: Any, call: str) -> None:
    if scaling is not None and not isinstance(scaling, DerivativeScaling):
        raise TypeError(
            f"`{call}` takes a `DerivativeScaling` as `scaling`, as the loss receives it in "
            f"`derivatives`, or `None`, but got {brief(scaling)}."
        )


def check_coords(scaling: DerivativeScaling, coords: Iterable[str], call: str) -> None:
    if scaling.kind != "direction":
        return
    unknown = [c for c in coords if c not in scaling.names]
    if unknown:
        raise ValueError(
            f"`{call}`: the scaling was built for the coordinates {', '.join(scaling.names)} and "
            f"has no scale for {', '.join(map(repr, unknown))}. Name all coordinates in "
            "`DerivativeScaling.per_direction`."
        )


def check_point(point: Any, coords: tuple[str, ...], dtype: Any, call: str) -> Float[Array, " n"]:
    point = jnp.asarray(point)
    if point.shape != (len(coords),):
        raise ValueError(
            f"`{call}` takes one point, an array of the {len(coords)} coordinates "
            f"{', '.join(coords)}, but got shape {point.shape}. For many points use `jax.vmap`."
        )
    if not jnp.issubdtype(point.dtype, jnp.floating):
        raise TypeError(f"`{call}` takes a floating-point point, but got {point.dtype.name}.")
    return point if dtype is None else point.astype(dtype)


def as_network(fun: Callable, outputs: tuple[str, ...], call: str) -> Callable:
    """`fun` with its output as an array of shape `[outputs]`."""

    def network(point):
        out = fun(point)
        shape = getattr(out, "shape", None)
        if shape != (len(outputs),) and not (shape == () and len(outputs) == 1):
            what = f"shape {shape}" if shape is not None else f"{type(out).__name__}"
            raise ValueError(
                f"`{call}` was told of {len(outputs)} outputs, {', '.join(outputs)}, but the "
                f"network returned {what} for one point. It must return an array with an entry for "
                "each of `outputs`" + (", or a scalar." if len(outputs) == 1 else ".")
            )
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(f"`{call}` needs real floating-point outputs, got {out.dtype.name}.")
        return out.reshape(len(outputs))

    return network


def row_of(scaling: DerivativeScaling, term: Term, coords: tuple[str, ...], call: str) -> int:
    """The row that counts a term and says by how much it is scaled."""
    rows, order = scaling.row_names, len(term.dirs)
    if scaling.order is not None and order > scaling.order and term.name not in scaling.names:
        raise ValueError(
            f"`{call}`: the term {term.name!r} is of order {order}, but the scaling was built for "
            f"orders up to {scaling.order}. Give `DerivativeScaling.per_{scaling.kind}` the order "
            f"{order}."
        )
    named = [coords[i] for i in term.dirs]
    if term.name in rows:
        row = rows.index(term.name)
        _check_row(scaling, row, term, named, call)
        return row
    if scaling.kind == "order":
        return order - 1
    if scaling.kind == "direction":
        return direction_row(scaling, named)
    raise ValueError(
        f"`{call}`: the scaling has no scaler for the term {term.name!r}; it knows "
        f"{', '.join(scaling.names)}. Name it in `DerivativeScaling.per_term`."
    )


def direction_row(scaling: DerivativeScaling, named: list[str]) -> int:
    """The row of the derivatives in these directions, whatever the output."""
    # Not by its name: with coordinates "x" and "xx" two rows share one.
    weights = weights_of(scaling.names.index(name) for name in named)
    return [row.weights if row.name.startswith("_") else () for row in scaling.rows].index(weights)


def _check_row(scaling: DerivativeScaling, row: int, term: Term, named: list[str], call: str):
    """A `ValueError` if a term is not the derivative that its histogram was made for."""
    if scaling.kind == "direction":
        expected = weights_of(scaling.names.index(name) for name in named)
    elif scaling.kind == "order" and term.name not in scaling.names:
        expected = ((len(named) - 1, 1),)
    else:
        return
    if scaling.rows[row].weights != expected:
        raise ValueError(
            f"`{call}`: the term {term.name!r} is the derivative in {', '.join(named)}, which is "
            f"not what `DerivativeScaling.per_{scaling.kind}` took it for. Give it the same "
            "coordinates" + (", as `coords`." if scaling.kind == "order" else ".")
        )
