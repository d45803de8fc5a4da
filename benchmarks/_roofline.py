"""A lower bound for the time of a compiled program, kernel by kernel.

Nothing runs: every time is a prediction under the assumptions of `_chips.py` and these:

- A kernel reads each of its operands once and writes each of its results once. A fusion reads only
  the elements of its operands that its results need (slices, gathers). An update in place counts as
  the update, not as the whole array. Workspaces of cuBLAS do not count, an operand that occurs
  twice counts once, and nothing stays in a cache between kernels.
- A product takes two operations per term. On a GPU, products of float32 arrays are TF32 unless
  another precision or algorithm is requested.
- A fusion evaluates only those elements of its instructions that its results need, weighted
  (`WEIGHTS`). A multiplication whose only use is one sum costs nothing beside that sum.
- An FFT goes through memory once for each axis.
- The time of a kernel is the longest of memory, products, arithmetic (which `seconds` leaves out)
  and launch; kernels do not overlap.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ._chips import WEIGHTS, Chip
from ._hlo import Instruction, Launch, Module, Shape, shapes


_MOVES = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "broadcast", "reshape"}
    | {"copy", "transpose", "slice", "concatenate", "dynamic-slice", "dynamic-update-slice", "pad"}
    | {"reverse", "iota", "fusion", "after-all", "optimization-barrier"}
)
_FREE = _MOVES | {"dot", "gather", "convolution"}
_LAYOUT = _MOVES | {"convert", "copy-start", "bitcast-convert"}
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_REDUCTIONS = frozenset({"reduce", "reduce-window"})
_PRODUCTS = ("matmul", "gemm", "cudnn$conv")

SECONDS = ("seconds", "seconds_with_arithmetic", "seconds_by_xla")
KINDS = ("products", "elementwise", "reductions", "layout", "FFT", "other")


@dataclass(frozen=True)
class Kernel:
    """The bytes that a kernel reads and writes and the operations it computes, each time it runs.

    **Attributes:**

    - `products`: operations by kind of product: `"half"`, `"tf32"`, `"f32"`, …
    - `arithmetic`: weighted elementwise operations.
    - `own_seconds`: XLA's estimate, if its compiler wrote one.
    """

    kind: str
    read: int
    written: int
    products: Mapping[str, float]
    arithmetic: float
    times: int
    own_seconds: float | None

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def memory_seconds(self, chip: Chip) -> float:
        return self.bytes / chip.memory.kept

    def product_seconds(self, chip: Chip) -> float:
        return sum(n / chip.products[kind].kept for kind, n in self.products.items())

    def seconds(self, chip: Chip) -> float:
        """Returns the time that memory and products alone take."""
        return max(self.memory_seconds(chip), self.product_seconds(chip), chip.launch)

    def seconds_with_arithmetic(self, chip: Chip) -> float:
        return max(self.seconds(chip), self.arithmetic / chip.arithmetic.kept)

    def seconds_by_xla(self, chip: Chip) -> float:
        """Returns XLA's estimate for fusions, and ours where XLA's is no use.

        XLA's is no use for products, for FFTs, and for a fused softmax, where it is 20 times ours
        and more.
        """
        own, ours = self.own_seconds, self.seconds_with_arithmetic(chip)
        if self.kind in ("products", "FFT") or not own or own > 20 * ours:
            return ours
        return max(own, chip.launch)


class Roofline:
    """The costs of the kernels of a module."""

    def __init__(self, module: Module):
        self.module = module
        self._demands: dict[str, dict[str, float]] = {}

    def kernels(self) -> list[Kernel]:
        return [self._kernel(launch) for launch in self.module.launched()]

    def _kernel(self, launch: Launch) -> Kernel:
        i, index = launch.instruction, self.module.index[launch.computation]
        products: Counter[str] = Counter()
        if i.opcode == "fusion":
            read, written = self._fusion_traffic(i, index)
            arithmetic, opcodes = self._work(i.called, products)
        else:
            read, written = _traffic(i, index)
            opaque = i.opcode in ("custom-call", "fft", "scatter")
            need = lambda name: 0 if opaque else index[name].elements
            arithmetic = _work_of(i, index, need, products)
            opcodes = {"dot"} if products else {i.opcode}
        costs = int(read), int(written), dict(products), arithmetic
        return Kernel(_kind(i, opcodes), *costs, launch.times, _own_seconds(i))

    # Bytes.

    def _demand(self, computation: str) -> dict[str, float]:
        """Returns how many elements of each instruction a fusion evaluates: those that its results
        need and no more."""
        if computation in self._demands:
            return self._demands[computation]
        body, index = self.module.computations[computation], self.module.index[computation]
        need: defaultdict[str, float] = defaultdict(float)
        for i in reversed(body):
            if i.root:
                need[i.name] = i.elements
            n = need[i.name] = min(need[i.name], i.elements)
            if not n or i.opcode in ("parameter", "constant", "iota"):
                continue
            for k, name in enumerate(i.operands):
                if name in index:
                    asked = self._asked(i, k, n, index[name].elements)
                    need[name] = min(index[name].elements, need[name] + asked)
        self._demands[computation] = dict(need)
        return self._demands[computation]

    def _asked(self, i: Instruction, k: int, n: float, full: int) -> float:
        """Returns how many of the `full` elements of operand `k` are needed for `n` of the
        result."""
        whole = max(i.elements, 1)
        if i.opcode == "fusion":
            body = self.module.computations[i.called]
            name = next(j.name for j in body if j.opcode == "parameter" and j.operands == (str(k),))
            return self._demand(i.called)[name]
        if i.opcode in _REDUCTIONS:
            return full * min(1.0, n / whole * (len(i.shapes) or 1))
        if i.opcode in ("concatenate", "pad"):
            return full * n / whole
        if i.opcode in ("tuple", "dot", "convolution") or (k and i.opcode in (*_SLICES, "scatter")):
            return full
        overwritten = i.opcode == "scatter" or (i.opcode == "dynamic-update-slice" and i.root)
        return 0 if overwritten and k == 0 else min(full, n)

    def _fusion_traffic(self, i: Instruction, index: dict[str, Instruction]) -> tuple[float, float]:
        body, need = self.module.computations[i.called], self._demand(i.called)
        read: defaultdict[str, float] = defaultdict(float)
        for p in body:
            if p.opcode == "parameter" and p.elements:
                share = min(1.0, need[p.name] / p.elements)
                read[i.operands[int(p.operands[0])]] += p.bytes * share
        total = sum(min(n, index[name].bytes) for name, n in read.items())
        root = next(j for j in body if j.root)
        return total, self._written(root, self.module.index[i.called])

    def _written(self, i: Instruction, index: dict[str, Instruction]) -> float:
        if i.opcode == "tuple":
            return sum(self._written(index[o], index) for o in i.operands)
        j = i
        while j.opcode == "bitcast" and j.operands[0] in index:
            j = index[j.operands[0]]
        if j.opcode == "dynamic-update-slice":
            return index[j.operands[1]].bytes
        if j.opcode == "scatter":
            return 2 * index[j.operands[-1]].bytes
        return i.bytes

    # Operations.

    def _work(self, computation: str, products: Counter[str]) -> tuple[float, set[str]]:
        """Returns a fusion's weighted arithmetic and its opcodes; adds its products to
        `products`."""
        body, index = self.module.computations[computation], self.module.index[computation]
        need, multiplied_on = self._demand(computation), _multiplied_on(body)
        arithmetic, opcodes = 0.0, set[str]()
        for i in body:
            if i.opcode == "fusion":
                more, inside = self._work(i.called, products)
                arithmetic, opcodes = arithmetic + more, opcodes | inside
                continue
            opcodes.add(i.opcode)
            if i.name not in multiplied_on:
                arithmetic += _work_of(i, index, need.__getitem__, products)
        return arithmetic, opcodes


def _work_of(
    i: Instruction,
    index: dict[str, Instruction],
    need: Callable[[str], float],
    products: Counter[str],
) -> float:
    """Returns an instruction's weighted arithmetic; adds a product to `products` instead."""
    if (product := _product(i, index)) is not None:
        products.update(dict([product]))
        return 0.0
    if i.opcode in _REDUCTIONS:
        return max(map(need, i.operands))
    return 0.0 if i.opcode in _FREE else need(i.name) * WEIGHTS.get(i.opcode, 1)


def _multiplied_on(body: Iterable[Instruction]) -> set[str]:
    """Returns the multiplications that fuse with the sum that is their only use, one for each
    sum."""
    users: defaultdict[str, list[Instruction]] = defaultdict(list)
    for i in body:
        for o in i.operands:
            users[o].append(i)
    found: dict[str, str] = {}
    for i in body:
        if i.opcode == "multiply" and [u.opcode for u in users[i.name]] in (["add"], ["subtract"]):
            found.setdefault(users[i.name][0].name, i.name)
    return set(found.values())


def _traffic(i: Instruction, index: dict[str, Instruction]) -> tuple[float, float]:
    """Returns the bytes that an instruction reads and writes if it is a kernel by itself."""
    operands = [index[o] for o in dict.fromkeys(i.operands) if o in index]
    read, written = sum(o.bytes for o in operands), i.bytes
    if i.opcode == "custom-call":
        arrays = shapes(i.type)
        # Leave out the workspace of a product.
        kept = [s for s in arrays if s.dtype != "s8"] if len(arrays) > 1 else arrays
        return read, sum(s.bytes for s in kept)
    if i.opcode == "fft":
        # The complex spectrum is written and read once more for each axis but the first.
        axes = len(i.integers("fft_length"))
        spectra = [s.bytes for s in (*operands[0].shapes, *i.shapes) if s.dtype.startswith("c")]
        extra = (axes - 1) * max(spectra)
        return read + extra, written + extra
    if i.opcode in ("copy", "transpose", "copy-start"):
        return operands[0].bytes, operands[0].bytes
    if i.opcode == "dynamic-update-slice":
        update = index[i.operands[1]].bytes
        return update, update
    if i.opcode in ("slice", "dynamic-slice"):
        return written, written
    return read, written


def _product(i: Instruction, index: dict[str, Instruction]) -> tuple[str, float] | None:
    """Returns the kind and the operations of a product or convolution; `None` for others."""
    if i.opcode == "dot":
        left = index[i.operands[0]].shapes[0]
        contracted = i.integers("lhs_contracting_dims")
    elif i.opcode == "custom-call" and any(name in i.target for name in _PRODUCTS[:2]):
        left = index[i.operands[0]].shapes[0]
        text = i.text(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        contracted = [int(n) for n in re.findall(r"\d+", text)]
    elif i.opcode == "custom-call" and "potrf" in i.target:  # a Cholesky factorization
        matrix = i.shapes[0]
        return _counted(matrix, "highest", matrix.sizes[-1] ** 3 / 3)
    elif i.opcode == "custom-call" and "triangularSolve" in i.target:
        matrix = index[i.operands[0]].shapes[0]
        return _counted(matrix, "highest", matrix.sizes[-1] * i.shapes[0].elements)
    elif i.opcode == "convolution":
        return _convolution(i, index)
    else:
        return None
    out = next(s for s in i.shapes if s.dtype != "s8")
    terms = math.prod(left.sizes[axis] for axis in contracted)
    return _counted(left, i.attributes, 2.0 * out.elements * terms)


def _convolution(i: Instruction, index: dict[str, Instruction]) -> tuple[str, float]:
    """Counts two operations for each entry of the result and each weight that enters it."""
    left, right = (index[o].shapes[0] for o in i.operands[:2])
    kernel = i.text(r"dim_labels=\w+_(\w+)->")
    outputs = right.sizes[kernel.index("o")] if kernel else 1
    operations = 2.0 * i.shapes[0].elements * (right.elements / max(outputs, 1))
    return _counted(left, i.attributes, operations)


def _counted(left: Shape, attributes: str, operations: float) -> tuple[str, float]:
    """Returns the kind of a product and its operations; a split product counts all its parts."""
    algorithm = re.search(r"algorithm=(\w+)|\"algorithm\":\"(\w+)\"", attributes)
    algorithm = (algorithm[1] or algorithm[2]).lower() if algorithm else ""
    split = re.search(r"_x(\d)$", algorithm)
    times = int(split[1]) if split else 1
    return _product_kind(left.dtype, algorithm, attributes), times * operations


def _product_kind(dtype: str, algorithm: str, attributes: str) -> str:
    if dtype not in ("f32", "c64"):
        known = {"f16": "half", "bf16": "half", "f64": "f64"}
        return known.get(dtype, "f8" if dtype.startswith("f8") else "int")
    if "tf32" in algorithm:
        return "tf32"
    if "bf16" in algorithm:
        return "split" if "_x" in algorithm else "half"
    full = "f32_f32_f32" in algorithm or "highest" in attributes.lower()
    return "f32" if full else "tf32"


def _kind(i: Instruction, opcodes: set[str]) -> str:
    if opcodes & {"dot", "convolution"}:
        return "products"
    if i.opcode == "fft":
        return "FFT"
    if opcodes <= _LAYOUT:
        return "layout"
    if opcodes & _REDUCTIONS and (i.opcode == "reduce" or "kind=kInput" in i.attributes):
        return "reductions"
    return "other" if i.opcode == "custom-call" else "elementwise"


def _own_seconds(i: Instruction) -> float | None:
    found = i.text(r'"exec_time_us":([\d.eE+-]+),"compute_time_us":[^,]+,[^,]+,"name":""')
    return 1e-6 * float(found) if found else None


def summary(kernels: list[Kernel], chip: Chip) -> dict:
    """Sums the costs of a program in one record: seconds as a range, bytes and operations."""
    total = lambda f: float(sum(f(k) * k.times for k in kernels))
    products: defaultdict[str, float] = defaultdict(float)
    by_kind = {kind: {"kernels": 0, "seconds": 0.0} for kind in KINDS}
    for k in kernels:
        for kind, n in k.products.items():
            products[kind] += n * k.times
        by_kind[k.kind]["kernels"] += k.times
        by_kind[k.kind]["seconds"] += k.seconds(chip) * k.times
    return {
        "kernels": sum(k.times for k in kernels),
        "bytes": total(lambda k: k.bytes),
        "operations": {kind: float(n) for kind, n in sorted(products.items())},
        **{s: total(lambda k, s=s: getattr(k, s)(chip)) for s in SECONDS},
        "by_kind": by_kind,
    }
