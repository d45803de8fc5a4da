"""The table of primitives, with a row for each that holds the properties interpreters need.

It is data only. `autocast`, the derivative engine and the reports of ranges read it.

The precisions are those of NVIDIA's automatic mixed precision. Matrix products run in half. Sums,
and functions that grow or shrink faster than their argument, run in float32. The cheap rest runs in
the dtype of its operands.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """The properties of a primitive.

    **Attributes:**

    - `engine`: what it is for derivatives. `"layout"` moves values, without arithmetic; `"linear"`
        is linear in all floating-point operands together; `"product"` is a matrix product or a
        convolution; `"multiplied"` is a product or quotient entry by entry; `"elementwise"` is a
        function of one variable; `"selection"` picks from its operands, or is linear piece by
        piece; `"constant"` is constant wherever it has a derivative; `"cast"` changes the dtype;
        `"container"` holds jaxprs;
        `"nested"` has no rule unless the row names one, and is differentiated by nested `jvp`;
        `"opaque"` cannot be differentiated.
    - `precision`: `"half"` rounds its operands to half, and accumulates in float32; `"itself"` is a
        mixed product of the program with its own precision; `"float32"`; `"operands"` is half if
        computed operands are half, and parameters, inputs and constants adapt to them; `"program"`
        stays in the dtypes of the program; `"inside"` is decided for the equations in it.
    - `reason`: the reason for that precision.
    - `traits`: the sets below that it is in.
    - `rule`: the name of its rule for derivatives, in `engine/taylor/_rules.py`. By default it is
        that of `engine`.
    """

    engine: str
    precision: str
    reason: str
    traits: frozenset[str]
    rule: str


_ENGINES = {"layout", "linear", "product", "multiplied", "elementwise", "selection", "constant"}
_ENGINES |= {"cast", "container", "nested", "opaque"}
_PRECISIONS = {"half", "itself", "float32", "operands", "program", "inside"}


def _row(
    names: str, engine: str, precision: str, reason: str, traits: str = "", rule: str = ""
) -> dict[str, Row]:
    """Returns the row of several primitives."""
    assert engine in _ENGINES, names
    assert precision in _PRECISIONS, names
    row = Row(engine, precision, reason, frozenset(traits.split()), rule or engine)
    return dict.fromkeys(names.split(), row)


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


_ROWS = (
    # Products.
    _row("dot_general", "product", "half", _HALVES, "dot"),
    _row("conv_general_dilated", "product", "half", _HALVES),
    _row("mixed_dot_general", "product", "itself", _MIXED, "dot"),
    _row("mixed_conv_general_dilated", "product", "itself", _MIXED),
    # Moves.
    _row("broadcast_in_dim", "layout", "operands", _MOVES, "coordinate", rule="together"),
    _row("reshape transpose squeeze", "layout", "operands", _MOVES, "coordinate orders"),
    _row("rev", "layout", "operands", _MOVES, "coordinate"),
    _row("slice dynamic_slice unstack split", "layout", "operands", _MOVES, "coordinate picks"),
    _row("concatenate", "layout", "operands", _MOVES, "coordinate joins"),
    _row("joined stack tile copy", "layout", "operands", _MOVES, "coordinate"),
    _row("batch_behind shared", "layout", "operands", _MOVES, "coordinate"),
    _row("sharding_constraint pvary", "layout", "operands", _MOVES, "devices"),
    _row("reshard", "layout", "operands", _MOVES, "devices slow"),
    _row("pad", "linear", "operands", _CHEAP, "coordinate accurate distance"),
    _row("gather", "linear", "operands", _CHEAP, "coordinate slow gathers distance"),
    _row("dynamic_update_slice", "linear", "operands", _CHEAP, "accurate distance"),
    _row("name", "linear", "operands", _CHEAP, "choice accurate"),
    _row("select_n", "linear", "operands", _CHEAP, "choice pointwise accurate selects"),
    _row(
        "ppermute all_gather all_gather_invariant all_to_all", "linear", "operands", _CHEAP, "slow"
    ),
    # Arithmetic.
    _row("add", "linear", "operands", _CHEAP, "arithmetic broadcasts coordinate pointwise adds"),
    _row(
        "sub", "linear", "operands", _CHEAP, "arithmetic broadcasts coordinate pointwise subtracts"
    ),
    _row(
        "neg",
        "linear",
        "operands",
        _CHEAP,
        "arithmetic broadcasts coordinate pointwise accurate negates",
    ),
    _row("add_any", "linear", "operands", _CHEAP, "arithmetic broadcasts pointwise adds"),
    _row(
        "mul",
        "multiplied",
        "operands",
        _CHEAP,
        "arithmetic broadcasts coordinate pointwise accurate multiplies",
        rule="mul",
    ),
    _row(
        "div",
        "multiplied",
        "operands",
        _CHEAP,
        "arithmetic broadcasts coordinate pointwise accurate divides",
        rule="div",
    ),
    _row("rem", "selection", "operands", _CHEAP, "broadcasts pointwise"),
    _row("atan2", "nested", "operands", _CHEAP, "broadcasts pointwise", rule="atan2"),
    _row("tanh erf", "elementwise", "operands", _CHEAP, "bounded pointwise accurate odd"),
    _row("atan", "elementwise", "operands", _CHEAP, "bounded angle pointwise accurate odd"),
    _row("logistic", "elementwise", "operands", _CHEAP, "bounded pointwise accurate positive"),
    _row("sin cos", "elementwise", "operands", _CHEAP, "bounded pointwise"),
    _row("one_minus_square", "elementwise", "operands", _CHEAP, "pointwise complement"),
    _row("abs", "elementwise", "operands", _CHEAP, "choice pointwise accurate positive"),
    # Functions whose arguments or results leave the range of float16. Some magnify earlier rounding
    # errors.
    _row(
        "exp", "elementwise", "float32", _GROWS, "magnifies pointwise positive decays exponential"
    ),
    _row("exp2", "elementwise", "float32", _GROWS, "magnifies pointwise positive"),
    _row("expm1", "elementwise", "float32", _GROWS, "magnifies pointwise"),
    _row("sinh", "elementwise", "float32", _GROWS, "pointwise"),
    _row("cosh", "elementwise", "float32", _GROWS, "pointwise positive"),
    _row("integer_pow", "elementwise", "float32", _GROWS, "pointwise accurate distance"),
    _row("log", "elementwise", "float32", _NEAR, "magnifies pointwise near logarithm natural"),
    _row("log2 log1p", "elementwise", "float32", _NEAR, "magnifies pointwise near logarithm"),
    _row("tan acos asin acosh atanh erf_inv", "elementwise", "float32", _NEAR, "pointwise near"),
    _row("asinh", "elementwise", "float32", "its argument may be large", "pointwise accurate odd"),
    _row("pow", "elementwise", "float32", _GROWS, "magnifies broadcasts pointwise distance"),
    _row(
        "square",
        "elementwise",
        "float32",
        "overflows float16 from 256 on",
        "magnifies pointwise accurate positive distance",
    ),
    _row(
        "sqrt",
        "elementwise",
        "float32",
        _SQUARES,
        "magnifies pointwise accurate positive distance",
        rule="sqrt",
    ),
    _row("rsqrt", "elementwise", "float32", _VARIANCE, "magnifies pointwise accurate"),
    _row(
        "cbrt",
        "elementwise",
        "float32",
        "its argument spans a wide range",
        "pointwise accurate odd",
    ),
    _row(
        "erfc",
        "elementwise",
        "float32",
        "its tail is below float16's smallest number",
        "pointwise accurate positive",
    ),
    _row(
        "lgamma digamma bessel_i0e bessel_i1e", "elementwise", "float32", _SERIES, "slow pointwise"
    ),
    _row("polygamma", "nested", "float32", _NEAR, "slow"),
    _row("igamma igammac regularized_incomplete_beta zeta", "nested", "float32", _SERIES, "slow"),
    # Reductions.
    _row("reduce_sum", "linear", "float32", _SUM, "sum", rule="together"),
    _row("cumsum reduce_window_sum", "linear", "float32", _SUM, "sum"),
    _row(
        "psum psum_invariant reduce_scatter", "linear", "float32", "a sum over devices", "sum slow"
    ),
    _row("reduce_prod cumprod polynomial cumlogsumexp", "nested", "float32", _GROWS),
    _row("reduce_max reduce_min", "selection", "operands", _CHEAP, "sum extreme accurate"),
    _row("cummax cummin reduce_window_max reduce_window_min", "selection", "operands", _CHEAP),
    _row("select_and_scatter_add", "nested", "operands", _CHEAP),
    _row("pmax pmin", "nested", "operands", _CHEAP, "slow"),
    # Choices.
    _row("max", "selection", "operands", _CHEAP, "choice broadcasts pointwise accurate larger"),
    _row("min", "selection", "operands", _CHEAP, "choice broadcasts pointwise accurate"),
    _row("clamp", "selection", "operands", _CHEAP, "choice pointwise accurate", rule="clamp"),
    _row("sort top_k", "selection", "operands", _CHEAP, "slow alone distance"),
    _row("approx_top_k", "nested", "operands", _CHEAP, "slow alone"),
    _row("eq ne lt le gt ge", "constant", "operands", _CHEAP, "pointwise"),
    _row("eq_to lt_to le_to is_finite", "constant", "operands", _CHEAP, "pointwise"),
    _row("floor ceil round", "constant", "operands", _CHEAP, "pointwise"),
    _row("sign", "constant", "operands", _CHEAP, "pointwise"),
    _row("stop_gradient", "constant", "operands", _CHEAP, "pointwise accurate"),
    _row("argmax argmin", "constant", "operands", _CHEAP, "sum"),
    _row("and or not", "constant", "program", _WHOLE, "light pointwise"),
    _row("xor", "constant", "program", _WHOLE, "pointwise"),
    # Primitives that stay in the dtypes of the program.
    _row(
        "convert_element_type",
        "cast",
        "program",
        _CAST,
        "coordinate light pointwise accurate orders distance",
    ),
    _row("iota", "nested", "program", _MAKES, "light pointwise"),
    _row("random_gamma rng_uniform", "nested", "program", _MAKES, "typed"),
    _row("reduce_precision", "linear", "program", "rounds on purpose"),
    _row("bitcast_convert_type nextafter", "nested", "program", "reads bits", "typed"),
    _row("complex real imag conj", "linear", "program", "one side is complex"),
    _row("fft", "linear", "program", "there is no half-precision transform"),
    _row("scatter", "linear", "program", _UPDATE, "distance", rule="scatter"),
    _row("scatter-add scatter-sub", "linear", "program", _UPDATE, "distance"),
    _row("scatter-mul scatter-min scatter-max", "nested", "program", _UPDATE, "distance"),
    _row("reduce reduce_window", "nested", "program", _UPDATE),
    _row("select_and_gather_add", "nested", "program", "packs pairs of float32"),
    _row("cholesky householder_product", "nested", "program", _FACTORS, "solves"),
    _row("lu qr geqrf svd eig eigh schur", "nested", "program", _FACTORS, "ambiguous solves"),
    _row("triangular_solve tridiagonal_solve", "nested", "program", _SOLVES, "solves"),
    _row("custom_linear_solve", "nested", "program", _SOLVES, "solves"),
    _row("custom_pullback", "nested", "program", _PULLED),
    _row("device_put", "linear", "program", "moves values between devices", rule="each"),
    _row("optimization_barrier in_turn", "linear", "program", _FIXES, "barrier"),
    _row("layout_constraint pbroadcast pbroadcast_dynamic relayout", "linear", "program", _FIXES),
    _row("pure_callback io_callback", "opaque", "program", _HOST, "typed"),
    _row("debug_callback debug_print", "nested", "program", _SHOWS, "typed"),
    _row("ffi_call pallas_call", "nested", "program", _KERNEL, "typed"),
    _row("swap addupdate", "opaque", "program", _REFERENCE, "typed"),
    # The library's own. They return values as they are or as memory stores them, add values, also
    # of two dtypes, repeat a value for each channel, take moments, or show values to observers.
    _row("rounded_cotangent written written_in", "linear", "program", _OURS, "stores"),
    _row("add_product sum_together", "linear", "program", _OURS),
    _row("spread_together", "linear", "program", _OURS, "light accurate repeats"),
    _row("broadcast_like summed_apart forward_only", "linear", "program", _OURS),
    _row("moments", "nested", "float32", _OURS, "sum", rule="moments"),
    _row("squares_about_mean", "nested", "float32", _OURS, "sum", rule="squares_about_mean"),
    _row("shift_to_largest", "selection", "operands", _OURS, rule="shift"),
    _row("derivative_tap", "nested", "program", _TAP, "derivative"),
    _row("derivative_count", "nested", "program", _TAP),
    # Containers.
    _row("jit call closed_call eval_jaxpr", "container", "inside", _HOLDS, "call once"),
    _row("custom_jvp_call", "container", "inside", _HOLDS, "custom pushes", rule="custom"),
    _row("custom_vjp_call", "container", "inside", _HOLDS, "custom reverse"),
    _row("remat2", "container", "inside", _HOLDS, "alone reverse checkpoint"),
    _row("scan", "container", "inside", _HOLDS, "alone loop"),
    _row("cond", "container", "inside", _HOLDS, "alone loop once"),
    _row("while", "container", "inside", _HOLDS, "alone unbounded loop"),
    _row("shard_map", "container", "inside", _HOLDS, "alone once"),
)

TABLE: dict[str, Row] = {name: row for rows in _ROWS for name, row in rows.items()}
"""Rows by the name of the primitive. A primitive without a row stays in the dtypes of the program,
and the report of `autocast` lists it as unknown."""

assert len(TABLE) == sum(map(len, _ROWS)), "a primitive has two rows"

_used = set[str]()


def _with(*words: str) -> frozenset[str]:
    """Returns the primitives that have one of these words in their rows."""
    _used.update(words)
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

CASTS = _with("cast")
"""Changes of the dtype."""

SAME = LAYOUT | CASTS
"""Moves and casts: the values of a result are those of the operands."""

ORDERS = _with("orders")
"""Moves and casts of all values of an array, which a product may make while it writes."""

GATHERS = _with("gathers")

JOINS = _with("joins")
"""Concatenations of arrays."""

DOTS = _with("dot")
"""Matrix products: the products that are no convolutions."""

LINEAR = _with("linear", "layout")
"""Operations that are linear in all floating-point operands together. Each stream goes through by
itself, and the derivative does not need the operands."""

ELEMENTWISE = _with("elementwise")
"""Functions of one variable."""

CONSTANT = _with("constant")
"""Functions that are constant wherever they have a derivative."""

OPAQUE = _with("opaque")
"""Operations that have a rule in JAX that only raises."""

CONTAINERS = _with("container")
"""Operations that hold jaxprs, which are evaluated by the rules of this table."""

CALLS = _with("call")
"""Containers that only stand for the jaxpr in them."""

CUSTOM = _with("custom")
"""Functions with a derivative of their own."""

PUSHES = _with("pushes")
"""Functions with a derivative of their own in forward mode."""

OF_REVERSE_MODE = _with("reverse")
"""Containers that define how the jaxpr in them is transposed."""

CHECKPOINTS = _with("checkpoint")

LOOPS = _with("loop")
"""Containers that do not run each jaxpr in them exactly once."""

ONCE = _with("once")
"""Containers that evaluate one of the jaxprs in them, and that once."""

UNBOUNDED = _with("unbounded")
"""Loops whose number of steps is not known while tracing. They have no derivative in reverse
mode."""

DERIVATIVES = _with("derivative")
"""Operations whose operands and results are derivatives."""

FULL = _with("float32")
"""Functions that are computed in float32, with a float32 result."""

FOLLOWING = _with("operands")
"""Operations in half if what was computed is half, and otherwise in float32."""

MAGNIFYING = _with("magnifies")
"""Functions that magnify earlier rounding errors. Arithmetic whose result goes into one of them is
computed in float32 too: the difference to the largest logit in a softmax, the residual in a squared
error. (The same holds for the base of an even power by `integer_pow`.)"""

ARITHMETIC = _with("arithmetic")

SUBTRACTIONS = _with("subtracts")

ADDITIONS = _with("adds") | SUBTRACTIONS
"""Sums and differences of two."""

NEGATIONS = _with("negates")

MULTIPLICATIONS = _with("multiplies")
"""Products entry by entry."""

DIVISIONS = _with("divides")
"""Quotients entry by entry."""

SCALINGS = MULTIPLICATIONS | DIVISIONS

MAXIMA = _with("larger")
"""The larger of two."""

SELECTS = _with("selects")
"""Choices between operands by booleans."""

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

COMPLEMENTS = _with("complement")
"""Functions that take the distance of a bounded value to 1. They lose nothing if both are evaluated
again from what the value is a function of."""

NEAR = _with("near")
"""Functions that take the distance of their operand to a nonzero number."""

LOGARITHMS = _with("logarithm")

EXPONENTIALS = _with("exponential")
"""The exponential function, and in `NATURAL` its inverse."""

NATURAL = _with("natural")

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

MERGED = LIGHT | PRODUCTS | PUSHES
"""Operations that are evaluated once where a program asks twice for the same result. A backward
rule of the user's is left out: of a sum of cotangents it may return another value than the sum of
what it returns for each, as one that clips them does."""

ALONE = _with("alone")
"""Operations that take long, have a memory of their own or choose by values. They are in no layer
that is evaluated again."""

BROADCASTS = _with("broadcasts")
"""Functions of several operands entry by entry, with a rule of their own. They accept a number
beside an array."""

POSITIVE = _with("positive")
"""Functions whose result is never below 0."""

ANGLES = _with("angle")
"""Functions whose bound is π/2, where that of others is 1."""

REPEATING = LAYOUT | _with("repeats")
"""Moves, and what repeats the values of several streams at once."""

EXTREMES = _with("extreme")
"""Reductions to the largest or the smallest value."""

DECAYING = _with("decays")
"""Functions that are bounded and accurate where their operand is negative."""

DISTANCES = ARITHMETIC | LAYOUT | CHOICES | EXTREMES | _with("distance")
"""Operations through which a rounding error reaches a difference."""

POINTWISE = _with("pointwise")
"""Operations that treat all entries of their operands alike and independently of each other."""

COORDINATES = _with("coordinate")
"""Operations that map coordinates to coordinates. Applied to the constant first derivatives of the
point itself, they show which of them vanish, as in a network with a part for each coordinate."""

AMBIGUOUS = _with("ambiguous")
"""Operations with several possible results, such as vectors up to their signs. Rounded operands may
give another result, so they are in no layer that is evaluated again at these."""

SOLVES = _with("solves")
"""Factorizations and solves. They magnify errors of their operands, so a product whose result goes
into one is computed in full."""

PICKS = _with("picks")
"""Moves that leave some values out."""

BARRIERS = _with("barrier")
"""Operations that return their operands once all of them are there."""

STORES = _with("stores")
"""Operations that return values as they are or as memory stores them."""

TYPED = _with("typed")
"""Operations that read bits, draw numbers in a dtype, or pass arrays to code for a dtype."""


def power_of(name: str, params: Mapping[str, Any]) -> int | None:
    """Returns the whole number to whose power an operation raises its operand, if any."""
    return {"square": 2, "integer_pow": params.get("y")}.get(name)


def exponent_of(name: str, params: Mapping[str, Any]) -> float | int | None:
    """Returns the number to whose power an operation raises its operand, if any."""
    return {"sqrt": 1 / 2, "rsqrt": -1 / 2, "cbrt": 1 / 3}.get(name, power_of(name, params))


assert set().union(*(row.traits for row in TABLE.values())) <= _used, "a trait that nothing reads"
assert _used <= set().union(
    *({row.engine, row.precision, *row.traits} for row in TABLE.values())
), "a trait that no primitive has"
