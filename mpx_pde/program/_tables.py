"""The table of primitives, with a row for each that holds the properties interpreters need.

It is data only. `autocast`, the derivative engine and the reports of ranges read it.

The precisions are those of NVIDIA's automatic mixed precision. Matrix products run in half. Sums,
and functions that grow or shrink faster than their argument, run in float32. The cheap rest runs in
the dtype of its operands.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """The properties of a primitive.

    **Attributes:**

    - `engine`: the rule for derivatives. `"layout"` moves values, without arithmetic; `"linear"` is
        linear in all floating-point operands together; `"product"` is a matrix product or a
        convolution; `"multiplied"` is a product or quotient entry by entry; `"elementwise"` is a
        function of one variable (with derivatives in `_towers.py`, or taken one by one);
        `"selection"` picks from its operands; `"constant"` is constant wherever it has a
        derivative; `"cast"` changes the dtype; `"container"` holds jaxprs; `"nested"` has no rule,
        and is differentiated by nested `jvp`; `"opaque"` cannot be differentiated.
    - `precision`: `"half"` rounds its operands to half, and accumulates in float32; `"itself"` is a
        mixed product of the program with its own precision; `"float32"`; `"operands"` is half if
        computed operands are half, and parameters, inputs and constants adapt to them; `"program"`
        stays in the dtypes of the program; `"inside"` is decided for the equations in it.
    - `reason`: the reason for that precision.
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
_SOLVES = "a solve"
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
    ("pad", "linear", "operands", _CHEAP, "coordinate accurate"),
    ("gather", "linear", "operands", _CHEAP, "coordinate slow"),
    ("dynamic_update_slice", "linear", "operands", _CHEAP, "accurate"),
    ("name", "linear", "operands", _CHEAP, "choice accurate"),
    ("select_n", "linear", "operands", _CHEAP, "choice pointwise accurate"),
    ("ppermute all_gather all_gather_invariant all_to_all", "linear", "operands", _CHEAP, "slow"),
    # Arithmetic.
    ("add sub", "linear", "operands", _CHEAP, "arithmetic broadcasts coordinate pointwise"),
    ("neg", "linear", "operands", _CHEAP, "arithmetic broadcasts coordinate pointwise accurate"),
    ("add_any", "linear", "operands", _CHEAP, "arithmetic broadcasts pointwise"),
    (
        "mul div",
        "multiplied",
        "operands",
        _CHEAP,
        "arithmetic broadcasts coordinate pointwise accurate",
    ),
    ("rem atan2", "nested", "operands", _CHEAP, "pointwise"),
    ("tanh erf atan", "elementwise", "operands", _CHEAP, "bounded pointwise accurate odd"),
    ("logistic", "elementwise", "operands", _CHEAP, "bounded pointwise accurate"),
    ("sin cos", "elementwise", "operands", _CHEAP, "bounded pointwise"),
    ("one_minus_square", "elementwise", "operands", _CHEAP, "pointwise"),
    ("abs", "elementwise", "operands", _CHEAP, "choice pointwise accurate"),
    # Functions whose arguments or results leave the range of float16. Some magnify earlier rounding
    # errors.
    ("exp exp2 expm1", "elementwise", "float32", _GROWS, "magnifies pointwise"),
    ("sinh cosh", "elementwise", "float32", _GROWS, "pointwise"),
    ("integer_pow", "elementwise", "float32", _GROWS, "pointwise accurate"),
    ("log log2 log1p", "elementwise", "float32", _NEAR, "magnifies pointwise near"),
    ("tan acos asin acosh atanh erf_inv", "elementwise", "float32", _NEAR, "pointwise near"),
    ("asinh", "elementwise", "float32", "its argument may be large", "pointwise accurate odd"),
    ("pow", "elementwise", "float32", _GROWS, "magnifies broadcasts pointwise"),
    (
        "square",
        "elementwise",
        "float32",
        "overflows float16 from 256 on",
        "magnifies pointwise accurate",
    ),
    ("sqrt", "elementwise", "float32", _SQUARES, "magnifies pointwise accurate"),
    ("rsqrt", "elementwise", "float32", _VARIANCE, "magnifies pointwise accurate"),
    ("cbrt", "elementwise", "float32", "its argument spans a wide range", "pointwise accurate odd"),
    (
        "erfc",
        "elementwise",
        "float32",
        "its tail is below float16's smallest number",
        "pointwise accurate",
    ),
    ("lgamma digamma bessel_i0e bessel_i1e", "elementwise", "float32", _SERIES, "slow pointwise"),
    ("polygamma", "nested", "float32", _NEAR, "slow"),
    ("igamma igammac regularized_incomplete_beta zeta", "nested", "float32", _SERIES, "slow"),
    # Reductions.
    ("reduce_sum", "linear", "float32", _SUM, "sum together"),
    ("cumsum reduce_window_sum", "linear", "float32", _SUM, "sum"),
    ("psum psum_invariant reduce_scatter", "linear", "float32", "a sum over devices", "sum slow"),
    ("reduce_prod cumprod polynomial cumlogsumexp", "nested", "float32", _GROWS, ""),
    ("reduce_max reduce_min", "selection", "operands", _CHEAP, "sum extreme accurate"),
    ("cummax cummin reduce_window_max reduce_window_min", "nested", "operands", _CHEAP, ""),
    ("select_and_scatter_add", "nested", "operands", _CHEAP, ""),
    ("pmax pmin", "nested", "operands", _CHEAP, "slow"),
    # Choices.
    ("max min", "selection", "operands", _CHEAP, "choice broadcasts pointwise accurate"),
    ("clamp", "selection", "operands", _CHEAP, "choice pointwise accurate"),
    ("sort top_k", "selection", "operands", _CHEAP, "slow alone"),
    ("approx_top_k", "nested", "operands", _CHEAP, "slow alone"),
    ("eq ne lt le gt ge", "constant", "operands", _CHEAP, "comparison pointwise"),
    ("eq_to lt_to le_to is_finite", "constant", "operands", _CHEAP, "comparison pointwise"),
    ("floor ceil round", "constant", "operands", _CHEAP, "whole pointwise"),
    ("sign", "constant", "operands", _CHEAP, "pointwise"),
    ("stop_gradient", "constant", "operands", _CHEAP, "pointwise accurate"),
    ("argmax argmin", "constant", "operands", _CHEAP, "sum"),
    ("and or not", "constant", "program", _WHOLE, "light pointwise"),
    ("xor", "constant", "program", _WHOLE, "pointwise"),
    # Primitives that stay in the dtypes of the program.
    ("convert_element_type", "cast", "program", _CAST, "coordinate light pointwise accurate"),
    ("iota", "nested", "program", _MAKES, "light pointwise"),
    ("random_gamma rng_uniform", "nested", "program", _MAKES, "typed"),
    ("reduce_precision", "linear", "program", "rounds on purpose", ""),
    ("bitcast_convert_type nextafter", "nested", "program", "reads bits", "typed"),
    ("complex real imag conj", "linear", "program", "one side is complex", ""),
    ("fft", "linear", "program", "there is no half-precision transform", ""),
    ("scatter scatter-add scatter-sub", "linear", "program", _UPDATE, ""),
    ("scatter-mul scatter-min scatter-max reduce reduce_window", "nested", "program", _UPDATE, ""),
    ("select_and_gather_add", "nested", "program", "packs pairs of float32", ""),
    ("cholesky householder_product", "nested", "program", _FACTORS, "solves"),
    ("lu qr geqrf svd eig eigh schur", "nested", "program", _FACTORS, "ambiguous solves"),
    ("triangular_solve tridiagonal_solve", "nested", "program", _SOLVES, "solves"),
    ("custom_linear_solve", "nested", "program", _SOLVES, "solves"),
    ("custom_pullback", "nested", "program", _PULLED, ""),
    ("device_put", "linear", "program", "moves values between devices", ""),
    ("optimization_barrier in_turn", "linear", "program", _FIXES, "barrier"),
    ("layout_constraint pbroadcast pbroadcast_dynamic relayout", "linear", "program", _FIXES, ""),
    ("pure_callback io_callback", "opaque", "program", _HOST, "typed"),
    ("debug_callback debug_print", "nested", "program", _SHOWS, "typed"),
    ("ffi_call pallas_call", "nested", "program", _KERNEL, "typed"),
    ("swap addupdate", "opaque", "program", _REFERENCE, "typed"),
    # The library's own. They return values as they are or as memory stores them, add values, also
    # of two dtypes, repeat a value for each channel, take moments, or show values to observers.
    ("rounded_cotangent written written_in", "linear", "program", _OURS, "stores"),
    ("add_product sum_together", "linear", "program", _OURS, ""),
    ("spread_together", "linear", "program", _OURS, "light accurate"),
    ("beside summed_apart forward_only", "linear", "program", _OURS, ""),
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
"""Rows by the name of the primitive. A primitive without a row stays in the dtypes of the program,
and the report of `autocast` lists it as unknown."""

assert len(TABLE) == sum(len(row[0].split()) for row in _ROWS), "a primitive has two rows"


def _with(*words: str) -> frozenset[str]:
    """Returns the primitives that have one of these words in their rows."""
    words_of = lambda row: {row.engine, row.precision, *row.traits}
    return frozenset(name for name, row in TABLE.items() if words_of(row) & {*words})


PRODUCTS = _with("product")
"""Products of JAX and of this library: linear in each of two operands, and worth tensor cores."""

MIXED = _with("itself")
"""The library's own products."""

JAX_PRODUCTS = PRODUCTS - MIXED
"""JAX's own products."""

SPARSE = frozenset(
    (
        "bcoo_dot_general",
        "bcsr_dot_general",
        "coo_matvec",
        "coo_matmat",
        "csr_matvec",
        "csr_matmat",
    )
)
"""Products with the sparse matrices of `jax.experimental.sparse`. They are in the dtypes of the
program. Many matrices of elements and stencils take differences."""

LAYOUT = _with("layout")
"""Moves of values. A float32 master that goes through one remains a master."""

MOVES = LAYOUT - _with("devices")
"""Moves on one device."""

LINEAR = _with("linear", "layout")
"""Operations that are linear in all floating-point operands together. Each stream goes through by
itself, and the derivative does not need the operands."""

ELEMENTWISE = _with("elementwise")
"""Functions of one variable."""

SELECTIONS = _with("selection")
"""Functions that pick from their operands and so are piecewise linear."""

CONSTANT = _with("constant")
"""Functions that are constant wherever they have a derivative."""

OPAQUE = _with("opaque")
"""Operations that have a rule in JAX that only raises."""

CONTAINERS = _with("container")
"""Operations that hold jaxprs, which are evaluated by the rules of this table."""

FULL = _with("float32")
"""Functions that are computed in float32, with a float32 result."""

FOLLOWING = _with("operands")
"""Operations in half if what was computed is half, and otherwise in float32."""

MAGNIFYING = _with("magnifies")
"""Functions that magnify earlier rounding errors. Arithmetic whose result goes into one of them is
computed in float32 too: the difference to the largest logit in a softmax, the residual in a squared
error. (The same holds for the base of an even power by `integer_pow`.)"""

ARITHMETIC = _with("arithmetic")

ADDITIONS = frozenset(("add", "sub", "add_any"))
"""Sums and differences of two."""

ACCURATE = _with("accurate") | LAYOUT
"""Operations whose result changes, relative to itself, by about as much as their operands do,
relative to themselves. So they can be evaluated again from rounded operands."""

ODD = _with("odd")
"""Functions whose result has the sign of their operand."""

BOUNDED = _with("bounded")
"""Functions with a small result for any argument."""

SATURATING = BOUNDED & ACCURATE
"""Functions that are bounded and accurate: a number may be added to their result without loss if
they are evaluated again from the same operand."""

NEAR = _with("near")
"""Functions that take the distance of their operand to a nonzero number."""

CHOICES = _with("choice")
"""Operations that return one of their operands, but for its sign. A product that goes through one
belongs to the reduction that the result goes into."""

SUMS = _with("sum")
"""Reductions. A product of values whose result goes into one of them is computed in float32 too,
such as a square, an inner product or a norm."""

LIGHT = ((FULL | FOLLOWING) - _with("slow")) | _with("light")
"""Operations that are bound by memory. A run of them that makes float32 values out of half ones
(softmax, norms, most activations) is evaluated again in the backward pass. Series and searches,
which take time, and collectives, which wait for other devices, are left out."""

ALONE = _with("alone")
"""Operations that take long, have a memory of their own or choose by values. They are in no layer
that is evaluated again."""

BROADCASTS = _with("broadcasts")
"""Functions of several operands entry by entry, with a rule of their own. They accept a number
beside an array."""

POSITIVE = frozenset(("abs", "exp", "exp2", "square", "sqrt", "logistic", "cosh"))
"""Functions whose result is never below 0."""

EXTREMES = _with("extreme")
"""Reductions to the largest or the smallest value."""

DISTANCES = ARITHMETIC | LAYOUT | CHOICES | EXTREMES
DISTANCES |= {"square", "integer_pow", "pow", "sqrt", "convert_element_type"}
DISTANCES |= {"pad", "gather", "dynamic_update_slice", "sort", "top_k"}
DISTANCES |= {name for name in TABLE if name.startswith("scatter")}
"""Operations through which a rounding error reaches a difference."""

POINTWISE = _with("pointwise")
"""Operations that treat all entries of their operands alike and independently of each other."""

TOGETHER = _with("together")
"""Linear operations that process all streams of a value in one pass over memory."""

COORDINATES = _with("coordinate")
"""Operations that map coordinates to coordinates. Applied to the constant first derivatives of the
point itself, they show which of them vanish, as in a network with a part for each coordinate."""

COMPARISONS = _with("comparison")

AMBIGUOUS = _with("ambiguous")
"""Operations with several possible results, such as vectors up to their signs. Rounded operands may
give another result, so they are in no layer that is evaluated again at these."""

SOLVES = _with("solves")
"""Factorizations and solves. They magnify errors of their operands, so a product whose result goes
into one is computed in full."""

WHOLE = _with("whole")
"""Functions that round to whole numbers."""

PICKS = _with("picks")
"""Moves that leave some values out."""

BARRIERS = _with("barrier")
"""Operations that return their operands once all of them are there."""

STORES = _with("stores")
"""Operations that return values as they are or as memory stores them."""

TYPED = _with("typed")
"""Operations that read bits, draw numbers in a dtype, or pass arrays to code for a dtype."""
