"""The precision that a program asks of a product."""

from jax import lax
from jax.extend.core import JaxprEqn


def says_its_dtype(eqn: JaxprEqn) -> bool:
    """Returns whether the program names what a mixed product multiplies in."""
    given = eqn.params.get("given")
    return given is None or given.dtype


def asks_for_more(eqn: JaxprEqn) -> bool:
    """Returns whether the program asks a product for more than JAX's default precision."""
    return any(p not in _DEFAULT for p in _precisions(eqn))


def leaves_it_to_tensorfloat32(eqn: JaxprEqn) -> bool:
    """Returns whether the program asks a product for no more than what a GPU takes for TF32: `HIGH`
    is just that."""
    return all(p in (*_DEFAULT, lax.Precision.HIGH) for p in _precisions(eqn))


_DEFAULT = (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def _precisions(eqn: JaxprEqn) -> tuple:
    precision = eqn.params.get("precision")
    return precision if isinstance(precision, tuple) else (precision,)
