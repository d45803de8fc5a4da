"""Compiles for hardware that is absent, and reads the compiled program.

XLA needs no H100 and no TPU to compile for one. The compiled program shows how much memory it
takes, which dtypes its products and collectives have, and how many kernels it launches. These
numbers are identical to the byte on every machine. The program does not show its run time.

Without the device there is no autotuning: XLA picks the first sensible tiling, and Triton where a
real GPU would also have tried cuBLAS.
"""

import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ._hlo import Module, shapes
from ._report import Report, TargetUnavailable, versions


# The name for people, the platform and the topology.
_TARGETS = {
    "cpu": ("CPU", "cpu", ""),
    "h100": ("H100", "cuda", "1x1x1"),
    "h100x4": ("4 × H100", "cuda", "1x1x4"),
    "h100x8": ("8 × H100", "cuda", "1x1x8"),
    "v5e": ("TPU v5e", "tpu", "v5e:1x1"),
    "v5ex4": ("4 × TPU v5e", "tpu", "v5e:2x2"),
    "v5ex16": ("16 × TPU v5e", "tpu", "v5e:4x4"),
    "v5ex64": ("64 × TPU v5e", "tpu", "v5e:8x8"),
}
_COMPILERS = {
    "cuda": ("jax[cuda12]", ("jax-cuda12-plugin", "jax-cuda13-plugin")),
    "tpu": ("jax[tpu]", ("libtpu",)),
}
"""For each platform, what to install, and packages one of which contains the compiler."""

CUBLAS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""GPU compiler options for programs with products that XLA cannot tile in Triton without a device
to tune on."""

TARGETS = tuple(_TARGETS)
"""`cpu` (this machine), an H100, four or eight H100s in one host, a TPU v5e, or a slice of 4, 16 or
64 of them."""


def title(target: str) -> str:
    """Returns the name of a target for people."""
    return _TARGETS[target][0]


@cache
def devices(target: str) -> tuple[Any, ...]:
    """Returns the devices to compile for: real ones for `cpu`, descriptions for the others.

    **Raises:** `TargetUnavailable` when the plugin of that platform is not installed,
    `ValueError` for an unknown target.
    """
    if target not in _TARGETS:
        raise ValueError(f"`target` must be one of {', '.join(TARGETS)}, but got {target!r}.")
    name, platform, topology = _TARGETS[target]
    if platform == "cpu":
        return tuple(jax.devices("cpu")[:1])
    install, packages = _COMPILERS[platform]
    if not versions(packages):
        raise TargetUnavailable(
            f'To compile for {name}, install `pip install "{install}"` in the version of JAX that '
            f"is here ({jax.__version__}). The hardware itself is not needed."
        )
    if platform == "cuda":
        config = (Path(__file__).parent / "_targets" / "h100.txtpb").read_text(encoding="utf-8")
        try:
            found = get_topology_desc(platform="cuda", target_config=config, topology=topology)
        except NotImplementedError as e:
            raise TargetUnavailable(
                f"JAX's CUDA plugin is installed but did not start, so nothing can be compiled for "
                f"{name}. On a machine without a GPU, set JAX_PLATFORMS=cpu."
            ) from e
        return tuple(found.devices)
    # Unless told, libtpu asks the cloud's metadata server what machine it is on.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Older versions of libtpu assume four chips in a host and reject a topology of one.
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    return tuple(get_topology_desc(platform="tpu", topology_name=topology, **bounds).devices)


def add_targets(parser: ArgumentParser, default: str) -> None:
    """Adds the option that lists the targets for `there`."""
    told = f"what to compile for: {','.join(TARGETS)}; those without a compiler are left out"
    parser.add_argument("--targets", default=default, help=f"{told} (default: %(default)s)")


def there(report: Report, targets: Sequence[str]) -> list[str]:
    """Returns the targets that have a compiler here, and prints a note for each of the others.

    **Raises:** `TargetUnavailable` when none has one.
    """
    found = []
    for target in targets:
        try:
            devices(target)
            found.append(target)
        except TargetUnavailable as error:
            report.note(f"{title(target)} is left out. {error}")
    if not found:
        raise TargetUnavailable(f"None of the targets {', '.join(targets)} has a compiler here.")
    return found


def target_mesh(target: str, axis_name: str = "data") -> Mesh:
    """Builds a mesh over the devices of a target along one axis."""
    return Mesh(np.array(devices(target)), (axis_name,))


def _has_shape(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _placed(tree: Any, sharding: Any) -> Any:
    """Returns the shapes of the arrays in a tree, placed on devices."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(shape, tree)


def compile_for(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    donate: Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
) -> "Compiled":
    """Compiles `fun(*args)` for a target.

    **Arguments:**

    - `target`: one of `TARGETS`.
    - `fun`: a function of PyTrees, not yet jitted. Models may be among the arguments: leaves that
        are neither arrays nor `jax.ShapeDtypeStruct`s are passed on unchanged.
    - `args`: its arguments. Only shapes and dtypes of arrays matter.
    - `mesh`: the devices to run on, built by `target_mesh`; by default the first device of the
        target.
    - `in_specs`: for each argument a PyTree prefix of `PartitionSpec`; by default replicated.
    - `donate`: positions of arguments whose memory the outputs may take over.
    - `compiler_options`: XLA options, such as `CUBLAS`; GPU options are ignored for other targets.

    **Returns:**

    A [`Compiled`][benchmarks._deviceless.Compiled].

    **Raises:** `TargetUnavailable` when the compiler is not installed.
    """
    stages = stages_for(target, fun, *args, mesh=mesh, in_specs=in_specs, donate=donate)
    executable: Any = stages.compile(stages.lower(stages.trace()), compiler_options)
    memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes
    told = cost.get("flops"), cost.get("bytes accessed")
    return Compiled(target, *sizes, *told, executable.as_text())


class Stages(NamedTuple):
    """The stages of compiling a function for a target, each by itself."""

    target: str
    jitted: Any
    shapes: Sequence[Any]

    def _as_there(self) -> Any:
        platform = devices(self.target)[0].platform
        return mock.patch.object(jax, "default_backend", return_value=platform)

    def trace(self) -> Any:
        with self._as_there():
            return self.jitted.trace(*self.shapes)

    def lower(self, traced: Any) -> Any:
        with self._as_there():
            return traced.lower()

    def compile(self, lowered: Any, compiler_options: dict[str, Any] | None = None) -> Any:
        options = {"xla_gpu_autotune_level": 0, **(compiler_options or {})}
        if _TARGETS[self.target][1] != "cuda":
            options = {k: v for k, v in options.items() if not k.startswith("xla_gpu_")}
        return lowered.compile(compiler_options=options or None)


def stages_for(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    donate: Sequence[int] = (),
) -> Stages:
    """Prepares what `compile_for` compiles; its arguments are the same."""
    first, *_ = devices(target)
    dynamic, static = eqx.partition(args, _has_shape)
    if mesh is None:
        shapes = _placed(dynamic, SingleDeviceSharding(first))
    else:
        is_spec = lambda x: isinstance(x, PartitionSpec)
        specs = (PartitionSpec(),) * len(args) if in_specs is None else tuple(in_specs)
        place = lambda spec, tree: _placed(tree, NamedSharding(mesh, spec))
        shapes = jax.tree.map(place, specs, dynamic, is_leaf=is_spec)

    def program(*dynamic):
        out = fun(*eqx.combine(dynamic, static))
        return eqx.filter(out, eqx.is_array)

    program.__name__ = getattr(fun, "__name__", "program")
    return Stages(target, jax.jit(program, donate_argnums=tuple(donate)), shapes)


_UNCOUNTED = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class Compiled:
    """A compiled program and what XLA reports about it.

    Bytes are those of one device. `flops` and `bytes_accessed` are `None` where XLA does not report
    them (GPUs).
    """

    target: str
    temp_bytes: int
    argument_bytes: int
    flops: float | None
    bytes_accessed: float | None
    text: str = field(repr=False)

    @cached_property
    def module(self) -> Module:
        """The parsed program."""
        return Module.parse(self.text)

    def costs(self) -> dict[str, float | None]:
        """Returns the costs as fields of a record."""
        counted = {"flops": self.flops, "bytes_accessed": self.bytes_accessed}
        return {"kernels": self.kernels(), **counted, "temp_bytes": self.temp_bytes}

    def kernels(self) -> int:
        """Counts the operations outside fusions; on a GPU this is about the launches in a step.

        Both ends of an asynchronous operation count once together, and so does a loop's body.
        """
        fused = self.module.fused
        return sum(
            c not in fused and i.opcode not in _UNCOUNTED and not i.opcode.endswith("-done")
            for c, i in self.module.instructions()
        )

    def collectives(self) -> dict[tuple[str, str], dict[str, int]]:
        """Counts collectives by kind and dtype, and sums the bytes of their results on one
        device."""
        out: dict[tuple[str, str], dict[str, int]] = {}
        for computation, i in self.module.instructions():
            kind = i.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            type_ = i.type
            if i.opcode.endswith("-start") and kind != "all-reduce":
                # The operands come first, then the results; either may be a tuple, and counters
                # may follow. The start of an all-reduce has the type of its results.
                type_ = _tuple_items(type_)[1]
            factor = 1
            if computation.startswith("all-reduce-scatter"):
                # TPUs write a reduce-scatter as an all-reduce of which a slice is kept.
                kind, factor = "reduce-scatter", len(devices(self.target))
            for array in shapes(type_):
                sent = out.setdefault((kind, array.dtype), {"count": 0, "bytes": 0})
                sent["count"] += 1
                sent["bytes"] += array.bytes // factor
        return out


def _tuple_items(type_: str) -> list[str]:
    items, depth, start = [], 0, 1
    for i, c in enumerate(type_):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 or (depth == 1 and c == ","):
            items.append(type_[start:i].strip())
            start = i + 1
    return items
