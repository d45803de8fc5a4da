"""Measures the present effect of rounding on a training run."""

import dataclasses
import functools as ft
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from .._util._calls import called, named, public
from .._util._notes import noting
from .._util._repr import table
from .._util._types import ForwardLike, PolicyLike, PyTree
from ..modes._choice import mode_at
from ..modes._mode import AbstractMode
from ..precision._cast import cast_tree, widen
from ..precision._dtypes import check_integer, check_positive
from ..precision._forward import RUNGS, check_rung
from ..precision._tree import all_finite
from ..scaling._loss import AbstractLossScaling
from ..scaling._marks import collecting
from ._accumulate import split_batch
from ._gradient import Gradient, copied
from ._norms import minus, norm, real_of, relative_distance, share_of, total, wide_of
from ._options import refuses_argnums


_SHOWN = 12


class PrecisionFloor(eqx.Module):
    """The effect of rounding on a loss and its gradient. Prints as a table with a verdict.

    Errors compare the present precision with the next one up, which stands for the truth. They are
    relative: the norm of the difference divided by the norm.

    **Attributes:**

    - `loss`: the error of the loss.
    - `terms`: the error of each derivative term of the loss, by its name in
        [`mpx_pde.partials`][] and related functions. It covers all points where the term was taken,
        except those in loops and branches.
    - `gradient`: the error of the gradient as a whole.
    - `parameters`: the error of the gradient of each parameter, by its path.
    - `noise`: the relative standard error of the gradient of a batch like this one, estimated from
        the differences between its micro-batches. Noise averages out over steps; rounding does not,
        because it depends on the weights. NaN where no micro-batches were asked for.
    - `parameter_noise`: the same for each parameter.
    - `finite`: whether loss and gradient are finite in both precisions. If they are not, a scale
        has to be found first.
    - `precision`, `above`: the precisions that were compared; static.
    - `tolerance`: the smallest error of loss or gradient at which the floor counts as reached;
        static.
    """

    loss: Float[Array, ""]
    terms: dict[str, Float[Array, ""]]
    gradient: Float[Array, ""]
    parameters: dict[str, Float[Array, ""]]
    noise: Float[Array, ""]
    parameter_noise: dict[str, Float[Array, ""]]
    finite: Bool[Array, ""]
    precision: str = eqx.field(static=True)
    above: str = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)

    @property
    def reached(self) -> Bool[Array, ""]:
        """Returns whether rounding makes up `tolerance` or more of the loss or the gradient."""
        # A loss or gradient of zero has no relative error.
        worst = jnp.maximum(self.loss, self.gradient)
        return self.finite & (worst >= self.tolerance)

    @property
    def verdict(self) -> str:
        """Returns the advice in one sentence. Needs values: a `TypeError` inside of `jax.jit`."""
        if isinstance(self.finite, Tracer):
            raise TypeError(
                "`PrecisionFloor.verdict` is a text, so it needs the values of the floor, which is "
                "being traced. Return the floor from the compiled function, and look at it there; "
                "`reached` is the verdict as an array."
            )
        if not self.finite:
            return (
                f"loss or gradient overflow in {self.precision}: measure again once the scales "
                "are found."
            )
        error, part = max(
            (float(self.gradient), "gradient"), (float(self.loss), "loss"), key=lambda x: x[0]
        )
        share = f"rounding is {_percent(error)} of your {part}"
        return f"{share}: go on with {self.above}." if self.reached else f"{share}: stay."

    def __str__(self) -> str:
        if isinstance(self.gradient, Tracer):
            return f"PrecisionFloor of {self.precision} against {self.above}, being traced"

        def percent(share):
            return "" if share is None else _percent(float(share))

        rows = [("", "rounding", "noise"), ("loss", percent(self.loss), "")]
        rows += [(f"  {name}", percent(x), "") for name, x in self.terms.items()]
        noise = self.noise if self.parameter_noise else None  # one micro-batch shows no noise
        rows.append(("gradient", percent(self.gradient), percent(noise)))
        worst = sorted(self.parameters, key=lambda path: -float(self.parameters[path]))
        rows += [
            (
                f"  {path}",
                percent(self.parameters[path]),
                percent(self.parameter_noise.get(path)),
            )
            for path in worst[:_SHOWN]
        ]
        lines = [f"{self.precision} against {self.above}", *table(rows)]
        if len(worst) > _SHOWN:
            lines.append(f"  and {len(worst) - _SHOWN} parameters with less rounding")
        text = self.verdict
        return "\n".join([*lines, text[0].upper() + text[1:]])


def _percent(share: float) -> str:
    # Two digits, except where two digits would print as 1e+02.
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


@public
@refuses_argnums
def precision_floor(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
    against: str | None = None,
    in_axes: PyTree = 0,
    micro_batches: int = 4,
    tolerance: float = 0.1,
) -> Callable[..., PrecisionFloor]:
    """Measures the effect of rounding *now*: errors of the loss, of its derivative terms and of the
    gradient of each parameter, and the noise between micro-batches.

    Early in a training run the residual is large, and any precision will do. As the residual
    vanishes, the rounding of its terms does not, and at some step most of the gradient is rounding.
    This function measures how much of it is, for the cost of three gradients. That cost is
    negligible if you call it every few hundred steps.

    ```python
    floor = mpx.precision_floor(loss, scaling, keep_full=(False, True))(model, points)
    print(floor)  # … Rounding is 40 % of your gradient: go on with forward='float32'.
    ```

    The measurement is compiled once per loss, by [`equinox.filter_jit`][], and may be called inside
    of another compiled function. It changes neither the model nor the scaling.

    **Arguments:**

    - `func`, `scaling`, `has_aux`, `use_mixed_precision`, `policy`, `keep_full`, `autocast`,
        `forward`: as for [`mpx_pde.filter_grad`][]; pass the values that the training uses.
    - `against`: the precision to compare with: a value of `forward`; `"full"`, which is float32 in
        the backward pass too (the precision of the parameters); or `"float64"`, which is float64
        throughout. The default is the next precision up: `"float32"` for half precision, `"full"`
        for other forward passes, and `"float64"` for `"full"`.
    - `in_axes`: the batch axis of the positional arguments after the model, as for
        [`mpx_pde.filter_accumulated_value_and_grad`][]: `None` marks what is not a batch.
    - `micro_batches`: the number of blocks of the batch that are compared to find the noise. The
        noise is NaN with 1, and if no positional argument after the model is an array.
    - `tolerance`: the share of rounding in the loss or the gradient at which the verdict becomes to
        go up.

    **Returns:**

    A function of the arguments of `func` that returns a [`mpx_pde.PrecisionFloor`][].

    **Raises:** as [`mpx_pde.filter_grad`][], and `ValueError` for an `against` that is unknown or
    not above the present precision, for float64 without 64-bit types, for a batch that does not
    divide into the micro-batches, and for a `tolerance` that is not positive.
    """
    gradient = Gradient.of(
        func,
        scaling,
        has_aux=has_aux,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )
    micro_batches = check_integer(micro_batches, "micro_batches")
    tolerance = check_positive(tolerance, "tolerance")
    present = gradient.mode.rung
    above = _above(gradient.mode, against)

    @ft.wraps(func, updated=())
    def floor(*args: Any, **kwargs: Any) -> PrecisionFloor:
        with named("precision_floor"):
            gradient.check_called_with(args)
            rungs = present, above
            return _measured(gradient, args, kwargs, rungs, in_axes, micro_batches, tolerance)

    return floor


def _above(mode: AbstractMode, against: Any) -> str:
    present = mode.rung
    if against is None:
        against = {"half": "float32", "full": "float64", "float64": "float64"}.get(present, "full")
    above = check_rung(against, "against")
    if RUNGS.index(above) < RUNGS.index(present) or (above == present != "float64"):
        policy = " (the compute dtype of `policy` is no half type)"
        why = policy if mode.scales and present == "full" else ""
        raise ValueError(
            f"`{called()}` compares {present!r}{why} with a precision above it, but got "
            f"`against={against!r}`. Precisions from below: {', '.join(map(repr, RUNGS))}."
        )
    return above


def in_float64(tree: PyTree) -> PyTree:
    """Casts all arrays to float64, also those in layers that are kept in full precision."""
    return jtu.tree_map(lambda x: cast_tree(x, "float64"), tree)


@eqx.filter_jit
def _measured(
    gradient: Gradient,
    args: tuple,
    kwargs: dict,
    rungs: tuple[str, str],
    in_axes: PyTree,
    micro_batches: int,
    tolerance: float,
) -> PrecisionFloor:
    present, above = rungs
    wider = in_float64 if above == "float64" else lambda tree: tree
    mode = mode_at(above, gradient.mode)
    reference = dataclasses.replace(gradient, func=wider(gradient.func), mode=mode)
    # Split first, so that a batch that does not divide is the first error.
    batches = split_batch(tuple(args[1:]), in_axes, micro_batches)
    value, grads, terms = _evaluated(gradient, args, kwargs)
    true, true_grads, true_terms = _evaluated(reference, wider(args), wider(kwargs))
    noise, noises = jnp.full((), jnp.nan), {}
    if micro_batches > 1 and batches[0]:
        note = (
            f"`{called()}` splits the positional arguments into micro-batches, and no keyword ones."
        )
        with noting(note, TypeError, ValueError) if kwargs else nullcontext():
            spread, means = _noise(gradient, micro_batches, batches, args[0], kwargs, grads)
        noises = _by_path(jtu.tree_map(share_of, spread, means))
        noise = share_of(total(spread), total(means))
    return PrecisionFloor(
        loss=relative_distance(value, true),
        terms={
            name: relative_distance(x, true_terms[name])
            for name, x in terms.items()
            if name in true_terms and x.shape == true_terms[name].shape
        },
        gradient=relative_distance(grads, true_grads),
        parameters=_by_path(jtu.tree_map(relative_distance, grads, true_grads)),
        noise=noise,
        parameter_noise=noises,
        finite=all_finite((value, true, grads, true_grads)),
        precision=_named(present, gradient, grads),
        above=_advised(above),
        tolerance=tolerance,
    )


def _named(present: str, gradient: Gradient, grads: PyTree) -> str:
    if present == "full":
        dtypes = (real_of(g.dtype) for g in jtu.tree_leaves(grads))
        return min(dtypes, key=lambda dtype: dtype.itemsize).name
    if present == "half":
        return gradient.mode.dtype.name
    return f"forward={present!r} with a backward pass in {gradient.mode.dtype.name}"


def _advised(above: str) -> str:
    named = {"full": "use_mixed_precision=False", "float64": "float64"}
    return named.get(above, f"forward={above!r}")


def _evaluated(gradient: Gradient, args: tuple, kwargs: dict) -> tuple[Array, PyTree, dict]:
    """Evaluates the loss, its unscaled gradients, and its derivative terms by name."""

    def value(args, kwargs):
        derivatives = gradient.derivatives if gradient.mode.scales else None
        args, kwargs = gradient.mode.cast(args, kwargs)
        with gradient.mode.around_gradient():
            return widen(gradient.loss(args, kwargs, derivatives)[0])

    with gradient.mode.context():
        loss, grads = _gradient(gradient, args, kwargs)
        return loss, grads, collecting(value)(*copied((args, kwargs)))[1]


def _gradient(gradient: Gradient, args: tuple, kwargs: dict) -> tuple[Array, PyTree]:
    evaluated = gradient.evaluate(*copied((args, kwargs)))
    return evaluated.value, gradient.unscale(evaluated.grads)


def _noise(
    gradient: Gradient, count: int, batches: tuple, model: PyTree, kwargs: dict, grads: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns, for each parameter, the norm of the standard error of the mean gradient over
    micro-batches, and the norm of that mean.
    """
    batched, whole = batches

    def body(sums, batch):
        args = model, *whole(batch)
        with gradient.mode.context():
            here = _gradient(gradient, args, kwargs)[1]
        # Sums of differences from the whole batch cancel less than sums of gradients.
        difference = jtu.tree_map(minus, here, grads)
        squares = jtu.tree_map(lambda x: norm(x) ** 2, difference)
        return jtu.tree_map(jnp.add, sums, (difference, squares)), None

    zero = jtu.tree_map(lambda g: jnp.zeros_like(g, wide_of(g)), grads)
    none = jtu.tree_map(lambda g: jnp.zeros((), real_of(wide_of(g))), grads)
    (sums, squares), _ = lax.scan(body, (zero, none), batched, length=count)
    mean = jtu.tree_map(lambda s: s / count, sums)

    def variance(q, m):
        return jnp.maximum(q - count * norm(m) ** 2, 0) / (count * (count - 1))

    spread = jtu.tree_map(lambda q, m: jnp.sqrt(variance(q, m)), squares, mean)
    return spread, jtu.tree_map(lambda g, m: norm(g.astype(m.dtype) + m), grads, mean)


def _by_path(tree: PyTree) -> dict[str, Array]:
    return {jtu.keystr(path): x for path, x in jtu.tree_leaves_with_path(tree)}
