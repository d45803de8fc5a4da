"""Small arrays travel as one, and come back as they were."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import tree_equal_bits

from mpx_pde._packed import SMALL, packing


def arrays():
    return [
        jnp.arange(3.0),
        jnp.array(7, jnp.int32),
        jnp.ones((2, 0)),
        jax.random.key(1),
        jnp.arange(4.0).reshape(2, 2),
        jnp.full((SMALL + 1,), 0.5),
        jnp.array(True),
        jnp.array([1, 2], jnp.int32),
        jnp.ones(3, jnp.float16),
        jnp.array(np.nan),
    ]


def test_arrays_come_back_as_they_were():
    pack, unpack = packing([jax.typeof(x) for x in arrays()])
    packed = pack(arrays())
    # The key, the large one, the flag and the half alone; one array of float32, one of integers.
    assert len(packed) == 6
    assert sorted(x.size for x in packed) == [1, 1, 3, 3, 8, SMALL + 1]
    back = unpack(packed)
    assert back[3] == arrays()[3]
    assert tree_equal_bits(back[:3] + back[4:], arrays()[:3] + arrays()[4:])


def test_they_travel_together_under_vmap_and_through_a_loop():
    pack, unpack = packing([jax.typeof(x) for x in (jnp.zeros(3), jnp.zeros(()))])

    def run(x):
        turn = lambda _, carry: pack([2 * y for y in unpack(carry)])
        return unpack(jax.lax.fori_loop(0, 3, turn, pack([x, x[0]])))

    x = jnp.arange(6.0).reshape(2, 3)
    vector, scalar = jax.jit(jax.vmap(run))(x)
    np.testing.assert_array_equal(vector, 8 * x)
    np.testing.assert_array_equal(scalar, 8 * x[:, 0])
