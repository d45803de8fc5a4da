"""Evaluates the derivatives of a network that a loss asks for, by name."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import DTypeLike, Names
from .._util._wrapper import says_how
from ..precision._dtypes import as_floating_dtype, check_integer
from ..precision._tree import check_key
from ..scaling._checks import (
    check_factor,
    check_network,
    coords_of,
    names_of,
    parse_terms,
    split_names,
)
from ..scaling._derivatives import check_derivatives
from ._evaluation import Evaluation, Sum, Summand


@public
@says_how(
    "`mpx_pde.partials(model, ['u_t', 'u_xx'], coords='tx', outputs='u')(point)`: "
    "`coords` and `outputs` name the entries of the point and of the output, in their order."
)
def partials(
    fun: Callable[..., Any],
    terms: Names,
    *,
    coords: Names,
    outputs: Names,
    scaling: Any = None,
    dtype: DTypeLike | None = None,
) -> Evaluation:
    """Evaluates derivatives of a network by their names.

    The function is traced once and evaluated on streams: its value, and the derivatives that the
    terms need. Each operation maps all of them by a rule. All outputs come out of one pass, and
    terms share lower orders. A derivative of order K along one coordinate costs K + 1 evaluations
    of the network; nested differentiation costs up to 2^K.

    If the network is in half precision, products multiply half by half, streams are stored in half
    between layers (multiplied by the scales of `scaling`), and everything between products is
    computed in float32. The product that first meets the point runs in float32, and so does
    everything that a [`mpx_pde.FullPrecision`][] holds. For the backward pass each stream is kept
    once per layer.

    **Arguments:**

    - `fun`: a function of one point, an array of shape `[coords]`, that returns an array of shape
        `[outputs]`, real or complex, or a scalar if there is one output. Usually the network.
    - `terms`: a list of names, or one name: an output (`"u"`), or an output, an underscore and
        coordinates (`"u_t"`, `"u_xxx"`, `"u_xy"`).
    - `coords`, `outputs`: the names of the entries of the point and of the output, in their order:
        a string with a letter for each, or a list.
    - `scaling`: the `derivatives` that the loss received, a [`mpx_pde.DerivativeScaling`][], or
        `None` for no scaling.
    - `dtype`: the dtype that the point is rounded to first. By default it is not rounded. Pass
        float32 points, since rounded coordinates cost more accuracy than anything else.

    **Returns:**

    A function of one point, to be mapped by `jax.vmap`, that returns a dict from the names to
    scalars in float32 (float64 for a float64 network), or in complex64 (complex128) if the outputs
    are complex: each term is the derivative of the real part plus i times that of the imaginary
    part. Products of complex numbers are never rounded to half. The method `report`, called with a
    point, tells how each operation is differentiated and in which precision each product is
    multiplied.

    **Raises:** `ValueError` for no terms at all, an unknown output or coordinate, names of
    coordinates that run together (`"x"` and `"xx"`), a term named twice or unknown to the scaling,
    and an order above that of the scaling; `TypeError` for a
    `scaling` that is not one. The function raises a `ValueError` for a point or a network output of
    another size and for an operation without derivatives.

    ```python
    terms = mpx.partials(jnp.prod, ["u", "u_x", "u_xt"], coords="xt", outputs="u")
    terms(jnp.array([2.0, 3.0]))  # {"u": 6.0, "u_x": 3.0, "u_xt": 1.0}
    ```
    """
    return _evaluation(fun, {}, terms, coords, outputs, coords, scaling, dtype)


@public
@says_how(
    "`mpx_pde.laplacian(model, coords='xy', outputs='u')(point)`: "
    "`coords` and `outputs` name the entries of the point and of the output, in their order."
)
def laplacian(
    fun: Callable[..., Any],
    terms: Names = (),
    *,
    coords: Names,
    outputs: Names,
    over: Names | None = None,
    scaling: Any = None,
    dtype: DTypeLike | None = None,
) -> Evaluation:
    """Evaluates the Laplacian of every output of a network.

    The value, the gradient and the Laplacian itself are propagated: D + 2 streams in D coordinates
    (*collapsed Taylor mode*). Nested differentiation takes 2 D + 1 or more.

    **Arguments:**

    - `fun`, `coords`, `outputs`, `scaling`, `dtype`: as for [`mpx_pde.partials`][].
    - `terms`: other terms, such as `["u", "u_x"]`, which are evaluated in the same pass.
    - `over`: the coordinates to sum over, by default all. `over="xy"` leaves out the time of
        `coords="txy"`.

    With a [per-direction][mpx_pde.DerivativeScaling.per_direction] scaling, the Laplacian is stored
    with the smallest scale that the second derivative in any of its directions has. With a
    [per-order][mpx_pde.DerivativeScaling.per_order] scaling, it is stored with that of order 2. A
    [per-term][mpx_pde.DerivativeScaling.per_term] scaling must have the term `"laplacian"`. A
    Laplacian over all coordinates of a scaling has a histogram of its own; one over some of them is
    counted with the second derivative in each.

    **Returns:**

    A function of one point that returns a dict of scalars, in the dtype of [`mpx_pde.partials`][]:
    `"lap_u"` for each output, and `terms` by their names. It has a method `report`, too.

    **Raises:** as [`mpx_pde.partials`][], and `ValueError` for a scaling without a Laplacian.

    ```python
    fun = lambda p: jnp.sum(p**2)
    mpx.laplacian(fun, ["u_x"], coords="xy", outputs="u")(jnp.array([2.0, 3.0]))
    # {"lap_u": 4.0, "u_x": 4.0}
    ```
    """
    over = coords if over is None else over
    operators = {"lap": "laplacian"}
    return _evaluation(fun, operators, terms, coords, outputs, over, scaling, dtype)


@public
@says_how(
    "`mpx_pde.linear_operator(model, {'heat': {'t': 1.0, 'xx': -0.1}}, coords='tx', outputs='u')`: "
    "`coords` and `outputs` name the entries of the point and of the output, in their order."
)
def linear_operator(
    fun: Callable[..., Any],
    operators: Mapping[str, Any],
    terms: Names = (),
    *,
    coords: Names,
    outputs: Names,
    scaling: Any = None,
    dtype: DTypeLike | None = None,
    samples: int | None = None,
    key: Any = None,
    replace: bool = False,
) -> Evaluation:
    """Evaluates linear combinations of derivatives of every output of a network, each as one
    stream.

    If only the sum is needed, such as `u_t - 0.1 u_xx`, its summands need no streams of their own.
    One stream is propagated for all of them, in addition to the streams below them (here `u_x`).

    **Arguments:**

    - `fun`, `coords`, `outputs`, `scaling`, `dtype`: as for [`mpx_pde.partials`][].
    - `operators`: a mapping from names to sums: `"laplacian"`, `"biharmonic"` (the Laplacian of the
        Laplacian), or a mapping from derivatives (`"t"`, `"xx"`; tuples if the names of coordinates
        have several letters) to their factors: numbers, scalar arrays, or functions of the point.
    - `terms`: other terms, such as `["u", "u_x"]`, which are evaluated in the same pass.
    - `samples`: the number of summands to draw at random instead of taking all. The estimate is
        unbiased and its variance falls as 1 / `samples`, for problems in hundreds of dimensions (Hu
        et al., *Stochastic Taylor Derivative Estimator*, 2024). Coordinates are drawn for
        `"laplacian"` and for mappings from pure derivatives of one order, such as all of `"xxx"`,
        to constants. Normally distributed directions are drawn for `"biharmonic"`.
    - `key`: a `jax.random.key` for the draws. Pass the same at all points, and a new one each step.
    - `replace`: whether a coordinate may be drawn twice. If not, the variance is smaller, and with
        as many samples as coordinates it is zero.

    **Returns:**

    A function of one point that returns a dict of scalars, in the dtype of [`mpx_pde.partials`][]:
    `"NAME_u"` for each operator and output, and `terms` by their names. Factors are real, also for
    complex outputs.

    **Raises:** as [`mpx_pde.partials`][]; `ValueError` for an operator that cannot be read or
    sampled, `TypeError` for samples without a key.

    ```python
    fun = lambda p: p[0] ** 2 * p[1]
    heat = mpx.linear_operator(fun, {"heat": {"t": 1.0, "xx": -0.5}}, coords="xt", outputs="u")
    heat(jnp.array([2.0, 3.0]))  # {"heat_u": 4.0 - 0.5 * 6.0}
    ```
    """
    if not isinstance(operators, Mapping) or not operators:
        raise TypeError(
            f"`{called()}` takes `operators` as a mapping from names to what is summed, such as "
            f'{{"heat": {{"t": 1.0, "xx": -0.1}}}}, but got {in_a_line(operators)}.'
        )
    draw = None
    if samples is not None:
        count = check_integer(samples, "samples")
        check_key(key)
        keys = iter(jax.random.split(key, len(operators)))

        def sampled(total, spec, size):
            return _sampled(total, spec, size, count, next(keys), replace)

        draw = sampled

    return _evaluation(fun, operators, terms, coords, outputs, coords, scaling, dtype, draw)


def _evaluation(
    fun: Callable[..., Any],
    operators: Mapping[str, Any],
    terms: Names,
    coords: Names,
    outputs: Names,
    over: Names,
    scaling: Any,
    dtype: DTypeLike | None,
    draw: Callable[[Sum, Any, int], Sum] | None = None,
) -> Evaluation:
    """Builds the function that evaluates terms and operators. `draw`, if given, samples sums."""
    check_network(fun)
    check_derivatives(scaling)
    coords = coords_of(coords)
    outputs = names_of(outputs, "the outputs")
    over = names_of(over, "the coordinates of `over`")
    unknown = [c for c in over if c not in coords]
    if unknown:
        raise ValueError(
            f"`{called()}` cannot sum over {', '.join(map(repr, unknown))}: the coordinates are "
            f"{', '.join(coords)}."
        )
    parsed = parse_terms(terms, coords, outputs)
    if not parsed and not operators:
        raise ValueError(
            f"`{called()}` takes the name of at least one term, such as ['u', 'u_x', 'u_xx'], but "
            f"got {terms!r}. It would return nothing."
        )
    dtype = None if dtype is None else as_floating_dtype(dtype)
    dirs = [coords.index(c) for c in over]
    sums = []
    for name, spec in operators.items():
        summands = _summands(spec, name, dirs, coords)
        rows: tuple[int, ...] = ()
        if scaling is not None:
            strategy, named = scaling.strategy, [[coords[i] for i in s.dirs] for s in summands]
            strategy.check_coords(dict.fromkeys(itertools.chain(*named)))
            rows = strategy.sum_rows(named, spec == "laplacian")
        total = Sum(name, summands, rows)
        sums.append(total if draw is None else draw(total, spec, len(coords)))
    return Evaluation(fun, coords, outputs, parsed, sums, scaling, dtype)


def _summands(
    spec: Any, name: str, dirs: Sequence[int], coords: tuple[str, ...]
) -> tuple[Summand, ...]:
    if isinstance(spec, str) and spec == "laplacian":
        return tuple(Summand((i, i)) for i in dirs)
    if isinstance(spec, str) and spec == "biharmonic":
        pairs = [(i, j) for k, i in enumerate(dirs) for j in dirs[k:]]
        return tuple(Summand(tuple(sorted((i, i, j, j))), 1.0 if i == j else 2.0) for i, j in pairs)
    if not isinstance(spec, Mapping) or not spec:
        raise ValueError(
            f"`{called()}` knows the operators 'laplacian' and 'biharmonic', and mappings from "
            f"derivatives such as 'xx' to factors, but got {in_a_line(spec)} for {name!r}."
        )
    out: dict[tuple[int, ...], Any] = {}
    for derivative, factor in spec.items():
        if isinstance(derivative, str):
            index = split_names(derivative, coords)
        else:
            known = all(c in coords for c in derivative)
            index = tuple(coords.index(c) for c in derivative) if known else None
        if not index:
            raise ValueError(
                f"`{called()}` cannot read {derivative!r} in the operator {name!r} as a sequence "
                f"of coordinates. The coordinates are {', '.join(coords)}; an operator applies to "
                "all outputs, and names none: 'xx', not 'u_xx'."
            )
        index = tuple(sorted(index))
        if index in out:
            raise ValueError(f"`{called()}` got the derivative {derivative!r} twice in {name!r}.")
        out[index] = factor if callable(factor) else check_factor(factor, name)
    return tuple(Summand(d, f) for d, f in out.items())


def _sampled(total: Sum, spec, size: int, samples: int, key, replace: bool) -> Sum:
    """Replaces a sum by one over randomly drawn directions."""
    some = total.summands[:1] * samples
    # The network may be in float64.
    widest = jax.dtypes.canonicalize_dtype("float64")
    if isinstance(spec, str) and spec == "biharmonic":
        dirs = sorted({i for s in total.summands for i in s.dirs})
        drawn = jax.random.normal(key, (samples, len(dirs)), jnp.float32)
        directions = jnp.zeros((samples, size), jnp.float32).at[:, np.array(dirs)].set(drawn)
        # The mean of the fourth derivative along these directions is three times the biharmonic.
        factors = jnp.full(samples, 1 / (3 * samples), widest)
        return dataclasses.replace(total, summands=some, directions=(directions, factors), order=4)
    orders = {len(s.dirs) for s in total.summands}
    if len(orders) > 1 or any(len(set(s.dirs)) > 1 or callable(s.factor) for s in total.summands):
        raise ValueError(
            f"`{called()}` draws samples of 'laplacian', 'biharmonic', and pure derivatives of one "
            "order with constant factors, such as 'xxx' in every coordinate, but "
            f"{total.name!r} has others, or functions of the point. Take those as an operator or "
            "a term of their own, without `samples`."
        )
    if not replace and samples > len(total.summands):
        raise ValueError(
            f"`{called()}` cannot draw {samples} of {len(total.summands)} summands of "
            f"{total.name!r} without replacement. Take fewer `samples`, or `replace=True`."
        )
    factors = jnp.asarray([s.factor for s in total.summands], widest)
    at = jnp.array([s.dirs[0] for s in total.summands])
    drawn = jax.random.choice(key, len(at), (samples,), replace=replace)
    directions = jax.nn.one_hot(at[drawn], size, dtype=jnp.float32)
    factors = factors[drawn] * (len(at) / samples)
    return dataclasses.replace(
        total, summands=some, directions=(directions, factors), order=orders.pop()
    )
