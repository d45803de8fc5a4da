"""The rule of mixed products for JAX's Taylor mode, `jax.experimental.jet`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jax import Array
from jax.experimental.jet import jet_rules

from ._conv import mixed_conv_general_dilated_p
from ._dot import mixed_dot_general_p
from ._dtypes import wide


def _cauchy_product(
    primitive: Any, primals: Sequence, series: Sequence, **params: Any
) -> tuple[Array, list[Array]]:
    """Returns the coefficients of a product from those of its factors, summed in float32."""
    xs, ys = ([primal, *terms] for primal, terms in zip(primals, series, strict=True))
    out_dtype = params["out_dtype"]
    params = {**params, "out_dtype": wide(out_dtype)}

    def coefficient(k: int) -> Array:
        out = primitive.bind(xs[0], ys[k], **params)
        for i in range(1, k + 1):
            out += primitive.bind(xs[i], ys[k - i], **params)
        return out.astype(out_dtype)

    value, *rest = map(coefficient, range(len(xs)))
    return value, rest


for _primitive in (mixed_dot_general_p, mixed_conv_general_dilated_p):
    jet_rules[_primitive] = partial(_cauchy_product, _primitive)
