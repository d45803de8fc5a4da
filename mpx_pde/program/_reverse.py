"""Derivatives for reverse mode whose backward rule comes with the residuals.

`jax.custom_vjp` has one backward rule for all uses of a function, and the structure of the
residuals is that of the forward pass that was traced last. If the rule depends on more than shapes
(the operands that move, the knowledge of the residuals), a function inside a `jit` that is used
twice would get the wrong rule. Here the forward pass returns the rule, and rule and residuals go
into one equation of the tangents.
"""

from collections.abc import Callable, Sequence

import jax
import jax.custom_derivatives
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


Backward = Callable[[list, list], list]

_pullback_p = Primitive("custom_pullback")
_pullback_p.multiple_results = True


def linear_by_pullback(
    backward: Backward, residuals: Sequence, tangents: Sequence, out: Sequence
) -> list:
    """Returns the tangents of `out`. Only their transpose is known.

    **Arguments:**

    - `backward`: takes the residuals and the cotangents of `out`, and returns the cotangents
        of `tangents`. It must be a pure function.
    - `residuals`, `tangents`: arrays.
    - `out`: the arrays that the tangents belong to.

    **Raises:** `TypeError` if forward mode evaluates the tangents.
    """
    avals = tuple(jax.typeof(x).to_tangent_aval() for x in out)
    return _pullback_p.bind(
        *residuals, *tangents, backward=backward, n_residuals=len(residuals), avals=avals
    )


def _forward_mode(*_, **__):
    raise TypeError(
        "can't apply forward-mode autodiff (jvp) to a custom_vjp function. Give it its derivative "
        "by `jax.custom_jvp`, which serves both modes."
    )


def _abstract_eval(*_, avals, **__):
    return avals


def _transpose(cotangents, *operands, backward, n_residuals, **_):
    instantiated = [ad.instantiate_zeros(ct) for ct in cotangents]
    out = backward(list(operands[:n_residuals]), instantiated)
    return [None] * n_residuals + list(out)


def _batch(axis, operands, dims, *, backward, n_residuals, avals):
    residuals = operands[:n_residuals]
    # Values that a batch shares get the sum of their cotangents from the broadcast.
    tangents = [
        batching.bdim_at_front(x, d, axis.size, mesh_axis=axis.explicit_mesh_axis)
        for x, d in zip(operands[n_residuals:], dims[n_residuals:], strict=True)
    ]

    def batched(residuals, cotangents):
        # An axis without a name has a placeholder, which `vmap` accepts as well.
        names = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
        axes = list(dims[:n_residuals]), [0] * len(cotangents)
        return jax.vmap(backward, axes, axis_size=axis.size, **names)(residuals, cotangents)

    def widened(x):
        return batching.broadcast(x, axis.size, 0, mesh_axis=axis.explicit_mesh_axis)

    wide = tuple(jax.make_jaxpr(widened)(aval).out_avals[0] for aval in avals)
    out = _pullback_p.bind(
        *residuals, *tangents, backward=batched, n_residuals=n_residuals, avals=wide
    )
    return out, [0] * len(out)


_pullback_p.def_impl(_forward_mode)
_pullback_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_pullback_p, _forward_mode)
ad.primitive_jvps[_pullback_p] = _forward_mode
ad.primitive_transposes[_pullback_p] = _transpose
batching.fancy_primitive_batchers[_pullback_p] = _batch
