"""Differentiates a loss in mixed precision. Each public transformation returns a part of the
result.
"""

import dataclasses
import functools as ft
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact

from .._util._calls import called, named
from .._util._notes import noting_the_model, noting_the_terms, noting_the_trace
from .._util._repr import in_a_line
from .._util._types import AxisName, PyTree
from .._util._varying import mark_varying, size_of_axis
from ..modes._choice import mode_at, mode_of
from ..modes._mode import AbstractMode
from ..precision._cast import widen
from ..precision._dtypes import check_bool, largest_scale
from ..precision._forward import forward_in
from ..precision._tree import all_finite, all_zero
from ..program._shown import shown
from ..program._warnings import traced
from ..reports._diagnosis import diagnose, warn_of_unscaled
from ..scaling._derivatives import (
    Scaling,
    check_takes_derivatives,
    loss_scaling_of,
    needs_derivatives,
    sum_counts,
)
from ..scaling._following import followed, is_small
from ..scaling._loss import DynamicLossScaling, NoOpLossScaling, check_scaling, split_aux
from ..scaling._unscaled import noting_unscaled


def _check_loss(value: Any, has_aux: bool) -> Inexact[Array, ""]:
    """Returns the loss as an array; raises a `TypeError` unless it is a real floating-point
    scalar.
    """
    hint = " Return the mean or the sum of the residuals."
    if isinstance(value, tuple) and not has_aux:
        hint = " If it returns `(loss, aux)`, pass `has_aux=True`."
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float):
        raise TypeError(
            f"`{called()}` needs a function that returns a scalar loss, but it returned "
            f"{type(value).__name__}.{hint}"
        )
    out = jnp.asarray(value)
    if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"`{called()}` needs a function that returns a real floating-point scalar, but it "
            f"returned dtype {out.dtype.name} and shape {out.shape}.{hint}"
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


def copied(tree: PyTree) -> PyTree:
    """Copies the containers of a PyTree, because an `eqx.nn.State` can be used only once."""
    return jtu.tree_map(lambda x: x, tree)


class Checked(NamedTuple):
    """What is known of a loss and its gradients.

    **Attributes:**

    - `finite`: whether both are finite.
    - `zero`: whether the gradients are zero.
    - `some`: whether the loss is not zero, as it is where it converged or is masked.
    - `small`: whether the gradients are too small for the scale of the loss, or `None` if no half
        type has too little range for them.
    """

    finite: Array
    zero: Array
    some: Array
    small: Array | None


class Evaluated(NamedTuple):
    """The value of a loss and its gradients.

    **Attributes:**

    - `value`: the loss before it is scaled, in float32 or wider.
    - `aux`: the auxiliary output as the function returned it, or `None`.
    - `grads`: the gradients, still scaled, in the dtypes of the masters.
    - `counts`: the counts of derivatives, or `None`.
    - `dtype`: the dtype that the function returned the loss in.
    - `depends`: whether the loss depends on the parameters, as JAX knows it. It does not behind a
        `jax.lax.stop_gradient`.
    """

    value: Array
    aux: PyTree
    grads: PyTree
    counts: PyTree
    dtype: np.dtype
    depends: bool = True

    @property
    def largest_scale(self) -> float:
        """Returns the largest scale that the loss has a cotangent for."""
        return largest_scale(self.dtype)


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


def check_eager(tree: PyTree) -> None:
    """Raises a `TypeError` if any leaf of `tree` is a tracer."""
    if traced(tree):
        raise TypeError(
            f"`{called()}` evaluates the gradient and looks at it, so it cannot be called "
            "inside of `jax.jit`, `jax.grad`, `jax.vmap` or `jax.shard_map`. Call it before the "
            "first step, with arrays."
        )


class Gradient(eqx.Module):
    """A loss function with its scaling and options, shared by all public transformations.

    **Attributes:**

    - `mode`: how it is evaluated and differentiated.
    - `call`: the name of the public function that the options were given to, for error messages.
    """

    func: Any
    scaling: Any
    mode: AbstractMode
    call: str = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        func: Any,
        scaling: Any,
        *,
        has_aux: Any,
        axis_name: AxisName | None = None,
        **options: Any,
    ) -> "Gradient":
        """Builds the `Gradient` of a loss function for the called function, after checking its
        arguments. `options` are those of [`mode_of`][]."""
        aux = (
            "whether the function returns `(loss, aux)` (model and batch are for what it returns: "
            f"`{called()}(loss, ...)(model, batch)`)"
        )
        has_aux = check_bool(has_aux, "has_aux", aux)
        mode = mode_of(**options)
        if not callable(func):
            raise TypeError(f"`{called()}` takes a loss function first, but got {in_a_line(func)}.")
        if isinstance(func, Transformed):
            raise TypeError(
                f"`{called()}` takes the loss itself, but got a gradient of it: "
                f"`{func.gradient.call}(loss)`. Write `{called()}(loss, ...)(model, batch)`."
            )
        if mode.scales or scaling is not None:
            check_scaling(scaling)
        if isinstance(scaling, Scaling):
            check_takes_derivatives(func)
        return cls(func, scaling, mode, called(), has_aux, axis_name)

    def check_called_with(self, args: tuple) -> None:
        """Raises a `TypeError` if the function was called without a model, or with a model without
        floating-point arrays.
        """
        if not args:
            raise TypeError(
                f"`{called()}` differentiates with respect to the first positional argument, but "
                "the function was called without one. Pass the model first."
            )
        if not any(map(eqx.is_inexact_array, jtu.tree_leaves(args[0]))):
            raise TypeError(
                f"`{called()}` differentiates with respect to the floating-point arrays of the "
                f"first positional argument, but {in_a_line(args[0])} has none. Pass the model "
                "first, with its parameters as arrays: numbers of Python and integers do not count."
            )

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
                    f"`{called()}` takes the scaling of one model, but got a "
                    f"{type(scaling).__name__} whose `{name}` has shape {jnp.shape(x)}, as a step "
                    "under `jax.vmap` returns it for all members. Map this call over the scaling "
                    "too, or take that of a member: `jax.tree.map(lambda x: x[0], scaling)`."
                )

    @property
    def derivatives(self) -> Any:
        """Returns the derivative scaling that the function receives, or `None` if there is none."""
        return self.scaling.derivatives if isinstance(self.scaling, Scaling) else None

    @property
    def is_unscaled(self) -> bool:
        """Returns whether nothing is scaled, neither the loss nor derivatives in it."""
        return not self.mode.scales or isinstance(self.scaling, NoOpLossScaling)

    def with_derivatives(self, kwargs: dict, derivatives: Any) -> dict:
        """Returns the keyword arguments of the function, with the derivative scaling among them."""
        if self.derivatives is None:
            if "derivatives" in kwargs or not needs_derivatives(self.func):
                return kwargs
            if self.is_unscaled:
                return {**kwargs, "derivatives": None}
            raise TypeError(
                f"`{called()}` passes `derivatives` to the function with a `Scaling` alone, but "
                "got no derivative scales. Pass `mpx_pde.Scaling(derivatives="
                "mpx_pde.DerivativeScaling.per_direction(...))`, where nothing is scaled "
                "`mpx_pde.NoOpLossScaling()`, or write `derivatives=None` in the function."
            )
        if "derivatives" in kwargs:
            raise TypeError(
                f"`{called()}` with a `Scaling` passes `derivatives` to the function "
                "itself. Do not pass it by hand."
            )
        return {**kwargs, "derivatives": derivatives}

    def loss(self, args: tuple, kwargs: dict, derivatives: Any) -> tuple[Inexact[Array, ""], Any]:
        """Evaluates the loss, in the dtype that the function returns, and its auxiliary output (or
        `None`)."""
        func, mode = self.mode.evaluated(self.func), self.mode
        noted = noting_the_model(args)
        with mode.around_loss(), noted, noting_the_terms(), noting_unscaled() as unscaled:
            out = func(*args, **self.with_derivatives(kwargs, derivatives))
        if unscaled and self.derivatives is None and mode.in_half:
            warn_of_unscaled(*unscaled.popitem())
        out, aux = split_aux(out) if self.has_aux else (out, None)
        return _check_loss(out, self.has_aux), aux

    def evaluate(self, args: tuple, kwargs: dict) -> Evaluated:
        """Evaluates the loss and its gradients with respect to `args[0]`."""
        mode = self.mode
        if mode.scales and self.axis_name is not None:
            size_of_axis(self.axis_name)
        depends: list[bool] = []
        dtypes: list[np.dtype] = []

        def loss(differentiated, others, kwargs):
            model, derivatives = differentiated
            if not mode.scales:
                value, aux = self.loss((model, *others), kwargs, None)
                dtypes.append(value.dtype)
                return value, (value, aux)
            # The cast in here is part of what is differentiated, so the gradients have the dtypes
            # of the masters.
            model = _as_varying(model, self.axis_name)
            cast_args, cast_kwargs = mode.cast((model, *others), kwargs)
            value, aux = self.loss(cast_args, cast_kwargs, derivatives)
            dtypes.append(value.dtype)
            value = widen(value)
            return self.scaling.scale(_noticed(value, depends)), (value, aux)

        differentiated = args[0], self.derivatives if mode.scales else None
        value_and_grad = mode.value_and_grad(loss, args, kwargs)
        with noting_the_trace(), mode.around_gradient():
            (_, out), (grads, counts) = value_and_grad(differentiated, args[1:], kwargs)
        value, aux = out
        counts = None if counts is None else counts.counts
        return Evaluated(value, aux, grads, counts, dtypes[-1], bool(depends))

    def unscale(self, grads: PyTree) -> PyTree:
        """Unscales gradients by the scale of this step."""
        return self.scaling.unscale(grads) if self.mode.scales else grads

    def finish(self, model: PyTree, evaluated: Evaluated) -> tuple:
        """Unscales the gradients and brings the scaling up to date."""
        masters = eqx.filter(model, eqx.is_inexact_array)
        # A NumPy master may have a dtype that is wider than those of JAX.
        like = lambda g, m: g.astype(jax.dtypes.canonicalize_dtype(m.dtype))
        grads = jtu.tree_map(like, self.unscale(evaluated.grads), masters)
        if not self.mode.scales:
            return self.scaling, jnp.array(True), grads
        found = self._checked(evaluated, grads)
        usable, seen = found.finite, ()
        if evaluated.counts is not None:
            seen = (sum_counts(evaluated.counts, self.axis_name),)
            # Gradients can be finite although a derivative overflowed, if the loss masks it.
            usable = usable & self.derivatives.finite(*seen)
        with forward_in(self.mode.forward):  # the cap of the scale depends on it
            adjusted = self.scaling.adjust(found.finite, *seen)
        vanished, small = found.zero & found.some, found.small
        if small is not None:
            if evaluated.dtype == jnp.float16:  # the loss may be zero for being small, too
                vanished = vanished | (small & ~found.zero)
            small = small & found.some & evaluated.depends
        vanished = usable & vanished & (self.mode.in_half and evaluated.depends)
        scaling = followed(self.scaling, adjusted, small, evaluated.largest_scale, vanished)
        return scaling, usable, grads

    def _checked(self, evaluated: Evaluated, grads: PyTree) -> Checked:
        """Looks at a loss and its gradients, with an `axis_name` at those of all devices."""
        anywhere = [
            ~(all_finite(grads) & jnp.isfinite(evaluated.value)),
            ~all_zero(grads),
            evaluated.value != 0,
        ]
        if self.mode.in_half and self.mode.dtype == jnp.float16:
            anywhere += [~is_small(grads, self.scaling, evaluated.largest_scale)]
        if self.axis_name is not None:
            flags = jnp.stack(anywhere).astype(jnp.int32)
            anywhere = list(lax.psum(flags, self.axis_name) > 0)
        infinite, moves, some, *large = anywhere
        return Checked(~infinite, ~moves, some, ~large[0] if large else None)


def transformed(run: Callable, func: Any, scaling: Any, **options: Any) -> Callable:
    """Builds the function that the called transformation returns. `run` is passed to
    [`Transformed`][], and `options` are those of [`Gradient.of`][].
    """
    return eqx.module_update_wrapper(Transformed(Gradient.of(func, scaling, **options), run))


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

    def in_full(self) -> "Transformed":
        """Returns the same transformation without mixed precision."""
        mode = mode_at("full", self.gradient.mode)
        gradient = dataclasses.replace(self.gradient, mode=mode)
        return dataclasses.replace(self, gradient=gradient)

    def __repr__(self) -> str:
        # `jax.jit` shows this when it is given the model, which is more than arrays.
        call, func = self.gradient.call, self.gradient.func
        name = getattr(func, "__name__", type(func).__name__)
        return (
            f"<mpx_pde.{call}({name}, ...); compile it by `eqx.filter_jit`, which takes models "
            "that are not only arrays>"
        )

    @property
    def is_mixed_precision(self) -> bool:
        return self.gradient.mode.scales

    @property
    def is_autocast(self) -> bool:
        return self.gradient.mode.is_autocast

    @property
    def scales_its_loss(self) -> bool:
        scaling = loss_scaling_of(self.gradient.scaling)
        return self.is_mixed_precision and not isinstance(scaling, NoOpLossScaling)

    @property
    def room_of_scale(self) -> int | None:
        """Returns by how many powers of two the loss scale can fall; `None` if it has no bound."""
        scaling = loss_scaling_of(self.gradient.scaling)
        if not isinstance(scaling, DynamicLossScaling):
            return None
        highest = float(np.max(np.asarray(scaling.loss_scaling)))
        return round(math.log2(highest / scaling.min_loss_scaling))

    @property
    def __signature__(self):
        # The caller passes no `derivatives`, or may leave them out.
        gradient = self.gradient
        if gradient.derivatives is not None:
            signature = inspect.signature(gradient.func)
            parameters = [p for p in signature.parameters.values() if p.name != "derivatives"]
        elif gradient.is_unscaled and needs_derivatives(gradient.func):
            signature = inspect.signature(gradient.func)
            optional = {"derivatives": signature.parameters["derivatives"].replace(default=None)}
            parameters = [*{**signature.parameters, **optional}.values()]
        else:
            raise AttributeError("__signature__")
        return signature.replace(parameters=parameters)

    def __call__(self, /, *args, **kwargs):
        gradient = self.gradient
        with named(gradient.call):
            gradient.check_called_with(args)
            gradient.check_unmapped()
            # The caller needs the old `eqx.nn.State` to roll back to.
            args, kwargs = copied((args, kwargs))
            with gradient.mode.context():
                return self._run(args, kwargs)

    def __iter__(self) -> Iterator:
        call = self.gradient.call
        raise TypeError(
            f"`{call}` returns a function, and has no results before that is called. Write "
            f"`mpx_pde.{call}(...)(model, batch)`."
        )

    def _run(self, args: tuple, kwargs: dict) -> Any:
        gradient, mode = self.gradient, self.gradient.mode
        everything = gradient, args, kwargs
        # There is no program to look at when the function runs eagerly.
        if not mode.in_half or not traced(everything):
            return self.run(*everything)
        return shown(self.run, everything, ft.partial(diagnose, self.run, everything))

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else eqx.Partial(self, instance)
