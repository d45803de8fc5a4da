"""The derivatives of a network that a loss asks for, by name."""

from collections.abc import Callable
from typing import Any

from .._dtypes import as_floating_dtype
from .._types import DTypeLike, Names
from ._checks import check_derivatives, check_network, parse_terms, rows_of
from ._evaluation import Evaluation
from ._names import names_of


def partials(
    fun: Callable[..., Any],
    terms: Names,
    *,
    coords: Names,
    outputs: Names,
    scaling: Any = None,
    dtype: DTypeLike | None = None,
) -> Evaluation:
    """The derivatives of a network that a loss asks for, by name.

    The function is traced once, and evaluated on streams: its value together with the derivatives
    that the terms need, each mapped by a rule for each operation. All outputs come out of one pass,
    and terms share lower orders: a derivative of order K along one coordinate costs K + 1
    evaluations of the network, where nested differentiation costs up to 2^K.

    In a network that is in half precision, products are half × half, streams are stored in half
    between layers (multiplied by the scales of `scaling`), and everything between products is
    computed in float32. The product that first meets the point runs in float32, and so does
    whatever a [`mpx_pde.FullPrecision`][] holds. For the backward pass each stream is kept once a
    layer.

    **Arguments:**

    - `fun`: a function of one point, an array of shape `[coords]`, that returns an array of shape
        `[outputs]`, or a scalar if there is one output. Usually the network.
    - `terms`: names: an output (`"u"`), or an output, an underscore and coordinates (`"u_t"`,
        `"u_xxx"`, `"u_xy"`).
    - `coords`, `outputs`: the names of the entries of the point and of the output, in their order:
        a string with a letter for each, or a list.
    - `scaling`: what the loss received as `derivatives`: a [`mpx_pde.DerivativeScaling`][], or
        `None` for no scaling.
    - `dtype`: what the point is rounded to first. By default it goes in as it is: give float32
        points, since rounded coordinates cost more accuracy than anything else.

    **Returns:**

    A function of one point, to be mapped by `jax.vmap`, that returns a dict from the names to
    scalars in float32 (float64 for a float64 network). Its method `report`, called with a point,
    tells how each operation was differentiated and what each product is multiplied in.

    **Raises:** `ValueError` for no terms at all, an unknown output or coordinate, a term named
    twice or unknown to the scaling, an order above that of the scaling, and, when it is called, for
    a point or a network output of another size or an operation without derivatives; `TypeError` for
    a `scaling` that is none.

    ```python
    terms = mpx.partials(jnp.prod, ["u", "u_x", "u_xt"], coords="xt", outputs="u")
    terms(jnp.array([2.0, 3.0]))  # {"u": 6.0, "u_x": 3.0, "u_xt": 1.0}
    ```
    """
    call = "partials"
    check_network(fun, call)
    check_derivatives(scaling, call)
    coords = names_of(coords, call, "the coordinates")
    outputs = names_of(outputs, call, "the outputs")
    parsed = parse_terms(terms, coords, outputs, call)
    if not parsed:
        raise ValueError(
            f"`{call}` takes the names of one term at least, such as ['u', 'u_x', 'u_xx'], but got "
            f"{terms!r}, of which it would return nothing."
        )
    dtype = None if dtype is None else as_floating_dtype(dtype, call)
    rows = rows_of(scaling, parsed, coords, call)
    return Evaluation(call, fun, coords, outputs, parsed, (), rows, scaling, dtype)
