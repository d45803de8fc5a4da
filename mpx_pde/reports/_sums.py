"""Lists the sums of a program that are so long that half precision may let them stand still."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, dependent, variables
from ..program._jaxpr import aval_of, close
from ..program._lines import Site, site_within
from ..program._rebind import carried_by
from ._known import LARGEST, Known, value_of
from ._survey import Seen, Survey


UNITS = {"float16": 2**11, "bfloat16": 2**8}
"""The number of equal terms from which on a sum in each half type stands still."""

STEPS = 40
"""The number of steps from which on a loop loses too much of what each step adds to its state.

A step rounds the state once. Its increment is about 1/n of the state, so n steps lose up to n
roundings of the sum of all increments, in each half type. Integrators lose 0.1 to 0.5 roundings a
step, and 16 roundings are what any function may lose: 16 / 0.4 steps."""


@dataclasses.dataclass(frozen=True)
class LongSum:
    """A sum that is added up term by term in the dtype of its terms.

    **Attributes:**

    - `line`: `file:line` in the user's code.
    - `primitive`: `"scatter-add"`, also for the gradient of a gather; `"scan"` for a sum that a
        loop carries; `"cumsum"`, `"reduce_window_sum"`, `"bcoo_dot_general"`, ….
    - `dtype`: the dtype of the sum.
    - `terms`: the largest number of terms that may meet in one entry.
    - `backward`: whether it belongs to the backward pass of a derivative.
    - `steps`: whether the terms depend on the sum, as the steps of an integrator do on its state.
    """

    line: str
    primitive: str
    dtype: str
    terms: int
    backward: bool
    steps: bool = False

    @property
    def half(self) -> bool:
        """Returns whether it is taken in half precision."""
        return self.dtype in UNITS

    def stagnates(self, dtype: str | None = None) -> bool:
        """Returns whether there are more terms than a half type has units, or more steps than leave
        enough of each, by default for the sum's own dtype."""
        return self.terms > _most(dtype or self.dtype, self.steps)

    def __str__(self) -> str:
        what = f"`{self.primitive}`" + " of a gradient" * self.backward
        terms = "steps" if self.steps else "terms"
        return f"{self.line} {what}: up to {self.terms:,} {terms} in {self.dtype}"


def _most(dtype: str, steps: bool) -> int | float:
    """Returns the largest number of terms, or of steps, of which a dtype keeps enough."""
    return min(UNITS[dtype], STEPS - 1 if steps else math.inf) if dtype in UNITS else math.inf


def long_sums(survey: Survey, *, wide: bool = False) -> list[LongSum]:
    """Returns the sums in half precision with more terms than their dtype has units, or with more
    steps than leave enough of each (`STEPS`). With `wide`, also those of float32 and float64 that
    would have more than bfloat16 allows.

    The largest number of terms is that of the indices of a scatter, unless it can be counted since
    they are known while tracing. A sum over an axis (`reduce_sum`) is not among them: compilers
    accumulate it in float32.
    """
    found: dict[LongSum, LongSum] = {}
    for one in _sums(survey, wide):
        if one.terms > _most(one.dtype if one.half else "bfloat16", one.steps):
            alike = dataclasses.replace(one, terms=0)
            found[alike] = max(found.get(alike, one), one, key=lambda x: x.terms)
    return sorted(found.values(), key=lambda x: -x.terms)


def described(sums: Sequence[LongSum], dtype: str | None = None) -> str:
    """Describes sums that stand still, in their own half type or another, and what to write."""
    worst = sums[0]
    units = UNITS[dtype or worst.dtype]
    others = list(dict.fromkeys(x.line for x in sums if x.line != worst.line))
    more = f" So does {others[0]}." if others else ""
    more = f" So do {len(others)} other lines, such as {others[0]}." if others[1:] else more
    if worst.steps:
        of = "the gradient of a value" if worst.backward else "a value"
        return (
            f"{worst.line} adds to {of} that a `scan` carries at each of {worst.terms:,} steps in "
            f"{dtype or worst.dtype}.{more} What is smaller than 1/{units:,} of the value is lost, "
            f"and of what is little larger few digits are left. {_MENDS['scan']}"
        )
    where = f"`{worst.primitive}`"
    if worst.backward:
        where = f"the gradient of an indexing, `{worst.primitive}`"
        if worst.primitive == "scan":
            where = "the gradient of what a `scan` uses at each step"
    elif worst.primitive == "scan":
        where = "a value that a `scan` carries"
    return (
        f"{worst.line} adds up to {worst.terms:,} terms in {dtype or worst.dtype} ({where}).{more} "
        f"Such a sum stands still at {units:,} times the size of its terms, without an overflow. "
        f"{_MENDS.get(worst.primitive, _CAST_FIRST)}"
    )


_CAST_FIRST = "Sum in float32 there: cast the terms by `x.astype(jnp.float32)` first"
_MENDS = {
    "scatter-add": "Sum in float32 there: cast what is summed or indexed by "
    "`x.astype(jnp.float32)` first",
    "scan": "Start the loop from a float32 value, and cast what it adds and uses by "
    "`astype(jnp.float32)`",
}


def _sums(survey: Survey, wide: bool) -> Iterator[LongSum]:
    """Yields the sums of a program in half precision, or with `wide` in any, of any length."""
    for seen in survey.seen:
        if seen.step.name in _TERMS and _counts(seen.step.eqn.outvars[0], wide):
            yield _sum(seen.step.name, seen.step.eqn.outvars[0], _terms_of(seen), seen.site)
        if seen.step.name == "scan":
            yield from _carried(seen, survey, wide)


def _terms_of(seen: Seen) -> int:
    """Returns the largest number of terms that meet in an entry of a sum."""
    try:
        return int(_TERMS[seen.step.name](seen.step.eqn, seen.known))
    except Exception:  # a size that is a symbol, or operands of another form
        return 0


def _counts(atom: Any, wide: bool) -> bool:
    dtype = getattr(aval_of(atom), "dtype", np.dtype(np.int32))
    return dtype.name in UNITS or (wide and jnp.issubdtype(dtype, jnp.floating))


def _sum(name: str, atom: Any, terms: int, site: Site, steps: bool = False) -> LongSum:
    dtype, line = aval_of(atom).dtype.name, site.line or "unknown"
    return LongSum(line, name, dtype, terms, bool(site.backward), steps)


def _carried(seen: Seen, survey: Survey, wide: bool) -> Iterator[LongSum]:
    """Yields the values that a loop carries and adds something to at each step."""
    eqn, (flat,) = seen.step.eqn, seen.bodies
    length, carried = eqn.params["length"], carried_by(eqn)
    numbers = [i for i in carried if _counts(eqn.invars[i], wide)]
    if not isinstance(length, int) or not numbers:
        return
    read = (x for step in flat.steps if step.eqn.effects for x in step.outputs)
    changing = dependent(flat, (*flat.inputs[carried.start :], *read))
    for i in numbers:
        units = UNITS.get(aval_of(eqn.invars[i]).dtype.name, UNITS["bfloat16"])
        fixed = lambda x, units=units: (
            x not in changing and _may_keep(value_of(x, survey.known), units)
        )
        held = _added_to(flat.steps, flat.inputs[i], fixed)
        added = held.get(flat.outputs[i - carried.start])
        if added is not None:
            site = site_within(added.eqn, (*seen.inside, *added.calls))
            terms = {*added.variables} - held.keys()
            steps = not terms.isdisjoint(_fed_by(flat, i, carried))
            steps = steps and not _from_layers(flat, carried, terms, survey)
            yield _sum("scan", eqn.invars[i], length, site if site.line else seen.site, steps)


def _fed_by(flat: Flat, i: int, carried: range) -> set[int]:
    """Returns the variables of the body of a loop that depend on what it carries at position `i`,
    in the same step or in a later one. `carried` are the positions of all that it carries."""
    on = {flat.inputs[i]}
    while True:
        found = dependent(flat, on)
        pairs = ((flat.inputs[j], flat.outputs[j - carried.start]) for j in carried)
        more = on | {x for x, y in pairs if y in found}
        if more == on:
            return found
        on = more


def _from_layers(flat: Flat, carried: range, terms: Iterable[int], survey: Survey) -> bool:
    """Returns whether what a loop adds to its state comes out of products of the state with other
    arrays in each step, as in the layers of a network. What these add differs from layer to layer,
    so what is rounded away does not add up."""
    state = dependent(flat, [flat.inputs[i] for i in carried])
    layers = dependent(flat, flat.inputs[carried.stop :]) - state
    containers = {id(seen.step): seen for seen in survey.seen if seen.bodies}
    made = _multiplied(flat, state, layers, containers)
    return not dependent(flat, made).isdisjoint(terms)


def _multiplied(
    flat: Flat, state: set[int], layers: set[int], containers: Mapping[int, Seen]
) -> list[int]:
    """Returns the results of products of one of `state` with one of `layers`, also if they are
    inside of one of the `containers`."""
    out: list[int] = []
    for step in flat.steps:
        both = [not variables.isdisjoint(step.variables) for variables in (state, layers)]
        if not all(both):
            continue
        multiplies = step.name in tables.PRODUCTS
        if (seen := containers.get(id(step))) is not None:
            inside = ((x, *_inside(x, seen, state, layers)) for x in seen.bodies)
            multiplies = any(_multiplied(*x, containers) for x in inside)
        if multiplies:
            out += step.outputs
    return out


def _inside(body: Flat, seen: Seen, state: set[int], layers: set[int]) -> tuple[set[int], set[int]]:
    """Returns which variables in the program of a container depend on the state, and which on
    layers alone."""
    both = [
        dependent(body, [y for x, y in seen.entered if x in variables])
        for variables in (state, layers)
    ]
    return both[0], both[1] - both[0]


_PASSED = tables.LAYOUT | {"convert_element_type", "select_n", "optimization_barrier", "name"}
"""Operations that hand a carried value on."""


def _added_to(
    steps: Sequence[Step], start: int, keeps: Callable[[int | Constant], bool]
) -> Mapping[Any, Step | None]:
    """Returns the variables that hold the value of `start` plus something, each with the sum.
    `keeps` tells whether a value may keep its size when it is multiplied by an operand."""
    held: dict[Any, Step | None] = {start: None}
    for step in steps:
        from_start = [x for x in variables(step.inputs) if x in held]
        if not from_start:
            continue
        if step.name in tables.ADDITIONS and not (
            step.name == "sub" and step.inputs[0] not in held
        ):
            held[step.outputs[0]] = step
        elif step.name == "mul" and len(from_start) == 1:
            (factor,) = (x for x in step.inputs if x != from_start[0])
            if keeps(factor):
                held[step.outputs[0]] = held[from_start[0]]
        elif step.name in _PASSED and len(step.outputs) in (1, len(step.inputs)):
            each = step.outputs if len(step.outputs) > 1 else step.outputs * len(step.inputs)
            pairs = zip(step.inputs, each, strict=True)
            held.update((y, held[x]) for x, y in pairs if x in from_start)
    return held


def _may_keep(factor: Known | None, units: int) -> bool:
    """Returns whether a carried value may keep its size when it is multiplied by `factor` in each
    step, as in Horner's rule or a leaky cell. Factors that are known to let it decay or grow within
    `units` steps do not."""
    if factor is None:
        return True
    return bool(np.any(np.abs(np.abs(np.asarray(factor(), np.float64)) - 1) < 1 / units))


def _most_alike(rows: np.ndarray) -> int:
    """Returns how often the most frequent row occurs."""
    if rows.shape[1] == 0 or not len(rows):
        return len(rows)
    return int(np.unique(rows, axis=0, return_counts=True)[1].max())


# The largest number of terms that meet in an entry, by the name of the primitive.


def _of_scatter(eqn: JaxprEqn, known: Sequence) -> int:
    if eqn.params["unique_indices"]:
        return 1
    shape = aval_of(eqn.invars[1]).shape
    batch = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    rows = math.prod(n for i, n in enumerate(shape[:-1]) if i not in batch)
    places = known[1]
    if rows <= UNITS["bfloat16"] or places is None or math.prod(shape) > LARGEST:
        return rows
    indices = np.moveaxis(places(), batch, range(len(batch)))
    groups = indices.reshape(math.prod(shape[i] for i in batch), -1, shape[-1])
    return max(map(_most_alike, groups), default=0)


def _of_window(eqn: JaxprEqn, _: Sequence) -> int:
    body = eqn.params.get("jaxpr")
    if body is not None and [e.primitive.name for e in close(body).jaxpr.eqns] != ["add"]:
        return 0
    return math.prod(eqn.params["window_dimensions"])


def _of_cumsum(eqn: JaxprEqn, _: Sequence) -> int:
    return aval_of(eqn.invars[0]).shape[eqn.params["axis"]]


def _of_polynomial(eqn: JaxprEqn, _: Sequence) -> int:
    return len(eqn.invars) - 1  # the number, and its coefficients


def _contracted(eqn: JaxprEqn) -> tuple[int, list[int]]:
    """Returns the contracted size of a product with a sparse array, and its contracted axes."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.params["lhs_spinfo"].shape[i] for i in axes), list(axes)


def _of_bcoo(eqn: JaxprEqn, known: Sequence) -> int:
    size, axes = _contracted(eqn)
    shape = aval_of(eqn.invars[1]).shape
    if known[1] is None or len(shape) != 2 or math.prod(shape) > LARGEST:
        return min(size, shape[-2])
    return _most_alike(np.delete(known[1](), axes, axis=1))


def _of_rows(starts: Known | None, otherwise: int) -> int:
    """Returns the length of the longest row of a matrix in compressed rows."""
    known = None if starts is None else starts()
    return otherwise if known is None or known.ndim != 1 else int(np.diff(known).max(initial=0))


def _of_bcsr(eqn: JaxprEqn, known: Sequence) -> int:
    size, axes = _contracted(eqn)
    least = min(size, aval_of(eqn.invars[0]).shape[-1])
    return _of_rows(known[2], least) if axes == [1] else least


def _of_matrix(eqn: JaxprEqn, known: Sequence) -> int:
    size = eqn.params["shape"] if "shape" in eqn.params else eqn.params["spinfo"].shape
    rows = 0 if eqn.params["transpose"] else 1
    least = min(size[rows], aval_of(eqn.invars[0]).shape[0])
    by_rows = eqn.primitive.name.startswith("csr") and not eqn.params["transpose"]
    return _of_rows(known[2], least) if by_rows else least


_TERMS: dict[str, Callable[[JaxprEqn, Sequence], int]] = {
    "scatter-add": _of_scatter,
    "scatter-sub": _of_scatter,
    "reduce_window_sum": _of_window,
    "reduce_window": _of_window,
    "cumsum": _of_cumsum,
    "polynomial": _of_polynomial,  # by Horner's rule, from JAX 0.12 on
    "bcoo_dot_general": _of_bcoo,
    "bcsr_dot_general": _of_bcsr,
    **dict.fromkeys(("csr_matvec", "csr_matmat", "coo_matvec", "coo_matmat"), _of_matrix),
}
