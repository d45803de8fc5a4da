"""Lists the sums of a jaxpr that are so long that half precision may let them stand still."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, dependent, flatten, variables
from ..program._jaxpr import aval_of, bodies_of, close, is_container
from ..program._lines import NOWHERE, Site, site_inside, site_of
from ..program._rebind import scan_counts
from ._known import LARGEST, Known, constant, results, value_of


UNITS = {"float16": 2**11, "bfloat16": 2**8}
"""The number of equal terms from which on a sum in each half type stands still."""

STEPS = {"float16": 128, "bfloat16": 48}
"""The number of steps from which on a loop loses too much of what each step adds to its state. Of n
steps of an integrator each adds about 1/n of the state, so most digits of it are rounded away: the
gradient of 128 Euler steps is off by 2 % in float16, that of 50 steps by 8 % in bfloat16."""


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
        limits = STEPS if self.steps else UNITS
        return self.terms > limits.get(dtype or self.dtype, math.inf)

    def __str__(self) -> str:
        what = f"`{self.primitive}`" + " of a gradient" * self.backward
        terms = "steps" if self.steps else "terms"
        return f"{self.line} {what}: up to {self.terms:,} {terms} in {self.dtype}"


def long_sums(closed: ClosedJaxpr, *, wide: bool = False) -> list[LongSum]:
    """Returns the sums in half precision with more terms than their dtype has units, or with more
    steps than leave enough of each (`STEPS`). With `wide`, also those of float32 and float64 that
    would have more than bfloat16 allows.

    The largest number of terms is that of the indices of a scatter, unless it can be counted since
    they are known while tracing. A sum over an axis (`reduce_sum`) is not among them: compilers
    accumulate it in float32.
    """
    return _Search(wide).found_in(closed)


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


class _Search:
    def __init__(self, wide: bool):
        self.wide = wide
        self.sums: dict[tuple, LongSum] = {}

    def found_in(self, closed: ClosedJaxpr) -> list[LongSum]:
        self._visit(closed, [None] * len(closed.jaxpr.invars), NOWHERE)
        return sorted(self.sums.values(), key=lambda x: -x.terms)

    def _visit(
        self, closed: ClosedJaxpr, operands: Sequence[Known | None], outer: Site
    ) -> list[Known | None]:
        jaxpr = closed.jaxpr
        known: dict[Any, Known | None] = dict(zip(jaxpr.invars, operands, strict=True))
        pairs = zip(jaxpr.constvars, closed.consts, strict=True)
        known.update((v, constant(x)) for v, x in pairs)
        read = lambda atom: constant(atom.val) if isinstance(atom, Literal) else known.get(atom)
        for eqn in jaxpr.eqns:
            given, site = list(map(read, eqn.invars)), site_of(eqn, outer)
            if is_container(eqn):
                out = self._enter(eqn, given, site)
            else:
                self._look(eqn, given, site)
                out = results(eqn, given)
            known.update(zip(eqn.outvars, out, strict=True))
        return list(map(read, jaxpr.outvars))

    def _enter(self, eqn: JaxprEqn, given: list, site: Site) -> list[Known | None]:
        name, bodies, inside = eqn.primitive.name, bodies_of(eqn), site_inside(eqn, site)
        unknown: list[Known | None] = [None] * len(eqn.outvars)
        if name == "scan":
            self._carried(eqn, bodies[0], given, site)
        if name in ("scan", "while", "cond", "shard_map") or len(bodies) != 1:
            for body in bodies:
                fixed = scan_counts(eqn)[0] if name == "scan" else 0
                inner = [*given[:fixed], *[None] * (len(body.jaxpr.invars) - fixed)]
                self._visit(body, inner, inside)
            return unknown
        out = self._visit(bodies[0], given, inside)
        return out if len(out) == len(unknown) else unknown

    def _look(self, eqn: JaxprEqn, given: list, site: Site) -> None:
        terms = _TERMS.get(eqn.primitive.name)
        if terms is None or not self._counts(aval_of(eqn.outvars[0])):
            return
        try:
            self._add(eqn.primitive.name, aval_of(eqn.outvars[0]), int(terms(eqn, given)), site)
        except Exception:  # a size that is a symbol, or operands of another form
            return

    def _counts(self, aval: Any) -> bool:
        dtype = getattr(aval, "dtype", np.dtype(np.int32))
        return dtype.name in UNITS or (self.wide and jnp.issubdtype(dtype, jnp.floating))

    def _add(self, name: str, aval: Any, terms: int, site: Site, steps: bool = False) -> None:
        dtype, limits = aval.dtype.name, STEPS if steps else UNITS
        if terms > limits.get(dtype, limits["bfloat16"]):
            line, backward = site.line or "unknown", bool(site.backward)
            key = line, name, dtype, backward, steps
            terms = max(terms, self.sums[key].terms if key in self.sums else 0)
            self.sums[key] = LongSum(line, name, dtype, terms, backward, steps)

    def _carried(self, eqn: JaxprEqn, body: ClosedJaxpr, given: list, site: Site) -> None:
        """Looks for values that a loop carries and adds something to at each step."""
        length, (first, count) = eqn.params["length"], scan_counts(eqn)
        carried = range(first, first + count)
        if not isinstance(length, int) or not any(self._counts(body.in_avals[i]) for i in carried):
            return
        flat = flatten(body, forward_mode=False)
        inside, fixed = site_inside(eqn, site), _fixed(flat, given[:first])
        for i in carried:
            if self._counts(body.in_avals[i]):
                units = UNITS.get(body.in_avals[i].dtype.name, UNITS["bfloat16"])
                held = _added_to(flat.steps, flat.inputs[i], fixed, units)
                added = held.get(flat.outputs[i - first])
                if added is not None:
                    where = _site_in(added, inside)
                    where = where if where.line else site
                    terms = {*added.variables} - held.keys()
                    steps = not terms.isdisjoint(_fed_by(flat, i, carried))
                    self._add("scan", body.in_avals[i], length, where, steps)


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


def _site_in(step: Step, outer: Site) -> Site:
    for call in step.calls:
        outer = site_inside(call, site_of(call, outer))
    return site_of(step.eqn, outer)


_PASSED = tables.LAYOUT | {"convert_element_type", "select_n", "optimization_barrier", "name"}
"""Operations that hand a carried value on."""


def _added_to(
    steps: Sequence[Step], start: int, fixed: Mapping[int, Known | None], units: int
) -> Mapping[Any, Step | None]:
    """Returns the variables that hold the value of `start` plus something, each with the sum.
    `fixed` are those that are the same in each step of the loop."""
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
            if _keeps(factor, fixed, units):
                held[step.outputs[0]] = held[from_start[0]]
        elif step.name in _PASSED and len(step.outputs) in (1, len(step.inputs)):
            each = step.outputs if len(step.outputs) > 1 else step.outputs * len(step.inputs)
            pairs = zip(step.inputs, each, strict=True)
            held.update((y, held[x]) for x, y in pairs if x in from_start)
    return held


def _fixed(flat: Flat, given: Sequence[Known | None]) -> dict[int, Known | None]:
    """Returns the variables of the body of a loop that are the same in each step, with their values
    if they are known. `given` are the constants of the loop."""
    fixed: dict[int, Known | None] = dict(zip(flat.inputs, given, strict=False))
    fixed.update((k, constant(x.value)) for k, x in flat.constants.items())
    for step in flat.steps:
        if not step.eqn.effects and fixed.keys() >= {*step.variables} and not bodies_of(step.eqn):
            values = results(step.eqn, [value_of(x, fixed) for x in step.inputs])
            fixed.update(zip(step.outputs, values, strict=True))
    return fixed


def _keeps(factor: int | Constant, fixed: Mapping[int, Known | None], units: int) -> bool:
    """Returns whether a carried value may keep its size when it is multiplied by `factor` in each
    step, as in Horner's rule or a leaky cell. Factors that are known to let it decay or grow within
    `units` steps do not."""
    if not isinstance(factor, Constant) and factor not in fixed:
        return False
    known = value_of(factor, fixed)
    if known is None:
        return True
    return bool(np.any(np.abs(np.abs(np.asarray(known(), np.float64)) - 1) < 1 / units))


def _most_alike(rows: np.ndarray) -> int:
    """Returns how often the most frequent row occurs."""
    if rows.shape[1] == 0 or not len(rows):
        return len(rows)
    return int(np.unique(rows, axis=0, return_counts=True)[1].max())


# The largest number of terms that meet in an entry, by the name of the primitive.


def _of_scatter(eqn: JaxprEqn, given: list) -> int:
    if eqn.params["unique_indices"]:
        return 1
    shape = aval_of(eqn.invars[1]).shape
    batch = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    rows = math.prod(n for i, n in enumerate(shape[:-1]) if i not in batch)
    known = given[1]
    if rows <= UNITS["bfloat16"] or known is None or math.prod(shape) > LARGEST:
        return rows
    indices = np.moveaxis(known(), batch, range(len(batch)))
    groups = indices.reshape(math.prod(shape[i] for i in batch), -1, shape[-1])
    return max(map(_most_alike, groups), default=0)


def _of_window(eqn: JaxprEqn, _: list) -> int:
    body = eqn.params.get("jaxpr")
    if body is not None and [e.primitive.name for e in close(body).jaxpr.eqns] != ["add"]:
        return 0
    return math.prod(eqn.params["window_dimensions"])


def _of_cumsum(eqn: JaxprEqn, _: list) -> int:
    return aval_of(eqn.invars[0]).shape[eqn.params["axis"]]


def _of_polynomial(eqn: JaxprEqn, _: list) -> int:
    return len(eqn.invars) - 1  # the number, and its coefficients


def _contracted(eqn: JaxprEqn) -> tuple[int, list[int]]:
    """Returns the contracted size of a product with a sparse array, and its contracted axes."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.params["lhs_spinfo"].shape[i] for i in axes), list(axes)


def _of_bcoo(eqn: JaxprEqn, given: list) -> int:
    size, axes = _contracted(eqn)
    shape = aval_of(eqn.invars[1]).shape
    if given[1] is None or len(shape) != 2 or math.prod(shape) > LARGEST:
        return min(size, shape[-2])
    return _most_alike(np.delete(given[1](), axes, axis=1))


def _of_rows(starts: Known | None, otherwise: int) -> int:
    """Returns the length of the longest row of a matrix in compressed rows."""
    known = None if starts is None else starts()
    return otherwise if known is None or known.ndim != 1 else int(np.diff(known).max(initial=0))


def _of_bcsr(eqn: JaxprEqn, given: list) -> int:
    size, axes = _contracted(eqn)
    least = min(size, aval_of(eqn.invars[0]).shape[-1])
    return _of_rows(given[2], least) if axes == [1] else least


def _of_matrix(eqn: JaxprEqn, given: list) -> int:
    size = eqn.params["shape"] if "shape" in eqn.params else eqn.params["spinfo"].shape
    rows = 0 if eqn.params["transpose"] else 1
    least = min(size[rows], aval_of(eqn.invars[0]).shape[0])
    by_rows = eqn.primitive.name.startswith("csr") and not eqn.params["transpose"]
    return _of_rows(given[2], least) if by_rows else least


_TERMS: dict[str, Callable[[JaxprEqn, list], int]] = {
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
