"""Policies for [`jax.checkpoint`][] that recognize mixed products.

The policies of `jax.checkpoint_policies` ask whether an operation is JAX's own product, so every
mixed product would be evaluated again in the backward pass. The policies in this module treat a
mixed product like a plain one, and agree with those of JAX on everything else.

A checkpoint inside of a function that [`mpx_pde.autocast`][] runs needs no change, because its
policy is translated. For a checkpoint around such a function, or around layers of `mpx_pde.nn`,
take a policy from this module.

```python
layer = jax.checkpoint(mpx.autocast(layer), policy=mpx.checkpoint_policies.dots_saveable)
```
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .precision._split import SPLIT_PRODUCTS
from .products._conv import mixed_conv_general_dilated_p
from .products._dot import mixed_dot_general_p
from .program._warnings import warn_user


__all__ = [
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "offload_dot_with_no_batch_dims",
    "translate",
]

_OFFLOADS_WRONGLY = "0.11.0"
"""The version of JAX with which a GPU reads offloaded residuals of a loop wrongly."""

_PLAIN = {
    mixed_dot_general_p: lax.dot_general_p,
    mixed_conv_general_dilated_p: lax.conv_general_dilated_p,
}
# The parameters of a mixed product that a plain one does not have.
_OWN = ("dtype", "out_dtype", "origin", "algorithm")


# A dataclass for its equality, by which equal checkpoints share one entry of JAX's caches.
@dataclasses.dataclass(frozen=True)
class _Translated:
    policy: Callable

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        plain = _PLAIN.get(primitive)
        if plain is None:
            return self.policy(primitive, *avals, **params)
        shared = {name: value for name, value in params.items() if name not in _OWN}
        precision = SPLIT_PRODUCTS.get(params.get("algorithm", ""))
        dtypes = {"precision": precision, "preferred_element_type": params["out_dtype"]}
        return self.policy(plain, *avals, **shared, **dtypes)


def translate(policy: Callable) -> Callable:
    """Returns a policy that treats mixed products as `policy` treats plain ones.

    **Arguments:**

    - `policy`: any policy for [`jax.checkpoint`][]: one of `jax.checkpoint_policies`, or your own.

    **Returns:** a policy.
    """
    return policy if isinstance(policy, _Translated) else _Translated(policy)


dots_saveable = translate(jax.checkpoint_policies.dots_saveable)
"""Keeps the result of every product and convolution."""

dots_with_no_batch_dims_saveable = translate(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)
"""Keeps the results of products without batch axes, such as those with weights."""


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable:
    """Keeps the same results as `dots_with_no_batch_dims_saveable`, in another memory.

    With JAX 0.11.0 on a GPU the gradient of a `scan` whose residuals are offloaded is wrong (XLA
    issue 46231). There this is a [`mpx_pde.PrecisionWarning`][].

    **Arguments:**

    - `offload_src`, `offload_dst`: kinds of memory, such as `"device"` and `"pinned_host"`.

    **Returns:** a policy.
    """
    if jax.__version__ == _OFFLOADS_WRONGLY and jax.default_backend() == "gpu":
        warn_user(
            "`offload_dot_with_no_batch_dims`: with JAX 0.11.0 on a GPU the gradient of a "
            "`jax.lax.scan` whose residuals are offloaded is wrong (XLA issue 46231). Use another "
            "version of JAX, or keep the results on the device by "
            "`dots_with_no_batch_dims_saveable`."
        )
    return translate(
        jax.checkpoint_policies.offload_dot_with_no_batch_dims(offload_src, offload_dst)
    )
