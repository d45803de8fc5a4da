"""Differentiates a loss in mixed precision. Each public transformation returns a part of the
result.
"""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Inexact

from .._cast import widen
from .._dtypes import highest_precision, true_float32
from .._forward import Forward, forward_in, without_halves
from .._loss_scaling import DynamicLossScaling, NoOpLossScaling, check_scaling, split_aux
from .._notes import noting_the_cast, noting_the_model, noting_the_trace
from .._repr import in_a_line
from .._tree import all_finite, all_zero, with_fields
from .._types import AxisName, PyTree
from .._varying import mark_varying, size_of_axis
from ..autocast import autocast as autocast_function
from ..derivatives._evaluation import noting_unscaled
from ..derivatives._probe import tap_p
from ..derivatives._scaling import (
    Scaling,
    check_takes_derivatives,
    check_takes_no_derivatives,
    sum_counts,
)
from ..engine import InForward, linearized
from ..engine._roles import dependent
from ..interpret._flat import flatten
from ..interpret._jaxpr import contains
from ..interpret._phases import rounded_phase
from ..interpret._precision_report import (
    LEAST_IN_FULL,
    OF_AUTOCAST,
    OF_CASTS,
    OF_FORWARDS,
    checked,
    traced,
    warn_user,
)
from ..interpret._sums import described as describe_sums, long_sums
from ._options import Options, parse_options


def _check_loss(value: Any, has_aux: bool, call: str) -> Inexact[Array, ""]:
    """Returns the loss as an array; raises a `TypeError` unless it is a real floating-point
    scalar.
    """
    hint = " Return the mean or the sum of the residuals."
    if isinstance(value, tuple) and not has_aux:
        hint = " If it returns `(loss, aux)`, pass `has_aux=True`."
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float):
        raise TypeError(
            f"`{call}` needs a function that returns a scalar loss, but it returned "
            f"{type(value).__name__}.{hint}"
        )
    out = jnp.asarray(value)
    if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"`{call}` needs a function that returns a real floating-point scalar, but it returned "
            f"dtype {out.dtype.name} and shape {out.shape}.{hint}"
        )
    return out


def _as_varying(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Marks the masters as each device's own along the mesh axes of `axis_name`.

    Inside `jax.shard_map`, an array that is the same on all devices has its cotangents summed over
    the devices. JAX takes this sum at the place where the array first meets one that differs
    between devices. The mark comes before the cast, so the sum is taken in the dtype of the
    masters.
    """
    names: Any = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    names = tuple(n for n in names if n in jax.sharding.get_abstract_mesh().manual_axes)
    return jtu.tree_map(lambda x: mark_varying(x, names) if eqx.is_inexact_array(x) else x, tree)


def _in_forward(
    loss: Callable, forward: Forward, in_full: Callable[[Any], bool], model: PyTree, *others: Any
) -> tuple[tuple, PyTree]:
    """Evaluates a loss with an auxiliary output in full, and its gradient in half."""
    out, pullback = linearized(loss, forward, model, *others, in_full=in_full)
    return out, pullback(jnp.ones_like(out[0]))


def copied(tree: PyTree) -> PyTree:
    """Copies the containers of a PyTree, because an `eqx.nn.State` can be used only once."""
    return jtu.tree_map(lambda x: x, tree)


_DESCENT = 4
"""Powers of two by which a scale falls per skipped step until a step has been taken. Without this,
a run would lose up to a dozen steps before its first one."""


def _descended(before: Any, after: Any) -> Any:
    """Returns the adjusted scaling `after`, but lets scales that fell fall faster if no step has
    been taken yet.
    """

    def faster(scale: Array, adjusted: Array, fallen: Array, lowest: Any) -> Array:
        fell = (after.taken_steps == 0) & (adjusted < scale)
        return jnp.where(fell, jnp.minimum(adjusted, jnp.maximum(fallen, lowest)), adjusted)

    if isinstance(before, Scaling):
        exponents, lowest = before.derivatives.exponents, before.derivatives.rule.lowest
        new = after.derivatives.exponents
        new = faster(exponents, new, exponents - _DESCENT, np.array(lowest, np.int32))
        derivatives = with_fields(after.derivatives, exponents=new)
        loss = _descended(before.loss, after.loss)
        return with_fields(after, loss=loss, derivatives=derivatives)
    if isinstance(before, DynamicLossScaling):
        scale, lowest = before.loss_scaling, before.min_loss_scaling
        new = faster(scale, after.loss_scaling, scale * 2.0**-_DESCENT, lowest)
        return with_fields(after, loss_scaling=new)
    return after


def _with_vanished(scaling: Any, vanished: Array) -> Any:
    """Returns a scaling that counts one more vanished gradient if `vanished`."""
    if isinstance(scaling, Scaling):
        loss = _with_vanished(scaling.loss, vanished)
        return with_fields(scaling, loss=loss, vanished=scaling.vanished + vanished)
    if isinstance(scaling, DynamicLossScaling):
        return with_fields(scaling, vanished=scaling.vanished + vanished)
    return scaling


class Evaluated(NamedTuple):
    """The value of a loss and its gradients.

    **Attributes:**

    - `value`: the loss before it is scaled.
    - `aux`: the auxiliary output as the function returned it, or `None`.
    - `grads`: the gradients, still scaled, in the dtypes of the masters.
    - `counts`: the counts of derivatives, or `None`.
    - `depends`: whether the loss depends on the parameters, as JAX knows it. It does not behind a
        `jax.lax.stop_gradient`.
    """

    value: Array
    aux: PyTree
    grads: PyTree
    counts: PyTree
    depends: bool = True


def _noticed(value: Array, depends: list[bool]) -> Array:
    """Returns `value`, and appends to `depends` when it is differentiated with a tangent."""

    @jax.custom_jvp
    def same(x):
        return x

    @same.defjvp
    def _(primals, tangents):  # not called for a tangent that is zero by structure
        depends.append(True)
        return primals[0], tangents[0]

    return same(value)


def check_eager(tree: PyTree, call: str) -> None:
    """Raises a `TypeError` in the name of `call` if any leaf of `tree` is a tracer."""
    if traced(tree):
        raise TypeError(
            f"`{call}` evaluates the gradient and looks at it, so it cannot be called inside of "
            "`jax.jit`, `jax.grad`, `jax.vmap` or `jax.shard_map`. Call it before the first step, "
            "with arrays."
        )


class Gradient(eqx.Module):
    """A loss function with its scaling and options, shared by all public transformations."""

    func: Any
    scaling: Any
    options: Options

    @classmethod
    def of(cls, func: Any, scaling: Any, options: Options) -> "Gradient":
        """Builds the `Gradient` of a loss function after checking it and its scaling."""
        call = options.call
        if not callable(func):
            raise TypeError(f"`{call}` takes a loss function first, but got {in_a_line(func)}.")
        if isinstance(func, Transformed):
            raise TypeError(
                f"`{call}` takes the loss itself, but got a gradient of it: "
                f"`{func.gradient.options.call}(loss)`. Write `{call}(loss, ...)(model, batch)`."
            )
        if options.use_mixed_precision or scaling is not None:
            check_scaling(scaling, call)
        if isinstance(scaling, Scaling):
            check_takes_derivatives(func, call)
        return cls(func, scaling, options)

    def check_unmapped(self) -> None:
        """Raises a `ValueError` if the scaling is that of several members of an ensemble."""
        scaling = self.scaling
        scales: dict[str, tuple[Any, int]] = {
            "loss_scaling": (getattr(scaling, "loss_scaling", None), 0)
        }
        if isinstance(scaling, Scaling):
            scales = {
                "loss.loss_scaling": (getattr(scaling.loss, "loss_scaling", None), 0),
                "derivatives.exponents": (scaling.derivatives.exponents, 1),
            }
        for name, (x, axes) in scales.items():
            if np.ndim(x) > axes:
                raise ValueError(
                    f"`{self.options.call}` takes the scaling of one model, but got a "
                    f"{type(scaling).__name__} whose `{name}` has shape {jnp.shape(x)}, as a step "
                    "under `jax.vmap` returns it for all members. Map this call over the scaling "
                    "too, or take that of a member: `jax.tree.map(lambda x: x[0], scaling)`."
                )

    @property
    def derivatives(self) -> Any:
        """Returns the derivative scaling that the function receives, or `None` if there is none."""
        return self.scaling.derivatives if isinstance(self.scaling, Scaling) else None

    def with_derivatives(self, kwargs: dict, derivatives: Any) -> dict:
        """Returns the keyword arguments of the function, with the derivative scaling among them."""
        if self.derivatives is None:
            if "derivatives" not in kwargs:
                check_takes_no_derivatives(self.func, self.options.call)
            return kwargs
        if "derivatives" in kwargs:
            raise TypeError(
                f"`{self.options.call}` with a `Scaling` passes `derivatives` to the function "
                "itself. Do not pass it by hand."
            )
        return {**kwargs, "derivatives": derivatives}

    def loss(self, args: tuple, kwargs: dict, derivatives: Any) -> tuple[Inexact[Array, ""], Any]:
        """Evaluates the loss and its auxiliary output (or `None`). In mixed precision the loss is
        returned in float32 or wider.
        """
        func, options, dtype = self.func, self.options, self.options.compute_dtype
        if options.precisions is not None:
            func = InForward(func, options.precisions)
        if options.autocast is not None and options.in_half:
            func = autocast_function(func, dtype, **dict(options.autocast))
        halves = nullcontext() if options.use_mixed_precision else without_halves()
        noted = noting_the_model(options.call, args)
        with halves, self._noting(), noted, noting_unscaled() as unscaled:
            out = func(*args, **self.with_derivatives(kwargs, derivatives))
        if unscaled and self.derivatives is None and options.in_half:
            self._warn_of_unscaled(*unscaled.popitem())
        out, aux = split_aux(out, options.call) if options.has_aux else (out, None)
        value = _check_loss(out, options.has_aux, options.call)
        return widen(value) if options.use_mixed_precision else value, aux

    def _noting(self, backward: bool = False) -> AbstractContextManager:
        """Adds a note to errors that the casts of arguments lead to."""
        options = self.options
        if not options.casts or not options.in_half:
            return nullcontext()
        return noting_the_cast(options.call, options.compute_dtype, backward)

    def _warn_of_unscaled(self, call: str, order: int) -> None:
        warn_user(
            f"`{self.options.call}` got a loss scaling alone, but the loss takes derivatives of "
            f"order {order} by `{call}` in float16. What overflows or vanishes in them is lost "
            "before the loss is scaled. Pass `mpx_pde.Scaling(loss=..., derivatives="
            "mpx_pde.DerivativeScaling.per_direction(...))`. The loss then receives `derivatives`: "
            f"pass them on by `{call}(..., scaling=derivatives)`. Or take `forward='float32'`, "
            "or bfloat16. If it is meant, filter `mpx_pde.PrecisionWarning`."
        )

    def evaluate(self, args: tuple, kwargs: dict) -> Evaluated:
        """Evaluates the loss and its gradients with respect to `args[0]`."""
        options, mixed = self.options, self.options.use_mixed_precision
        if mixed and options.axis_name is not None:
            size_of_axis(options.axis_name, options.call)
        depends: list[bool] = []

        def loss(differentiated, others, kwargs):
            model, derivatives = differentiated
            if not mixed:
                value, aux = self.loss((model, *others), kwargs, None)
                return value, (value, aux)
            # The cast in here is part of what is differentiated, so the gradients have the dtypes
            # of the masters.
            model = _as_varying(model, options.axis_name)
            cast_args, cast_kwargs = options.cast((model, *others), kwargs)
            value, aux = self.loss(cast_args, cast_kwargs, derivatives)
            return self.scaling.scale(_noticed(value, depends)), (value, aux)

        differentiated = args[0], self.derivatives if mixed else None
        value_and_grad: Any = eqx.filter_value_and_grad(loss, has_aux=True)
        if options.precisions is not None:
            kept = options.kept(args, kwargs)
            leaves = jtu.tree_leaves_with_path((None, args, kwargs))
            places = {id(x) for path, x in leaves if path in kept}
            value_and_grad = ft.partial(
                _in_forward, loss, options.precisions, lambda x: id(x) in places
            )
        # For products that ask for no precision: in a full forward pass they are true float32 too.
        full = highest_precision("highest") if options.in_full else nullcontext()
        precision = full if mixed else true_float32()
        with precision, noting_the_trace(options.call), self._noting(backward=True):
            (_, out), (grads, counts) = value_and_grad(differentiated, args[1:], kwargs)
        value, aux = out
        return Evaluated(
            value, aux, grads, None if counts is None else counts.counts, bool(depends)
        )

    def unscale(self, grads: PyTree) -> PyTree:
        """Unscales gradients by the scale of this step."""
        return self.scaling.unscale(grads) if self.options.use_mixed_precision else grads

    def finish(self, model: PyTree, found: Evaluated) -> tuple:
        """Unscales the gradients and brings the scaling up to date."""
        masters = eqx.filter(model, eqx.is_inexact_array)
        # A NumPy master may have a dtype that is wider than those of JAX.
        like = lambda g, m: g.astype(jax.dtypes.canonicalize_dtype(m.dtype))
        grads = jtu.tree_map(like, self.unscale(found.grads), masters)
        if not self.options.use_mixed_precision:
            return self.scaling, jnp.array(True), grads
        finite, vanished = self._checked(found, grads)
        usable, seen = finite, ()
        if found.counts is not None:
            seen = (sum_counts(found.counts, self.options.axis_name),)
            # Gradients can be finite although a derivative overflowed, if the loss masks it.
            usable = finite & self.derivatives.finite(*seen)
        with forward_in(self.options.precisions):  # the cap of the scale depends on it
            adjusted = self.scaling.adjust(finite, *seen)
        adjusted = _descended(self.scaling, adjusted)
        return _with_vanished(adjusted, vanished & usable), usable, grads

    def _checked(self, found: Evaluated, grads: PyTree) -> tuple[Array, Array]:
        """Returns whether the loss and its gradients are finite, and whether the gradients are zero
        although the loss depends on the parameters and is not zero, as it is where it converged or
        is masked. With an `axis_name`, all devices are looked at.
        """
        finite = all_finite(grads) & jnp.isfinite(found.value)
        zero, some = all_zero(grads), found.value != 0
        if self.options.axis_name is not None:
            flags = jnp.stack([~finite, ~zero, some]).astype(jnp.int32)
            told = lax.psum(flags, self.options.axis_name) > 0
            finite, zero, some = ~told[0], ~told[1], told[2]
        return finite, zero & some & (self.options.in_half and found.depends)


@dataclasses.dataclass
class _Place:
    """A placeholder for a result of a program."""

    index: int


def _check_states(
    options: Options, args: tuple, closed: ClosedJaxpr, leaves: Sequence, assemble: Callable
) -> None:
    """Issues a warning if a part of the auxiliary output has the structure of an argument and each
    of its arrays was computed from the rounded array at the same place in that argument.
    """
    out = assemble([_Place(i) for i in range(len(closed.jaxpr.outvars))])
    aux = out[0][1] if isinstance(out[0], tuple) else out[-1]
    number = {id(x): i for i, (_, x) in enumerate(leaves)}
    rounded, _ = eqx.filter_eval_shape(options.cast, args, {})
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    digits = lambda x: jnp.finfo(x.dtype).nmant if inexact(x) else 0
    for i, (given, narrow) in enumerate(zip(args[1:], rounded[1:], strict=True), start=1):
        structure, paths = jtu.tree_structure(given), jtu.tree_leaves_with_path(given)
        # Plain tuples of arrays are skipped: their structure may match by chance.
        if all(isinstance(k, jtu.SequenceKey) for path, _ in paths for k in path):
            continue
        pairs = zip(paths, jtu.tree_leaves(narrow), strict=True)
        lost = [eqx.is_array(x) and digits(y) < digits(x) for (_, x), y in pairs]
        is_alike = ft.partial(_has_structure, structure)
        for found in filter(is_alike, jtu.tree_leaves(aux, is_alike) if any(lost) else ()):
            places = zip(paths, jtu.tree_leaves(found), lost, strict=True)
            pairs = [(number[id(x)], y) for (_, x), y, is_lost in places if is_lost]
            arrays = all(isinstance(y, _Place) for _, y in pairs)
            if arrays and _computed_of(closed, [(j, y.index) for j, y in pairs]):
                keep = options.keep_full if isinstance(options.keep_full, tuple) else ()
                keep = (*keep, *[False] * len(args))[: len(args)]
                warn_user(
                    f"`{options.call}` rounds argument {i} ({type(given).__name__}) to "
                    f"{options.compute_dtype.name}, and the function returns a new one. Values "
                    "that change little, such as running statistics, stand still if rounded at "
                    "each step. "
                    f"Pass `keep_full={(*keep[:i], True, *keep[i + 1 :])}`, or `autocast=True`, "
                    "which casts no argument. If it is meant, filter `mpx_pde.PrecisionWarning`."
                )


def _has_structure(structure: Any, tree: PyTree) -> bool:
    try:
        return jtu.tree_structure(tree) == structure
    except ValueError:  # static fields that are arrays cannot be compared
        return False


def _computed_of(closed: ClosedJaxpr, pairs: Sequence[tuple[int, int]]) -> bool:
    """Returns whether each result in `pairs`, which holds positions of operands and results,
    depends on its operand and has its shape, and whether any result is more than its operand cast.
    """
    if any(closed.in_avals[i].shape != closed.out_avals[j].shape for i, j in pairs):
        return False
    flat = flatten(closed, forward_mode=False)
    same: dict[Any, int] = {k: k for k in flat.inputs}
    for step in flat.steps:
        if step.name == "convert_element_type":
            same.update((step.outputs[0], same[x]) for x in step.variables if x in same)
    found = [(flat.inputs[i], flat.outputs[j]) for i, j in pairs]
    results = [(k, x) for k, x in found if x in dependent(flat, [k])]
    return len(results) == len(found) and any(same.get(x) != k for k, x in results)


def _check_scales_anything(call: str, closed: ClosedJaxpr) -> None:
    """Issues a warning if a derivative scaling scales nothing in a traced program."""
    if not contains(closed, {tap_p.name}):
        warn_user(
            f"`{call}` got a `Scaling`, but the loss takes no derivative by the `derivatives` that "
            "it receives, so nothing in it is scaled or counted. Pass them on: "
            "`mpx_pde.partials(..., scaling=derivatives)`. A loss without derivatives takes a loss "
            "scaling alone, such as `scaling.loss`."
        )


def _check_sums(options: Options, closed: ClosedJaxpr) -> None:
    """Issues a warning if a traced program has sums in half precision that stand still."""
    if sums := [x for x in long_sums(closed) if x.stagnates()]:
        others = ["`forward='float32'`", "`autocast=True`"]
        others = others[: 2 - options.in_full - (options.autocast is not None)]
        others = f", or pass {' or '.join(others)}" if others and not options.in_full else ""
        warn_user(
            f"`{options.call}`: {describe_sums(sums)}{others}. If it is meant, filter "
            "`mpx_pde.PrecisionWarning`."
        )


def _check_phases(options: Options, closed: ClosedJaxpr) -> None:
    """Issues a warning if a traced program takes exponentials of complex numbers whose phases were
    rounded.
    """
    if options.casts and (line := rounded_phase(closed)) is not None:
        digits = jnp.finfo(options.compute_dtype).nmant + 1
        warn_user(
            f"`{options.call}`: {line} takes an exponential of complex numbers whose parts were "
            f"rounded to {options.compute_dtype.name}: 2^-{digits} of a phase, of which only the "
            "rest modulo 2π counts. Keep these parameters in float32 by "
            "`keep_full` or `mpx_pde.FullPrecision`, or pass `autocast=True` or "
            "`forward='float32'`. If it is meant, filter `mpx_pde.PrecisionWarning`."
        )


def transformed(call: str, run: Callable, func: Any, scaling: Any, *given: Any) -> Callable:
    """Builds the function that the public transformation `call` returns. `run` is passed to
    [`Transformed`][], and `given` are the arguments of [`parse_options`][].
    """
    gradient = Gradient.of(func, scaling, parse_options(call, *given))
    return eqx.module_update_wrapper(Transformed(gradient, run))


class Transformed(eqx.Module):
    """A differentiated function. `run`, a function of `(gradient, args, kwargs)`, evaluates its
    result.
    """

    gradient: Gradient
    run: Callable

    # Compares by identity, as functions do, so that `jax.jit` takes one whose scaling has arrays.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return self is other

    @property
    def __wrapped__(self):
        return self.gradient.func

    def __repr__(self) -> str:
        # `jax.jit` shows this when it is given the model, which is more than arrays.
        call, func = self.gradient.options.call, self.gradient.func
        name = getattr(func, "__name__", type(func).__name__)
        return (
            f"<mpx_pde.{call}({name}, ...); compile it by `eqx.filter_jit`, which takes models "
            "that are not only arrays>"
        )

    @property
    def is_mixed_precision(self) -> bool:
        return self.gradient.options.use_mixed_precision

    @property
    def is_autocast(self) -> bool:
        return self.is_mixed_precision and self.gradient.options.autocast is not None

    @property
    def scales_its_loss(self) -> bool:
        scaling = getattr(self.gradient.scaling, "loss", self.gradient.scaling)
        return self.is_mixed_precision and not isinstance(scaling, NoOpLossScaling)

    @property
    def __signature__(self):
        # The arguments that a caller passes do not include `derivatives`.
        if self.gradient.derivatives is None:
            raise AttributeError("__signature__")
        signature = inspect.signature(self.gradient.func)
        parameters = [p for p in signature.parameters.values() if p.name != "derivatives"]
        return signature.replace(parameters=parameters)

    def __call__(self, /, *args, **kwargs):
        self.gradient.options.check_called_with(args)
        self.gradient.check_unmapped()
        # The caller needs the old `eqx.nn.State` to roll back to.
        args, kwargs = copied((args, kwargs))
        return self.gradient.options.in_context(lambda: self._run(args, kwargs))

    def _run(self, args: tuple, kwargs: dict) -> Any:
        gradient, options = self.gradient, self.gradient.options
        everything = gradient, args, kwargs
        # There is no program to look at when the function runs eagerly.
        if not options.in_half or not traced(everything):
            return self.run(*everything)
        advice = OF_CASTS if options.autocast is None else OF_AUTOCAST
        advice = OF_FORWARDS if options.in_full else advice
        least = LEAST_IN_FULL if options.in_full else 0.5
        # A user who names what stays in float32 gets no warning about it.
        without = None
        if options.autocast:
            no_overrides = dataclasses.replace(options, autocast=())
            without = dataclasses.replace(gradient, options=no_overrides), args, kwargs
        asked_for = options.call, options.compute_dtype

        def look(closed, *traced):
            _check_sums(options, closed)
            _check_phases(options, closed)
            if gradient.derivatives is not None and gradient.derivatives.active:
                _check_scales_anything(options.call, closed)
            if options.has_aux and options.casts:
                _check_states(options, args, closed, *traced)

        return checked(self.run, everything, *asked_for, advice, without, least, look=look)

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else eqx.Partial(self, instance)
