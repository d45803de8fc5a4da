"""What kind of operation a primitive is: what `autocast`, the derivative engine and the reports of
ranges all ask. Which precision that means says `_tables.py`, and how derivatives pass
`propagation/_tables.py`; both are made of these."""

from jax import lax
from jax.extend.core import JaxprEqn


PRODUCTS = ("dot_general", "conv_general_dilated")
"""Linear in each of two operands, and worth tensor cores."""

MIXED = tuple(f"mixed_{name}" for name in PRODUCTS)
"""The library's own products."""

ARITHMETIC = ("add", "sub", "mul", "div", "neg", "add_any")

MOVES = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "rev",
    "slice",
    "dynamic_slice",
    "concatenate",
    "stack",
    "unstack",
    "split",
    "tile",
    "copy",
    "batch_behind",
    "shared",
)
"""Moves values on one device, without arithmetic."""

PLACES = ("sharding_constraint", "reshard", "pvary")
"""Says on which devices values are, and changes none."""

STORES = ("rounded_cotangent", "written", "written_in", "read_at_once")
"""The library's own: values as they are, what they are rounded to on their way to memory, and how
they are read."""

FIELDS = ("spread", "add_product")
"""The library's own: a value for each channel on a grid, and a sum of two dtypes. Linear in all
operands together."""

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite")

CALLBACKS = ("pure_callback", "io_callback")
"""Python functions, of which nothing is known."""


def says_its_dtype(eqn: JaxprEqn) -> bool:
    """Whether the program names what a mixed product multiplies in."""
    given = eqn.params.get("given")
    return given is None or given.dtype


def asks_for_more(eqn: JaxprEqn) -> bool:
    """Whether the program asks a product for more than JAX's default precision."""
    return any(p not in _DEFAULT for p in _precisions(eqn))


def leaves_it_to_tensorfloat32(eqn: JaxprEqn) -> bool:
    """Whether the program asks a product for no more than what a GPU takes for TF32: `HIGH` is
    just that."""
    return all(p in (*_DEFAULT, lax.Precision.HIGH) for p in _precisions(eqn))


_DEFAULT = (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def _precisions(eqn: JaxprEqn) -> tuple:
    precision = eqn.params.get("precision")
    return precision if isinstance(precision, tuple) else (precision,)
