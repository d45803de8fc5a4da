"""Finds where float32 enters a program whose arguments were cast to half precision."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..program import _tables as tables
from ..program._flat import Constant, Flat
from ..program._jaxpr import aval_of
from ..program._lines import is_of_jax
from ..program._products import HALVES
from ._formulas import dtype_of
from ._survey import Seen, Survey


WIDE = ("float32", "float64")


_ASKED = ("astype", "asarray", "array", "convert_element_type")
"""Functions of JAX by which programs ask for a cast. Others cast what meets a wider operand."""


class _Reason(NamedTuple):
    """The reason why an array is float32.

    **Attributes:**

    - `kind`: `"own"` for an array, and `"number"` for a number, that nothing in half precision led
        to; `"promoted"` for what was half until JAX cast it because of another operand; `"entered"`
        for what follows from both, or from a cast that the program asks for.
    - `text`: where float32 enters, or what it comes with, unless that is made on a line.
    - `line`: this line.
    """

    kind: str
    text: str
    line: str = ""

    def at(self, line: str, atom: Any) -> "_Reason":
        """Returns the reason for what this array, `atom` in its jaxpr, makes float32 on a line."""
        what = f"{self.text or _type(atom)}"
        if self.line:
            what += ", made there" if self.line == line else f", made at {self.line}"
        return _Reason("entered", f"at {line}, with {what}")


def entry_of(survey: Survey, line: str, names: Sequence[str]) -> str | None:
    """Tells where, and with what, float32 enters what a float32 product on a line takes.

    **Arguments:**

    - `names`: the names of the operands of the program.
    """
    entries = _Entries(survey, names)
    for seen in survey.seen:
        entries.add(seen)
        if seen.step.name in tables.PRODUCTS and seen.site.line == line:
            reason = entries.reason(seen)
            if reason is not None and reason.text:
                return f"with {reason.text}" if reason.kind == "own" else reason.text
    return None


class _Entries:
    """The reasons why the arrays of a program are float32."""

    def __init__(self, survey: Survey, names: Sequence[str]):
        program = survey.program
        self._reasons: dict[int, _Reason] = {}
        self._same: dict[int, int | Constant] = {}
        for x, name in zip(program.inputs, names, strict=True):
            self._reasons[x] = _Reason("own", f"{name}, which is not cast")
        self._know(program)

    def _know(self, flat: Flat) -> None:
        known = flat.constants.items()
        self._reasons.update((x, _constant(value)) for x, value in known)

    def add(self, seen: Seen) -> None:
        """Adds an equation."""
        self._same.update((inner, outer) for outer, inner in seen.entered)
        for flat in seen.bodies:
            self._know(flat)
        if seen.bodies:
            self._same.update(zip(seen.step.outputs, seen.bodies[-1].outputs, strict=False))
        elif dtype_of(seen.step.eqn.outvars) in WIDE:
            reason = self.reason(seen)
            self._reasons.update((x, reason) for x in seen.step.outputs if reason is not None)

    def reason(self, seen: Seen) -> _Reason | None:
        """Returns the reason why the results of an equation are float32, or why its operands are
        for a product."""
        step, line = seen.step, seen.site.line or "an unknown line"
        halves = any(dtype_of([x]) in HALVES for x in step.eqn.invars)
        pairs = zip(step.inputs, step.eqn.invars, strict=True)
        found = [(self._of(x), atom) for x, atom in pairs if dtype_of([atom]) in WIDE]
        by = {reason.kind: (reason, atom) for reason, atom in reversed(found) if reason is not None}
        if "entered" in by:
            return by["entered"][0]
        if step.name in tables.CASTS and halves:
            asked = any(is_of_jax(step.eqn, name) for name in _ASKED)
            return _Reason("entered", f"at {line}, by a cast") if asked else _Reason("promoted", "")
        own = by.get("own", by.get("number"))
        if own is not None and (halves or "promoted" in by):
            return own[0].at(line, own[1])
        if halves:
            return _Reason("entered", f"at {line}, by the result that `{step.name}` is asked for")
        fills = [*by] == ["number"] and aval_of(step.eqn.outvars[0]).shape
        if not by or fills:
            return _Reason("own", "", line)
        return next(iter(by.values()))[0] if own is None else own[0]

    def _of(self, x: int | Constant) -> _Reason | None:
        while not isinstance(x, Constant):
            if x not in self._same:
                return self._reasons.get(x)
            x = self._same[x]
        return _constant(x)


def _type(atom: Any) -> str:
    aval = aval_of(atom)
    return f"{aval.dtype.name}{[*aval.shape]}"


def _constant(x: Constant) -> _Reason:
    """Returns the reason that is a number, or an array that the program knows."""
    if aval_of(x).shape:
        return _Reason("own", f"an array {_type(x)} that is no argument")
    value = "" if x.number is None else f" {np.asarray(x.number).item():.6g}"
    return _Reason("number", f"the number{value}, which is no Python number")
