"""The text of a report: its first finding, and advice on it."""

import glob
import math

import equinox as eqx
import jax

from ..program import _tables as tables
from ..program._lines import is_ours
from ..program._products import KEPT_IN_HALF
from ._meter import OPERAND
from ._range_report import RangeReport, Row, cancellation
from ._stats import is_finite, percent
from ._sums import described


_GIVEN = ("input", "constant")

_MASKS = {"pad", "dynamic_update_slice", "scatter", "gather"}
_EXTREMES = {"reduce_max", "reduce_min", "scatter-max", "scatter-min"}
_CHOICES = {*tables.CHOICES, *_MASKS, *_EXTREMES}
"""Primitives in which infinities are intended: masks, and the initial value of a minimum."""

_DERIVATIVES = ("partials", "laplacian", "linear_operator")

_PRODUCTS = ("mixed_dot_general", "mixed_matmul", "mixed_einsum", "mixed_conv_general_dilated")


_ROUNDINGS = {*_GIVEN, *tables.PRODUCTS, *tables.MIXED, "convert_element_type", "reduce_precision"}
"""Operations whose float16 may be the precision of a mode, and not that of the code."""


def _written(row: Row) -> bool:
    """Returns whether a row shows that the code itself computes in float16."""
    return row.dtype == "float16" and row.primitive not in _ROUNDINGS and not is_ours(row.layer)


def _excess(report: RangeReport, name: str) -> int:
    """Returns by how many powers of two the loss scale must fall so that nothing of the backward
    pass overflows `name`."""
    rows = (row for row in report.rows if row.backward and report.at_risk(row))
    largest = max((row.exponents[1] for row in rows if row.exponents), default=0.0)
    highest = {"float16": 16, "bfloat16": 128}[name]
    return max(1, math.floor(largest) + 1 - highest)


def _size(row: Row) -> str:
    return "only zeros" if row.exponents is None else f"largest 2^{row.exponents[1]:.1f}"


def _name(row: Row) -> str:
    """Names a row. An argument or a constant has a place instead of a line."""
    return f"the {row.primitive} at {row.line}" if row.primitive in _GIVEN else row.where


def _fix(row: Row, report: RangeReport, name: str) -> str:
    """Returns the advice for a row that overflows."""
    mixed, smaller = report.mixed, "make its operands smaller by a power of two, or use bfloat16."
    if row.primitive == "input" or (row.cast_of == "arguments" and not row.backward):
        return (
            "Keep that argument in float32: mark it in `keep_full` of `mpx.filter_grad`, or pass "
            "`autocast=True`, which casts no arguments."
        )
    if row.primitive == "constant":
        return "Keep it in float32: `mpx.autocast` casts no arrays before a product takes them."
    if row.backward and mixed:
        excess, room = _excess(report, name), report.room
        if room is not None and excess > room:
            return (
                "It belongs to the backward pass, and no loss scale helps: it would have to fall "
                f"by 2^{excess}, and can fall by 2^{room} at most. Divide the loss, or the term in "
                "it that is so large, by a power of two, or use bfloat16."
            )
        found = (
            "`mpx.DynamicLossScaling` finds that out at the cost of a few skipped steps. To lose "
            f"none, divide it by 2^{excess}, or let `mpx.initial_scaling` find it."
        )
        by_scaling = {
            True: f", so the loss scale is too large: {found}",
            None: f". If the loss is scaled, the scale is too large: {found} If not, make the loss "
            "smaller by a power of two, or use bfloat16.",
            False: ", and the loss is not scaled: `mpx.DynamicLossScaling` finds a scale below 1 "
            "for it. Or use bfloat16.",
        }
        return f"It belongs to the backward pass{by_scaling[report.scaled]}"
    primitive = row.primitive.removeprefix(OPERAND)
    ours = is_ours(row.layer)
    taken = "partials" if row.cast_of in ("derivatives", "layers") else row.layer
    if taken in _DERIVATIVES and report.scaled and mixed:
        which = "If it is a derivative, pass" if row.cast_of == "layers" else "Pass"
        return (
            f"{which} `{taken}` the derivative scales of the step (`scaling=derivatives`), which "
            "fall by themselves and which `mpx.initial_scaling` finds before the first step. If "
            f"it has them, or the output itself overflows, {smaller}"
        )
    wrapper = (
        "`mpx.force_full_precision(f, jnp.float32)` around the function that calls it, or "
        "`mpx.FullPrecision(layer, out_dtype='float32')` around its layer"
    )
    if (primitive, row.layer, row.cast_of) == ("convert_element_type", "mpx_pde", ""):
        return f"A function in full precision returns half there: {wrapper} returns float32."
    if ours and (mixed or primitive in tables.MIXED):
        # These set their precision themselves.
        return (
            f"`{row.layer}` sets its precision itself: {smaller}"
            if row.layer not in _PRODUCTS
            else f"Pass `dtype=jnp.float32` to `mpx.{row.layer}` there, {smaller}"
        )
    if row.scope.endswith(KEPT_IN_HALF):
        return (
            "It is kept in half for the backward pass. Divide it by a power of two before the "
            "product that takes it, or use bfloat16."
        )
    # Under autocast, mixed products stand for the user's own products.
    primitive = primitive.removeprefix("mixed_")
    if primitive in tables.FULL:
        return (
            "`mpx.autocast` keeps it in float32 by itself (`mpx.filter_grad(..., "
            f"autocast=True)`). When whole models are cast, keep it in float32 with {wrapper}."
        )
    if primitive == "convert_element_type" and not row.scope:
        # Autocast delays the program's own casts, so no override can name them.
        if report.autocast:
            return (
                "`mpx.autocast` casts it for the products that take it. Divide the data by a power "
                "of two, override these products (`autocast={'full': ...}` in `mpx.filter_grad` "
                "takes primitives and name scopes), or use bfloat16."
            )
        if row.dtype in ("float32", "float64"):
            return (
                f"That is a cast to {row.dtype}. If the code names that dtype, it stays so in half "
                "precision too, and overflows only where it is rounded later. If the code takes "
                f"the dtype of an array that is half then, name float32 instead. Or {smaller}"
            )
        return (
            f"That is a cast to {row.dtype}, by the code or by a function such as `jnp.sum`, which "
            "returns the dtype that it was given. Write `astype(jnp.float32)`, or leave the cast "
            "out (`mpx.autocast` rounds the operands of products by itself). In a layer of a model "
            f"that is cast, use `mpx.FullPrecision` around the layer. Or {smaller}"
        )
    scope = glob.escape(row.scope.rsplit("/", 1)[-1]) or primitive  # overrides are patterns
    return (
        f"Keep it in float32 with `mpx.autocast(..., full={scope!r})` (or `autocast={{'full': "
        f"{scope!r}}}` in `mpx.filter_grad`). When whole models are cast, use "
        f"`mpx.FullPrecision` around its layer. Or {smaller}"
    )


def _not_finite(report: RangeReport, harmless: bool) -> str | None:
    """Explains why something is not finite in float32. Returns `None` if everything is finite, or
    if all infinities are intended and do not reach the results (`harmless`).
    """
    of_inputs = [row for row in report.rows if row.primitive in _GIVEN and row.nonfinite]
    of_data = (
        "There are {} in {} ({}), before anything is computed. No precision helps: look at where "
        "these data come from."
    )
    for row in of_inputs:
        if row.nans:
            return of_data.format("NaNs", _name(row), percent(row.nans))
    for row in report.rows:
        largest = row.exponents[1] if row.exponents else 0
        # The count was taken before JAX cast the input from float64 to float32.
        if row.primitive == "input" and row.dtype == "float32" and largest >= 128:
            return (
                f"The input at {row.line} is beyond float32, in which JAX holds it ({_size(row)}). "
                "Change its units, or set `jax_enable_x64`."
            )
    advice = (
        'Keep that layer in float32 (`mpx.FullPrecision`), or the whole model (`forward="float32"` '
        "or `autocast=True` in `mpx.filter_grad`), or use bfloat16."
    )
    row = report.first_nonfinite
    if row is not None:
        first = (
            f"not finite first at {row.where} ({percent(row.nonfinite)}, out of finite operands)"
        )
        look = (
            "look for a division by zero, the logarithm or root of something negative, or a step "
            "size that is too large."
        )
        before = (x for x in report.rows if _written(x) and x.order <= row.order)
        if any(before):
            held = "which the code" if row.dtype == "float16" else "and what comes before, the code"
            return (
                f"It is {first}, {held} holds as float16. There a number below 2^-24 is "
                "zero, such as an epsilon, since JAX gives numbers of Python the dtype of the "
                f"array that they meet. {advice} If it is so already, or does not help, {look}"
            )
        return f"float32 itself is {first}. More precision does not help: {look}"
    if of_inputs:
        return of_data.format("infinities", _name(of_inputs[0]), percent(of_inputs[0].nonfinite))
    rows = [row for row in report.rows if row.nonfinite]
    taken = next((row for row in rows if row.primitive != "convert_element_type"), None)
    if not rows or (harmless and (taken is None or taken.primitive in _CHOICES)):
        return None
    row = rows[0]
    if row.dtype == "float16":
        # It arose while the program was traced, so the run had no earlier value to look at.
        return (
            f"An infinity or a NaN enters at {row.where} ({percent(row.nonfinite)}) that the code "
            "holds as float16: a number above 65504 is one, since JAX gives numbers of Python the "
            f"dtype of the array that they meet. {advice}"
        )
    return (
        f"float32 itself is not finite first at {row.where} ({percent(row.nonfinite)}), out "
        "of an infinity or a NaN that is written in the code."
    )


def _lost(report: RangeReport, name: str) -> str:
    """Describes the values that a format rounds to zero, for a function in which none overflow."""
    rows = [row for row in report.rows if report.at_risk(row) and row.loss(name).zero]
    if not rows:
        all_of_it = not any(row.nonfinite for row in report.rows)
        finite = "Everything" if all_of_it else "What the function returns"
        return f"{finite} is finite, and nothing overflows {name} or is lost to zero in it."
    # Values lost in the forward pass are lost in the backward pass too, where a scale can help.
    worst = max(rows, key=lambda row: (row.loss(name).zero, row.backward))
    text = (
        f"Nothing overflows {name}. Most is lost to zero at {_name(worst)}: "
        f"{percent(worst.loss(name).zero)} of its values, {_size(worst)}."
    )
    if not worst.backward:
        return f"{text} If that matters, use bfloat16 or float32 there."
    if report.mixed:
        by_scaling = {True: "a larger loss scale", None: "a loss scale, or a larger one,"}
        scale = by_scaling.get(report.scaled, "a loss scale (`mpx.DynamicLossScaling`)")
        return f"{text} It belongs to the backward pass: {scale} keeps more of it, if that matters."
    return (
        f"{text} It belongs to the backward pass of a float32 function, which has no loss scale: "
        "ask about `mpx.filter_grad(loss, scaling)` to see what is lost with one."
    )


def _is_finite(report: RangeReport) -> bool:
    return all(map(is_finite, filter(eqx.is_inexact_array, jax.tree.leaves(report.result))))


def _skips(report: RangeReport) -> bool:
    """Returns whether the `grads_finite` among the results of a gradient is false."""
    flags = (x for x in jax.tree.leaves(report.result) if eqx.is_array(x) and x.dtype == bool)
    return any(x.shape == () and not x for x in flags)


def explain(report: RangeReport, name: str, full: RangeReport | None = None) -> str:
    """Explains a report. `full` is one of the same function without halves, if there is one."""
    harmless = _is_finite(report)
    if full is not None and full.first_nonfinite is not None:
        # What fails in full precision too is explained as it fails there. A loss that is not finite
        # skips the step, even if its gradient is finite and the loss itself is not returned.
        harmless, report = harmless and not _skips(report), full
    broken = _not_finite(report, harmless)
    if broken and not harmless:
        return broken
    row = report.first_overflow(name)
    text = _lost(report, name)
    if row is not None:
        text = (
            f"{name} overflows first at {_name(row)}: {percent(row.loss(name).overflow)} of its "
            f"values, {_size(row)}. {_fix(row, report, name)}"
        )
    elif broken:
        text = f"Nothing overflows {name}."
    if broken:
        text = f"{text} What the function returns is finite; but: {broken}"
    if sums := report.stagnating(name):
        text = f"{text} But {described(sums, name)}."
    if rows := report.cancelling(name):
        more = f" {len(rows) - 1} other lines are alike." if rows[1:] else ""
        text = (
            f"{text} Digits are lost at {cancellation(rows[0])}.{more} Subtract in float32, before "
            'anything is cast, or pass `forward="float32"`.'
        )
    return text
