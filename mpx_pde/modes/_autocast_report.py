"""The report of what autocast casts where, and the patterns of its overrides."""

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Primitive

from ..engine import Mixed, multiplied_in
from ..precision._dtypes import is_half
from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step
from ..program._jaxpr import inner_scope, is_container, scopes_of
from ..program._lines import line_of


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of the program.

    **Attributes:**

    - `primitive`: the name of its primitive.
    - `rule`: `"product"` (half × half, float32 accumulation), `"full"`, `"half"`, `"follow"`,
        `"layout"`, `"convert"`, `"mixed"`, or `"own"` (the dtypes of the program).
    - `reason`: why this rule applies.
    - `operands`, `results`: their dtypes. A master that enters a product is float32, and rounded
        inside.
    - `multiplied`: for a product, the dtype to which its operands are rounded, or the algorithm
        that splits them; `None` for other operations.
    - `scope`: the `jax.named_scope`s and jitted functions around it, joined by slashes.
    - `line`: `file:line` in the user's code.
    """

    primitive: str
    rule: str
    reason: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    scope: str
    line: str
    multiplied: str | None = None


@dataclasses.dataclass(frozen=True)
class AutocastReport:
    """A report of what is cast where. Prints as a table.

    **Attributes:**

    - `operations`: an `Operation` for each equation on floating-point values, in program
        order.
    - `unknown`: operations for which autocast has no rule, and which stay in the program's dtypes.
    - `unused`: overrides that match nothing, or nothing that they could change, such as the casts
        of the program itself.
    - `rounded`: overrides that keep a result in float32 although the program itself rounds it to
        half precision: it returns it, carries it through a loop, or asks for the other half type.
    """

    operations: tuple[Operation, ...]
    unknown: tuple[Operation, ...]
    unused: tuple[str, ...]
    rounded: tuple[str, ...] = ()

    def count(self, rule: str) -> int:
        """Returns the number of operations under a rule."""
        return sum(x.rule == rule for x in self.operations)

    def __str__(self) -> str:
        by = lambda x: x.reason if x.multiplied is None else f"{x.multiplied}: {x.reason}"
        rows = Counter((x.rule, x.primitive, by(x)) for x in self.operations)
        lines = [f"{'rule':8} {'primitive':26} {'count':>5}  reason"]
        lines += [
            f"{rule:8} {primitive:26} {count:5}  {reason}"
            for (rule, primitive, reason), count in sorted(rows.items())
        ]
        lines += [
            f"unknown: {x.primitive} at {x.line} stays in {', '.join(x.results)}"
            for x in self.unknown
        ]
        lines += [f"unused override: {pattern!r}" for pattern in self.unused]
        lines += [f"rounded all the same: {x}" for x in self.rounded]
        return "\n".join(lines)


_PASSING = tables.FOLLOWING | tables.SUMS | tables.CASTS
"""Operations whose results are as large as their operands, or larger."""


class Recorder:
    """Collects operations while a program is evaluated."""

    def __init__(self, half: tuple[str, ...], full: tuple[str, ...], mixed: Mixed):
        self.half, self.full, self.mixed = half, full, mixed
        # Equations by identity: a loop or rule may be traced several times, but counts once.
        self.seen: dict[tuple, tuple[JaxprEqn, Operation, bool]] = {}
        self.used: set[str | None] = set()
        self.rounded: dict[str, None] = {}
        # For each program and variable, the override that keeps it in float32, also if cheap
        # operations have moved or changed it since; and the same for the results of the program
        # that was evaluated last.
        self.asked: dict[tuple[int, int | Constant], str | None] = {}
        self.last: list[str | None] = []
        self.programs: list[Any] = []

    def overrides(self, eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> tuple[str | None, str | None]:
        scopes = _scopes(eqn, around)
        return match(self.half, eqn, scopes), match(self.full, eqn, scopes)

    def operation(self, step: Step, around: Sequence[JaxprEqn], roles: Any) -> None:
        """Records the rule and dtypes of an equation inside of the containers `around` it."""
        eqn, rule, key = step.eqn, roles.rule(step), lambda x: (id(roles), x)
        given = (self.asked.get(key(x)) for x in step.variables)
        by = next(filter(None, given), None)
        if is_container(eqn):
            # A value that an override outside asks for may be in any of the results.
            pairs = zip(step.outputs, self.last, strict=False)
            self.asked.update((key(x), inside or by) for x, inside in pairs)
            return
        line = line_of(eqn, around)
        by = by if eqn.primitive.name in _PASSING else None
        by = f"`{eqn.primitive.name}` at {line}" if rule.asked else by
        self.asked.update((key(x), by) for x in step.outputs)
        for x in eqn.outvars:
            # A half of the other type keeps its dtype.
            if rule.asked and not self.mixed.governs(x.aval):
                self.leaving(by, x.aval)
        # Overrides cannot change operations that keep the program's own dtypes, such as its casts.
        if rule.name not in ("own", "convert"):
            self.used.update(self.overrides(eqn, around))
        floating = any(self.mixed.governs(v.aval) for v in (*eqn.invars, *eqn.outvars))
        scope = "/".join(_scopes(eqn, around))
        where = (id(eqn), line, scope, rule)
        if not floating or where in self.seen:
            return

        def dtypes(names, atoms):
            return tuple(self._dtype(roles, *x) for x in zip(names, atoms, strict=True))

        operation = Operation(
            primitive=eqn.primitive.name,
            rule=rule.name,
            reason=rule.reason,
            operands=dtypes(step.inputs, eqn.invars),
            results=dtypes(step.outputs, eqn.outvars),
            scope=scope,
            line=line,
            multiplied=multiplied_in(eqn, rule.name, self.mixed.dtype, self.mixed.algorithm),
        )
        self.seen[where] = eqn, operation, rule.known

    def _dtype(self, roles: Any, name: Any, atom: Any) -> str:
        if not self.mixed.governs(atom.aval):
            return str(getattr(atom.aval, "dtype", type(atom.aval).__name__))
        rounded = name in roles.stored and name not in roles.unrounded
        return self.mixed.dtype.name if rounded else "float32"

    def program(self, flat: Flat, roles: Any) -> None:
        """Records that a program was evaluated."""
        self.programs.append(roles)
        self.last = [self.asked.get((id(roles), x)) for x in flat.outputs]

    def leaving(self, by: str | None, aval: Any) -> None:
        """Records that the program holds as a half what an override keeps in float32."""
        dtype = getattr(aval, "dtype", bool)
        if by and is_half(dtype):
            self.rounded[f"{by} to {dtype}"] = None

    def report(self) -> AutocastReport:
        patterns = (*self.half, *self.full)
        entries = list(self.seen.values())
        return AutocastReport(
            tuple(operation for _, operation, _ in entries),
            tuple(operation for _, operation, known in entries if not known),
            tuple(p for p in dict.fromkeys(patterns) if p not in self.used),
            tuple(self.rounded),
        )


def _scopes(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> tuple[str, ...]:
    """Returns the `jax.named_scope`s and jitted functions around an equation."""
    return (*(x for outer in around for x in inner_scope(outer)), *scopes_of(eqn))


def parse_patterns(patterns: Any, name: str) -> tuple[str, ...]:
    """Parses one or several names of primitives and patterns of scopes."""
    if isinstance(patterns, str | Primitive) or not isinstance(patterns, Iterable):
        patterns = (patterns,)
    out = []
    for pattern in patterns:
        text = pattern.name if isinstance(pattern, Primitive) else pattern
        if not isinstance(text, str) or not text.strip("/"):
            raise TypeError(
                f"`autocast` takes names of primitives (such as 'exp') and patterns of "
                f"`jax.named_scope`s (such as 'decoder/norm*') as `{name}`, but got {pattern!r}."
            )
        out.append(text.strip("/"))
    return tuple(out)


def match(patterns: Sequence[str], eqn: JaxprEqn, scopes: tuple[str, ...]) -> str | None:
    """Returns the first of `patterns` that names the primitive or a run of consecutive scopes."""
    for pattern in patterns:
        parts = pattern.split("/")
        runs = (scopes[i : i + len(parts)] for i in range(len(scopes) - len(parts) + 1))
        if any(all(map(fnmatch.fnmatchcase, run, parts)) for run in runs):
            return pattern
        if len(parts) == 1 and fnmatch.fnmatchcase(eqn.primitive.name, pattern):
            return pattern
    return None
