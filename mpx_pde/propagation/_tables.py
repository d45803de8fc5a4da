"""Which primitive derivatives pass in which way. Data only: `_rules.py` reads it."""

from ..interpret import _primitives


LINEAR: frozenset[str] = frozenset(
    {
        *_primitives.MOVES,
        *_primitives.PLACES,
        *_primitives.STORES,
        *_primitives.FIELDS,
        # sums
        "add",
        "sub",
        "add_any",
        "neg",
        "reduce_sum",
        "cumsum",
        "reduce_window_sum",
        # moves with indices, targets and masks of their own
        "dynamic_update_slice",
        "pad",
        "gather",
        "scatter",
        "scatter-add",
        "scatter-sub",
        "select_n",
        "name",
        "layout_constraint",
        "optimization_barrier",
        "device_put",
        "reduce_precision",
        # complex numbers and transforms
        "real",
        "imag",
        "complex",
        "conj",
        "fft",
        # between devices
        "psum",
        "psum_invariant",
        "pcast",
        "ppermute",
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "reduce_scatter",
        "pbroadcast",
    }
)
"""Linear in all floating-point operands together: each stream goes through by itself."""

PRODUCTS: frozenset[str] = frozenset({*_primitives.PRODUCTS, *_primitives.MIXED})
"""By the rule of Leibniz, in the precision of `_products.py`."""

ELEMENTWISE: frozenset[str] = frozenset(
    {
        "tan",
        "acos",
        "asin",
        "atan",
        "acosh",
        "asinh",
        "atanh",
        "lgamma",
        "digamma",
        "erf_inv",
        "bessel_i0e",
        "bessel_i1e",
        "one_minus_square",
    }
)
"""Functions of one variable whose derivatives are taken one by one; for those that are known in
closed form see `_towers.py`."""

CONSTANT: frozenset[str] = frozenset(
    {
        *_primitives.COMPARISONS,
        "stop_gradient",
        "sign",
        "floor",
        "ceil",
        "round",
        "argmax",
        "argmin",
        "and",
        "or",
        "xor",
        "not",
    }
)
"""Constant wherever they have a derivative."""

LAYOUT: frozenset[str] = frozenset(
    {*_primitives.MOVES, "gather", "pad", "convert_element_type"}
    | {"neg", "add", "sub", "mul", "div"}
)
"""What a coordinate goes through unchanged in kind. Done on the constant first derivatives of the
point itself, it shows which of them vanish, as in a network with a part for each coordinate."""

CALLBACKS: frozenset[str] = frozenset(_primitives.CALLBACKS)
"""JAX has a rule for them that only raises."""
