"""Adds hints to errors that JAX raises in code that is cast to, or traced for, half precision."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import equinox as eqx
import jax
import numpy as np

from ._calls import called


# Operations without a half-precision form: transforms, factorizations and solves, complex numbers.
_UNKNOWN_IN_HALF = re.compile(
    r"FFT input must be|"
    r"(?i:(unsupported|not supported|not implemented|does not accept|must be).*"
    r"(dtype|float32|float64|complex))|"
    r"dtype=\S+ is not supported|"
    r"data type .* not inexact"  # `numpy.finfo` of bfloat16, as in `jnp.interp`
)

# Errors of derivatives inside of the function, whose tangents or cotangents have another dtype.
_OF_TANGENTS = re.compile(
    r"(?i:tangent.*dtype|dtype.*tangent|argument to vjp function|cotangent type does not match"
    r"|tangent values inconsistent)"
)

# Errors of operations, loops and branches that do not promote dtypes, and of strict promotion.
_OF_DIFFERENT_DTYPES = re.compile(
    r"same dtypes?\b|equal (output )?types|dtypes do not match|implicit dtype promotion"
)


_SHORT = {"float16": "f16", "bfloat16": "bf16"}
"""Names of half types in the types of arrays, as some errors print them."""


@contextmanager
def noting_the_cast(dtype: np.dtype, backward: bool = False) -> Iterator[None]:
    """Adds a note to errors of operations that have no half-precision form, or that got float32
    together with half precision. Errors without a note are of the backward pass if `backward`."""
    call = called()
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as e:
        cast = f"`{call}` has cast the arguments of this function to {dtype.name}, "
        note = _of_the_cast(str(e), dtype, backward)
        if note and not any(x.startswith(cast) for x in getattr(e, "__notes__", ())):
            e.add_note(cast + note)
        raise


def _of_the_cast(error: str, dtype: np.dtype, backward: bool) -> str | None:
    """Returns the note on an error in a function whose arguments were cast, if it has one."""
    named = dtype.name in error or f"{_SHORT.get(dtype.name)}[" in error
    if named and _OF_TANGENTS.search(error):
        return (
            "and a tangent or cotangent in it has another dtype. Make it of the array that it "
            "belongs to: `jnp.ones_like(x)` and `jnp.zeros_like(x)` in place of `jnp.ones(...)` "
            "and of numbers, or `v.astype(x.dtype)`. Or pass `forward='float32'` or "
            "`autocast=True`, which cast no arguments."
        )
    if dtype.name in error and "float32" in error and _OF_DIFFERENT_DTYPES.search(error):
        if backward:
            return (
                "and its backward pass meets two dtypes: that of a `jax.custom_vjp`, or of a "
                "solver such as `odeint`, which takes float32 times beside them. Run that function "
                "in float32 by `mpx_pde.force_full_precision`, make its rule return the dtype of "
                "its arguments, or pass `forward='float32'` or `autocast=True`, which cast no "
                "arguments."
            )
        return (
            "and something in it returns float32 all the same. An array that the function makes, "
            "such as `jnp.arange(9.0)`, one that it closes over, or a NumPy number: give it the "
            "dtype of what it meets by `astype(x.dtype)`, or write a Python number. A layer that "
            "is kept in full, or that gets points which `keep_full` keeps: wrap it as "
            '`mpx_pde.FullPrecision(layer, out_dtype="half")`, which returns half precision. Or '
            "pass `autocast=True`, which decides by operation."
        )
    if (named or "FFT" in error) and _UNKNOWN_IN_HALF.search(error):
        return (
            "for which JAX has no such operation. Keep the layer that does it in float32, by "
            "`mpx_pde.FullPrecision(layer)`, or pass `autocast=True`, which casts no arguments "
            "and leaves such operations in float32."
        )
    return None


@contextmanager
def noting(note: str, *errors: type[Exception], about: str = "") -> Iterator[None]:
    """Adds a note to errors of these types whose message contains `about`."""
    try:
        yield
    except errors as e:
        if about in str(e):
            e.add_note(note)
        raise


_TERM = re.compile(r"[^\W_]+(_[a-z]+)?")
"""Names that a derivative may have, such as `u`, `u_xx` and `lap_u`."""


@contextmanager
def noting_the_terms() -> Iterator[None]:
    """Adds a note to a `KeyError` of a name that a derivative may have."""
    try:
        yield
    except KeyError as e:
        if e.args and isinstance(e.args[0], str) and _TERM.fullmatch(e.args[0]):
            e.add_note(
                "`mpx_pde.partials`, `laplacian` and `linear_operator` return the terms that they "
                f"are asked for. If {e.args[0]!r} is a term, name it in that call too, as in "
                f'`partials(model, [..., "{e.args[0]}"], ...)`. That of an operator ends in the '
                "output, as `lap_u` does."
            )
        raise


def noting_the_trace() -> AbstractContextManager:
    """Adds a note to errors about values that outlive the trace by the present call."""
    note = (
        f"`{called()}` traces this function, and evaluates its program again: a "
        "`jax.custom_jvp` or `jax.custom_vjp` function in it may close over no array that "
        "depends on the arguments, parameters included. Pass such arrays to it as arguments."
    )
    return noting(note, jax.errors.UnexpectedTracerError)


def noting_the_model(args: tuple) -> AbstractContextManager:
    """Adds a note to errors of a function if its model may not have been passed first."""
    if not eqx.is_array(args[0]) or not any(map(callable, args[1:])):
        return nullcontext()
    return noting(
        f"`{called()}` differentiates with respect to the first positional argument, here an "
        "array. If the model is another one, pass it first.",
        Exception,
    )
