"""What it takes to differentiate a loss in mixed precision; the public transformations say what of
it they return."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Bool, Inexact

from ._cast import cast_except, cast_operands, widen
from ._dtypes import asked_for_half, half_precision, half_precision_datatype, is_half, true_float32
from ._forward import Forward, check_forward
from ._loss_scaling import check_scaling, split_aux
from ._notes import noting_the_cast
from ._policy import parse_policy
from ._precision_report import OF_AUTOCAST, OF_CASTS, checked, evaluated, traced
from ._search import can_search, differentiable_search, search, search_eagerly
from ._tree import all_finite
from ._types import PyTree
from ._varying import mark_varying
from .autocast import autocast as autocast_function, parse_patterns
from .derivatives._counts import check_takes_derivatives, sum_counts
from .derivatives._scaling import Scaling
from .propagation import InForward


def _parse_autocast(options: Any, call: str) -> tuple[tuple[str, Any], ...] | None:
    """The overrides to run `autocast` with; `None` to cast the arguments instead."""
    if options is False:
        return None
    options = {} if options is True else options
    if not isinstance(options, dict) or not options.keys() <= {"half", "full"}:
        raise TypeError(
            f"`{call}` takes a bool as `autocast`, or a dict of the overrides of "
            '`mpx_pde.autocast`, such as {"full": "readout"}. Got '
            f"{options!r}."
        )
    return tuple((name, parse_patterns(options[name], name)) for name in sorted(options))


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


class Gradient(eqx.Module):
    """What the public transformations share: a loss function and how to differentiate it."""

    func: Any
    scaling: Any
    has_aux: bool = eqx.field(static=True)
    use_mixed_precision: bool = eqx.field(static=True)
    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree
    axis_name: Any = eqx.field(static=True)
    autocast: tuple[tuple[str, Any], ...] | None = eqx.field(static=True)
    forward: str = eqx.field(static=True)
    search: bool = eqx.field(static=True)
    call: str = eqx.field(static=True)

    def __init__(
        self,
        call,
        func,
        scaling,
        has_aux,
        use_mixed_precision,
        policy,
        keep_full,
        axis_name,
        autocast: bool | dict[str, Any] = False,
        forward: str = "half",
        search: bool = True,
    ):
        if not callable(func):
            raise TypeError(f"`{call}` takes a loss function first, but got {func!r}.")
        if use_mixed_precision or scaling is not None:
            check_scaling(scaling, call)
        if isinstance(scaling, Scaling):
            check_takes_derivatives(func, call)
        self.func = func
        self.scaling = scaling
        self.has_aux = bool(has_aux)
        self.use_mixed_precision = bool(use_mixed_precision)
        self.policy = parse_policy(policy, call)
        self.keep_full = keep_full
        self.axis_name = axis_name
        self.autocast = _parse_autocast(autocast, call)
        self.forward = check_forward(forward, call)
        if self.in_full and self.autocast:
            raise ValueError(
                f"`{call}` takes either overrides of `autocast` or `forward={forward!r}`, which "
                "evaluates the loss in that precision and leaves nothing to cast. Drop one of them."
            )
        if self.in_full:
            self.autocast = None
        if not isinstance(search, bool):
            raise TypeError(
                f"`{call}` takes a bool as `search`, whether to find the first scales on the first "
                f"batch, but got {search!r}."
            )
        self.search = search
        self.call = call

    @property
    def searches(self) -> bool:
        """Whether a step that overflows is evaluated again while none has been taken."""
        float16 = self.use_mixed_precision and self.compute_dtype == jnp.float16
        return self.search and float16 and can_search(self.scaling)

    def at(self, scaling: Any) -> "Gradient":
        """The same with another state of the scaling."""
        return eqx.tree_at(lambda g: g.scaling, self, scaling)

    @property
    def in_full(self) -> bool:
        """Whether the forward pass is in another precision than the backward pass."""
        return self.use_mixed_precision and self.forward != "half"

    @property
    def compute_dtype(self) -> np.dtype:
        if self.policy is None:
            return half_precision_datatype()
        return jnp.dtype(self.policy.compute_dtype)

    @property
    def derivatives(self) -> Any:
        """The derivative scaling that the function receives; `None` without one."""
        return self.scaling.derivatives if isinstance(self.scaling, Scaling) else None

    def without_overrides(self) -> "Gradient":
        """The same, by `autocast` alone."""
        return Gradient(
            self.call,
            self.func,
            self.scaling,
            self.has_aux,
            self.use_mixed_precision,
            self.policy,
            self.keep_full,
            self.axis_name,
            autocast=True,
        )

    def in_context(self, thunk: Callable) -> Any:
        """Runs `thunk` where *half precision* means the dtype that this transformation computes
        in, so that the function itself and the cap of the scaling see it."""
        if not is_half(self.compute_dtype):
            return thunk()
        casts = self.use_mixed_precision and self.autocast is None and not self.in_full
        asked = partial(asked_for_half, "cast") if casts else half_precision
        with asked(self.compute_dtype):
            return thunk()

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self.autocast is not None or self.in_full:
            return args, kwargs
        dtype = self.compute_dtype
        args = cast_except(self.keep_full, args, dtype, self.call)
        return args, kwargs if self.keep_full is True else cast_operands(kwargs, dtype)

    def output(self, tree: PyTree) -> PyTree:
        """Auxiliary output in the dtype that the caller is promised."""
        if self.policy is None:
            return widen(tree)
        return cast_operands(tree, jnp.dtype(self.policy.output_dtype))

    def with_derivatives(self, kwargs: dict, derivatives: Any) -> dict:
        """The keyword arguments of the function, the derivative scaling among them."""
        if self.derivatives is None:
            return kwargs
        if "derivatives" in kwargs:
            raise TypeError(
                f"`{self.call}` with a `Scaling` passes `derivatives` to the function itself. Do "
                "not pass it by hand."
            )
        return {**kwargs, "derivatives": derivatives}

    def loss(self, args: tuple, kwargs: dict, derivatives: Any) -> tuple[Inexact[Array, ""], Any]:
        """The loss in float32 or wider, and auxiliary output (`None` without)."""
        func = self.func
        if self.in_full:
            func = InForward(func, Forward(self.forward, self.compute_dtype.name))
        if self.autocast is not None and is_half(self.compute_dtype):
            func = autocast_function(func, self.compute_dtype, **dict(self.autocast))
        cast = self.autocast is None and not self.in_full and is_half(self.compute_dtype)
        with noting_the_cast(self.call, self.compute_dtype) if cast else nullcontext():
            out = func(*args, **self.with_derivatives(kwargs, derivatives))
        aux = None
        if self.has_aux:
            out, aux = split_aux(out, self.call)
        return widen(_check_loss(out, self.has_aux, self.call)), aux

    def plain(self, args: tuple, kwargs: dict) -> tuple[tuple, PyTree]:
        """Value, auxiliary output and gradients without any mixed precision."""
        kwargs = self.with_derivatives(kwargs, None)

        def loss(model):
            out = self.func(model, *args[1:], **kwargs)
            value, aux = split_aux(out, self.call) if self.has_aux else (out, None)
            _check_loss(value, self.has_aux, self.call)
            return value, aux

        with true_float32():
            return eqx.filter_value_and_grad(loss, has_aux=True)(args[0])

    def scaled(self, args: tuple, kwargs: dict) -> tuple[tuple, PyTree, PyTree]:
        """The unscaled float32 loss, auxiliary output, the still-scaled gradients, which have the
        dtypes of the masters in `args[0]`, and the counts of derivatives (`None` without)."""

        def loss(differentiated):
            # Casting in here makes the cast part of what is differentiated: the gradients arrive
            # in the dtypes of the masters.
            model, derivatives = differentiated
            model = _as_varying(model, self.axis_name)
            cast_args, cast_kwargs = self.cast((model, *args[1:]), kwargs)
            value, aux = self.loss(cast_args, cast_kwargs, derivatives)
            return self.scaling.scale(value), (value, self.output(aux))

        (_, out), (grads, counts) = eqx.filter_value_and_grad(loss, has_aux=True)(
            (args[0], self.derivatives)
        )
        return out, grads, None if counts is None else counts.counts

    def finish(self, grads: PyTree, model: PyTree, counts: PyTree) -> tuple:
        """Unscales the gradients and brings the scaling up to date."""
        # With the scale that scaled them, not with the adjusted one.
        grads = self.scaling.unscale(grads)
        grads = jtu.tree_map(
            lambda g, m: g if g is None else g.astype(m.dtype),
            grads,
            eqx.filter(model, eqx.is_inexact_array),
            is_leaf=lambda x: x is None,
        )
        finite = _agree(all_finite(grads), self.axis_name)
        if counts is None:
            return self.scaling.adjust(finite), finite, grads
        counts = sum_counts(counts, self.axis_name)
        # Gradients can be finite all the same, where a loss masks what overflowed.
        usable = finite & self.derivatives.finite(counts)
        return self.scaling.adjust(finite, counts), usable, grads


def _searched(
    run: Callable, args: tuple, closed: ClosedJaxpr, leaves: list, assemble: Any
) -> tuple:
    """`run(*args)` at the largest scales at which the step can be taken, by what was traced."""
    gradient, args, kwargs = args
    scaling, axis_name = gradient.scaling, gradient.axis_name
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


def arrange_value_and_grad(gradient: Gradient, out: tuple) -> tuple:
    """What a transformation returns that returns the value."""
    (value, aux), scaling, finite, grads = out
    return (value, aux) if gradient.has_aux else value, scaling, finite, grads


class Transformed(eqx.Module):
    """A differentiated function; `run` says what is asked of it."""

    gradient: Gradient
    run: Callable
    """Takes `(gradient, args, kwargs)`."""
    arrange: Callable | None = None
    """What the caller gets of `((value, aux), scaling, finite, grads)`. Without it that is what
    `run` returns, and nothing is searched for."""

    @property
    def __wrapped__(self):
        return self.gradient.func

    @property
    def is_mixed_precision(self) -> bool:
        return self.gradient.use_mixed_precision

    @property
    def __signature__(self):
        # What a caller passes: `derivatives` is not among it.
        if self.gradient.derivatives is None:
            raise AttributeError("__signature__")
        signature = inspect.signature(self.gradient.func)
        parameters = [p for p in signature.parameters.values() if p.name != "derivatives"]
        return signature.replace(parameters=parameters)

    def __call__(self, /, *args, **kwargs):
        if not args:
            raise TypeError(
                f"`{self.gradient.call}` differentiates with respect to the first positional "
                "argument, but the function was called without one. Pass the model first."
            )
        # Copies of the containers: an `eqx.nn.State` that the loss sets can be used once only, and
        # the caller needs the old one to roll back to.
        args, kwargs = jtu.tree_map(lambda x: x, (args, kwargs))
        return self.gradient.in_context(lambda: self._checked(args, kwargs))

    def _checked(self, args: tuple, kwargs: dict) -> Any:
        gradient = self.gradient
        if self.arrange is None:
            return self._run(args, kwargs, False)
        return self.arrange(gradient, self._run(args, kwargs, gradient.searches))

    def _run(self, args: tuple, kwargs: dict, searches: bool) -> Any:
        gradient = self.gradient
        everything = gradient, args, kwargs
        if not (gradient.use_mixed_precision and is_half(gradient.compute_dtype)):
            return self.run(*everything)
        # Run eagerly there is no program to look at.
        if not traced(everything):
            out = self.run(*everything)
            if not searches:
                return out
            if not traced(out):
                again = lambda scaling: self.run(gradient.at(scaling), args, kwargs)
                return search_eagerly(again, gradient.scaling, out, gradient.axis_name)
        advice = OF_CASTS if gradient.autocast is None else OF_AUTOCAST
        # Who names what stays in float32 is not warned of that.
        without = (gradient.without_overrides(), args, kwargs) if gradient.autocast else None
        asked_for = gradient.call, gradient.compute_dtype
        evaluate = _searched if searches else evaluated
        return checked(self.run, everything, *asked_for, advice, without, evaluate)

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else eqx.Partial(self, instance)
