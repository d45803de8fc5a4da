"""Gradients in mixed precision."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._util._calls import public
from .._util._types import AxisName, ForwardLike, GradientOptions, PolicyLike, PyTree
from .._util._varying import mark_varying, varying_axes
from ..scaling._loss import AbstractLossScaling
from ._gradient import Gradient, transformed
from ._options import refuses_argnums


_Scaling = TypeVar("_Scaling", bound=AbstractLossScaling | None)


def _value_and_grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    evaluated = gradient.evaluate(args, kwargs)
    out = evaluated.value
    if gradient.has_aux:
        out = out, gradient.mode.output(evaluated.aux)
    return out, *gradient.finish(args[0], evaluated)


def _grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    out, *rest = _value_and_grad(gradient, args, kwargs)
    return (*rest, out[1]) if gradient.has_aux else tuple(rest)


def _scaled_grad(gradient: Gradient, args: tuple, kwargs: dict) -> tuple:
    if gradient.mode.casts:
        # Cast outside of the differentiated function.
        args, kwargs = gradient.mode.cast(args, kwargs)
    value, aux, grads, counts, *_ = gradient.evaluate(args, kwargs)
    if gradient.mode.scales:
        value = gradient.scaling.scale(value)
    grads = grads if counts is None else (grads, counts)
    return (value, aux) if gradient.has_aux else value, grads


if TYPE_CHECKING:

    @overload
    def filter_value_and_grad(
        func: Callable[..., Any],
        scaling: _Scaling,
        has_aux: Literal[False] = False,
        use_mixed_precision: bool = True,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[Array, _Scaling, Array, PyTree]]: ...

    @overload
    def filter_value_and_grad(
        func: Callable[..., Any],
        scaling: _Scaling,
        has_aux: Literal[True],
        use_mixed_precision: bool = True,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[tuple[Array, PyTree], _Scaling, Array, PyTree]]: ...


@public
@refuses_argnums
def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    axis_name: AxisName | None = None,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
) -> Callable[..., Any]:
    """Evaluates [`equinox.filter_value_and_grad`][] in mixed precision, with loss scaling.

    For a physics-informed network pass `forward="float32"` and a [`mpx_pde.Scaling`][] with
    derivative scales. For an operator, a transformer or a U-Net pass `autocast=True`, or for
    [`mpx_pde.nn.FNO`][] `keep_full=(False, True, True)`, and a [`mpx_pde.DynamicLossScaling`][].

    Casts the arguments to half precision, runs `func`, and scales its loss in float32. Then
    differentiates it with respect to all floating-point arrays of the first argument, unscales and
    checks the gradients, and adjusts the scaling.

    The cast is part of what is differentiated, so gradients have the dtypes of the parameters
    that were passed in (the float32 masters). If a parameter is used many times, in a scan or on
    many devices, its cotangents are summed in float32 where its products go through
    [`mpx_pde.mixed_dot_general`][]. In other code they are summed in half precision.

    **Arguments:**

    - `func`: a function of the model and anything else, that returns a scalar loss, or
        `(loss, aux)` with `has_aux=True`.
    - `scaling`: a loss scaling, such as [`mpx_pde.DynamicLossScaling`][], or a
        [`mpx_pde.Scaling`][] with derivative scales as well. With the latter, `func` receives
        them as the keyword argument `derivatives`, and `grads_finite` is also false when one of
        these derivatives overflowed. Under `jax.jit`, a `func` that takes no derivative with them
        in float16 is a [`mpx_pde.PrecisionWarning`][]. A `func` that needs `derivatives` gets
        `None` with a [`mpx_pde.NoOpLossScaling`][], and without mixed precision, where `scaling`
        may be `None` too.
    - `has_aux`: whether `func` returns auxiliary output.
    - `use_mixed_precision`: with `False` this is `equinox.filter_value_and_grad`: nothing is cast
        or scaled (`derivatives` is `None`), `scaling` is returned unchanged and `grads_finite`
        is true. float32 is then true float32: products take the highest precision (on a GPU JAX's
        own default is TF32), unless you have set `jax.default_matmul_precision`. Layers of
        `mpx_pde.nn` that were given a half `dtype` multiply in the dtype of their weights.
    - `policy`: a [`jmp.Policy`](https://github.com/google-deepmind/jmp) or its string, such as
        `"params=float32,compute=bfloat16,output=float32"`. `compute` is the dtype of the casts, by
        default [`mpx_pde.half_precision_datatype`][]; while `func` runs, that function returns it
        too. `output` is the dtype of `aux`; by default half-precision arrays become float32.
        `params` is ignored here, because the gradients have the dtypes of the model. It is for the
        code that builds the model.
    - `keep_full`: the arguments that are not cast: a bool for everything, or a prefix of the
        positional arguments, such as `(False, True)` to cast the model and keep the collocation
        points. `eqx.nn.State` and [`mpx_pde.FullPrecision`][] are never cast. With `forward=`
        nothing is cast; there, products with kept arguments are of full precision in the backward
        pass too, and what is computed of such arguments alone is kept as it is.
    - `axis_name`: inside `jax.shard_map` or `jax.pmap`, the mesh axis or axes whose devices must
        agree on `grads_finite`. This function does not sum gradients over devices. With
        `check_vma=True`, the default of `jax.shard_map`, JAX returns the sum for parameters that
        are the same on all devices, and takes it in the dtype of the parameters. Otherwise sum them
        yourself.
    - `autocast`: whether to run `func` by [`mpx_pde.autocast`][] instead of casting its arguments,
        with the compute dtype of the policy; a dict gives its overrides, such as
        `{"full": "readout"}`. Nothing is cast beforehand then, so `keep_full` has no effect:
        parameters are rounded inside of each product, and their cotangents are float32
        throughout. Use it for networks whose own code does not keep norms, softmax or attention in
        float32.
    - `forward`: the precision of the forward pass, up to the loss. `"half"` takes the precision of
        the backward pass. `"float32"` (true float32: products take the highest precision), a split
        product (`"bfloat16_x3"`, `"bfloat16_x6"`, `"bfloat16_x9"`, `"tensorfloat32_x3"`),
        `"tensorfloat32"` and `"float64"` evaluate the loss and the derivatives in it in that
        precision, but float64 arrays in float64. What the backward pass needs is computed in that
        precision, and kept rounded to the compute dtype of the policy (which may be float32 under
        `"float64"`). Products of the backward pass round their operands to it; cotangents and
        their sums are float32. Decisions, such as the mask of a `where`, are those of the full
        evaluation. So the error of the gradient is relative to the gradient: it vanishes as the
        residual does (see *How it works* in the documentation). Nothing is cast
        beforehand, with or without `autocast=True`. The arguments themselves, and what is computed
        of the parameters alone, are never rounded except inside of a product.

    **Returns:**

    A function of the arguments of `func` that returns `(value, scaling, grads_finite, grads)`, or
    `((value, aux), scaling, grads_finite, grads)`:

    - `value`: the loss before scaling, float32 (float64 for a float64 loss).
    - `aux`: the auxiliary output, in the output dtype; integers and `eqx.nn.State` are untouched.
    - `scaling`: the scaling for the next step.
    - `grads_finite`: a scalar bool array, whether the gradients and `value` are finite. Pass it to
        [`mpx_pde.optimizer_update`][].
    - `grads`: the gradients, with the structure and dtypes of the first argument, and `None` for
        leaves that are not differentiated.

    **Raises:** at trace time, `TypeError` for a loss that is not a real floating-point scalar, for
    a `scaling` that is not one, for a `Scaling` with a `func` that takes no `derivatives`, and for
    a call without a model; `ValueError` for a policy that cannot be read, a `keep_full` that does
    not fit the arguments, and a `forward` that is unknown, float64 without 64-bit types, or given
    together with overrides of `autocast`.

    The gradients may be differentiated in turn, in forward mode (`jax.jvp`). In reverse mode their
    cotangents are divided by the loss scale, and underflow in float16: pass bfloat16, or a
    [`mpx_pde.NoOpLossScaling`][].

    The recipe follows Micikevicius et al., *Mixed Precision Training* (2018), section 3. Names and
    return orders follow MPX (Gräfe & Trimpe, 2025).
    """
    return transformed(
        _value_and_grad,
        func,
        scaling,
        has_aux=has_aux,
        axis_name=axis_name,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )


if TYPE_CHECKING:

    @overload
    def filter_grad(
        func: Callable[..., Any],
        scaling: _Scaling,
        has_aux: Literal[False] = False,
        use_mixed_precision: bool = True,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[_Scaling, Array, PyTree]]: ...

    @overload
    def filter_grad(
        func: Callable[..., Any],
        scaling: _Scaling,
        has_aux: Literal[True],
        use_mixed_precision: bool = True,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[_Scaling, Array, PyTree, PyTree]]: ...


@public
@refuses_argnums
def filter_grad(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    axis_name: AxisName | None = None,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
) -> Callable[..., Any]:
    """Evaluates [`mpx_pde.filter_value_and_grad`][] without returning the value.

    ```python
    scaling, grads_finite, grads = mpx.filter_grad(loss, scaling)(model, batch)
    ```

    **Arguments:** as for [`mpx_pde.filter_value_and_grad`][].

    **Returns:**

    A function of the arguments of `func` that returns `(scaling, grads_finite, grads)`, or
    `(scaling, grads_finite, grads, aux)` with `has_aux=True`.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][].
    """
    return transformed(
        _grad,
        func,
        scaling,
        has_aux=has_aux,
        axis_name=axis_name,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )


if TYPE_CHECKING:

    @overload
    def calculate_scaled_grad(
        func: Callable[..., Any],
        scaling: AbstractLossScaling | None,
        has_aux: Literal[False] = False,
        use_mixed_precision: bool = True,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[Array, PyTree]]: ...

    @overload
    def calculate_scaled_grad(
        func: Callable[..., Any],
        scaling: AbstractLossScaling | None,
        has_aux: Literal[True],
        use_mixed_precision: bool = True,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[tuple[Array, PyTree], PyTree]]: ...


@public
@refuses_argnums
def calculate_scaled_grad(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    axis_name: AxisName | None = None,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
) -> Callable[..., Any]:
    """Evaluates the loss and its gradients, both still scaled, for users who unscale, check and
    adjust themselves.

    The cast is *not* part of what is differentiated here, so gradients are in half precision. (With
    `autocast`, which casts no arguments, they have the dtypes of the parameters.) They are still
    scaled, and `aux` is as `func` returned it. The scaling is not adjusted, and `axis_name` is not
    used.

    **Arguments:** as for [`mpx_pde.filter_value_and_grad`][].

    **Returns:**

    A function of the arguments of `func` that returns `(scaled_value, scaled_grads)`, or
    `((scaled_value, aux), scaled_grads)` with `has_aux=True`. The value is float32. With a
    [`mpx_pde.Scaling`][] the second entry is `(scaled_grads, counts)`; pass the counts to its
    `adjust`.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][].
    """
    return transformed(
        _scaled_grad,
        func,
        scaling,
        has_aux=has_aux,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )


@public
@refuses_argnums
def line_search_value(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    axis_name: AxisName | None = None,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
) -> Callable[..., Array]:
    """Builds a function that evaluates the loss for a line search, such as that of `optax.lbfgs`.

    A line search differentiates the function that it gets, and compares slopes with differences of
    values. So value and slope must come from one evaluation, at one loss scale. The value of
    [`mpx_pde.filter_value_and_grad`][] will not do: differentiating it runs another backward pass,
    in half precision and without loss scaling, in which small gradients vanish. The gradient of the
    function built here is that of [`mpx_pde.filter_value_and_grad`][], unscaled, at the scale of
    `scaling`.

    With `forward="float32"` values are exact to float32's rounding, and a search ends as it does in
    float32. In half precision throughout it stops early (see *PINNs* in the
    documentation).

    ```python
    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling, **options)(model, x)
    search = mpx.line_search_value(loss, scaling, **options)
    static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
    model, opt_state = mpx.optimizer_update(
        model, optimizer, opt_state, grads, finite, value=value, grad=grads,
        value_fn=lambda params: search(eqx.combine(params, static), x),
    )
    ```

    **Arguments:** as for [`mpx_pde.filter_value_and_grad`][], without `has_aux`.

    **Returns:** a function of the arguments of `func` that returns the loss, float32 (float64 for a
    float64 loss). It can be differentiated once, in reverse mode, with respect to the first one.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][].
    """
    run = transformed(
        _value_and_grad,
        func,
        scaling,
        has_aux=False,
        axis_name=axis_name,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )

    @eqx.filter_custom_vjp
    def value(model, args, kwargs):
        return run(model, *args, **kwargs)[0]

    @value.def_fwd
    def _(perturbed, model, args, kwargs):
        out, _, _, grads = run(model, *args, **kwargs)
        return out, grads

    @value.def_bwd
    def _(grads, cotangent, perturbed, model, args, kwargs):
        return jtu.tree_map(lambda g: (jnp.asarray(cotangent, g.dtype) * g).astype(g.dtype), grads)

    def search(model: PyTree, /, *args: Any, **kwargs: Any) -> Array:
        if jax.sharding.get_abstract_mesh().manual_axes:
            # Where the value differs between devices, each device has its own gradient. The
            # transpose of the mark sums these, after the cotangent has multiplied them.
            axes = varying_axes(jax.eval_shape(lambda: run(model, *args, **kwargs)[0]))

            def mark(x):
                return mark_varying(x, axes) if eqx.is_inexact_array(x) else x

            model = jtu.tree_map(mark, model)
        return value(model, args, kwargs)

    return search
