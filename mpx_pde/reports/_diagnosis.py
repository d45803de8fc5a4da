"""Diagnoses the program of a step in half precision, and warns. The step itself does none of it.

Each finding is a [`mpx_pde.PrecisionWarning`][] in the name of the function that the user called.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._util._calls import called
from .._util._types import PyTree
from ..program._flat import Flat, dependent
from ..program._jaxpr import contains, trace_arrays
from ..program._products import ProductRow
from ..program._shown import Program, shown
from ..program._warnings import warn_user
from ..scaling._loss import NoOpLossScaling
from ..scaling._probe import tap_p
from ._cotangents import compared_cotangents
from ._differences import magnified_differences
from ._entries import entry_of
from ._factorized import factorizations
from ._fragile import fragile_calls
from ._phases import rounded_phase
from ._precision import PrecisionReport, arrays_closed_over, half_share_of, report_of
from ._sums import described as describe_sums, long_sums
from ._survey import Survey


def diagnose(run: Callable, step: tuple, program: Program) -> None:
    """Warns of what the program of `run(*step)` loses in half precision. `step` is a `Gradient` and
    the arguments of its loss."""
    gradient, args, _ = step
    survey = Survey(program.closed)
    _warn_of_full_products(run, step, program, survey)
    _warn_of_sums(gradient, survey)
    if gradient.mode.casts:
        _warn_of_phases(gradient, survey)
        _warn_of_factorizations(program.closed)
    if not isinstance(getattr(gradient.scaling, "loss", gradient.scaling), NoOpLossScaling):
        _warn_of_rules(survey)
    if gradient.mode.forward is None:
        _warn_of_functions(gradient, survey)
        _warn_of_differences(gradient, args[0], program, survey)
    if gradient.derivatives is not None and gradient.derivatives.active:
        _warn_of_unused_scaling(program.closed)
    if gradient.has_aux and gradient.mode.casts:
        _warn_of_states(gradient, args, program, survey)


# --- Products in full precision ----------------------------------------------------------------


LEAST_IN_FULL = 1 / 4
"""The share of the work that should be half if values are evaluated in full: three eighths of the
backward pass, which is two thirds of the work. Small networks also have their first layer in
float32."""

OF_JACOBIANS = (
    "The first layer, what meets a network's one output, and what `FullPrecision` holds stay in "
    "float32: a network of one hidden layer has nothing else, and gains nothing by it."
)


_OF_COMPLEX = (
    "Products of complex numbers have no half-precision form: write those of large arrays as "
    "products of real and imaginary parts."
)


def checked(
    fun: Callable,
    args: tuple,
    dtype: np.dtype,
    advice: str,
    least: float,
    instead: str,
) -> Any:
    """Evaluates `fun(*args)`, and issues a [`mpx_pde.PrecisionWarning`][] with `advice` if less
    than `least` of the work of its products is done in half precision. `instead` requests float32.
    """

    def look(program: Program) -> None:
        report = report_of(program.closed)
        if _castable(report) < least:
            warn_user(_text(report, dtype, advice, instead))

    return shown(fun, args, look)


def _warn_of_full_products(run: Callable, step: tuple, program: Program, survey: Survey) -> None:
    """Warns if too little of the work of products is done in half precision, unless the user named
    what stays in float32 and enough would be done without that."""
    gradient, *arguments = step
    mode, report = gradient.mode, report_of(program.closed)
    if _castable(report) >= mode.least:
        return
    if (without := mode.without_overrides()) is not None:
        others = dataclasses.replace(gradient, mode=without), *arguments
        if _castable(report_of(trace_arrays(run, others, {})[0])) >= mode.least:
            return
    advice = mode.advice
    if mode.casts:
        advice = _entering(report, program, survey) + advice
    if mode.casts and (arrays := arrays_closed_over(program.closed)):
        advice += (
            f" No cast reaches arrays that the loss closes over, here {', '.join(arrays)}: pass "
            "data as arguments."
        )
    warn_user(_text(report, mode.dtype, advice, "use_mixed_precision=False"))


def _entering(report: PrecisionReport, program: Program, survey: Survey) -> str:
    """Tells where float32 enters the program, of which the largest product in full is made."""
    names = [_argument(path) for path, _ in program.leaves]
    entry = entry_of(survey, _largest_in_full(report).line, names)
    return f"float32 enters {entry}. " if entry else ""


def _argument(path: Sequence[Any]) -> str:
    """Names an array by its path in the function and arguments of a step: `run`, the arguments of
    `run`, of which the second are those of the loss."""
    at = jtu.keystr(tuple(path[2:]))
    return f"argument {at}" if at else "the loss"


def _castable(report: PrecisionReport) -> float:
    """Returns the share of the work that is done in half precision, among the work that has a
    half-precision form, if any has.
    """
    return half_share_of(_of_numbers(report))


_LEAST_REAL = 1 / 10
"""The share of the work from which on products of real numbers are what half precision is for."""


def _of_numbers(report: PrecisionReport) -> list[ProductRow]:
    """Returns the products of real numbers, and those of complex numbers too if these are nearly
    all of the work. They have no half-precision form."""
    numbers = [row for row in report.rows if not row.of_integers]
    real = [row for row in numbers if row.real]
    work = [sum(row.flops for row in rows) for rows in (real, numbers)]
    return real if real and work[0] >= _LEAST_REAL * work[1] else numbers


def _largest_in_full(report: PrecisionReport) -> ProductRow:
    return next(x for x in _of_numbers(report) if not x.half)


def _text(report: PrecisionReport, dtype: np.dtype, advice: str, instead: str) -> str:
    row = _largest_in_full(report)
    advice = advice if row.real else _OF_COMPLEX
    count = sum(row.count for row in _of_numbers(report))
    return (
        f"`{called()}` was asked for {dtype.name}, but {100 * _castable(report):.0f}% of the work "
        f"of its {count} products is done in half precision. The largest part of the rest is "
        f"{row.dtype}, at {row.line}. {advice} `mpx.precision_report` lists all products. "
        f"If float32 is meant, pass `{instead}` or filter `mpx.PrecisionWarning`."
    )


# --- Sums, phases and functions ---------------------------------------------------------------


def _warn_of_sums(gradient: Any, survey: Survey) -> None:
    """Warns of sums in half precision that stand still."""
    if sums := [x for x in long_sums(survey) if x.stagnates()]:
        others = gradient.mode.alternatives
        others = f", or pass {' or '.join(others)}" if others else ""
        warn_user(
            f"`{called()}`: {describe_sums(sums)}{others}. If it is meant, filter "
            "`mpx_pde.PrecisionWarning`."
        )


def _warn_of_phases(gradient: Any, survey: Survey) -> None:
    """Warns of an exponential of complex numbers whose phases were rounded."""
    if (line := rounded_phase(survey.program)) is not None:
        digits = jnp.finfo(gradient.mode.dtype).nmant + 1
        warn_user(
            f"`{called()}`: {line} takes an exponential of complex numbers whose parts were "
            f"rounded to {gradient.mode.dtype.name}: 2^-{digits} of a phase, of which only the "
            "rest modulo 2π counts. Keep these parameters in float32 by "
            "`keep_full` or `mpx_pde.FullPrecision`, or pass `autocast=True` or "
            "`forward='float32'`. If it is meant, filter `mpx_pde.PrecisionWarning`."
        )


def _warn_of_functions(gradient: Any, survey: Survey) -> None:
    """Warns of functions and formulas whose own arithmetic fails in half precision."""
    if calls := fragile_calls(survey):
        more = f" {len(calls) - 1} other calls are alike." if calls[1:] else ""
        warn_user(
            f"`{called()}`: {calls[0]}.{more} Cast its arguments by `astype(jnp.float32)`, or pass "
            f"{' or '.join(gradient.mode.alternatives)}. If its arguments are harmless, filter "
            "`mpx_pde.PrecisionWarning`."
        )


def _warn_of_factorizations(closed: ClosedJaxpr) -> None:
    """Warns of factorizations in half precision. The step is traced, and the error of its
    compiler will name no line."""
    if calls := factorizations(closed):
        more = f" So do {len(calls) - 1} other calls." if calls[1:] else ""
        warn_user(
            f"`{called()}`: {calls[0].line} factorizes or solves in {calls[0].dtype} "
            f"(`{calls[0].name}`), which JAX cannot compile: it raises `NotImplementedError` "
            f"without a line.{more} Cast the matrix by `astype(jnp.float32)` there, or pass "
            "`forward='float32'` or `autocast=True`, which cast no arguments."
        )


def _warn_of_rules(survey: Survey) -> None:
    """Warns of backward rules that compare a scaled cotangent."""
    if lines := compared_cotangents(survey):
        more = f" {len(lines) - 1} other lines are alike." if lines[1:] else ""
        warn_user(
            f"`{called()}`: the backward rule of the `jax.custom_vjp` function that {lines[0]} "
            f"calls compares its cotangent, as clipping does.{more} The cotangent is multiplied by "
            "the loss scale, so the rule does something else than without it. Compute in bfloat16 "
            "with `mpx_pde.NoOpLossScaling()`, or clip the gradients that this call returns. If "
            "it is meant, filter `mpx_pde.PrecisionWarning`."
        )


def _warn_of_differences(gradient: Any, model: PyTree, program: Program, survey: Survey) -> None:
    """Warns of differences that magnify the rounding of what half products computed."""
    half, own = gradient.mode.dtype.name, {id(x) for x in jtu.tree_leaves(model)}
    parameters = [i for i, (_, x) in enumerate(program.leaves) if id(x) in own]
    if differences := magnified_differences(survey, half, parameters):
        line, what, nodes, factor = differences[0]
        more = f" {len(differences) - 1} other lines are alike." if differences[1:] else ""
        warn_user(
            f"`{called()}`: {line} {what} values at {nodes:,} nodes that were rounded to "
            f"{half}, or that products of {half} computed.{more} It magnifies their rounding, "
            f"relative to the result, by a factor of about {float(f'{factor:.1g}'):,.0f}. Pass "
            "`forward='float32'`. If it averages, or if it is meant, filter "
            "`mpx_pde.PrecisionWarning`."
        )


# --- Derivatives in the loss -----------------------------------------------------------------


def _warn_of_unused_scaling(closed: ClosedJaxpr) -> None:
    """Warns if a derivative scaling scales nothing."""
    if not contains(closed, {tap_p.name}):
        warn_user(
            f"`{called()}` got a `Scaling`, but the loss takes no derivative by the "
            "`derivatives` that it receives, so nothing in it is scaled or counted. Pass them on: "
            "`mpx_pde.partials(..., scaling=derivatives)`. A loss without derivatives takes a loss "
            "scaling alone, such as `scaling.loss`."
        )


def warn_of_unscaled(taken: str, order: int) -> None:
    """Warns that a loss takes derivatives in float16 by the call `taken`, without a scaling."""
    warn_user(
        f"`{called()}` got a loss scaling alone, but the loss takes derivatives of order "
        f"{order} by `{taken}` in float16. What overflows or vanishes in them is lost before "
        "the loss is scaled. Pass `mpx_pde.Scaling(loss=..., derivatives="
        "mpx_pde.DerivativeScaling.per_direction(...))`. The loss then receives `derivatives`: "
        f"pass them on by `{taken}(..., scaling=derivatives)`. Or take `forward='float32'`, or "
        "bfloat16. If it is meant, filter `mpx_pde.PrecisionWarning`."
    )


# --- States that are rounded at each step --------------------------------------------------------


@dataclasses.dataclass
class _Place:
    """A placeholder for a result of a program."""

    index: int


def _warn_of_states(gradient: Any, args: tuple, program: Program, survey: Survey) -> None:
    """Warns if a part of the auxiliary output has the structure of an argument and each
    of its arrays was computed from the rounded array at the same place in that argument.
    """
    closed, leaves, assemble = program
    out = assemble([_Place(i) for i in range(len(closed.jaxpr.outvars))])
    aux = out[0][1] if isinstance(out[0], tuple) else out[-1]
    number = {id(x): i for i, (_, x) in enumerate(leaves)}
    mode = gradient.mode
    rounded, _ = eqx.filter_eval_shape(mode.cast, args, {})
    for i, (argument, narrow) in enumerate(zip(args[1:], rounded[1:], strict=True), start=1):
        structure, paths = jtu.tree_structure(argument), jtu.tree_leaves_with_path(argument)
        # Plain tuples of arrays are skipped: their structure may match by chance.
        if all(isinstance(k, jtu.SequenceKey) for path, _ in paths for k in path):
            continue
        pairs = zip(paths, jtu.tree_leaves(narrow), strict=True)
        lost = [eqx.is_array(x) and _digits(y) < _digits(x) for (_, x), y in pairs]
        is_alike = ft.partial(_has_structure, structure)
        for state in filter(is_alike, jtu.tree_leaves(aux, is_alike) if any(lost) else ()):
            places = zip(paths, jtu.tree_leaves(state), lost, strict=True)
            pairs = [(number[id(x)], y) for (_, x), y, is_lost in places if is_lost]
            arrays = all(isinstance(y, _Place) for _, y in pairs)
            if arrays and _computed_of(closed, survey.program, [(j, y.index) for j, y in pairs]):
                keep = mode.keep_full if isinstance(mode.keep_full, tuple) else ()
                keep = (*keep, *[False] * len(args))[: len(args)]
                warn_user(
                    f"`{called()}` rounds argument {i} ({type(argument).__name__}) to "
                    f"{mode.dtype.name}, and the function returns a new one. Values "
                    "that change little, such as running statistics, stand still if rounded at "
                    "each step. "
                    f"Pass `keep_full={(*keep[:i], True, *keep[i + 1 :])}`, or `autocast=True`, "
                    "which casts no argument. If it is meant, filter `mpx_pde.PrecisionWarning`."
                )


def _digits(x: Any) -> int:
    return jnp.finfo(x.dtype).nmant if jnp.issubdtype(x.dtype, jnp.inexact) else 0


def _has_structure(structure: Any, tree: PyTree) -> bool:
    try:
        return jtu.tree_structure(tree) == structure
    except ValueError:  # static fields that are arrays cannot be compared
        return False


def _computed_of(closed: ClosedJaxpr, flat: Flat, pairs: Sequence[tuple[int, int]]) -> bool:
    """Returns whether each result in `pairs`, which holds positions of operands and results,
    depends on its operand and has its shape, and whether any result is more than its operand cast.
    """
    if any(closed.in_avals[i].shape != closed.out_avals[j].shape for i, j in pairs):
        return False
    same: dict[Any, int] = {k: k for k in flat.inputs}
    for step in flat.steps:
        if step.name == "convert_element_type":
            same.update((step.outputs[0], same[x]) for x in step.variables if x in same)
    carried = [(flat.inputs[i], flat.outputs[j]) for i, j in pairs]
    results = [(k, x) for k, x in carried if x in dependent(flat, [k])]
    return len(results) == len(carried) and any(same.get(x) != k for k, x in results)
