"""The derivatives of a network that a loss asks for, by name."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._cast import widen
from .._dtypes import as_floating_dtype
from .._repr import brief
from ._names import names_of, split_names
from ._probe import tap
from ._seeds import multiply, power_of_two, unscaled
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


def propagation(fun: Any, outputs: tuple[str, ...], call: str) -> Callable:
    """`fun.forward_derivatives` with an axis for the outputs in all that it returns."""

    def propagate(point, seeds, second):
        value, first, sums = fun.forward_derivatives(point, jnp.stack(seeds), second)
        value = as_network(lambda _: value, outputs, call)(point)
        return value, first.reshape(-1, len(outputs)), sums.reshape(-1, len(outputs))

    return propagate


def chain(network: Callable, seeds: list[Array]) -> Callable:
    """The value and all derivatives along a sequence of directions, by nested `jax.jvp`.

    The same seed at each level lets XLA merge what the levels compute twice: a chain of order K
    costs what propagating a Taylor series of that length costs.
    """
    if not seeds:
        return lambda point: (network(point),)
    inner = chain(network, seeds[:-1])

    def outer(point):
        values, tangents = jax.jvp(inner, (point,), (seeds[-1],))
        return *values, tangents[-1]

    return outer


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


def split_exponent(total: Any, order: int) -> list[Any]:
    """Whole exponents that sum to `total`, as even as can be."""
    return [jnp.floor_divide(total + j, order) for j in range(order)]


def unit(coords: int, i: int, dtype: Any, exponent: Any = None) -> Float[Array, " n"]:
    """The tangent in direction `i`, scaled by a power of two."""
    seed = jnp.asarray(np.eye(coords)[i], dtype)
    return seed if exponent is None else multiply(seed, power_of_two(exponent))


def partials(
    fun: Callable,
    terms: Any,
    *,
    coords: Any,
    outputs: Any,
    scaling: Any = None,
    dtype: Any = None,
) -> Callable[[Float[Array, " coords"]], dict[str, Float[Array, ""]]]:
    """The derivatives of a network that a loss asks for, by name.

    Derivatives are taken in forward mode. All outputs come from one pass, and terms share lower
    orders: `u`, `u_x`, `v_x` and `u_xx` cost what `u_xx` costs. A network that carries value, first
    and second derivatives through its layers together (a method `forward_derivatives`, as
    `mpx_pde.nn.CoordinateMLP` and `mpx_pde.nn.Ansatz` have it) does so up to order 2: in half
    precision this keeps less for the backward pass. Higher orders and other functions take nested
    `jax.jvp`. With a scaling, the seeds are multiplied by powers of two, the chain runs in the
    precision of `fun`, and the results are unscaled once, in float32.

    **Arguments:**

    - `fun`: a function of one point, an array of shape `[coords]`, that returns an array of shape
        `[outputs]`, or a scalar if there is one output. Usually the network.
    - `terms`: names: an output (`"u"`), or an output, an underscore and coordinates (`"u_t"`,
        `"u_xxx"`, `"u_xy"`).
    - `coords`, `outputs`: the names of the entries of the point and of the output, in their order:
        a string with a letter for each, or a list.
    - `scaling`: what the loss received as `derivatives`: a [`mpx_pde.DerivativeScaling`][], or
        `None` for no scaling.
    - `dtype`: what the point is cast to first. By default it goes in as it is: give float32 points
        to a network whose first layer runs in float32, such as `mpx_pde.nn.CoordinateMLP`.

    **Returns:**

    A function of one point, to be mapped by `jax.vmap`, that returns a dict from the names to
    scalars in float32 (float64 for a float64 network).

    **Raises:** `ValueError` for an unknown output or coordinate, a term named twice or unknown to
    the scaling, an order above that of the scaling, and, when it is called, for a point or a
    network output of another size; `TypeError` for a `scaling` that is none.

    ```python
    terms = mpx.partials(jnp.prod, ["u", "u_x", "u_xt"], coords="xt", outputs="u")
    terms(jnp.array([2.0, 3.0]))  # {"u": 6.0, "u_x": 3.0, "u_xt": 1.0}
    ```
    """
    call = "partials"
    check_fun(fun, call)
    check_derivatives(scaling, call)
    coords = names_of(coords, call, "the coordinates")
    outputs = names_of(outputs, call, "the outputs")
    parsed = parse_terms(terms, coords, outputs, call)
    dtype = None if dtype is None else as_floating_dtype(dtype, call)
    rows = {}
    if scaling is not None:
        used = sorted({i for t in parsed for i in t.dirs})
        check_coords(scaling, [coords[i] for i in used], call)
        rows = {t.name: row_of(scaling, t, coords, call) for t in parsed if t.dirs}

    def evaluate(point):
        point = check_point(point, coords, dtype, call)
        values = _evaluate(fun, outputs, parsed, rows, scaling, coords, point, call)
        out = {}
        for term in parsed:
            value = values[term.name][term.output]
            if term.dirs and scaling is not None:
                row = rows[term.name]
                value = tap(scaling.counts[row], value)
                if scaling.active:
                    shift = scaling.rows[row].shift(scaling.exponents)
                    value = unscaled(value, power_of_two(-shift))
            out[term.name] = widen(value)
        return out

    return evaluate


def _evaluate(fun, outputs, terms, rows, scaling, coords, point, call) -> dict[str, Array]:
    """Each term, still scaled, for all outputs."""
    seeds: dict[Any, Array] = {}
    paths = {}
    for term in terms:
        # Which seeds a term takes. Where scales depend on the order or the term, so do they.
        path, exponents = term.dirs, [None] * len(term.dirs)
        if scaling is not None and scaling.active and scaling.kind == "direction":
            exponents = [scaling.exponents[scaling.names.index(coords[i])] for i in term.dirs]
        elif scaling is not None and scaling.active and term.dirs:
            row = scaling.rows[rows[term.name]]
            path = tuple((i, row.weights, j) for j, i in enumerate(term.dirs))
            exponents = split_exponent(row.shift(scaling.exponents), len(path))
        for key, i, exponent in zip(path, term.dirs, exponents, strict=True):
            seeds[key] = unit(len(coords), i, point.dtype, exponent)
        paths[term.name] = path
    wanted = set(paths.values())
    if seeds and hasattr(fun, "forward_derivatives") and all(len(path) <= 2 for path in wanted):
        values = _propagated(propagation(fun, outputs, call), wanted, seeds, point)
    else:
        values = _nested(as_network(fun, outputs, call), wanted, seeds, point)
    return {name: values[path] for name, path in paths.items()}


def _propagated(propagate, wanted, seeds, point) -> dict[tuple, Array]:
    """By a network that carries value and derivatives through its layers together."""
    keys = list(seeds)
    pairs = sorted(tuple(map(keys.index, path)) for path in wanted if len(path) == 2)
    value, first, second = propagate(point, list(seeds.values()), [[pair] for pair in pairs])
    values: dict[tuple, Array] = {(): value}
    values |= {(key,): slope for key, slope in zip(keys, first, strict=True)}
    values |= {(keys[i], keys[j]): curve for (i, j), curve in zip(pairs, second, strict=True)}
    return values


def _nested(network, wanted, seeds, point) -> dict[tuple, Array]:
    """By nested `jax.jvp`: only the longest chains are evaluated."""
    longest = [
        path
        for path in sorted(wanted)
        if not any(other != path and other[: len(path)] == path for other in wanted)
    ]
    values: dict[tuple, Array] = {}
    for path in longest:
        derivatives = chain(network, [seeds[key] for key in path])(point)
        for k, value in enumerate(derivatives):
            values.setdefault(path[:k], value)
    return values
