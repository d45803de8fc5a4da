"""Policies of jmp."""

from typing import Any

import jmp


def parse_policy(policy: Any, call: str) -> jmp.Policy | None:
    """A policy from itself or its string; errors are in the name of `call`."""
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
