"""The table of primitives: one row for each, with what every interpreter needs to know of it.

Data only. `autocast`, the derivative engine and the reports of ranges read it.

The division by precision is that of NVIDIA's automatic mixed precision: matrix products in half;
sums, and functions that grow or shrink faster than their argument, in float32; the cheap rest in
whatever its operands are in.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """The properties of a primitive.

    **Attributes:**

    - `engine`: how derivatives pass. `"layout"` moves values, without arithmetic; `"linear"` is
        linear in all floating-point operands together; `"product"` is a matrix product or a
        convolution; `"multiplied"` is a product or quotient entry by entry; `"elementwise"` a
        function of one variable (its derivatives stand in `_towers.py`, or are taken one by one);
        `"selection"` picks out of its operands; `"constant"` is so wherever it has a derivative;
        `"cast"` changes the dtype; `"container"` holds jaxprs; `"nested"` has no rule, and is
        differentiated by nested `jvp`; `"opaque"` cannot be differentiated.
    - `precision`: `"half"` rounds its operands to half, and accumulates in float32; `"itself"` is a
        mixed product of the program, which says its precision; `"float32"`; `"operands"` is half if
        what was computed is half, where parameters, inputs and constants give way; `"program"`
        stays in the dtypes that the program has; `"inside"` is decided for what it holds.
    - `reason`: why that precision.
    - `traits`: the sets below that it is in.
    """

    engine: str
    precision: str
    reason: str
    traits: frozenset[str] = frozenset()


_HALVES = "tensor cores multiply halves exactly and accumulate in float32"
_MIXED = "a mixed product already: it says its precision itself"
_GROWS = "leaves the range of float16 for ordinary arguments"
_SUM = "a sum of many terms loses the small ones"
_NEAR = "its relative error is unbounded near a zero or a pole"
_SERIES = "a series"
_SQUARES = "its argument is a sum of squares more often than not"
_VARIANCE = "its argument is a variance, often below float16's smallest normal number"
_CAST = "the program's own cast, put off until its value is used"
_PULLED = "the derivative of what is in mixed precision already"
_CHEAP = "cheap and safe in the dtype of its operands"
_MOVES = "moves values without arithmetic"
_OURS = "has the dtypes that a network of ours gives it"
_SHOWS = "shows values as the program has them"
_MAKES = "makes its own values"
_UPDATE = "carries the program of its step"
_FACTORS = "a factorization"
_HOST = "the host's function is written for the program's dtypes"
_KERNEL = "a kernel is written for the program's dtypes"
_REFERENCE = "a reference has the dtype that the program gives it"
_FIXES = "fixes values as the program has them"
_WHOLE = "integers and bools"
_TAP = "shows values to what measures them"
_HOLDS = "what it holds is evaluated by these rules"


# Names, engine, precision, reason and traits.
_ROWS: tuple[tuple[str, str, str, str, str], ...] = (
    # Products.
    ("dot_general conv_general_dilated", "product", "half", _HALVES, ""),
    ("mixed_dot_general mixed_conv_general_dilated", "product", "itself", _MIXED, ""),
    # Moves.
    ("broadcast_in_dim", "layout", "operands", _MOVES, "coordinate together"),
    ("reshape transpose squeeze rev", "layout", "operands", _MOVES, "coordinate"),
    ("slice dynamic_slice unstack split", "layout", "operands", _MOVES, "coordinate picks"),
    ("concatenate joined stack tile copy", "layout", "operands", _MOVES, "coordinate"),
    ("batch_behind shared", "layout", "operands", _MOVES, "coordinate"),
    ("sharding_constraint pvary", "layout", "operands", _MOVES, "devices"),
    ("reshard", "layout", "operands", _MOVES, "devices slow"),
    ("pad", "linear", "operands", _CHEAP, "coordinate"),
    ("gather", "linear", "operands", _CHEAP, "coordinate slow"),
    ("dynamic_update_slice", "linear", "operands", _CHEAP, ""),
    ("name", "linear", "operands", _CHEAP, "choice"),
    ("select_n", "linear", "operands", _CHEAP, "choice pointwise"),
    ("ppermute all_gather all_gather_invariant all_to_all", "linear", "operands", _CHEAP, "slow"),
    # Arithmetic.
    ("add sub neg", "linear", "operands", _CHEAP, "arithmetic broadcasts coordinate pointwise"),
    ("add_any", "linear", "operands", _CHEAP, "arithmetic broadcasts pointwise"),
    ("mul div", "multiplied", "operands", _CHEAP, "arithmetic broadcasts coordinate pointwise"),
    ("rem atan2", "nested", "operands", _CHEAP, "pointwise"),
    ("tanh logistic erf sin cos atan", "elementwise", "operands", _CHEAP, "bounded pointwise"),
    ("one_minus_square", "elementwise", "operands", _CHEAP, "pointwise"),
    ("abs", "elementwise", "operands", _CHEAP, "choice pointwise"),
    # Functions whose arguments or results leave the range of float16. Some magnify what was rounded
    # off before them.
    ("exp exp2 expm1", "elementwise", "float32", _GROWS, "magnifies pointwise"),
    ("sinh cosh integer_pow", "elementwise", "float32", _GROWS, "pointwise"),
    ("log log2 log1p", "elementwise", "float32", _NEAR, "magnifies pointwise near"),
    ("tan acos asin acosh atanh erf_inv", "elementwise", "float32", _NEAR, "pointwise near"),
    ("asinh", "elementwise", "float32", "its argument may be large", "pointwise"),
    ("pow", "elementwise", "float32", _GROWS, "magnifies broadcasts pointwise"),
    ("square", "elementwise", "float32", "overflows float16 from 256 on", "magnifies pointwise"),
    ("sqrt", "elementwise", "float32", _SQUARES, "magnifies pointwise"),
    ("rsqrt", "elementwise", "float32", _VARIANCE, "magnifies pointwise"),
    ("cbrt", "elementwise", "float32", "its argument spans a wide range", "pointwise"),
    ("erfc", "elementwise", "float32", "its tail is below float16's smallest number", "pointwise"),
    ("lgamma digamma bessel_i0e bessel_i1e", "elementwise", "float32", _SERIES, "slow pointwise"),
    ("polygamma", "nested", "float32", _NEAR, "slow"),
    ("igamma igammac regularized_incomplete_beta zeta", "nested", "float32", _SERIES, "slow"),
    # Reductions.
    ("reduce_sum", "linear", "float32", _SUM, "sum together"),
    ("cumsum reduce_window_sum", "linear", "float32", _SUM, "sum"),
    ("psum psum_invariant reduce_scatter", "linear", "float32", "a sum over devices", "sum slow"),
    ("reduce_prod cumprod polynomial cumlogsumexp", "nested", "float32", _GROWS, ""),
    ("reduce_max reduce_min", "selection", "operands", _CHEAP, "sum extreme"),
    ("cummax cummin reduce_window_max reduce_window_min", "nested", "operands", _CHEAP, ""),
    ("select_and_scatter_add", "nested", "operands", _CHEAP, ""),
    ("pmax pmin", "nested", "operands", _CHEAP, "slow"),
    # Choices.
    ("max min", "selection", "operands", _CHEAP, "choice broadcasts pointwise"),
    ("clamp", "selection", "operands", _CHEAP, "choice pointwise"),
    ("sort top_k", "selection", "operands", _CHEAP, "slow alone"),
    ("approx_top_k", "nested", "operands", _CHEAP, "slow alone"),
    ("eq ne lt le gt ge", "constant", "operands", _CHEAP, "comparison pointwise"),
    ("eq_to lt_to le_to is_finite", "constant", "operands", _CHEAP, "comparison pointwise"),
    ("floor ceil round", "constant", "operands", _CHEAP, "whole pointwise"),
    ("sign stop_gradient", "constant", "operands", _CHEAP, "pointwise"),
    ("argmax argmin", "constant", "operands", _CHEAP, "sum"),
    ("and or not", "constant", "program", _WHOLE, "light pointwise"),
    ("xor", "constant", "program", _WHOLE, "pointwise"),
    # What stays in the dtypes of the program.
    ("convert_element_type", "cast", "program", _CAST, "coordinate light pointwise"),
    ("iota", "nested", "program", _MAKES, "light pointwise"),
    ("random_gamma rng_uniform", "nested", "program", _MAKES, "typed"),
    ("reduce_precision", "linear", "program", "rounds on purpose", ""),
    ("bitcast_convert_type nextafter", "nested", "program", "reads bits", "typed"),
    ("complex real imag conj", "linear", "program", "one side is complex", ""),
    ("fft", "linear", "program", "there is no half-precision transform", ""),
    ("scatter scatter-add scatter-sub", "linear", "program", _UPDATE, ""),
    ("scatter-mul scatter-min scatter-max reduce reduce_window", "nested", "program", _UPDATE, ""),
    ("select_and_gather_add", "nested", "program", "packs pairs of float32", ""),
    ("cholesky householder_product", "nested", "program", _FACTORS, ""),
    ("lu qr geqrf svd eig eigh schur", "nested", "program", _FACTORS, "ambiguous"),
    ("triangular_solve tridiagonal_solve custom_linear_solve", "nested", "program", "a solve", ""),
    ("custom_pullback", "nested", "program", _PULLED, ""),
    ("device_put", "linear", "program", "moves values between devices", ""),
    ("optimization_barrier in_turn", "linear", "program", _FIXES, "barrier"),
    ("layout_constraint pbroadcast pbroadcast_dynamic relayout", "linear", "program", _FIXES, ""),
    ("pure_callback io_callback", "opaque", "program", _HOST, "typed"),
    ("debug_callback debug_print", "nested", "program", _SHOWS, "typed"),
    ("ffi_call pallas_call", "nested", "program", _KERNEL, "typed"),
    ("swap addupdate", "opaque", "program", _REFERENCE, "typed"),
    # The library's own: values as they are, what they are rounded to on their way to memory, how
    # they are read, and who sees them; a value for each channel on a grid, a sum of two dtypes.
    ("rounded_cotangent written written_in read_at_once", "linear", "program", _OURS, "stores"),
    ("add_product sum_together spread_together", "linear", "program", _OURS, ""),
    ("beside summed_apart", "linear", "program", _OURS, ""),
    ("moments", "nested", "float32", _OURS, "sum"),
    ("any_together", "constant", "program", _OURS, ""),
    ("derivative_tap derivative_count", "nested", "program", _TAP, ""),
    # Containers.
    ("jit call closed_call eval_jaxpr", "container", "inside", _HOLDS, ""),
    ("custom_jvp_call custom_vjp_call", "container", "inside", _HOLDS, ""),
    ("remat2 scan while cond shard_map", "container", "inside", _HOLDS, "alone"),
)

TABLE: dict[str, Row] = {
    name: Row(engine, precision, reason, frozenset(traits.split()))
    for names, engine, precision, reason, traits in _ROWS
    for name in names.split()
}
"""By the name of a primitive. One that is in no row stays in the dtypes of the program, and the
report of `autocast` lists it as unknown."""

assert len(TABLE) == sum(len(row[0].split()) for row in _ROWS), "a primitive has two rows"


def _with(*words: str) -> frozenset[str]:
    """Returns the primitives that have one of some words in their rows."""
    words_of = lambda row: {row.engine, row.precision, *row.traits}
    return frozenset(name for name, row in TABLE.items() if words_of(row) & {*words})


PRODUCTS = _with("product")
"""Linear in each of two operands, and worth tensor cores: JAX's and the library's own."""

MIXED = _with("itself")
"""The library's own products."""

JAX_PRODUCTS = PRODUCTS - MIXED
"""JAX's own."""

LAYOUT = _with("layout")
"""Moves values. A float32 master that goes through remains one."""

MOVES = LAYOUT - _with("devices")
"""Moves on one device."""

LINEAR = _with("linear", "layout")
"""Linear in all floating-point operands together: each stream goes through by itself, and the
derivative does not need the operands."""

ELEMENTWISE = _with("elementwise")
"""Functions of one variable."""

SELECTIONS = _with("selection")
"""Picks out of its operands: piecewise linear."""

CONSTANT = _with("constant")
"""Constant wherever they have a derivative."""

OPAQUE = _with("opaque")
"""JAX has a rule for them that only raises."""

CONTAINERS = _with("container")
"""Holds jaxprs, which are evaluated by the rules of this table."""

FULL = _with("float32")
"""Computed in float32, with a float32 result."""

FOLLOWING = _with("operands")
"""Half if what was computed is half, else float32."""

MAGNIFYING = _with("magnifies")
"""Functions that magnify what was rounded off before them. Arithmetic whose result goes into one
of them is computed in float32 too: the difference to the largest logit in a softmax, the
residual in a squared error. (So is what is raised to an even power by `integer_pow`.)"""

ARITHMETIC = _with("arithmetic")

ADDITIONS = frozenset(("add", "sub", "add_any"))
"""Sums and differences of two."""

BOUNDED = _with("bounded")
"""Functions whose result is small, whatever their argument."""

NEAR = _with("near")
"""Functions that take the distance of their operand to a number that is not zero."""

CHOICES = _with("choice")
"""Operations by way of which a product belongs to the reduction that their result goes into: it is
one of their operands, but for its sign."""

SUMS = _with("sum")
"""Reductions. A product of values whose result goes into one of them is computed in float32 too: a
square, an inner product, a norm."""

LIGHT = ((FULL | FOLLOWING) - _with("slow")) | _with("light")
"""Bound by the memory that they read and write. Where a run of nothing else makes float32 values
out of half ones (softmax, norms, most activations), it is evaluated again in the backward pass.
Series and searches take time, collectives wait for other devices."""

ALONE = _with("alone")
"""Takes long, has a memory of its own or chooses by values: no part of a layer that is evaluated
again."""

BROADCASTS = _with("broadcasts")
"""Functions of several operands entry by entry, with a rule of their own, that take a number beside
an array."""

POSITIVE = frozenset(("abs", "exp", "exp2", "square", "sqrt", "logistic", "cosh"))
"""Functions whose result is not below 0, whatever their argument."""

EXTREMES = _with("extreme")
"""Picks the largest or the smallest of many."""

DISTANCES = ARITHMETIC | LAYOUT | CHOICES | EXTREMES
DISTANCES |= {"square", "integer_pow", "pow", "sqrt", "convert_element_type"}
DISTANCES |= {"pad", "gather", "dynamic_update_slice", "sort", "top_k"}
DISTANCES |= {name for name in TABLE if name.startswith("scatter")}
"""Operations by way of which a rounding error reaches a difference."""

POINTWISE = _with("pointwise")
"""Does to each entry of its operands the same, whatever the others are."""

TOGETHER = _with("together")
"""Linear operations that take all streams of a value in one pass over memory."""

COORDINATES = _with("coordinate")
"""Operations that a coordinate goes through unchanged in kind. Done on the constant first
derivatives of the point itself, it shows which of them vanish, as in a network with a part for each
coordinate."""

COMPARISONS = _with("comparison")

AMBIGUOUS = _with("ambiguous")
"""Returns one of several results, such as vectors but for their signs: another at rounded operands,
so that it is no part of a layer that is evaluated again at these."""

WHOLE = _with("whole")
"""Whole numbers of values."""

PICKS = _with("picks")
"""Moves that leave some values out."""

BARRIERS = _with("barrier")
"""Returns its operands, once all of them are there."""

STORES = _with("stores")
"""Values as they are, and what they are rounded to on their way to memory."""

TYPED = _with("typed")
"""Reads bits, draws numbers in a dtype, or hands arrays to code that was written for a dtype."""
