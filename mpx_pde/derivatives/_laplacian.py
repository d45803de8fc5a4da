"""The Laplacian of a network."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._cast import widen
from .._dtypes import as_floating_dtype
from ._names import names_of
from ._partials import (
    Term,
    as_network,
    chain,
    check_coords,
    check_derivatives,
    check_fun,
    check_point,
    direction_row,
    parse_terms,
    propagation,
    row_of,
    unit,
)
from ._probe import tap
from ._seeds import power_of_two, unscaled
from ._state import DerivativeScaling


def laplacian(
    fun: Callable,
    terms: Any = (),
    *,
    coords: Any,
    outputs: Any,
    over: Any = None,
    scaling: Any = None,
    dtype: Any = None,
) -> Callable[[Float[Array, " coords"]], dict[str, Float[Array, ""]]]:
    """The Laplacian of every output of a network.

    A network that knows how to propagate value, gradient and Laplacian together (a method
    `forward_derivatives`, as `mpx_pde.nn.CoordinateMLP` has it) does so, at about 60 % of the cost
    of nested differentiation. Any other function is differentiated twice in each direction.

    **Arguments:**

    - `fun`, `coords`, `outputs`, `scaling`, `dtype`: as for [`mpx_pde.partials`][].
    - `terms`: values and first derivatives, such as `["u", "u_x"]`, which come out of the same
        pass.
    - `over`: the coordinates to sum over, by default all. `over="xy"` leaves out the time of
        `coords="txy"`.

    All directions carry the same scale here: the smallest of theirs with a
    [per-direction][mpx_pde.DerivativeScaling.per_direction] scaling, that of order 2 with a
    [per-order][mpx_pde.DerivativeScaling.per_order] one; a
    [per-term][mpx_pde.DerivativeScaling.per_term] one must have the term `"laplacian"`. Scales per
    direction that are not summed over play no part. A Laplacian over all of their coordinates has a
    histogram of its own, one over some of them is counted with the second derivative in each.

    **Returns:**

    A function of one point that returns a dict of float32 scalars: `"lap_u"` for each output, and
    `terms` by their names.

    **Raises:** as [`mpx_pde.partials`][], and `ValueError` for a scaling that knows no Laplacian or
    a term of higher order or in another direction.

    ```python
    fun = lambda p: jnp.sum(p**2)
    mpx.laplacian(fun, ["u_x"], coords="xy", outputs="u")(jnp.array([2.0, 3.0]))
    # {"lap_u": 4.0, "u_x": 4.0}
    ```
    """
    call = "laplacian"
    check_fun(fun, call)
    check_derivatives(scaling, call)
    coords = names_of(coords, call, "the coordinates")
    outputs = names_of(outputs, call, "the outputs")
    over = coords if over is None else names_of(over, call, "the coordinates of `over`")
    unknown = [c for c in over if c not in coords]
    if unknown:
        raise ValueError(
            f"`{call}` cannot sum over {', '.join(map(repr, unknown))}: the coordinates are "
            f"{', '.join(coords)}."
        )
    dirs = tuple(coords.index(c) for c in over)
    parsed = parse_terms(terms, coords, outputs, call)
    for term in parsed:
        if len(term.dirs) > 1 or not set(term.dirs) <= set(dirs):
            raise ValueError(
                f"`{call}` has values and first derivatives in {', '.join(over)} beside the "
                f"Laplacian, but got the term {term.name!r}. Take it from `partials`."
            )
    dtype = None if dtype is None else as_floating_dtype(dtype, call)
    rows, whole = {}, []
    if scaling is not None:
        check_coords(scaling, over, call)
        whole = laplacian_rows(scaling, over, call)
        rows = {t.name: row_of(scaling, t, coords, call) for t in parsed if t.dirs}

    def evaluate(point):
        point = check_point(point, coords, dtype, call)
        exponent = None
        if scaling is not None and scaling.active:
            exponent = _exponent(scaling, whole)
        seeds = [unit(len(coords), i, point.dtype, exponent) for i in dirs]
        value, gradient, second = _propagate(fun, outputs, point, seeds, call)

        def finish(x, order, counted):
            """Unscales `x`, which carries `order` seeds, and counts it in each of these rows."""
            if scaling is None:
                return widen(x)
            shift = 0 if exponent is None else order * exponent
            for row in counted:
                if exponent is not None:
                    # To the scale that the row stands for, so that its histogram means one thing.
                    own = scaling.rows[row].shift(scaling.exponents)
                    x, shift = unscaled(x, power_of_two(own - shift)), own
                x = tap(scaling.counts[row], x)
            return widen(x) if exponent is None else unscaled(x, power_of_two(-shift))

        out = {}
        for i, name in enumerate(outputs):
            out[f"lap_{name}"] = sum(finish(x[i], 2, whole) for x in second)
        for term in parsed:
            out[term.name] = _lower(term, value, gradient, dirs, finish, rows)
        return out

    return evaluate


def laplacian_rows(scaling: DerivativeScaling, over: tuple[str, ...], call: str) -> list[int]:
    """The rows that count a Laplacian over some coordinates: those whose scalers it answers for."""
    if scaling.kind == "direction" and set(over) != set(scaling.names) and scaling.order != 1:
        return [direction_row(scaling, [name] * 2) for name in over]
    if "laplacian" not in scaling.row_names:
        raise ValueError(
            f"`{call}`: the scaling has no scaler for a Laplacian; it knows "
            f"{', '.join(scaling.names)}. Name 'laplacian' in `DerivativeScaling.per_term`, or "
            "build the scaling for order 2."
        )
    return [scaling.row_names.index("laplacian")]


def _exponent(scaling: DerivativeScaling, rows: list[int]) -> Any:
    """The exponent of the one seed that all directions share: the smallest that a row allows."""
    shifts = [scaling.rows[row].shift(scaling.exponents) for row in rows]
    return jnp.floor_divide(ft.reduce(jnp.minimum, shifts), 2)


def _propagate(fun, outputs, point, seeds, call) -> tuple[Array, list[Array], list[Array]]:
    """Value, first derivatives, and summands of the Laplacian, for all outputs."""
    if hasattr(fun, "forward_derivatives"):
        every = [(i, i) for i in range(len(seeds))]
        value, first, second = propagation(fun, outputs, call)(point, seeds, [every])
        return value, list(first), list(second)
    network = as_network(fun, outputs, call)
    chains = [chain(network, [seed, seed])(point) for seed in seeds]
    return chains[0][0], [c[1] for c in chains], [c[2] for c in chains]


def _lower(term: Term, value, gradient, dirs, finish, rows) -> Array:
    if not term.dirs:
        return widen(value[term.output])
    return finish(
        gradient[dirs.index(term.dirs[0])][term.output], 1, [rows[term.name]] if rows else []
    )
