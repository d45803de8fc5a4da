"""Tests what is known of a program inside of its containers, for all reports that ask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpx_pde.reports._survey import Survey


MATRIX = np.arange(9.0, dtype=np.float32).reshape(3, 3)
VECTOR = np.ones(3, np.float32)
HERE = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

# Functions of a vector that multiply by a matrix, which is twice the same array or changes.
SAME = {
    "scan": lambda m, x: lax.scan(lambda c, _: (m @ c, None), x, length=2)[0],
    "while": lambda m, x: lax.while_loop(lambda c: c[0] < 2, lambda c: m @ c, x),
    "test": lambda m, x: lax.while_loop(lambda c: (m @ c)[0] < 2, lambda c: 2 * c, x),
    "cond": lambda m, x: lax.cond(x[0] > 0, lambda x: m @ x, lambda x: x, x),
    "jit": lambda m, x: jax.jit(lambda m: m @ x)(m),
    "checkpoint": lambda m, x: jax.checkpoint(lambda m: m @ x)(m),
    "out of a checkpoint": lambda m, x: jax.checkpoint(lambda m: 1 * m)(m) @ x,
    "shard_map": lambda m, x: jax.shard_map(
        jnp.matmul, mesh=HERE, in_specs=(jax.P(), jax.P()), out_specs=jax.P()
    )(m, x),
}
CHANGES = {
    "carry of a scan": lambda m, x: lax.scan(lambda m, _: (m + 1, m @ x), m, length=2)[1],
    "slices of a scan": lambda m, x: lax.scan(lambda c, m: (c, m @ x), 0, jnp.stack([m, -m]))[1],
    "carry of a while": lambda m, x: lax.while_loop(
        lambda c: c[1][0] < 2, lambda c: (c[0] + 1, c[0] @ c[1]), (m, x)
    )[1],
}


@pytest.mark.parametrize("name", [*SAME, *CHANGES])
def test_an_array_is_known_in_a_container_unless_it_changes(name):
    run = (SAME | CHANGES)[name]
    survey = Survey(jax.make_jaxpr(lambda x: run(2 * jnp.asarray(MATRIX), x))(VECTOR))
    (product,) = (seen for seen in survey.seen if seen.step.name == "dot_general")
    matrix, vector = product.known
    assert (matrix is None, vector) == (name in CHANGES, None)
    if matrix is not None:
        np.testing.assert_array_equal(matrix(), 2 * MATRIX)
    assert f"{__file__}:" in product.site.line
