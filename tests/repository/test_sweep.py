"""Runs a fixed part of the sweep over JAX's functions. `python -m benchmarks sweep` runs all."""

import numpy as np
import pytest

from benchmarks import sweep
from benchmarks._functions import function


# One of each kind: bounded, of squares, a sum, a scatter, a product, a choice at ties.
FEW = ("jnp.tanh", "jnp.linalg.norm", "jnp.cumsum", "lax.scatter_add", "jnp.dot", "jnp.maximum")
WHOLE = ("autocast", "forward", "partials")
"""The modes in which nothing may be wrong and silent."""


@pytest.mark.parametrize(
    "name", [*FEW[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in FEW[2:])]
)
def test_nothing_is_silently_wrong(name):
    rows = sweep.rows_of(name, WHOLE)
    assert len(rows) >= len(WHOLE) * len(sweep.HALVES) * (len(sweep.SIZES) - 2)
    assert [row for row in rows if row["status"] in ("silent", "raised")] == []


def test_what_is_wrong_in_a_cast_is_found_and_told():
    """Squares beyond float16 make the slope x/(x² + y²) zero, beside finite ones."""
    rows = sweep.rows_of("jnp.arctan2", ("cast",), ("float16",))
    found = {row["size"]: row for row in rows}
    assert found["ordinary"]["status"] == "right"
    assert (found["hundreds"]["status"], found["hundreds"]["what"]) == ("told", "derivative")
    assert sweep.letters(rows)["cast float16"][:2] == "rt"


def test_errors_are_in_roundings_of_the_format():
    want = np.asarray([1.0, 2.0])
    assert sweep.off(want * (1 + 2.0**-8), want, "bfloat16") == pytest.approx(1.0)
    # Of each error the smallest normal number is taken off.
    assert sweep.off(want * (1 + 2.0**-8), want, "float16") == pytest.approx(8.0, rel=0.02)
    assert sweep.off([0.0], [1e-9], "float16") == 0.0  # below the smallest normal number
    assert sweep.off([np.nan], [1.0], "float16") == np.inf


def test_inputs_are_exact_in_the_format():
    f = function("jnp.dot")
    for half in sweep.HALVES:
        for size in sweep.SIZES:
            for x in sweep.arrays_of(f, size, half) or ():
                np.testing.assert_array_equal(x.astype(sweep.jnp.dtype(half)).astype("float32"), x)
