"""What autocast did, and where."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from .._dtypes import wide
from ..interpret import _tables as tables
from ..interpret._asks import says_its_dtype
from ..interpret._jaxpr import aval_of
from ._rules import Policy, Rule, match
from ._values import FULL, Value


_FEW = 20


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of the program.

    **Attributes:**

    - `primitive`: the name of its primitive.
    - `rule`: `"product"` (half × half, float32 accumulation), `"full"`, `"half"`, `"follow"`,
        `"layout"`, `"convert"`, `"mixed"`, or `"own"` (the dtypes of the program).
    - `reason`: why.
    - `operands`, `results`: dtypes. The master of a product is float32, and rounded inside.
    - `multiplied`: of a product, the dtype that its operands are rounded to, or the algorithm that
        splits them; `None` for other operations.
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
    """What is cast where. Prints as a table.

    **Attributes:**

    - `operations`: an `Operation` for each equation on floating-point values, in program
        order.
    - `unknown`: those on which autocast has no opinion, and which stay in the program's dtypes.
    - `unused`: overrides that match nothing, or nothing that they could change, such as the casts
        of the program itself.
    - `rounded`: what an override keeps in float32 and the program itself rounds to half: where it
        returns it, carries it through a loop, or asks for the other half type.
    """

    operations: tuple[Operation, ...]
    unknown: tuple[Operation, ...]
    unused: tuple[str, ...]
    rounded: tuple[str, ...] = ()

    def count(self, rule: str) -> int:
        """How many operations fall under a rule."""
        return sum(x.rule == rule for x in self.operations)

    def __str__(self) -> str:
        rows = Counter((x.rule, x.primitive, _told(x)) for x in self.operations)
        lines = [f"{'rule':8} {'primitive':26} {'count':>5}  reason"]
        lines += [
            f"{rule:8} {primitive:26} {count:5}  {reason}"
            for (rule, primitive, reason), count in sorted(rows.items())
        ]
        for x in self.unknown[:_FEW]:
            lines.append(f"unknown: {x.primitive} at {x.line} stays in {', '.join(x.results)}")
        if len(self.unknown) > _FEW:
            lines.append(f"unknown: {len(self.unknown) - _FEW} more")
        lines += [f"unused override: {pattern!r}" for pattern in self.unused]
        lines += [f"rounded all the same: {x}" for x in self.rounded]
        return "\n".join(lines)


class Recorder:
    """Collects operations while an evaluator runs."""

    def __init__(self, policy: Policy):
        self.policy = policy
        # A loop or rule may be traced more than once; its equations count once.
        self.seen: dict[tuple, tuple[JaxprEqn, Operation, bool]] = {}
        self.used: set[str] = set()
        self.rounded: dict[str, None] = {}

    def __call__(
        self,
        eqn: JaxprEqn,
        line: str,
        scopes: tuple[str, ...],
        rule: Rule,
        operands: Sequence[Value],
        results: Sequence[Value],
    ) -> None:
        name = eqn.primitive.name
        # What keeps the program's own dtypes, its casts among them, is not theirs to change.
        if rule.name not in ("own", "convert"):
            for patterns in (self.policy.half, self.policy.full):
                if pattern := match(patterns, name, scopes):
                    self.used.add(pattern)
        floating = [x for x in (*operands, *results) if x.kind.governed]
        key = (id(eqn), line, scopes, rule)
        if not floating or key in self.seen:
            return
        operation = Operation(
            primitive=name,
            rule=rule.name,
            reason=rule.reason,
            operands=self._dtypes(operands),
            results=self._dtypes(results),
            scope="/".join(scopes),
            line=line,
            multiplied=self._multiplied(eqn, rule),
        )
        self.seen[key] = eqn, operation, rule.known

    def _dtypes(self, values: Sequence[Value]) -> tuple[str, ...]:
        return tuple(
            x.dtype(self.policy).name if x.kind.governed else _name(x.array(self.policy))
            for x in values
        )

    def _multiplied(self, eqn: JaxprEqn, rule: Rule) -> str | None:
        name, policy = eqn.primitive.name, self.policy
        if name not in tables.PRODUCTS:
            return None
        own = eqn.params.get("dtype", aval_of(eqn.invars[0]).dtype)
        if rule.name == "own" or (rule.name == "mixed" and (own != FULL or says_its_dtype(eqn))):
            return own.name
        if rule.name == "full":
            return wide(own if name in tables.MIXED else FULL).name
        if policy.algorithm is None:
            return policy.dtype.name
        return policy.algorithm.name if "dot" in name else FULL.name

    def report(self) -> AutocastReport:
        entries = list(self.seen.values())
        patterns = (*self.policy.half, *self.policy.full)
        return AutocastReport(
            tuple(operation for _, operation, _ in entries),
            tuple(operation for _, operation, known in entries if not known),
            tuple(p for p in dict.fromkeys(patterns) if p not in self.used),
            tuple(self.rounded),
        )


def _told(x: Operation) -> str:
    return x.reason if x.multiplied is None else f"{x.multiplied}: {x.reason}"


def _name(x: object) -> str:
    return str(getattr(x, "dtype", type(x).__name__))
