"""The public transformation."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._util._calls import named, public
from .._util._notes import noting_the_trace
from .._util._repr import in_a_line
from .._util._types import DTypeLike, Names
from .._util._wrapper import AbstractWrapper, check_callable
from ..engine import Mixed
from ..precision._dtypes import (
    asked_for_half,
    half_precision,
    half_precision_datatype,
    is_half,
    precision_gives_way,
    precision_of_user,
)
from ..precision._split import SPLIT_PRODUCTS
from ..program._jaxpr import trace_arrays
from ..program._warnings import warn_user
from ._autocast_report import AutocastReport, Recorder, parse_patterns


def _parse_dtype(dtype: Any) -> np.dtype | lax.DotAlgorithmPreset | None:
    if dtype is None or isinstance(dtype, lax.DotAlgorithmPreset):
        return dtype
    if isinstance(dtype, str) and dtype in SPLIT_PRODUCTS:
        return SPLIT_PRODUCTS[dtype]
    try:
        out = jnp.dtype(dtype)
    except TypeError:
        out = None
    if out is None or not is_half(out):
        raise ValueError(
            "`autocast` takes float16, bfloat16 or the name of a split product "
            f"({', '.join(map(repr, SPLIT_PRODUCTS))}) as `dtype`, but got {in_a_line(dtype)}. For "
            "float32 call the function without `autocast`."
        )
    return out


class _Autocast(AbstractWrapper):
    fun: Any
    _dtype: np.dtype | lax.DotAlgorithmPreset | None = eqx.field(static=True)
    _half: tuple[str, ...] = eqx.field(static=True)
    _full: tuple[str, ...] = eqx.field(static=True)

    is_mixed_precision: ClassVar = True
    is_autocast: ClassVar = True

    def _mixed(self) -> Mixed:
        if isinstance(self._dtype, lax.DotAlgorithmPreset):
            # Values are kept in float32. Only the program itself may have halves.
            return Mixed(jnp.dtype("bfloat16"), self._dtype)
        return Mixed(half_precision_datatype() if self._dtype is None else self._dtype)

    def _run(self, mixed: Mixed, recorder: Recorder | None, args: tuple, kwargs: dict) -> Any:
        """Evaluates the function as `trace_arrays` does, with the dtype of `mixed` as *half
        precision*.
        """
        # Split products keep float32, so layers use the dtype of their weights there.
        split = mixed.algorithm is not None
        asked = half_precision if split else partial(asked_for_half, "autocast")
        with asked(mixed.dtype), precision_gives_way(), precision_of_user():
            closed, leaves, assemble = trace_arrays(self.fun, args, kwargs)
        out = dataclasses.replace(mixed, listener=recorder)(closed, [x for _, x in leaves])
        if recorder is not None:
            for by, aval in zip(recorder.last, closed.out_avals, strict=True):
                recorder.leaving(by, aval)
        return assemble(out)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        mixed, overrides = self._mixed(), (self._half, self._full)
        recorder = Recorder(*overrides, mixed) if any(overrides) else None
        with named("autocast"), noting_the_trace():
            out = self._run(mixed, recorder, args, kwargs)
        report = None if recorder is None else recorder.report()
        if report and report.unused:
            warn_user(
                f"`autocast` found nothing to change for {', '.join(map(repr, report.unused))} in "
                "`half` or `full`: no operation has such a name or is in such a "
                "`jax.named_scope`. Its `report` lists the operations with their scopes."
            )
        if report and report.rounded:
            warn_user(
                "`autocast` computes in float32 what `full` asks for, but the function itself "
                "holds these results in half precision (it returns them, a loop carries them, or "
                f"their half type is another), so they are rounded: {'; '.join(report.rounded)}. "
                "Cast them to float32 there, or pass `out_dtype=jnp.float32` to the mixed product."
            )
        return out

    def report(self, /, *args: Any, **kwargs: Any) -> AutocastReport:
        """Reports what is cast where, for these arguments. It traces the function without running
        it.

        **Arguments:** the arguments of the function. A [`jax.ShapeDtypeStruct`][] may stand for an
        array.

        **Returns:** an [`mpx_pde.AutocastReport`][].
        """
        mixed = self._mixed()
        recorder = Recorder(self._half, self._full, mixed)
        eqx.filter_eval_shape(_Autocast._run, self, mixed, recorder, args, kwargs)
        return recorder.report()

    def __get__(self, instance: Any, owner: Any = None):
        if instance is None:
            return self
        # The instance is part of the function: its parameters are masters.
        return _Autocast(eqx.Partial(self.fun, instance), self._dtype, self._half, self._full)


if TYPE_CHECKING:

    @overload
    def autocast(
        fun: None = None,
        dtype: DTypeLike | lax.DotAlgorithmPreset | None = None,
        *,
        half: Names = (),
        full: Names = (),
    ) -> Callable[[Callable[..., Any]], _Autocast]: ...

    @overload
    def autocast(
        fun: Callable[..., Any],
        dtype: DTypeLike | lax.DotAlgorithmPreset | None = None,
        *,
        half: Names = (),
        full: Names = (),
    ) -> _Autocast: ...


@public
def autocast(
    fun: Callable[..., Any] | None = None,
    dtype: DTypeLike | lax.DotAlgorithmPreset | None = None,
    *,
    half: Names = (),
    full: Names = (),
) -> Any:
    """Runs a function that was written for float32 in mixed precision, operation by operation.

    Traces `fun` and evaluates its jaxpr by the derivative engine, without derivatives, according to
    the engine's table of operations:

    - *Matrix products and convolutions* go through [`mpx_pde.mixed_dot_general`][] and
        [`mpx_pde.mixed_conv_general_dilated`][]: half × half with float32 accumulation, here and
        in every derivative. A product for which `fun` asks more than the default precision (as
        [`mpx_pde.force_full_precision`][] does) is left alone. The float32 sum is rounded where it
        is kept or enters the next product. It is used as it is up to a difference, and at the end
        of the function. A product whose result goes into a factorization or a solve is in full.
    - *Everything between products* is computed in float32, and evaluated again in the backward pass
        where it reads halves. Its result is stored in half precision if one of its operands was;
        parameters, inputs and constants take the dtype of computed values. Results of sums,
        exponentials, logarithms, powers, roots and other functions that leave the range of float16
        stay in float32. So does the arithmetic that goes into them (softmax, norms, losses), and
        the result of a constant that half precision cannot hold (an epsilon of 1e-12, a mask of
        -1e9). Values that only products use are stored in half precision.

    Parameters are never cast beforehand. They stay float32 masters until the product that uses
    them, also in a loop. So their cotangents are float32, and are summed over uses, scan steps and
    devices in float32. The rounding is a part of each product: if a parameter is used five times,
    the jaxpr rounds it five times, and XLA merges these into one cast. A computed value is cast
    once, however often it is used; a cast back and forth is removed. Loops carry their state in the
    dtype of the program, halves in float32.

    Integers, bools, keys, float64 and complex values pass through untouched; so do references,
    callbacks and other effects. The rules also apply inside of `jax.jit`, loops, branches,
    `jax.checkpoint`, `jax.custom_jvp` and `jax.custom_vjp` (whose rules are kept) and
    `jax.shard_map`. An operation that is in no table stays in float32, and the report lists it.

    The result can be differentiated in both modes and repeatedly, vmapped and jitted. It traces at
    each call, so use it inside of a `jax.jit`.

    **Arguments:**

    - `fun`: a function, method or callable module. Without it, a decorator is returned.
    - `dtype`: float16 or bfloat16, by default [`mpx_pde.half_precision_datatype`][] at the time
        of the call. The name of a split product (`"bfloat16_x3"`, `"bfloat16_x6"`,
        `"bfloat16_x9"`, `"tensorfloat32"`, `"tensorfloat32_x3"`, or any
        [`jax.lax.DotAlgorithmPreset`][]) keeps every value in float32, and computes the matrix
        products from several products of halves, where the hardware has them.
    - `half`, `full`: overrides, one or a sequence: names of primitives (`"exp"`), or patterns of
        [`jax.named_scope`][]s and names of jitted functions (`"decoder/norm*"`, wildcards as in
        `fnmatch`). Operations that match `half` are computed in half precision. Those that match
        `full` are computed in float32, as without `autocast`. If both match, `full` wins.

    **Returns:**

    A callable with the name, docstring and signature of `fun`, which returns what `fun` returns,
    in the same dtypes. It is an Equinox module that holds `fun`, and binds as a method. Its
    method `report`, called with the arguments of `fun`, reports what is cast where.

    **Raises:** `TypeError` if `fun` cannot be called or for an override that is not a string,
    `ValueError` for a `dtype` that is none of the above. An override that changes nothing, such as
    a misspelled one, is a [`mpx_pde.PrecisionWarning`][]. So is a `full` override whose result the
    function itself returns, or carries through a loop, in half precision.

    ```python
    @mpx.autocast(dtype="bfloat16", full="readout")
    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    print(loss.report(model, x, y))
    ```

    The tables follow NVIDIA's automatic mixed precision (Stosic, *Training Neural Networks with
    Tensor Cores*).
    """
    parsed = _parse_dtype(dtype)
    patterns = parse_patterns(half, "half"), parse_patterns(full, "full")
    if fun is None:
        return lambda fun: autocast(fun, dtype, half=half, full=full)
    check_callable(fun)
    return eqx.module_update_wrapper(_Autocast(fun, parsed, *patterns))
