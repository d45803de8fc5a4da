"""Adds hints to errors that JAX raises in code that is cast to, or traced for, half precision."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import equinox as eqx
import jax
import numpy as np


# Operations without a half-precision form: transforms, factorizations and solves, complex numbers.
_UNKNOWN_IN_HALF = re.compile(
    r"FFT input must be|"
    r"(?i:(unsupported|not supported|not implemented|does not accept|must be).*"
    r"(dtype|float32|float64|complex))"
)

# Errors of operations, loops and branches that do not promote dtypes, and of strict promotion.
_OF_DIFFERENT_DTYPES = re.compile(
    r"same dtypes?\b|equal (output )?types|dtypes do not match|implicit dtype promotion"
)


@contextmanager
def noting_the_cast(call: str, dtype: np.dtype) -> Iterator[None]:
    """Adds a note to errors of operations that have no half-precision form, or that got float32
    together with half precision."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as e:
        named = dtype.name in str(e) or "FFT" in str(e)
        if dtype.name in str(e) and "float32" in str(e) and _OF_DIFFERENT_DTYPES.search(str(e)):
            e.add_note(
                f"`{call}` has cast the arguments of this function to {dtype.name}, and something "
                "in it returns float32 all the same: a layer that is kept in full, or that gets "
                "points which `keep_full` keeps. Wrap that layer as "
                '`mpx_pde.FullPrecision(layer, out_dtype="half")`, which returns half '
                "precision, or pass `autocast=True`, which decides by operation."
            )
        elif named and _UNKNOWN_IN_HALF.search(str(e)):
            e.add_note(
                f"`{call}` has cast the arguments of this function to {dtype.name}, for which JAX "
                "has no such operation. Keep the layer that does it in float32, by "
                "`mpx_pde.FullPrecision(layer)`, or pass `autocast=True`, which casts no "
                "arguments and leaves such operations in float32."
            )
        raise


@contextmanager
def noting(note: str, *errors: type[Exception], about: str = "") -> Iterator[None]:
    """Adds a note to errors of these types whose message contains `about`."""
    try:
        yield
    except errors as e:
        if about in str(e):
            e.add_note(note)
        raise


def noting_the_trace(call: str) -> AbstractContextManager:
    """Adds a note to errors about values that outlive the trace by `call`."""
    note = (
        f"`{call}` traces this function, and evaluates its program again: a `jax.custom_jvp` "
        "or `jax.custom_vjp` function in it may close over no array that depends on the "
        "arguments, parameters included. Pass such arrays to it as arguments."
    )
    return noting(note, jax.errors.UnexpectedTracerError)


def noting_the_model(call: str, args: tuple) -> AbstractContextManager:
    """Adds a note to errors of a function if its model may not have been passed first."""
    if not eqx.is_array(args[0]) or not any(map(callable, args[1:])):
        return nullcontext()
    return noting(
        f"`{call}` differentiates with respect to the first positional argument, here an array. "
        "If the model is another one, pass it first.",
        Exception,
    )
