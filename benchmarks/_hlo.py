"""Parses the text of optimized HLO into computations of instructions."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


_BITS = {
    **dict.fromkeys(("s4", "u4"), 4),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    "token": 0,
}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")

BOOKKEEPING = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
    | {"partition-id", "replica-id", "optimization-barrier", "add-dependency"}
)
"""Instructions that do nothing when the program runs."""


def bits(dtype: str) -> int | None:
    """Returns the bits of an element; `None` if `dtype` is not a dtype."""
    return 8 if dtype.startswith("f8") else _BITS.get(dtype)


class Shape(NamedTuple):
    """An array's dtype and sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        return self.elements * (bits(self.dtype) or 0) // 8


def shapes(type_: str) -> list[Shape]:
    """Returns the arrays of a type, which may be a tuple."""
    return [
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(type_)
        if bits(dtype) is not None
    ]


@dataclass(frozen=True)
class Instruction:
    """`name = type opcode(operands), attributes`; the operand of a parameter is its number."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @cached_property
    def shapes(self) -> list[Shape]:
        return shapes(self.type)

    @cached_property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.shapes)

    @cached_property
    def elements(self) -> int:
        return sum(s.elements for s in self.shapes)

    def integers(self, name: str) -> list[int]:
        """Returns the integers of an attribute such as `dimensions={0,1}`."""
        found = re.search(name + r"=\{([\d,]*)\}", self.attributes)
        return [int(n) for n in found[1].split(",") if n] if found else []

    def text(self, pattern: str) -> str:
        """Returns the first group of a pattern in the attributes, or an empty string."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> str:
        """The name of the computation that a fusion, a call or a reduction applies."""
        return self.text(r"(?:calls|to_apply)=%?([^\s,}]+)")

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.text(r'custom_call_target="([^"]*)"')


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def _instruction(root: bool, name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    operands = [inside.strip()] if opcode == "parameter" else re.findall(r"%([^\s,()]+)", inside)
    return Instruction(name, type_, opcode, tuple(operands), rest[end + 1 :], root)


@dataclass(frozen=True)
class Module:
    """A compiled program.

    **Attributes:**

    - `computations`: lists of instructions by name; in each, an operand comes before the
        instructions that use it.
    - `entry`: the name of the computation that runs.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Parses the text that `jax.stages.Compiled.as_text` returns.

        **Raises:** `ValueError` for a text without an entry computation.
        """
        computations: dict[str, list[Instruction]] = {}
        entry, body = "", None
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                body = computations.setdefault(found[2], [])
                entry = found[2] if found[1] else entry
            elif line.startswith("}"):
                body = None
            elif body is not None and (found := _INSTRUCTION.match(line)):
                body.append(_instruction(bool(found[1]), found[2], found[3]))
        if not entry:
            raise ValueError("`Module.parse` takes optimized HLO, but found no `ENTRY` in it.")
        return cls(computations, entry)

    @cached_property
    def index(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {c: {i.name: i for i in body} for c, body in self.computations.items()}

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Yields all instructions, each with the name of its computation."""
        for computation, body in self.computations.items():
            yield from ((computation, i) for i in body)

    @cached_property
    def fused(self) -> set[str]:
        """The computations that are not kernels of their own: a fusion is one kernel with all that
        it calls, and a reduction or scatter contains the computation that it applies."""
        applied = lambda i: "to_apply=" in i.attributes and i.opcode != "call"
        return {i.called for _, i in self.instructions() if i.opcode == "fusion" or applied(i)}

    def launched(self, computation: str | None = None, times: int = 1) -> list["Launch"]:
        """Returns the kernels that the program runs, in order.

        A loop counts as often as XLA knows that it runs, a conditional as its branch with the most
        kernels.
        """
        out: list[Launch] = []
        computation = computation or self.entry
        for i in self.computations[computation]:
            if i.opcode in BOOKKEEPING or i.opcode.endswith("-done"):
                continue
            if i.opcode == "while":
                trips = int(i.text(r'"known_trip_count":\{"n":"(\d+)"') or 1)
                out += self.launched(i.text(r"body=%?([^\s,}]+)"), times * trips)
            elif i.opcode == "conditional":
                names = re.findall(r"%([^\s,}]+)", i.text(r"branch_computations=\{([^}]*)\}"))
                names += re.findall(r"(?:true|false)_computation=%?([^\s,}]+)", i.attributes)
                out += max((self.launched(n, times) for n in names), key=len)
            elif i.opcode in ("call", "async-start"):
                out += self.launched(i.called, times)
            else:
                out.append(Launch(i, computation, times))
        return out


class Launch(NamedTuple):
    """An instruction that is a kernel, the name of its computation, and how often it runs."""

    instruction: Instruction
    computation: str
    times: int
