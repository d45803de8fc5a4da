"""Compiles for hardware that is not here, and reads what came out.

XLA needs no H100 and no TPU to compile for one. The compiled program tells how much memory it
takes, which dtypes its products and collectives have, and how many kernels it launches, and it
tells the same on every machine, to the byte. It does not tell the time.

What is missing without the device is autotuning: XLA picks the first sensible tiling, and Triton
where a real GPU would also have tried cuBLAS.
"""

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


class TargetUnavailable(RuntimeError):
    """The compiler for a target is not installed."""


class _Target(NamedTuple):
    title: str
    platform: str
    topology: str
    modules: tuple[str, ...]
    install: str


_CUDA = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_TARGETS = {
    "cpu": _Target("CPU", "cpu", "", (), ""),
    "h100": _Target("H100", "cuda", "1x1x1", _CUDA, "jax[cuda12]"),
    "h100x4": _Target("4 × H100", "cuda", "1x1x4", _CUDA, "jax[cuda12]"),
    "h100x8": _Target("8 × H100", "cuda", "1x1x8", _CUDA, "jax[cuda12]"),
    "v5e": _Target("TPU v5e", "tpu", "v5e:1x1", ("libtpu",), "jax[tpu]"),
    "v5ex4": _Target("4 × TPU v5e", "tpu", "v5e:2x2", ("libtpu",), "jax[tpu]"),
    "v5ex16": _Target("16 × TPU v5e", "tpu", "v5e:4x4", ("libtpu",), "jax[tpu]"),
    "v5ex64": _Target("64 × TPU v5e", "tpu", "v5e:8x8", ("libtpu",), "jax[tpu]"),
}

CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Options of a GPU's compiler for programs with products that XLA cannot tile in Triton without a
device to tune on."""

TARGETS = tuple(_TARGETS)
"""`cpu` (this machine), an H100, four or eight of them in one host, a TPU v5e, or a slice of 4, 16
or 64 of them."""


def title(target: str) -> str:
    """The name of a target for people."""
    return _TARGETS[target].title


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@cache
def devices(target: str) -> tuple[Any, ...]:
    """The devices to compile for: real ones for `cpu`, descriptions for the others.

    **Raises:** `TargetUnavailable` when the plugin of that platform is not installed,
    `ValueError` for an unknown target.
    """
    if target not in _TARGETS:
        raise ValueError(f"`target` must be one of {', '.join(TARGETS)}, but got {target!r}.")
    spec = _TARGETS[target]
    if spec.platform == "cpu":
        return tuple(jax.devices("cpu")[:1])
    if not any(map(_installed, spec.modules)):
        raise TargetUnavailable(
            f'To compile for {spec.title}, install `pip install "{spec.install}"` in the version '
            f"of JAX that is here ({jax.__version__}). The hardware itself is not needed."
        )
    if spec.platform == "cuda":
        try:
            return _cuda_devices(spec.topology)
        except NotImplementedError as e:
            raise TargetUnavailable(
                f"JAX's CUDA plugin is installed but did not start, so nothing can be compiled for "
                f"{spec.title}. On a machine without a GPU, set JAX_PLATFORMS=cpu."
            ) from e
    # libtpu asks the cloud's metadata server what machine it is on, unless told.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Older versions of libtpu take a host to have four chips, and reject a topology of one.
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if spec.topology.endswith(":1x1") else {}
    found = get_topology_desc(platform="tpu", topology_name=spec.topology, **bounds)
    return tuple(found.devices)


def _cuda_devices(topology: str) -> tuple[Any, ...]:
    config = Path(__file__).parent / "_targets" / "h100.txtpb"
    found = get_topology_desc(
        platform="cuda", target_config=config.read_text(encoding="utf-8"), topology=topology
    )
    return tuple(found.devices)


def target_mesh(target: str, axis_names: Sequence[str] = ("data",), shape: Any = None) -> Mesh:
    """A mesh over the devices of a target, by default with all of them along the first axis."""
    found = devices(target)
    if shape is None:
        shape = (len(found),) + (1,) * (len(axis_names) - 1)
    return Mesh(np.array(found).reshape(shape), tuple(axis_names))


def abstract(tree: Any) -> Any:
    """`tree` with every array replaced by its `jax.ShapeDtypeStruct`."""

    def leaf(x):
        is_array = isinstance(x, jax.Array | np.ndarray)
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array else x

    return jax.tree.map(leaf, tree)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def compile_for(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
) -> "Compiled":
    """Compiles `fun(*args)` for a target.

    **Arguments:**

    - `target`: one of `TARGETS`.
    - `fun`: a function of PyTrees, not yet jitted. Models may be among the arguments: what is
        neither an array nor a `jax.ShapeDtypeStruct` is passed on as it is.
    - `args`: its arguments. Only shapes and dtypes of arrays matter.
    - `mesh`: the devices to run on; by default the first of the target. Make it by
        `target_mesh`.
    - `in_specs`: for each argument a PyTree prefix of `PartitionSpec`; by default replicated.
    - `out_specs`: the same for the outputs; by default the compiler's choice.
    - `donate`: positions of arguments whose memory the outputs may take over.
    - `compiler_options`: XLA options, such as `{"xla_gpu_enable_triton_gemm": False}`.

    **Returns:**

    A [`Compiled`][benchmarks._deviceless.Compiled].

    **Raises:** `TargetUnavailable` when the compiler is not installed.
    """
    found = devices(target)
    dynamic, static = eqx.partition(abstract(args), _is_shape)

    if mesh is None:
        sharding = SingleDeviceSharding(found[0])
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), dynamic
        )
    else:
        if in_specs is None:
            in_specs = (PartitionSpec(),) * len(args)

        def place(spec, subtree):
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree
            )

        is_spec = lambda x: isinstance(x, PartitionSpec)
        shapes = jax.tree.map(place, tuple(in_specs), dynamic, is_leaf=is_spec)
    kwargs: dict[str, Any] = {}
    if out_specs is not None:
        if mesh is None:
            raise ValueError("`compile_for` takes `out_specs` only together with a `mesh`.")
        kwargs["out_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            out_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def program(*dynamic):
        out = fun(*eqx.combine(dynamic, static))
        return eqx.filter(out, eqx.is_array)

    program.__name__ = getattr(fun, "__name__", "program")
    options: dict[str, Any] = (
        {"xla_gpu_autotune_level": 0} if _TARGETS[target].platform == "cuda" else {}
    )
    options.update(compiler_options or {})
    lowered = jax.jit(program, donate_argnums=tuple(donate), **kwargs).lower(*shapes)
    return Compiled.read(target, lowered.compile(compiler_options=options or None))


# What follows reads HLO text.

_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,<=]*)\]")
_BITS = re.compile(r"\d+")

_BOOKKEEPING = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
_PRODUCTS = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    computation: str
    nested: bool  # inside a fusion or a reducer, so that it launches nothing by itself

    @property
    def op_name(self) -> str:
        """Where it comes from: JAX's name stack."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def call_target(self) -> str:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def _split_type(text: str) -> tuple[str, str]:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    return text[:end], text[end:].lstrip()


def instructions(text: str) -> list[Instruction]:
    """The instructions of an optimised HLO module."""
    called = set()
    for line in text.splitlines():
        # What a fusion calls is one kernel; what a reduction or a scatter applies is inside one.
        if " fusion(" in line or ("to_apply=" in line and " call(" not in line):
            called.update(re.findall(r"(?:calls|to_apply)=%?([^\s,}]+)", line))
    out = []
    computation = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            computation = found[2]
        elif computation and (found := _INSTRUCTION.match(line)):
            type_, rest = _split_type(found[2])
            opcode, _, _ = rest.partition("(")
            end = _closing(rest, len(opcode))
            operands = tuple(re.findall(r"%([^\s,()]+)", rest[len(opcode) : end]))
            nested = computation in called
            out.append(
                Instruction(found[1], type_, opcode, operands, rest[end + 1 :], computation, nested)
            )
    return out


def _dtypes(type_: str) -> list[str]:
    return [dtype for dtype, _ in _ARRAY.findall(type_)]


def _bytes(type_: str) -> int:
    total = 0
    for dtype, dims in _ARRAY.findall(type_):
        found = _BITS.search(dtype)
        bits = 8 if dtype == "pred" or found is None else int(found[0])
        total += prod(int(n.lstrip("<=")) for n in dims.split(",") if n) * bits // 8
    return total


class Product(NamedTuple):
    """The dtypes of a matrix product or convolution, and which pass it belongs to."""

    lhs: str
    rhs: str
    out: str
    direction: str  # "forward" or "backward"


class Traffic(NamedTuple):
    """How many collectives there are of a kind, and the bytes of their results on one device."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Compiled:
    """A compiled program and what it tells about itself.

    Bytes are those of one device. `flops` and `bytes_accessed` are `None` where XLA does not
    tell them (GPUs).
    """

    target: str
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    flops: float | None
    bytes_accessed: float | None
    text: str = field(repr=False)

    @classmethod
    def read(cls, target: str, executable: Any) -> "Compiled":
        """From what `jax.jit(…).lower(…).compile()` returns."""
        memory = executable.memory_analysis()
        cost = executable.cost_analysis() or {}
        return cls(
            target,
            memory.temp_size_in_bytes,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            cost.get("flops"),
            cost.get("bytes accessed"),
            executable.as_text(),
        )

    def opcodes(self) -> Counter[str]:
        """How many operations of each kind, inside fusions too, without parameters, constants,
        tuples and bitcasts."""
        return Counter(i.opcode for i in instructions(self.text) if i.opcode not in _BOOKKEEPING)

    def operations(self) -> int:
        """How many operations in all."""
        return self.opcodes().total()

    def kernels(self) -> int:
        """How many operations outside fusions: on a GPU about what is launched in a step.

        The two ends of an asynchronous operation count once, the body of a loop once.
        """
        return sum(
            not i.nested and i.opcode not in _BOOKKEEPING and not i.opcode.endswith("-done")
            for i in instructions(self.text)
        )

    def products(self) -> Counter[Product]:
        """The dtypes of all matrix products and convolutions.

        "backward" is what JAX's name stack says comes from a transposition. On a CPU XLA
        rewrites half-precision products into float32 ones with casts around: look at a GPU's
        or a TPU's program for what a training step does.
        """
        all_of_them = instructions(self.text)
        types = {(i.computation, i.name): i.type for i in all_of_them}
        out: Counter[Product] = Counter()
        for i in all_of_them:
            matmul = any(s in i.call_target for s in ("matmul", "gemm", "cudnn$conv"))
            if i.opcode not in _PRODUCTS and not matmul:
                continue
            lhs, rhs = (_dtypes(types[i.computation, name])[0] for name in i.operands[:2])
            direction = "backward" if "transpose(" in i.op_name else "forward"
            out[Product(lhs, rhs, _dtypes(i.type)[0], direction)] += 1
        return out

    def collectives(self) -> dict[tuple[str, str], Traffic]:
        """By kind and dtype, what goes over the wires."""
        out: dict[tuple[str, str], Traffic] = {}
        for i in instructions(self.text):
            kind = i.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            type_ = i.type
            if i.opcode.endswith("-start") and kind != "all-reduce":
                # Operands first, results second, both perhaps tuples; counters may follow. The
                # start of an all-reduce has the type of its results.
                type_ = _tuple_items(type_)[1]
            factor = 1
            if i.computation.startswith("all-reduce-scatter"):
                # TPUs write a reduce-scatter as an all-reduce whose slice is kept.
                kind, factor = "reduce-scatter", len(devices(self.target))
            for item in _ARRAY.finditer(type_):
                count, size = out.get((kind, item[1]), Traffic(0, 0))
                out[kind, item[1]] = Traffic(count + 1, size + _bytes(item[0]) // factor)
        return out


def _tuple_items(type_: str) -> list[str]:
    items, depth, start = [], 0, 1
    for i, c in enumerate(type_):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 or (depth == 1 and c == ","):
            items.append(type_[start:i].strip())
            start = i + 1
    return items
