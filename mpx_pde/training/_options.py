"""The options that all gradient transformations share, and `as_trained`, which rounds a model as
training with such options does."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np

from .._cast import cast_except, cast_operands, kept_paths, widen
from .._dtypes import (
    as_floating_dtype,
    asked_for_half,
    check_bool,
    half_precision,
    half_precision_datatype,
    is_half,
    precision_gives_way,
)
from .._forward import Forward, check_forward
from .._repr import in_a_line
from .._types import AxisName, ForwardLike, PolicyLike, PyTree
from .._wrapper import check_bound
from ..autocast import parse_patterns


class Options(eqx.Module):
    """The options for differentiating a loss. [`parse_options`][] builds them.

    [`mpx_pde.filter_value_and_grad`][] explains each of them.

    **Attributes:**

    - `call`: the name of the public function that they were given to, for error messages.
    - `autocast`: the overrides to run `autocast` with; `None` to cast the arguments instead.
    """

    call: str = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    use_mixed_precision: bool = eqx.field(static=True)
    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree
    autocast: tuple[tuple[str, Any], ...] | None = eqx.field(static=True)
    forward: str = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True, default=None)

    @property
    def in_full(self) -> bool:
        """Returns whether the forward pass is in another precision than the backward pass."""
        return self.use_mixed_precision and self.forward != "half"

    @property
    def compute_dtype(self) -> np.dtype:
        if self.policy is None:
            return half_precision_datatype()
        return jnp.dtype(self.policy.compute_dtype)

    @property
    def precisions(self) -> Forward | None:
        """Returns the precisions of forward and backward pass, or `None` if they are the same."""
        return Forward(self.forward, self.compute_dtype.name) if self.in_full else None

    @property
    def casts(self) -> bool:
        """Returns whether arguments are cast before the function sees them."""
        return self.use_mixed_precision and self.autocast is None and not self.in_full

    @property
    def in_half(self) -> bool:
        """Returns whether anything is computed in half precision."""
        return self.use_mixed_precision and is_half(self.compute_dtype)

    def check_called_with(self, args: tuple) -> None:
        """Raises a `TypeError` if the function was called without a model, or with a model without
        floating-point arrays.
        """
        if not args:
            raise TypeError(
                f"`{self.call}` differentiates with respect to the first positional argument, but "
                "the function was called without one. Pass the model first."
            )
        if not any(map(eqx.is_inexact_array, jtu.tree_leaves(args[0]))):
            raise TypeError(
                f"`{self.call}` differentiates with respect to the floating-point arrays of the "
                f"first positional argument, but {in_a_line(args[0])} has none. Pass the model "
                "first, with its parameters as arrays: numbers of Python and integers do not count."
            )

    def in_context(self, thunk: Callable) -> Any:
        """Runs `thunk` in a context where *half precision* means the compute dtype, so that the
        function itself and the cap of the scaling use it."""
        if not is_half(self.compute_dtype):
            return thunk()
        asked = partial(asked_for_half, "cast") if self.casts else half_precision
        with asked(self.compute_dtype), precision_gives_way():
            return thunk()

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Casts the arguments of the function if these options ask for it."""
        if not self.casts:
            self.kept(args, kwargs)  # only to raise its errors
            return args, kwargs
        return cast_except(self.keep_full, args, kwargs, self.compute_dtype, self.call)

    def kept(self, args: tuple, kwargs: dict) -> frozenset:
        """Returns the paths in `(fun, args, kwargs)` of leaves that stay in full precision."""
        return kept_paths(self.keep_full, args, kwargs, self.call)

    def output(self, tree: PyTree) -> PyTree:
        """Casts auxiliary output to the output dtype."""
        if not self.use_mixed_precision:
            return tree
        if self.policy is None:
            return widen(tree)
        return cast_operands(tree, jnp.dtype(self.policy.output_dtype))


def parse_options(
    call: str,
    has_aux: Any,
    use_mixed_precision: Any,
    policy: Any,
    keep_full: PyTree,
    autocast: Any,
    forward: Any,
    axis_name: AxisName | None = None,
) -> Options:
    """Builds the options of the public function `call`.

    **Raises:** `ValueError` and `TypeError`, in the name of `call`, for invalid options.
    """
    half = "whether anything is done in half precision (in which, says `policy`)"
    aux = (
        "whether the function returns `(loss, aux)` (model and batch are for what it returns: "
        f"`{call}(loss, ...)(model, batch)`)"
    )
    options = Options(
        call=call,
        has_aux=check_bool(has_aux, call, "has_aux", aux),
        use_mixed_precision=check_bool(use_mixed_precision, call, "use_mixed_precision", half),
        policy=_parse_policy(policy, call),
        keep_full=keep_full,
        autocast=_parse_autocast(autocast, call),
        forward=check_forward(forward, call),
        axis_name=axis_name,
    )
    if options.in_full and options.autocast:
        raise ValueError(
            f"`{call}` takes either overrides of `autocast` or `forward={options.forward!r}`, "
            "which evaluates the loss in that precision and leaves nothing to cast. Drop one of "
            "them."
        )
    return dataclasses.replace(options, autocast=None) if options.in_full else options


_Function = TypeVar("_Function", bound=Callable)


def refuses_argnums(transformation: _Function) -> _Function:
    """Makes a gradient transformation raise a `TypeError` with the code to write for `argnums`, and
    for arguments that are missing."""
    call = transformation.__name__
    parameters = inspect.signature(transformation).parameters.values()
    needed = ["loss", *[x.name for x in parameters if x.default is x.empty][1:]]
    example = (
        f"`mpx_pde.{call}({', '.join(needed)})(model, batch)`, with `scaling = "
        "mpx_pde.DynamicLossScaling()`, or `mpx_pde.Scaling(derivatives=...)` for a loss that "
        "takes derivatives of the network."
    )

    @wraps(transformation)
    def checked(*args: Any, **kwargs: Any) -> Any:
        argnums = kwargs.pop("argnums", None)
        if argnums is None or argnums == 0:
            check_bound(transformation, example, args, kwargs)
            return transformation(*args, **kwargs)
        moved, given, first = _moved(argnums)
        raise TypeError(
            f"`{call}` differentiates with respect to the first positional argument, as Equinox "
            f"does, and takes no `argnums`, but got {argnums!r}. Write:\n"
            f"    moved = lambda {first}: loss({moved})\n"
            f"    mpx_pde.{call}(moved, scaling, ...)({given})\n"
            "Entries of `keep_full` are for the arguments in this order."
        )

    return cast(_Function, checked)


def _moved(argnums: Any) -> tuple[str, str, str]:
    """Returns the arguments of a loss, those of the call and those of the function between them,
    as code, if what `argnums` selects is passed first."""
    chosen = argnums if isinstance(argnums, tuple | list) else (argnums,)
    if not chosen or not all(isinstance(i, int) and i >= 0 for i in chosen):
        return "*given, *rest", "(model, other), batch", "given, *rest"
    single = not isinstance(argnums, tuple | list)
    names = "abcdefghijklmnopqrstuvwxyz"[: max(chosen) + 1] + "*"
    places = {i: "given" if single else f"given[{k}]" for k, i in enumerate(chosen)}
    others = [x for i, x in enumerate(names[:-1]) if i not in places]
    inside = [places.get(i, x) for i, x in enumerate(names[:-1])]
    picked = ", ".join(names[i] for i in chosen)
    picked = picked if single else f"({picked}{',' * (len(chosen) == 1)})"
    join = lambda *parts: ", ".join((*parts, "*rest"))
    return join(*inside), join(picked, *others), join("given", *others)


def _parse_policy(policy: Any, call: str) -> jmp.Policy | None:
    if policy is None:
        return None
    if isinstance(policy, jmp.Policy):
        for dtype in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
            as_floating_dtype(dtype, f"{call}(policy=…)")
        return policy
    if isinstance(policy, str):
        try:
            return jmp.get_policy(policy)
        except (KeyError, ValueError) as e:
            raise ValueError(
                f"`{call}` cannot read the policy {policy!r}. Write it as jmp does, for example "
                '"params=float32,compute=bfloat16,output=float32".'
            ) from e
    raise TypeError(
        f"`{call}` takes a `jmp.Policy` or its string as `policy`, such as "
        f'"params=float32,compute=bfloat16,output=float32", but got {in_a_line(policy)}.'
    )


def _parse_autocast(options: Any, call: str) -> tuple[tuple[str, Any], ...] | None:
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


def as_trained(
    model: PyTree,
    *,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    forward: ForwardLike = "half",
) -> PyTree:
    """Rounds the parameters of a model to half precision, as its training did, and returns them in
    float32.

    A step in half precision casts the float32 masters first, so training minimizes the loss of the
    rounded parameters. The masters are other numbers than those that were trained: the difference
    amounts to 5 to 40 % of the error of a well-trained network. So evaluate both, and take the
    better; they are the same model.

    ```python
    error = evaluate(model)
    error_as_trained = evaluate(mpx.as_trained(model))
    ```

    Arrays that the step does not round are not rounded here: those in a
    [`mpx_pde.FullPrecision`][], such as first layers and the random matrices of Fourier features,
    those that `keep_full` keeps, and all arrays if the forward pass is in full precision.
    [`mpx_pde.autocast`][] rounds the operands inside of each product: evaluate
    `mpx.autocast(model)` instead.

    **Arguments:**

    - `model`: the float32 masters, any PyTree.
    - `policy`, `keep_full`, `forward`: as passed to [`mpx_pde.filter_grad`][] in the training. If
        `keep_full` is a tuple, its first entry applies to the model.

    **Returns:**

    A PyTree of the same structure, shapes and dtypes.

    **Raises:** `ValueError` or `TypeError` for arguments that [`mpx_pde.filter_grad`][] rejects
    too.
    """
    keep = keep_full[0] if isinstance(keep_full, tuple) and keep_full else keep_full
    keep = keep if isinstance(keep, bool) else (keep,)
    options = parse_options("as_trained", False, True, policy, keep, False, forward)
    (rounded,), _ = options.cast((model,), {})
    like = lambda x, master: x.astype(master.dtype) if eqx.is_inexact_array(master) else master
    return jtu.tree_map(like, rounded, model)
