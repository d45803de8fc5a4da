"""Short forms of states and of wrong arguments, also without values."""

import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer


def number(x: Any) -> str:
    """A scalar, or a few of them, for reading; or what is known of an array without values."""
    if isinstance(x, Tracer | jax.ShapeDtypeStruct) or np.size(x) > 8:
        return f"{x.dtype}{[*x.shape]}"
    if np.ndim(x):
        return f"[{', '.join(map(number, np.asarray(x)))}]"
    x = np.asarray(x).item() if eqx.is_array_like(x) else x
    if isinstance(x, float) and 0 < x < math.inf and math.frexp(x)[0] == 0.5:
        return f"2^{math.frexp(x)[1] - 1}"
    return str(x)


def by_name(names: tuple[str, ...], values: Any, prefix: str = "") -> str:
    """`{x: …, y: …}`, or `{each: …}` for what is the same for all."""
    if not isinstance(values, list):
        if isinstance(values, Tracer | jax.ShapeDtypeStruct) or np.ndim(values) != 1:
            return f"{prefix}{number(values)}"
        values = [f"{prefix}{v}" for v in np.asarray(values)]
    if len(names) > 1 and len(set(values)) == 1:
        return f"{{each: {values[0]}}}"
    return f"{{{', '.join(f'{n}: {v}' for n, v in zip(names, values, strict=True))}}}"


def skips(scaling: Any) -> str:
    """Formats the number of steps that a scaling has skipped."""
    skipped, row = number(scaling.skipped_steps), number(scaling.consecutive_skips)
    return f"skipped_steps={skipped}, consecutive_skips={row}"


def described(obj: Any, *parts: str) -> str:
    """`Name(part)`, or with a line for each part."""
    name = type(obj).__name__
    if len(parts) == 1:
        return f"{name}({parts[0]})"
    lines = [part.replace("\n", "\n  ") for part in parts]
    return f"{name}(\n  " + ",\n  ".join(lines) + "\n)"


def brief(value: Any) -> str:
    """Describes a wrong argument for an error: its type, and its value if that is short."""
    text, kind = repr(value), type(value).__name__
    return f"{kind}: {text}" if len(text) <= 80 and "\n" not in text else f"a {kind}"
