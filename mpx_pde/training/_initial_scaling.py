"""Finds the scales that a training run starts with."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool

from .._util._calls import called, public
from .._util._types import ForwardLike, PolicyLike, PyTree
from ..modes._choice import mode_at
from ..precision._dtypes import LARGEST_SCALE
from ..precision._tree import with_fields
from ..program._warnings import warn_user
from ..scaling._derivatives import DerivativeScaling, Scaling, loss_scaling_of
from ..scaling._loss import AbstractLossScaling, DynamicLossScaling, default_cap
from ..scaling._rules import SMALLEST_NORMAL
from ..scaling._telemetry import telemetry
from ._gradient import Gradient, check_eager, copied, transformed
from ._norms import minus, norm
from ._options import refuses_argnums


_ROUNDING = 2.0**-12
"""Half of float16's unit roundoff. A smaller change of a gradient does not count as underflow."""

_MARGIN = 2
"""The powers of two by which a first loss scale stays below overflow, if that costs nothing."""

_LOST = 2.0**-7
"""Underflow at the highest loss scale is reported if it changes a parameter's gradient by more."""

_STARVED = 0.9
"""The share of a derivative below float16's range above which it is reported."""

_BEYOND = 4
"""The step, in powers of two, between the loss scales that are tried beyond the highest."""

_IN_FLOAT32 = (
    "Compute the last steps of the loss in float32, by `astype(jnp.float32)` or `forward='float32'`"
)


@public
@refuses_argnums
def initial_scaling(
    func: Callable[..., Any],
    scaling: AbstractLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
) -> Callable[..., Any]:
    """Finds the scales to start a training run with: those at which the gradient of a batch neither
    overflows nor underflows.

    Without it, each of the first steps is skipped and lowers the scales by a factor of 16, until
    they are small enough. Scales that start too small cause no overflow, but take thousands of
    steps to grow. Call it once, before the first step, with the arguments of the step:

    ```python
    scaling = mpx.initial_scaling(loss, scaling, **options)(model, batch)
    ```

    The gradient is compiled once, and evaluated at falling scales until nothing overflows. Scales
    are powers of two, so a larger scale gives a bit-identical gradient unless something underflows.
    Each gradient is therefore compared with the one at the largest possible scale. The loss scale
    is set as large as possible, and each derivative scale as near as possible to where it started.
    Both leave room below overflow as far as that does not change the gradient.

    There are three warnings, each a [`mpx_pde.PrecisionWarning`][]. If the loss scale ends at its
    highest, larger ones are tried too. If these change the gradient of a parameter by 1 % or more,
    the warning names the `max_loss_scaling` to take. If they overflow, and a smaller scale shows as
    much underflow, it asks for a loss that ends in float32. A second warning asks for the same
    where the gradient is zero in float16, but not in float32. A third names a derivative that
    vanishes because it shares its scale with a far larger one.

    **Arguments:** as for [`mpx_pde.filter_value_and_grad`][]; pass the values that the training
    uses.

    **Returns:**

    A function of the arguments of `func` that returns the scaling with new scales and unchanged
    counters. A scaling without scales to find ([`mpx_pde.NoOpLossScaling`][],
    [`mpx_pde.StaticLossScaling`][], a subclass of your own) is returned unchanged. So is any
    scaling if the compute dtype is not float16.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][]; `TypeError` inside of `jax.jit`, `jax.vmap`
    and `jax.shard_map`, since it looks at values (arrays may be sharded); `ValueError` where the
    gradient is finite at no scale, or the error of `equinox.error_if` that no scale prevents.
    """
    return transformed(
        _run,
        func,
        scaling,
        has_aux=has_aux,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )


class NoScaleError(ValueError):
    """Raised when no scale makes a gradient finite."""


class _Evaluated(eqx.Module):
    """The gradient at one scaling, and whether it is finite."""

    fixable: Bool[Array, ""]
    """True if other scales may help when the gradient is not finite. No loss scale makes the loss
    itself finite, because it is computed before it is scaled."""
    adjusted: Any
    finite: Bool[Array, ""]
    grads: PyTree


@eqx.filter_jit
def _evaluate(gradient: Gradient, args: tuple, kwargs: dict) -> _Evaluated:
    evaluated = gradient.evaluate(args, kwargs)
    # These are no steps: a gradient that vanishes at some scale is not counted.
    adjusted, finite, grads = gradient.finish(args[0], evaluated._replace(depends=False))
    fixable = jnp.isfinite(evaluated.value)
    if evaluated.counts is not None:
        fixable = fixable | ~gradient.derivatives.finite(evaluated.counts)
    return _Evaluated(fixable, adjusted, finite, grads)


@eqx.filter_jit
def _differ(grads: PyTree, others: PyTree, share: float = _ROUNDING) -> Bool[Array, ""]:
    """Returns whether the gradients of any parameter differ by more than `share`, relative to the
    larger one. By default that is more than rounding could explain.
    """

    def differ(g, h):
        return norm(minus(g, h)) > share * jnp.maximum(norm(g), norm(h))

    return jnp.any(jnp.stack(jtu.tree_leaves(jtu.tree_map(differ, grads, others))))


def _is_zero(grads: PyTree) -> bool:
    return not _differ(grads, jtu.tree_map(jnp.zeros_like, grads))


def _zeros(grads: PyTree) -> dict[str, bool]:
    """Returns whether the gradient of each parameter is zero, by the path of the parameter."""
    return {jtu.keystr(path): not jnp.any(x) for path, x in jtu.tree_leaves_with_path(grads)}


def _vanished(grads: PyTree, gradient: Gradient, args: tuple, kwargs: dict) -> list[str]:
    """Returns the paths of the parameters whose gradient is zero in `grads`, but not without
    halves, as far as that is known."""
    zero = [path for path, is_zero in _zeros(grads).items() if is_zero]
    if not zero:
        return []
    full = dataclasses.replace(gradient, mode=mode_at("full", gradient.mode))
    try:
        really = _zeros(_evaluate(full, *copied((args, kwargs))).grads)
    except (TypeError, ValueError):  # such as a loop that begins with a half
        return []
    return [path for path in zero if not really[path]]


def _run(gradient: Gradient, args: tuple, kwargs: dict) -> Any:
    mode, start = gradient.mode, gradient.scaling
    check_eager((gradient, args, kwargs))
    float16 = mode.scales and mode.dtype == jnp.float16
    if not float16 or not isinstance(start, DynamicLossScaling | Scaling):
        return start

    raised = []

    def evaluate(exponents: np.ndarray) -> _Evaluated:
        present = with_fields(gradient, scaling=_with_exponents(start, exponents))
        try:
            return _evaluate(present, *copied((args, kwargs)))
        except eqx.EquinoxRuntimeError as error:
            # A check in the program, such as that of a linear solver, may be of an overflow.
            raised.append(error)
            adjusted = present.scaling.adjust(jnp.array(False))
            if isinstance(adjusted, Scaling):  # it may be of a derivative, too
                derivatives = adjusted.derivatives
                lower = derivatives.with_exponents(derivatives.exponents - derivatives.rule.step)
                adjusted = with_fields(adjusted, derivatives=lower)
            return _Evaluated(jnp.array(True), adjusted, jnp.array(False), None)

    cap = default_cap(mode.forward, mode.dtype)
    try:
        exponents, evaluated = _search(start, evaluate, cap)
    except NoScaleError as error:
        raise (raised[-1] if raised else error) from None
    if vanished := _vanished(evaluated.grads, gradient, args, kwargs):
        of = "" if len(vanished) == len(_zeros(evaluated.grads)) else f" for {', '.join(vanished)}"
        warn_user(
            f"`{called()}` finds a gradient that is zero{of} at every scale, but not in float32. "
            "In float16 a number below 2^-24 is zero, even one that is written in the code, and so "
            "is the derivative of what overflows and divides. `mpx_pde.explain_nonfinite` of the "
            f"gradient names the line. {_IN_FLOAT32}, pass `autocast=True`, or make the loss "
            "larger."
        )
    return _with_exponents(start, exponents)


def _search(
    start: Any, evaluate: Callable[[np.ndarray], _Evaluated], cap: float
) -> tuple[np.ndarray, _Evaluated]:
    """Returns the exponents to start with, and the gradient there or at a larger scale. The
    exponent of the loss scale is at most that of `cap`."""
    scales = _scales(start, cap)
    loss = loss_scaling_of(start)
    of_loss = np.arange(len(scales)) < isinstance(loss, DynamicLossScaling)
    exponents, evaluated = _in_range(_exponents(start), evaluate, of_loss)
    for i, scale in enumerate(scales):
        step = scale.step * np.eye(len(scales), dtype=int)[i]
        before, start_of = (exponents, evaluated), exponents[i]
        exponents, evaluated, overflows = _raised(
            exponents, evaluated, evaluate, i, scale.step, scale.highest
        )
        if _is_zero(evaluated.grads):
            # A zero gradient, such as that of a loss that has no weight yet, asks for no scale.
            exponents, evaluated = before
            continue
        largest = evaluated
        # A loss scale is set as large as possible, a derivative scale as near as possible to where
        # it was. A margin is left, as derivatives and gradients of the next batch may be larger.
        lowest = exponents[i] if of_loss[i] else start_of
        lowest = min(lowest, exponents[i] - scale.margin) if overflows else lowest
        while exponents[i] - scale.step >= max(lowest, scale.lowest):
            other = evaluate(exponents - step)
            if not other.finite or _differ(largest.grads, other.grads):
                break
            exponents, evaluated = exponents - step, other
    if isinstance(start, Scaling):
        _warn_of_starved(evaluated.adjusted.derivatives)
    if any(of_loss) and exponents[0] + scales[0].step > scales[0].highest:
        evaluated = _beyond(exponents, evaluated, evaluate)
    return exponents, evaluated


def _raised(
    exponents: np.ndarray,
    evaluated: _Evaluated,
    evaluate: Callable[[np.ndarray], _Evaluated],
    i: int,
    step: int,
    highest: int,
) -> tuple[np.ndarray, _Evaluated, bool]:
    """Raises scale `i` until the next step overflows or is beyond `highest`. Returns the exponents,
    the gradient there, and whether the next step overflows.
    """
    while exponents[i] + step <= highest:
        raised = exponents + step * np.eye(len(exponents), dtype=int)[i]
        other = evaluate(raised)
        if not other.finite or np.any(_exponents(other.adjusted) < raised):
            return exponents, evaluated, True
        exponents, evaluated = raised, other
    return exponents, evaluated, False


def _beyond(
    exponents: np.ndarray, evaluated: _Evaluated, evaluate: Callable[[np.ndarray], _Evaluated]
) -> _Evaluated:
    """Returns the gradient at the largest loss scale that does not overflow. Issues a warning if a
    part of that gradient underflows at the highest scale that is allowed."""
    highest = round(math.log2(LARGEST_SCALE))
    beyond, largest, _ = _raised(exponents, evaluated, evaluate, 0, _BEYOND, highest)
    other, share = largest, _LOST
    fix = f"Let the scale grow by `max_loss_scaling=2**{beyond[0]}` in `mpx_pde.DynamicLossScaling`"
    if beyond[0] == exponents[0]:
        # A larger scale overflows, so compare with a smaller one: the loss by underflow is
        # inversely proportional to the scale.
        other = evaluate(exponents - _BEYOND * (np.arange(len(exponents)) == 0))
        share, fix = 2**_BEYOND * _LOST, _IN_FLOAT32
    if other.finite and _differ(evaluated.grads, other.grads, share):
        warn_user(
            f"`{called()}` ends at the highest loss scale, 2^{exponents[0]}, at which a part of "
            f"the gradient of this batch underflows. {fix}, or make the loss larger."
        )
    return largest


def _warn_of_starved(derivatives: DerivativeScaling) -> None:
    """Issues a warning if a derivative nearly vanishes while another one with the same scale is in
    range."""
    seen = telemetry(derivatives)
    starved: dict[str, set[int]] = {}  # the scalers of each such derivative
    fed: set[int] = set()  # the scalers of all others
    for (name, counts), row in zip(seen["counts"].items(), derivatives.strategy.rows, strict=True):
        total = counts.sum()
        carried = seen["exponents"][name] + seen["shift"][name]
        scalers = set(dict(row.weights))
        if counts[carried < SMALLEST_NORMAL].sum() > _STARVED * total:
            starved[name] = scalers
        elif total:
            fed |= scalers
    lost = [name for name, scalers in starved.items() if scalers & fed]
    if lost:
        warn_user(
            f"`{called()}` ends at derivative scales at which {', '.join(map(repr, lost))} is "
            "nearly all below float16's range, because it shares its scale with a far larger "
            "derivative. Give each its own, by `per_direction`, `per_term` or `special`, or "
            "measure coordinates in other units."
        )


def _in_range(
    exponents: np.ndarray, evaluate: Callable[[np.ndarray], _Evaluated], of_loss: np.ndarray
) -> tuple[np.ndarray, _Evaluated]:
    """Finds exponents at which the gradient is finite, by the same rules that adjust scales from
    step to step. Returns these exponents and the gradient there.
    """
    tried, taken, fixable = set(), None, True
    while tuple(exponents) not in tried:
        tried.add(tuple(exponents))
        evaluated = evaluate(exponents)
        following = _exponents(evaluated.adjusted)
        if evaluated.finite:
            # Derivatives may still vanish: then their scales rise.
            taken, following = (exponents, evaluated), np.where(of_loss, exponents, following)
        elif not (fixable := bool(evaluated.fixable)):
            break
        exponents = following
    if taken is None:
        why = "" if fixable else " The loss itself is not finite, before it is scaled."
        raise NoScaleError(
            f"`{called()}` found no scale at which the gradient of this batch is finite.{why} Look "
            "where it overflows with `mpx_pde.explain_nonfinite`, and whether it is finite in "
            "float32, with `use_mixed_precision=False`."
        )
    return taken


@dataclasses.dataclass(frozen=True)
class _Scale:
    """A scale that may change, and its bounds, as exponents of two."""

    exponent: int
    lowest: int
    highest: int
    step: int
    margin: int
    """The distance that it keeps from overflow, if that costs nothing."""


def _scales(scaling: Any, cap: float = LARGEST_SCALE) -> list[_Scale]:
    """Returns the scales of a scaling that may change, that of the loss first. Its upper bound is
    its own cap, or else `cap`."""
    loss = loss_scaling_of(scaling)
    out = []
    if isinstance(loss, DynamicLossScaling):
        exponent = lambda x: round(math.log2(float(x)))
        first, low = exponent(loss.loss_scaling), exponent(loss.min_loss_scaling)
        high = exponent(loss.max_loss_scaling or cap)
        out.append(_Scale(first, low, high, exponent(loss.factor), _MARGIN))
    if isinstance(scaling, Scaling):
        rule, strategy = scaling.derivatives.rule, scaling.derivatives.strategy
        for i, exponent in enumerate(np.asarray(scaling.derivatives.exponents)):
            rows = [row for row in strategy.rows if i in dict(row.weights)]
            margin = strategy.steps(rule.margin, rows)
            out.append(_Scale(int(exponent), rule.lowest[i], rule.highest[i], rule.step, margin))
    return out


def _exponents(scaling: Any) -> np.ndarray:
    return np.array([scale.exponent for scale in _scales(scaling)])


def _with_exponents(scaling: Any, exponents: np.ndarray) -> Any:
    """Returns `scaling` with these exponents for the scales that [`_scales`][] returns."""
    if isinstance(scaling, DynamicLossScaling):
        return with_fields(scaling, loss_scaling=jnp.array(2.0 ** exponents[0], jnp.float32))
    if isinstance(scaling.loss, DynamicLossScaling):
        loss = _with_exponents(scaling.loss, exponents)
        scaling, exponents = with_fields(scaling, loss=loss), exponents[1:]
    return with_fields(scaling, derivatives=scaling.derivatives.with_exponents(exponents))
