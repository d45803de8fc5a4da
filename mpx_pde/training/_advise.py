"""Advice on the precision of a loss."""

import dataclasses
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._loss_scaling import (
    AbstractLossScaling,
    DynamicLossScaling,
    NoOpLossScaling,
    check_scaling,
)
from .._repr import in_a_line, table
from .._types import PyTree
from ..derivatives import Scaling
from ..interpret._jaxpr import jaxprs_in
from ..interpret._precision_report import PrecisionWarning, report_of, traced
from ..interpret._products import product_shape
from ._floor import in_float64
from ._grad import filter_value_and_grad
from ._initial_scaling import initial_scaling
from ._norms import minus, norm, share_of, total


_CALL = "advise"
_TOLERANCE = 0.01
"""The largest error of a recommended gradient. Noise between batches is nearly always larger."""
_GAIN = 0.9
"""The part of float32's memory above which another precision is not worth its while."""
_WIDE = 128
"""Products with a smaller dimension keep the tensor cores of a GPU waiting for memory."""


@dataclasses.dataclass(frozen=True)
class Advised:
    """One precision for the gradient of a loss.

    **Attributes:**

    - `name`: what it is, such as `"forward float32, backward bfloat16"`.
    - `options`: what the gradient transformations take for it, beside those that were given.
    - `memory`: bytes that the compiled gradient needs beside its arguments, on this machine.
    - `memory_per_example`: by how much that grows with an example of the batch; `None` where there
        is no axis that all arrays of the batch share.
    - `error`: the error of the gradient, relative to it; NaN where it is not finite.
    - `vanished`: the part of the entries of the gradient that are 0 and should not be.
    - `finite`: whether any loss scale makes the gradient finite.
    - `half_share`: the part of the work of all products that is done in half precision.
    - `scaling`: the scaling to start with.
    - `failed`: what it raised; `None` if it did not. Then nothing else is known.
    """

    name: str
    options: dict[str, Any]
    memory: int = 0
    memory_per_example: float | None = None
    error: float = float("nan")
    vanished: float = 0.0
    finite: bool = False
    half_share: float = 0.0
    scaling: Any = None
    failed: str | None = None


@dataclasses.dataclass(frozen=True)
class Advice:
    """Precisions for the gradient of a loss, and which of them to take. Prints as a table.

    **Attributes:**

    - `rows`: float32 first, then a full forward pass with half behind it, then half throughout.
    - `choice`: the row to take: of those with a gradient to 1 % the one with the least memory, and
        float32 if none saves a tenth of its memory.
    - `call`: the code to write for it.
    - `width`: the smallest dimension of the products that do most of the work.
    - `reference`: what errors are relative to, `"float32"` or `"float64"`.
    - `examples`: how many examples the batch has, if that is known.
    """

    rows: tuple[Advised, ...]
    choice: Advised
    call: str
    width: int
    reference: str
    examples: int | None

    def __str__(self) -> str:
        head = ("", "memory", "an example more", "gradient off by", "vanished", "half products")
        lines = table([head, *map(_cells, self.rows)])
        lines += [f"{row.name} fails: {row.failed}" for row in self.rows if row.failed is not None]
        lines.append(f"Gradients are compared with those in {self.reference}.")
        if jax.default_backend() == "cpu":
            lines.append("A CPU computes halves in float32, so a GPU needs less memory for them.")
        if 0 < self.width < _WIDE:
            lines.append(
                f"Most products are {self.width} wide: half precision saves memory, hardly time."
            )
        return "\n".join([*lines, f"Take {self.choice.name}:", f"    {self.call}"])


def _cells(row: Advised) -> tuple[str, ...]:
    if row.failed is not None:
        return (row.name, *["fails"] * 5)
    each = row.memory_per_example
    return (
        row.name,
        f"{row.memory / 2**20:#.3g} MiB",
        "" if each is None else f"{each / 2**10:#.3g} KiB",
        f"{row.error:.1e}" if row.finite else "overflows",
        f"{100 * row.vanished:.2g} %",
        f"{100 * row.half_share:.0f} %",
    )


def advise(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None = None,
    has_aux: bool = False,
    *,
    keep_full: PyTree = False,
    autocast: bool | dict[str, Any] = False,
) -> Callable[..., Advice]:
    """Recommends a precision to train in, by trying several on the gradient of a loss.

    Compiles and evaluates the gradient in float32, with a forward pass in float32 and half
    precision behind it, and in half precision throughout, in float16 and in bfloat16; and says what
    each needs of memory and how far its gradient is off. Call it once, before a training:

    ```python
    print(mpx.advise(loss)(model, batch))
    ```

    **Arguments:**

    - `func`, `has_aux`: as for [`mpx_pde.filter_value_and_grad`][].
    - `scaling`: where the scales of float16 start, which are found by
        [`mpx_pde.initial_scaling`][]; by default [`mpx_pde.DynamicLossScaling`][]. A loss that
        takes `derivatives` gets `None` for them unless this is a [`mpx_pde.Scaling`][].
    - `keep_full`, `autocast`: as for [`mpx_pde.filter_value_and_grad`][]; for half precision
        throughout.

    **Returns:**

    A function of the arguments of `func` that returns an [`mpx_pde.Advice`][]. With 64-bit types
    errors are relative to float64, else to float32. While it works it says so on a terminal.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][] does in float32; `TypeError` inside of
    `jax.jit`.
    """
    if not callable(func):
        raise TypeError(f"`{_CALL}` takes a loss function first, but got {in_a_line(func)}.")
    start = DynamicLossScaling() if scaling is None else scaling
    check_scaling(start, _CALL)
    parameters = inspect.signature(func).parameters if scaling is None else {}
    alone = "derivatives" in parameters and parameters["derivatives"].default is inspect._empty

    def advice(*args: Any, **kwargs: Any) -> Advice:
        if traced((args, kwargs)):
            raise TypeError(
                f"`{_CALL}` compiles and evaluates the gradient, so it cannot be called inside of "
                "`jax.jit`. Call it before the first step, with arrays."
            )
        if alone:
            kwargs = {"derivatives": None, **kwargs}
        with warnings.catch_warnings():
            # It says the same, and more.
            warnings.simplefilter("ignore", PrecisionWarning)
            candidates = _candidates(keep_full, autocast)
            return _advice((func, start, has_aux), candidates, args, kwargs)

    return advice


def _candidates(keep_full: PyTree, autocast: Any) -> list[tuple[str, dict[str, Any]]]:
    policies = {h: f"params=float32,compute={h},output=float32" for h in ("float16", "bfloat16")}
    given = {"keep_full": keep_full, "autocast": autocast}
    given = {name: x for name, x in given.items() if x is not False}
    out: list[tuple[str, dict[str, Any]]] = [("float32", {"use_mixed_precision": False})]
    for half, policy in policies.items():
        out.append((f"forward float32, backward {half}", {"policy": policy, "forward": "float32"}))
    for half, policy in policies.items():
        out.append((f"{half} throughout", {"policy": policy, **given}))
    return out


def _advice(
    task: tuple[Callable, Any, bool], candidates: list, args: tuple, kwargs: dict
) -> Advice:
    rows: list[Advised] = []
    reference, wide, width = "float32", None, 0
    if jnp.zeros((), float).dtype == jnp.float64:
        reference, wide = "float64", _in_float64_by(task, args, kwargs)
    for i, (name, options) in enumerate(candidates):
        _say(f"{i} of {len(candidates)}, {name}")
        try:
            try:
                row, grads, closed = _advised(task, name, options, args, kwargs)
            except Exception:
                # Casts meet what has no half precision; autocast leaves it as it is.
                if "throughout" not in name or "autocast" in options:
                    raise
                name, options = f"{name}, autocast", {"policy": options["policy"], "autocast": True}
                row, grads, closed = _advised(task, name, options, args, kwargs)
        except Exception as error:
            if not rows:
                raise
            rows.append(Advised(name, options, failed=f"{type(error).__name__}: {error}"))
            continue
        if not rows:
            width, wide = _width(closed), grads if wide is None else wide
        rows.append(dataclasses.replace(row, **_compared(grads, wide)))
    _say("")
    good = [r for r in rows if r.finite and r.error <= _TOLERANCE and r.vanished < _TOLERANCE]
    best = min(good, key=lambda row: row.memory, default=rows[0])
    choice = best if best.memory <= _GAIN * rows[0].memory else rows[0]
    return Advice(tuple(rows), choice, _written(choice, task[2]), width, reference, _examples(args))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{_CALL + ': ' + text if text else '':70}\r", end="", file=sys.stderr, flush=True)


def _advised(
    task: tuple[Callable, Any, bool], name: str, options: dict, args: tuple, kwargs: dict
) -> tuple[Advised, PyTree, ClosedJaxpr]:
    func, scaling, has_aux = task
    finite = True
    if "compute=bfloat16" in options.get("policy", "") and not isinstance(scaling, Scaling):
        scaling = NoOpLossScaling()
    try:
        scaling = initial_scaling(func, scaling, has_aux, **options)(*args, **kwargs)
    except ValueError as error:
        if "no scale" not in str(error):
            raise
        finite = False
    step = filter_value_and_grad(func, scaling, has_aux, **options)
    arrays, static = eqx.partition((args, kwargs), eqx.is_array)

    def gradient(arrays: PyTree) -> PyTree:
        args, kwargs = eqx.combine(arrays, static)
        return eqx.filter(step(*args, **kwargs)[-1], eqx.is_array)

    program = jax.jit(gradient).trace(arrays)
    compiled = program.lower().compile()
    closed = ClosedJaxpr(program.jaxpr.jaxpr, program.jaxpr.consts)
    memory = _memory(compiled)
    each, half = None, _halved(arrays, args)
    if half is not None:
        count, smaller = half
        less = _memory(jax.jit(gradient).lower(smaller).compile())
        each = (memory - less) / (count - count // 2)
    share = report_of(closed).half_share
    row = Advised(name, options, memory, each, finite=finite, half_share=share, scaling=scaling)
    return row, compiled(arrays), closed


def _in_float64_by(task: tuple[Callable, Any, bool], args: tuple, kwargs: dict) -> PyTree:
    func, scaling, has_aux = task
    step = filter_value_and_grad(func, scaling, has_aux, use_mixed_precision=False)
    args, kwargs = in_float64((args, kwargs))
    return eqx.filter(eqx.filter_jit(step)(*args, **kwargs)[-1], eqx.is_array)


def _memory(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return int(getattr(analysis, "temp_size_in_bytes", 0))


def _compared(grads: PyTree, wide: PyTree) -> dict[str, Any]:
    pairs = list(zip(jtu.tree_leaves(grads), jtu.tree_leaves(wide), strict=True))
    finite = all(bool(jnp.all(jnp.isfinite(g))) for g, _ in pairs)
    gone = sum(int(jnp.sum((g == 0) & (w != 0))) for g, w in pairs)
    there = sum(int(jnp.sum(w != 0)) for _, w in pairs)
    error = share_of(
        total([norm(minus(g, w)) for g, w in pairs]), total([norm(w) for _, w in pairs])
    )
    return {
        "error": float(error) if finite else float("nan"),
        "vanished": gone / max(1, there),
        "finite": finite,
    }


def _examples(args: tuple) -> int | None:
    """Returns the length of the leading axis that all arrays of the batch share, or `None`."""
    found = {np.shape(x)[:1] for x in jtu.tree_leaves(args[1:]) if eqx.is_array(x)}
    [length] = found if len(found) == 1 else [()]
    return length[0] if length else None


def _halved(arrays: PyTree, args: tuple) -> tuple[int, PyTree] | None:
    """Returns the number of examples, and the types of all arrays with half as many examples."""
    count = _examples(args)
    if count is None or count < 2:
        return None
    positional, keyword = arrays
    shape = lambda x: jax.ShapeDtypeStruct((count // 2, *x.shape[1:]), x.dtype)
    return count, ((positional[0], *jtu.tree_map(shape, positional[1:])), keyword)


def _width(closed: ClosedJaxpr) -> int:
    """Returns the smallest dimension of the products: the median, weighted by their work."""
    found = sorted(_products(closed.jaxpr))
    work = np.cumsum([work for _, work in found])
    return found[int(np.searchsorted(work, work[-1] / 2))][0] if found else 0


def _products(jaxpr: Any) -> Iterator[tuple[int, float]]:
    for eqn in jaxpr.eqns:
        if "dot_general" in eqn.primitive.name:
            shape = product_shape(eqn)
            yield min(shape[1:]), math.prod(shape)
        for inner in jaxprs_in(eqn):
            yield from _products(inner)


def _written(row: Advised, has_aux: bool) -> str:
    options = {"has_aux": True} if has_aux else {}
    shown = "".join(f", {name}={value!r}" for name, value in {**options, **row.options}.items())
    scaling = "mpx_pde.NoOpLossScaling()" if isinstance(row.scaling, NoOpLossScaling) else "scaling"
    return f"mpx_pde.filter_value_and_grad(loss, {scaling}{shown})"
