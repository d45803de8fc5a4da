"""Gradients in mixed precision."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, PyTree

from ._cast import cast_operands, widen
from ._dot import varying_axes
from ._dtypes import half_precision, half_precision_datatype, is_half
from ._loss_scaling import AbstractLossScaling, check_scaling, split_aux
from ._tree import all_finite
from .autocast import autocast as autocast_function, parse_patterns
from .derivatives._counts import check_takes_derivatives, sum_counts
from .derivatives._scaling import Scaling


def _parse_policy(policy: Any, call: str) -> jmp.Policy | None:
    if policy is None or isinstance(policy, jmp.Policy):
        return policy
    if isinstance(policy, str):
        try:
            return jmp.get_policy(policy)
        except (KeyError, ValueError) as e:
            raise ValueError(
                f"`{call}` cannot read the policy {policy!r}. Write it as jmp does, for example "
                '"params=float32,compute=bfloat16,output=float32".'
            ) from e
    raise TypeError(f"`{call}` takes a `jmp.Policy` or its string as `policy`, but got {policy!r}.")


def _cast_except(keep: PyTree, args: tuple, dtype: np.dtype, call: str) -> tuple:
    """Casts `args` where the prefix `keep` is false."""

    def cast(k, subtree):
        if not isinstance(k, bool):
            raise TypeError(f"`{call}` takes bools as the leaves of `keep_full`, but got {k!r}.")
        return subtree if k else cast_operands(subtree, dtype)

    try:
        return jtu.tree_map(cast, keep, args)
    except ValueError as e:
        raise ValueError(
            f"`{call}` takes `keep_full` as a prefix of its {len(args)} positional arguments: one "
            f"bool for all, or a tuple with one entry each, such as (False, True). Got {keep!r}."
        ) from e


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

    def mark(x):
        missing = tuple(n for n in names if n not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    differentiated, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jtu.tree_map(mark, differentiated), rest)


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
        self.policy = _parse_policy(policy, call)
        self.keep_full = keep_full
        self.axis_name = axis_name
        self.autocast = _parse_autocast(autocast, call)
        self.call = call

    @property
    def compute_dtype(self) -> np.dtype:
        if self.policy is None:
            return half_precision_datatype()
        return jnp.dtype(self.policy.compute_dtype)

    @property
    def derivatives(self) -> Any:
        """The derivative scaling that the function receives; `None` without one."""
        return self.scaling.derivatives if isinstance(self.scaling, Scaling) else None

    def in_context(self, thunk: Callable) -> Any:
        """Runs `thunk` where *half precision* means the dtype that this transformation computes
        in, so that the function itself and the cap of the scaling see it."""
        if not is_half(self.compute_dtype):
            return thunk()
        with half_precision(self.compute_dtype):
            return thunk()

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self.autocast is not None:
            return args, kwargs
        dtype = self.compute_dtype
        args = _cast_except(self.keep_full, args, dtype, self.call)
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
        if self.autocast is not None and is_half(self.compute_dtype):
            func = autocast_function(func, self.compute_dtype, **dict(self.autocast))
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


class Transformed(eqx.Module):
    """A differentiated function; `run` says what is asked of it."""

    gradient: Gradient
    run: Callable

    @property
    def __wrapped__(self):
        return self.gradient.func

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
        return self.gradient.in_context(lambda: self.run(self.gradient, args, kwargs))

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else eqx.Partial(self, instance)


def _value_and_grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    if not gradient.use_mixed_precision:
        out, grads = gradient.plain(args, kwargs)
        return out, gradient.scaling, jnp.array(True), grads
    out, grads, counts = gradient.scaled(args, kwargs)
    return out, *gradient.finish(grads, args[0], counts)


def _run_value_and_grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    (value, aux), scaling, finite, grads = _value_and_grad(gradient, args, kwargs)
    return (value, aux) if gradient.has_aux else value, scaling, finite, grads


def _run_grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    (_, aux), scaling, finite, grads = _value_and_grad(gradient, args, kwargs)
    return (scaling, finite, grads, aux) if gradient.has_aux else (scaling, finite, grads)


def _run_scaled_grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    if not gradient.use_mixed_precision:
        (value, aux), grads = gradient.plain(args, kwargs)
    else:
        (model, *rest), kwargs = gradient.cast(args, kwargs)

        def loss(differentiated):
            model, derivatives = differentiated
            value, aux = gradient.loss((model, *rest), kwargs, derivatives)
            return gradient.scaling.scale(value), aux

        (value, aux), (grads, counts) = eqx.filter_value_and_grad(loss, has_aux=True)(
            (model, gradient.derivatives)
        )
        if counts is not None:
            grads = (grads, counts.counts)
    return (value, aux) if gradient.has_aux else value, grads


def filter_value_and_grad(
    func: Callable,
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Any = None,
    keep_full: PyTree = False,
    axis_name: Any = None,
    autocast: bool | dict[str, Any] = False,
) -> Callable:
    """[`equinox.filter_value_and_grad`][] in mixed precision, with loss scaling.

    The arguments are cast to half precision, `func` runs, its loss is scaled in float32 and
    differentiated with respect to all floating-point arrays of the first argument; the gradients
    are unscaled and checked, and the scaling is adjusted.

    The cast is part of what is differentiated, so gradients have the dtypes of the parameters
    that were passed in (the float32 masters). A parameter that is used many times, in a scan or
    on many devices, has its cotangents summed in float32 where its products go through
    [`mpx_pde.mixed_dot_general`][]; in foreign code they are summed in half.

    **Arguments:**

    - `func`: a function of the model and anything else, that returns a scalar loss, or
        `(loss, aux)` with `has_aux=True`.
    - `scaling`: a loss scaling, such as [`mpx_pde.DynamicLossScaling`][], or a
        [`mpx_pde.Scaling`][] with derivative scales as well. With the latter, `func` receives
        them as the keyword argument `derivatives`, and `grads_finite` is also false when one of
        these derivatives overflowed. `None` will do without mixed precision.
    - `has_aux`: whether `func` returns auxiliary output.
    - `use_mixed_precision`: with `False` this is `equinox.filter_value_and_grad`: no cast, no
        scaling (`derivatives` is `None`), `scaling` comes back as it went in and `grads_finite`
        is true.
    - `policy`: a [`jmp.Policy`](https://github.com/google-deepmind/jmp) or its string, such as
        `"params=float32,compute=bfloat16,output=float32"`. `compute` is the dtype of the casts, by
        default [`mpx_pde.half_precision_datatype`][]; while `func` runs, that function returns it
        too. `output` is the dtype of `aux`, by default float32 for what is half. `params` is for
        the code that makes the model: the gradients follow the model that they are given.
    - `keep_full`: what is not cast: a bool for everything, or a prefix of the positional
        arguments, such as `(False, True)` to cast the model and keep the collocation points.
        `eqx.nn.State` and [`mpx_pde.FullPrecision`][] are never cast.
    - `axis_name`: inside `jax.shard_map` or `jax.pmap`, the mesh axis or axes whose devices must
        agree on `grads_finite`. What sums gradients over devices is JAX or you: with
        `check_vma=True`, the default of `jax.shard_map`, JAX returns the sum for parameters that
        are the same on all devices, and takes it in the dtype of the parameters.
    - `autocast`: whether to run `func` by [`mpx_pde.autocast`][] instead of casting its arguments,
        with the compute dtype of the policy; a dict gives its overrides, such as
        `{"full": "readout"}`. Nothing is cast beforehand then (`keep_full` has nothing to keep):
        parameters are rounded inside of each product, and their cotangents are float32
        throughout.

    **Returns:**

    A function of the arguments of `func` that returns `(value, scaling, grads_finite, grads)`, or
    `((value, aux), scaling, grads_finite, grads)`:

    - `value`: the loss before scaling, float32 (float64 for a float64 loss).
    - `aux`: in the output dtype; integers and `eqx.nn.State` untouched.
    - `scaling`: the scaling for the next step.
    - `grads_finite`: a scalar bool array. Give it to [`mpx_pde.optimizer_update`][].
    - `grads`: like the first argument, in its dtypes, with `None` for what is not differentiated.

    **Raises:** at trace time, `TypeError` for a loss that is no real floating-point scalar, for a
    `scaling` that is none, for a `Scaling` with a `func` that takes no `derivatives`, and for a
    call without a model; `ValueError` for a policy that cannot be read or a `keep_full` that does
    not fit the arguments.

    The recipe is that of Micikevicius et al., *Mixed Precision Training* (2018), section 3; names
    and return orders are those of MPX (Gräfe & Trimpe, 2025).
    """
    gradient = Gradient(
        "filter_value_and_grad",
        func,
        scaling,
        has_aux,
        use_mixed_precision,
        policy,
        keep_full,
        axis_name,
        autocast,
    )
    return eqx.module_update_wrapper(Transformed(gradient, _run_value_and_grad))


def filter_grad(
    func: Callable,
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Any = None,
    keep_full: PyTree = False,
    axis_name: Any = None,
    autocast: bool | dict[str, Any] = False,
) -> Callable:
    """[`mpx_pde.filter_value_and_grad`][] without the value.

    ```python
    scaling, grads_finite, grads = mpx.filter_grad(loss, scaling)(model, batch)
    ```

    **Arguments:** as for [`mpx_pde.filter_value_and_grad`][].

    **Returns:**

    A function of the arguments of `func` that returns `(scaling, grads_finite, grads)`, or
    `(scaling, grads_finite, grads, aux)` with `has_aux=True`.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][].
    """
    gradient = Gradient(
        "filter_grad",
        func,
        scaling,
        has_aux,
        use_mixed_precision,
        policy,
        keep_full,
        axis_name,
        autocast,
    )
    return eqx.module_update_wrapper(Transformed(gradient, _run_grad))


def calculate_scaled_grad(
    func: Callable,
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: Any = None,
    keep_full: PyTree = False,
    axis_name: Any = None,
    autocast: bool | dict[str, Any] = False,
) -> Callable:
    """The raw ingredients, for people who unscale, check and adjust by themselves.

    The cast is *not* part of what is differentiated here: gradients are in half precision (with
    `autocast`, which casts no arguments, in the dtypes of the parameters) and still scaled, `aux`
    is as `func` returned it, and neither is the scaling adjusted nor `axis_name` used.

    **Arguments:** as for [`mpx_pde.filter_value_and_grad`][].

    **Returns:**

    A function of the arguments of `func` that returns `(scaled_value, scaled_grads)`, or
    `((scaled_value, aux), scaled_grads)` with `has_aux=True`. The value is float32. With a
    [`mpx_pde.Scaling`][] the second entry is `(scaled_grads, counts)`; hand the counts to its
    `adjust`.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][].
    """
    gradient = Gradient(
        "calculate_scaled_grad",
        func,
        scaling,
        has_aux,
        use_mixed_precision,
        policy,
        keep_full,
        axis_name,
        autocast,
    )
    return eqx.module_update_wrapper(Transformed(gradient, _run_scaled_grad))
