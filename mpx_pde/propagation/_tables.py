"""Which primitive derivatives pass in which way. Data only: `_rules.py` reads it."""

LINEAR: frozenset[str] = frozenset(
    {
        # sums
        "add",
        "sub",
        "add_any",
        "neg",
        "reduce_sum",
        "cumsum",
        "reduce_window_sum",
        # moves
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "rev",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "stack",
        "unstack",
        "split",
        "tile",
        "pad",
        "gather",
        "scatter",
        "scatter-add",
        "scatter-sub",
        "select_n",
        "copy",
        "copy_p",
        "name",
        "sharding_constraint",
        "reshard",
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
        "pvary",
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

PRODUCTS: frozenset[str] = frozenset(
    {
        "dot_general",
        "mixed_dot_general",
        "conv_general_dilated",
        "mixed_conv_general_dilated",
    }
)
"""Linear in each of two operands, and worth tensor cores."""

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
    }
)
"""Functions of one variable whose derivatives are taken one by one; for those that are known in
closed form see `_towers.py`."""

CONSTANT: frozenset[str] = frozenset(
    {
        "stop_gradient",
        "sign",
        "floor",
        "ceil",
        "round",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "eq_to",
        "lt_to",
        "le_to",
        "is_finite",
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
    {
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "rev",
        "slice",
        "concatenate",
        "stack",
        "unstack",
        "split",
        "copy",
        "copy_p",
        "gather",
        "dynamic_slice",
        "pad",
        "convert_element_type",
        "neg",
        "add",
        "sub",
        "mul",
        "div",
    }
)
"""What a coordinate goes through unchanged in kind. Done on the constant first derivatives of the
point itself, it shows which of them vanish, as in a network with a part for each coordinate."""

CALLBACKS: frozenset[str] = frozenset({"pure_callback", "io_callback"})
"""Python functions, of which nothing is known; JAX has a rule for them that only raises."""
