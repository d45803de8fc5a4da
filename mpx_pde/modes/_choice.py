"""Builds the mode that the options of a gradient transformation select."""

from typing import Any

import jmp

from .._util._calls import called, named
from .._util._repr import in_a_line
from .._util._types import PyTree
from ..precision._dtypes import as_floating_dtype, check_bool
from ..precision._forward import check_forward
from ._mode import AbstractMode, Casts, Full


def mode_of(
    *,
    use_mixed_precision: Any = True,
    policy: Any = None,
    keep_full: PyTree = False,
    autocast: Any = False,
    forward: Any = "half",
) -> AbstractMode:
    """Builds the mode that these options of a public function select.

    **Raises:** `ValueError` and `TypeError`, in the name of the present call, for invalid options.
    """
    half = "whether anything is done in half precision (in which, says `policy`)"
    mixed = check_bool(use_mixed_precision, "use_mixed_precision", half)
    common = _parse_policy(policy), keep_full
    overrides = _parse_autocast(autocast)
    forward = check_forward(forward)
    if not mixed:
        return Full(*common)
    if forward == "half" and overrides is None:
        return Casts(*common)
    # These two need the engine, and the others do not.
    from ._by_engine import Autocast, FullForward

    if forward == "half" and overrides is not None:
        return Autocast(*common, overrides)
    if overrides:
        raise ValueError(
            f"`{called()}` takes either overrides of `autocast` or `forward={forward!r}`, which "
            "evaluates the loss in that precision and leaves nothing to cast. Drop one of them."
        )
    return FullForward(*common, forward)


def mode_at(rung: str, like: AbstractMode) -> AbstractMode:
    """Returns the mode of a rung above half precision, with the policy and exceptions of another
    mode."""
    if rung in ("full", "float64"):
        return Full(like.policy, like.keep_full)
    from ._by_engine import FullForward

    return FullForward(like.policy, like.keep_full, rung)


def _parse_policy(policy: Any) -> jmp.Policy | None:
    if policy is None:
        return None
    if isinstance(policy, jmp.Policy):
        with named(f"{called()}(policy=…)"):
            for dtype in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
                as_floating_dtype(dtype)
        return policy
    if isinstance(policy, str):
        try:
            return jmp.get_policy(policy)
        except (KeyError, ValueError) as e:
            raise ValueError(
                f"`{called()}` cannot read the policy {policy!r}. Write it as jmp does, for "
                'example "params=float32,compute=bfloat16,output=float32".'
            ) from e
    raise TypeError(
        f"`{called()}` takes a `jmp.Policy` or its string as `policy`, such as "
        f'"params=float32,compute=bfloat16,output=float32", but got {in_a_line(policy)}.'
    )


def _parse_autocast(options: Any) -> tuple[tuple[str, Any], ...] | None:
    if options is False:
        return None
    options = {} if options is True else options
    if not isinstance(options, dict) or not options.keys() <= {"half", "full"}:
        raise TypeError(
            f"`{called()}` takes a bool as `autocast`, or a dict of the overrides of "
            '`mpx_pde.autocast`, such as {"full": "readout"}. Got '
            f"{options!r}."
        )
    from ._autocast_report import parse_patterns

    return tuple((name, parse_patterns(options[name], name)) for name in sorted(options))
