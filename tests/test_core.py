"""Tests that the core of the package imports and works without the engine."""

import subprocess
import sys
from pathlib import Path

import pytest

import mpx_pde as mpx


CORE = """
import importlib, sys, types

package = types.ModuleType("mpx_pde")  # in place of `__init__`, which imports everything
package.__path__, package.__all__ = [sys.argv[1]], ()
sys.modules["mpx_pde"] = package
WITHOUT = ("mpx_pde.engine", "mpx_pde.derivatives", "mpx_pde.nn", "mpx_pde.second_order")


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(WITHOUT):
            raise ImportError(f"{name} is not part of the core")


sys.meta_path.insert(0, Refuse())
for name in ("_util", "precision", "program", "products", "scaling", "reports", "training"):
    importlib.import_module(f"mpx_pde.{name}")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpx_pde.precision._cast import cast_tree
from mpx_pde.products._dot import mixed_dot_general
from mpx_pde.scaling._loss import DynamicLossScaling
from mpx_pde.training import filter_grad, optimizer_update

model = {"w": jnp.full((3, 2), 0.5), "b": jnp.zeros(2)}
x = jnp.arange(12.0).reshape(4, 3) / 8
assert cast_tree(model, "bfloat16")["w"].dtype == "bfloat16"


def loss(model, x):
    dimensions = (((1,), (0,)), ((), ()))
    return jnp.sum(mixed_dot_general(x, model["w"], dimensions, dtype="float16") + model["b"])


optimizer = optax.sgd(0.25)
state = optimizer.init(model)


@jax.jit
def step(model, state, scaling):
    scaling, finite, grads = filter_grad(loss, scaling)(model, x)
    return *optimizer_update(model, optimizer, state, grads, finite), scaling, grads


model, state, scaling, grads = step(model, state, DynamicLossScaling(2**10))
# All numbers are small multiples of powers of two, so half precision is exact.
np.testing.assert_array_equal(grads["w"], np.repeat(np.asarray(x).sum(0)[:, None], 2, 1))
np.testing.assert_array_equal(grads["b"], [4.0, 4.0])
np.testing.assert_array_equal(model["b"], [-1.0, -1.0])
full, finite, exact = filter_grad(loss, None, use_mixed_precision=False)(model, x)
np.testing.assert_array_equal(exact["w"], grads["w"])
assert not [name for name in sys.modules if name.startswith(WITHOUT)]
print("works")
"""


@pytest.mark.slow
def test_the_core_imports_and_works_without_the_engine():
    command = [sys.executable, "-W", "error", "-c", CORE, str(Path(mpx.__file__).parent)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert out.stdout == "works\n", out.stderr
