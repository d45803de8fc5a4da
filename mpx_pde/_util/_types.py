"""Types of common arguments, for type checkers only.

At run time they are `Any`. The function that takes an argument checks it, and its errors name the
call and the fix.
"""

from typing import TYPE_CHECKING, Any, TypedDict


if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal, TypeAlias

    import jax
    import jmp
    import numpy as np
    from jax.typing import DTypeLike as DTypeLike

    # A type checker does not understand jaxtyping's `PyTree`.
    PyTree: TypeAlias = Any
    # A policy of jmp or its string.
    PolicyLike: TypeAlias = jmp.Policy | str
    # A Python number or a scalar array.
    ScalarLike: TypeAlias = float | np.number[Any] | np.ndarray | jax.Array
    BoolLike: TypeAlias = bool | np.bool_ | np.ndarray | jax.Array
    # One name, a string with one character for each name, or a sequence of names.
    Names: TypeAlias = str | Sequence[str]
    AxisName: TypeAlias = str | tuple[str, ...]
    ForwardLike: TypeAlias = Literal[
        "half",
        "float32",
        "bfloat16_x3",
        "bfloat16_x6",
        "bfloat16_x9",
        "tensorfloat32",
        "tensorfloat32_x3",
        "float64",
    ]
    MasterLike: TypeAlias = Literal["nearest", "stochastic", "kahan"]
else:
    from jaxtyping import PyTree as PyTree

    DTypeLike = PolicyLike = ScalarLike = BoolLike = Any
    Names = AxisName = ForwardLike = MasterLike = Any


class GradientOptions(TypedDict, total=False):
    """The keyword arguments that all gradient transformations share."""

    policy: PolicyLike | None
    keep_full: Any
    axis_name: AxisName | None
    autocast: bool | dict[str, Any]
    forward: ForwardLike
