"""Formats states and wrong arguments in short form, also while values are not known."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer


def number(x: Any) -> str:
    """Formats a scalar or a few scalars. Of an array without values it shows what is known."""
    if isinstance(x, Tracer | jax.ShapeDtypeStruct) or np.size(x) > 8:
        return f"{x.dtype}{[*x.shape]}"
    if np.ndim(x):
        return f"[{', '.join(map(number, np.asarray(x)))}]"
    x = np.asarray(x).item() if eqx.is_array_like(x) else x
    if isinstance(x, float) and 0 < x < math.inf and math.frexp(x)[0] == 0.5:
        return f"2^{math.frexp(x)[1] - 1}"
    return str(x)


def by_name(names: tuple[str, ...], values: Any, prefix: str = "") -> str:
    """Formats values as `{x: …, y: …}`, or as `{each: …}` if they are the same for all names."""
    if not isinstance(values, list):
        if isinstance(values, Tracer | jax.ShapeDtypeStruct) or np.ndim(values) != 1:
            return f"{prefix}{number(values)}"
        values = [f"{prefix}{v}" for v in np.asarray(values)]
    if len(names) > 1 and len(set(values)) == 1:
        return f"{{each: {values[0]}}}"
    return f"{{{', '.join(f'{n}: {v}' for n, v in zip(names, values, strict=True))}}}"


def skips(scaling: Any) -> str:
    """Formats the numbers of steps that a scaling has skipped, and whose gradient vanished."""
    names = ("skipped_steps", "consecutive_skips", "vanished_steps")
    return ", ".join(f"{name}={number(getattr(scaling, name))}" for name in names)


def described(obj: Any, *parts: str) -> str:
    """Formats an object as `Name(part)`, or with a line for each part."""
    name = type(obj).__name__
    if len(parts) == 1:
        return f"{name}({parts[0]})"
    lines = [part.replace("\n", "\n  ") for part in parts]
    return f"{name}(\n  " + ",\n  ".join(lines) + "\n)"


def in_a_line(x: Any) -> str:
    """Describes a wrong argument for an error, by its type if its text is long, as for a model."""
    if eqx.is_array(x) and np.size(x) > 8:
        return number(x)
    text = repr(x)
    return text if len(text) <= 80 and "\n" not in text else f"a `{type(x).__name__}`"


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Formats the rows of a table as lines, with the columns in `left` aligned to the left and the
    others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(i, cell):
        return cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])

    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]
