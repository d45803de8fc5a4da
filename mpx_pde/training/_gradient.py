"""What it takes to differentiate a loss in mixed precision; the public transformations say what of
it they return."""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Bool, Inexact

from .._cast import widen
from .._dtypes import true_float32
from .._forward import Forward
from .._loss_scaling import check_scaling, split_aux
from .._notes import noting_the_cast, noting_the_trace
from .._tree import all_finite, in_a_line, with_fields
from .._types import PyTree
from .._varying import mark_varying, size_of_axis
from ..autocast import autocast as autocast_function
from ..derivatives._counts import check_takes_derivatives, sum_counts
from ..derivatives._probe import tap_p
from ..derivatives._scaling import Scaling
from ..interpret._jaxpr import contains
from ..interpret._precision_report import (
    LEAST_IN_FULL,
    OF_AUTOCAST,
    OF_CASTS,
    OF_FORWARDS,
    checked,
    evaluated,
    traced,
    warn_user,
)
from ..propagation import InForward
from ._options import Options, parse_options
from ._search import can_search, differentiable_search, search, search_eagerly


def _check_loss(value: Any, has_aux: bool, call: str) -> Inexact[Array, ""]:
    """The loss as an array; an error unless it is a real floating-point scalar."""
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


def _as_varying(tree: PyTree, axis_name: Any) -> PyTree:
    """Marks the masters as each device's own along the mesh axes of `axis_name`.

    Inside `jax.shard_map`, JAX sums the cotangents of what is the same on all devices where it
    first meets what is not. Marked before the cast, that sum is taken in the dtype of the masters.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    names = tuple(n for n in names if n in jax.sharding.get_abstract_mesh().manual_axes)

    differentiated, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jtu.tree_map(lambda x: mark_varying(x, names), differentiated), rest)


def _agree(finite: Bool[Array, ""], axis_name: Any) -> Bool[Array, ""]:
    """Whether `finite` holds on every device along the mapped axes."""
    if axis_name is None:
        return finite
    return lax.psum((~finite).astype(jnp.int32), axis_name) == 0


def like_masters(grads: PyTree, masters: PyTree) -> PyTree:
    """Gradients in the dtypes of what they are of, as JAX has them: NumPy's may be wider."""
    return jtu.tree_map(
        lambda g, m: g if g is None else g.astype(jax.dtypes.canonicalize_dtype(m.dtype)),
        grads,
        masters,
        is_leaf=lambda x: x is None,
    )


class Gradient(eqx.Module):
    """What the public transformations share: a loss function and how to differentiate it."""

    func: Any
    scaling: Any
    options: Options

    @classmethod
    def of(cls, call: str, arguments: Mapping[str, Any]) -> "Gradient":
        """That of a public function, `call`, by its arguments."""
        func, scaling = arguments["func"], arguments["scaling"]
        if not callable(func):
            raise TypeError(f"`{call}` takes a loss function first, but got {in_a_line(func)}.")
        if arguments["use_mixed_precision"] or scaling is not None:
            check_scaling(scaling, call)
        if isinstance(scaling, Scaling):
            check_takes_derivatives(func, call)
        return cls(func, scaling, parse_options(call, arguments))

    @property
    def searches(self) -> bool:
        """Whether a step that overflows is evaluated again while none has been taken."""
        options = self.options
        float16 = options.use_mixed_precision and options.compute_dtype == jnp.float16
        return options.search and float16 and can_search(self.scaling)

    def at(self, scaling: Any) -> "Gradient":
        """The same with another state of the scaling."""
        return with_fields(self, scaling=scaling)

    @property
    def derivatives(self) -> Any:
        """The derivative scaling that the function receives; `None` without one."""
        return self.scaling.derivatives if isinstance(self.scaling, Scaling) else None

    def without_overrides(self) -> "Gradient":
        """The same, by `autocast` alone."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, autocast=()))

    def with_derivatives(self, kwargs: dict, derivatives: Any) -> dict:
        """The keyword arguments of the function, the derivative scaling among them."""
        if self.derivatives is None:
            return kwargs
        if "derivatives" in kwargs:
            raise TypeError(
                f"`{self.options.call}` with a `Scaling` passes `derivatives` to the function "
                "itself. Do not pass it by hand."
            )
        return {**kwargs, "derivatives": derivatives}

    def loss(self, args: tuple, kwargs: dict, derivatives: Any) -> tuple[Inexact[Array, ""], Any]:
        """The loss in float32 or wider, and auxiliary output (`None` without)."""
        func, options, dtype = self.func, self.options, self.options.compute_dtype
        if options.in_full:
            func = InForward(func, Forward(options.forward, dtype.name))
        if options.autocast is not None and options.in_half:
            func = autocast_function(func, dtype, **dict(options.autocast))
        cast = options.casts and options.in_half
        with noting_the_cast(options.call, dtype) if cast else nullcontext():
            out = func(*args, **self.with_derivatives(kwargs, derivatives))
        aux = None
        if self.options.has_aux:
            out, aux = split_aux(out, self.options.call)
        return widen(_check_loss(out, self.options.has_aux, self.options.call)), aux

    def plain(self, args: tuple, kwargs: dict) -> tuple[tuple, PyTree]:
        """Value, auxiliary output and gradients without any mixed precision."""
        kwargs = self.with_derivatives(kwargs, None)

        def loss(model):
            out = self.func(model, *args[1:], **kwargs)
            value, aux = split_aux(out, self.options.call) if self.options.has_aux else (out, None)
            _check_loss(value, self.options.has_aux, self.options.call)
            return value, aux

        with true_float32():
            return eqx.filter_value_and_grad(loss, has_aux=True)(args[0])

    def scaled(self, args: tuple, kwargs: dict) -> tuple[tuple, PyTree, PyTree]:
        """The unscaled float32 loss, auxiliary output, the still-scaled gradients, which have the
        dtypes of the masters in `args[0]`, and the counts of derivatives (`None` without)."""
        if self.options.axis_name is not None:
            size_of_axis(self.options.axis_name, self.options.call)

        def loss(differentiated):
            # Casting in here makes the cast part of what is differentiated: the gradients arrive
            # in the dtypes of the masters.
            model, derivatives = differentiated
            model = _as_varying(model, self.options.axis_name)
            cast_args, cast_kwargs = self.options.cast((model, *args[1:]), kwargs)
            value, aux = self.loss(cast_args, cast_kwargs, derivatives)
            return self.scaling.scale(value), (value, self.options.output(aux))

        with noting_the_trace(self.options.call):
            (_, out), (grads, counts) = eqx.filter_value_and_grad(loss, has_aux=True)(
                (args[0], self.derivatives)
            )
        return out, grads, None if counts is None else counts.counts

    def finish(self, grads: PyTree, model: PyTree, counts: PyTree) -> tuple:
        """Unscales the gradients and brings the scaling up to date."""
        # With the scale that scaled them, not with the adjusted one.
        grads = self.scaling.unscale(grads)
        grads = like_masters(grads, eqx.filter(model, eqx.is_inexact_array))
        finite = _agree(all_finite(grads), self.options.axis_name)
        if counts is None:
            return self.scaling.adjust(finite), finite, grads
        counts = sum_counts(counts, self.options.axis_name)
        # Gradients can be finite all the same, where a loss masks what overflowed.
        usable = finite & self.derivatives.finite(counts)
        return self.scaling.adjust(finite, counts), usable, grads


def _searched(
    run: Callable, args: tuple, closed: ClosedJaxpr, leaves: list, assemble: Any
) -> tuple:
    """`run(*args)` at the largest scales at which the step can be taken, by what was traced."""
    gradient, args, kwargs = args
    scaling, axis_name = gradient.scaling, gradient.options.axis_name
    if jax.sharding.get_abstract_mesh().manual_axes:
        dynamic, static = eqx.partition(scaling, eqx.is_array)
        treedef = jtu.tree_structure(dynamic)

        def step(arrays):
            at = gradient.at(eqx.combine(treedef.unflatten(arrays), static))
            return jtu.tree_leaves(eqx.filter(run(at, args, kwargs), eqx.is_array))

        arrays, _ = search(step, assemble, closed.out_avals, scaling, axis_name)
        return assemble(arrays)
    # The paths are those in `(run, (gradient, args, kwargs), {})`.
    prefix = (jtu.SequenceKey(1), jtu.SequenceKey(0), jtu.GetAttrKey("scaling"))
    places = [i for i, (path, _) in enumerate(leaves) if tuple(path[:3]) == prefix]
    values = [x for _, x in leaves]
    return assemble(differentiable_search(closed, values, places, assemble, scaling, axis_name))


def _with_derivatives(
    evaluate: Callable, run: Callable, args: tuple, closed: ClosedJaxpr, *rest: Any
) -> Any:
    """`evaluate`, with a warning where a derivative scaling scales nothing in what was traced."""
    if not contains(closed, {tap_p.name}):
        warn_user(
            f"`{args[0].options.call}` got a `Scaling`, but the loss takes no derivative by the "
            "`derivatives` that it receives, so nothing in it is scaled or counted. Pass them on: "
            "`mpx_pde.partials(..., scaling=derivatives)`. A loss without derivatives takes a loss "
            "scaling alone, such as `scaling.loss`."
        )
    return evaluate(run, args, closed, *rest)


def arrange_value_and_grad(gradient: Gradient, out: tuple) -> tuple:
    """What a transformation returns that returns the value."""
    (value, aux), scaling, finite, grads = out
    return (value, aux) if gradient.options.has_aux else value, scaling, finite, grads


def transformed(
    call: str, arguments: Mapping[str, Any], run: Callable, arrange: Callable | None = None
) -> Callable[..., Any]:
    """What a public function, `call`, returns: of its arguments, by name, those that say how `func`
    is differentiated. `run` and `arrange` are those of [`Transformed`][]."""
    return eqx.module_update_wrapper(Transformed(Gradient.of(call, arguments), run, arrange))


class Transformed(eqx.Module):
    """A differentiated function; `run` says what is asked of it."""

    gradient: Gradient
    run: Callable
    """Takes `(gradient, args, kwargs)`."""
    arrange: Callable | None = None
    """What the caller gets of `((value, aux), scaling, finite, grads)`. Without it that is what
    `run` returns, and nothing is searched for."""

    # As functions are compared, so that `jax.jit` takes one whose scaling has arrays.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return self is other

    @property
    def __wrapped__(self):
        return self.gradient.func

    @property
    def is_mixed_precision(self) -> bool:
        return self.gradient.options.use_mixed_precision

    @property
    def __signature__(self):
        # What a caller passes: `derivatives` is not among it.
        if self.gradient.derivatives is None:
            raise AttributeError("__signature__")
        signature = inspect.signature(self.gradient.func)
        parameters = [p for p in signature.parameters.values() if p.name != "derivatives"]
        return signature.replace(parameters=parameters)

    def __call__(self, /, *args, **kwargs):
        self.gradient.options.check_called_with(args)
        # Copies of the containers: an `eqx.nn.State` that the loss sets can be used once only, and
        # the caller needs the old one to roll back to.
        args, kwargs = jtu.tree_map(lambda x: x, (args, kwargs))
        return self.gradient.options.in_context(lambda: self._checked(args, kwargs))

    def _checked(self, args: tuple, kwargs: dict) -> Any:
        gradient = self.gradient
        if self.arrange is None:
            return self._run(args, kwargs, False)
        return self.arrange(gradient, self._run(args, kwargs, gradient.searches))

    def _run(self, args: tuple, kwargs: dict, searches: bool) -> Any:
        gradient, options = self.gradient, self.gradient.options
        everything = gradient, args, kwargs
        if not options.in_half:
            return self.run(*everything)
        # Run eagerly there is no program to look at.
        if not traced(everything):
            out = self.run(*everything)
            if not searches:
                return out
            if not traced(out):
                again = lambda scaling: self.run(gradient.at(scaling), args, kwargs)
                return search_eagerly(again, gradient.scaling, out, options.axis_name)
        advice = OF_CASTS if options.autocast is None else OF_AUTOCAST
        advice = OF_FORWARDS if options.in_full else advice
        least = LEAST_IN_FULL if options.in_full else 0.5
        # Who names what stays in float32 is not warned of that.
        without = (gradient.without_overrides(), args, kwargs) if options.autocast else None
        asked_for = options.call, options.compute_dtype
        evaluate = _searched if searches else evaluated
        if gradient.derivatives is not None and gradient.derivatives.active:
            evaluate = ft.partial(_with_derivatives, evaluate)
        return checked(self.run, everything, *asked_for, advice, without, evaluate, least)

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else eqx.Partial(self, instance)
