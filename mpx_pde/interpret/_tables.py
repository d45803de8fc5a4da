"""Which operation runs in which precision, and why. Data only: `autocast` decides by it, and the
reports of ranges advise.

The division is that of NVIDIA's automatic mixed precision: matrix products in half; sums, and
functions that grow or shrink faster than their argument, in float32; the cheap rest in whatever
its operands are in.
"""

from . import _primitives


PRODUCTS: dict[str, str] = dict.fromkeys(
    _primitives.PRODUCTS, "tensor cores multiply halves exactly and accumulate in float32"
)
"""Operands rounded to half inside the operation, float32 accumulation, result in half."""

MIXED: dict[str, str] = dict.fromkeys(
    _primitives.MIXED, "a mixed product already: it says its precision itself"
)
"""The library's own products in the code of the user: operands as they come."""

_GROWS = "leaves the range of float16 for ordinary arguments"
_SUM = "a sum of many terms loses the small ones"
_NEAR = "its relative error is unbounded near a zero or a pole"

FULL: dict[str, str] = {
    "exp": _GROWS,
    "exp2": _GROWS,
    "expm1": _GROWS,
    "sinh": _GROWS,
    "cosh": _GROWS,
    "log": _NEAR,
    "log1p": _NEAR,
    "log2": _NEAR,
    "tan": _NEAR,
    "acos": _NEAR,
    "asin": _NEAR,
    "acosh": _NEAR,
    "atanh": _NEAR,
    "asinh": "its argument may be large",
    "pow": _GROWS,
    "integer_pow": _GROWS,
    "square": "overflows float16 from 256 on",
    "sqrt": "its argument is a sum of squares more often than not",
    "rsqrt": "its argument is a variance, often below float16's smallest normal number",
    "cbrt": "its argument spans a wide range",
    "erf_inv": _NEAR,
    "erfc": "its tail is below float16's smallest number",
    "lgamma": _GROWS,
    "digamma": _NEAR,
    "polygamma": _NEAR,
    "igamma": "a series",
    "igammac": "a series",
    "bessel_i0e": "a series",
    "bessel_i1e": "a series",
    "regularized_incomplete_beta": "a series",
    "zeta": "a series",
    "reduce_sum": _SUM,
    "reduce_prod": _GROWS,
    "cumsum": _SUM,
    "cumprod": _GROWS,
    "cumlogsumexp": _SUM,
    "reduce_window_sum": _SUM,
    "psum": "a sum over devices",
    "psum_invariant": "a sum over devices",
    "reduce_scatter": "a sum over devices",
}
"""Computed in float32, with a float32 result."""

FEEDS: tuple[str, ...] = (
    *("exp", "exp2", "expm1", "log", "log1p", "log2"),
    *("pow", "square", "sqrt", "rsqrt"),
)
"""Functions that magnify what was rounded off before them. Arithmetic whose result goes into one
of them is computed in float32 too: the difference to the largest logit in a softmax, the
residual in a squared error. (So is what is raised to an even power by `integer_pow`.)"""

ARITHMETIC: tuple[str, ...] = _primitives.ARITHMETIC

CHOICES: tuple[str, ...] = ("select_n", "max", "min", "clamp", "abs", "name")
"""Operations by way of which a product belongs to the reduction that their result goes into: it is
one of their operands, but for its sign."""

SUMS: tuple[str, ...] = (
    "reduce_sum",
    "cumsum",
    "reduce_window_sum",
    "psum",
    "psum_invariant",
    "reduce_scatter",
    "reduce_max",
    "reduce_min",
    "argmax",
    "argmin",
)
"""Reductions. A product of values whose result goes into one of them is computed in float32 too: a
square, an inner product, a norm."""

LINEAR: frozenset[str] = frozenset(
    {"add", "sub", "add_any", "select_n", "concatenate", "pad", "dynamic_update_slice"}
    | {"select_and_scatter_add", "gather", "stack"}
)
"""Operations of several operands whose derivative does not need them."""

FOLLOW: dict[str, str] = dict.fromkeys(
    (
        *ARITHMETIC,
        "abs",
        "sign",
        "max",
        "min",
        "rem",
        "floor",
        "ceil",
        "round",
        "clamp",
        "select_n",
        "tanh",
        "one_minus_square",
        "logistic",
        "erf",
        "sin",
        "cos",
        "atan",
        "atan2",
        *_primitives.COMPARISONS,
        "reduce_max",
        "reduce_min",
        "argmax",
        "argmin",
        "cummax",
        "cummin",
        "reduce_window_max",
        "reduce_window_min",
        "select_and_scatter_add",
        "sort",
        "top_k",
        "approx_top_k",
        "gather",
        "pad",
        "dynamic_update_slice",
        "pmax",
        "pmin",
        "ppermute",
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "name",
        "stop_gradient",
    ),
    "cheap and safe in the dtype of its operands",
)
"""Half if what was computed is half, else float32. Parameters, inputs and constants give way."""

LAYOUT: dict[str, str] = dict.fromkeys(
    (*_primitives.MOVES, *_primitives.PLACES), "moves values without arithmetic"
)
"""As `FOLLOW`, and a float32 master that goes through remains one."""

OWN: dict[str, str] = {
    "iota": "makes its own values",
    "reduce_precision": "rounds on purpose",
    "bitcast_convert_type": "reads bits",
    "nextafter": "reads bits",
    "complex": "there is no half complex dtype",
    "fft": "there is no half-precision transform",
    "random_gamma": "makes its own values",
    "rng_uniform": "makes its own values",
    "scatter": "carries the program of its update",
    "scatter-add": "sums into its target",
    "scatter-sub": "sums into its target",
    "scatter-mul": "multiplies into its target",
    "scatter-min": "carries the program of its update",
    "scatter-max": "carries the program of its update",
    "reduce": "carries the program of its step",
    "reduce_window": "carries the program of its step",
    "select_and_gather_add": "packs pairs of float32",
    "cholesky": "a factorization",
    "lu": "a factorization",
    "qr": "a factorization",
    "geqrf": "a factorization",
    "householder_product": "a factorization",
    "svd": "a factorization",
    "eig": "a factorization",
    "eigh": "a factorization",
    "schur": "a factorization",
    "triangular_solve": "a solve",
    "tridiagonal_solve": "a solve",
    "custom_linear_solve": "a solve",
    "custom_pullback": "the derivative of what is in mixed precision already",
    "debug_callback": "shows values as the program has them",
    "debug_print": "shows values as the program has them",
    **dict.fromkeys(
        _primitives.CALLBACKS, "the host's function is written for the program's dtypes"
    ),
    "device_put": "moves values between devices",
    "layout_constraint": "fixes values as the program has them",
    "optimization_barrier": "fixes values as the program has them",
    **dict.fromkeys(
        (*_primitives.STORES, *_primitives.FIELDS), "has the dtypes that a network of ours gives it"
    ),
}
"""Stays in the dtype of the program, for a reason. What is in no table does so too, and is listed
by the report as unknown."""

LIGHT: frozenset[str] = frozenset(
    {*FULL, *FOLLOW, *LAYOUT, "convert_element_type", "iota", "and", "or", "not"}
    # Series and searches take time, collectives wait for other devices.
    - {"lgamma", "digamma", "polygamma", "igamma", "igammac", "bessel_i0e", "bessel_i1e"}
    - {"regularized_incomplete_beta", "zeta", "sort", "top_k", "approx_top_k", "gather", "reshard"}
    - {"psum", "psum_invariant", "reduce_scatter", "pmax", "pmin", "ppermute"}
    - {"all_gather", "all_gather_invariant", "all_to_all"}
)
"""Bound by the memory that they read and write. Where a run of nothing else makes float32 values
out of half ones (softmax, norms, most activations), it is evaluated again in the backward pass."""
