"""Tests the options of scalings: named, the same in every process, and compared."""

import functools
import json
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OwnScaling

import mpx_pde as mpx


def state(margin=6):
    derivatives = mpx.DerivativeScaling.per_direction("xt", order=2, margin=margin)
    return {"scaling": mpx.Scaling(mpx.DynamicLossScaling(), derivatives), "step": 3}


def custom(rule, period=2000):
    return OwnScaling(mpx.DynamicLossScaling(period=period), rule)


class Rule:
    pass


def test_options_are_the_same_in_another_process():
    for rule in (
        *(lambda x: x, jnp.tanh, jax.jit(jnp.sin), functools.partial(max, 1, key=abs)),
        *(frozenset({"a", "b"}), Rule(), np.dtype("int8"), float("nan"), {"a": (1, Rule)}),
    ):
        options = mpx.scaling_options({"s": custom(rule)})
        text = json.dumps(options, allow_nan=False)
        assert "0x" not in text
        mpx.check_scaling_options(json.loads(text), {"s": custom(rule)})
    with pytest.raises(ValueError, match=r"rule was 'jax.*tanh' and is 'jax.*sin'"):
        mpx.check_scaling_options(mpx.scaling_options(custom(jnp.tanh)), custom(jnp.sin))


def test_options_go_through_json():
    tree = state()
    options = json.loads(json.dumps(mpx.scaling_options(tree), allow_nan=False))
    mpx.check_scaling_options(options, tree)
    assert options["['scaling'].loss"]["period"] == 2000
    with pytest.raises(ValueError, match=r"rule\.margin was 6 and is 7"):
        mpx.check_scaling_options(options, state(margin=7))
    with pytest.raises(ValueError, match="is missing"):
        mpx.check_scaling_options(options, {})
    with pytest.raises(ValueError, match="only in `tree`"):
        mpx.check_scaling_options({}, tree)


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda new: new.per_direction("xt", order=2), ("direction", ["x", "t"], 2)),
        (lambda new: new.per_order(1, special=["u_x"]), ("order", ["order 1", "u_x"], 1)),
        (lambda new: new.per_term(["u_x"]), ("term", ["u_x"], None)),
    ],
    ids=lambda x: "" if callable(x) else x[0],
)
def test_options_of_derivative_scalings(make, want):
    scaling = make(mpx.DerivativeScaling)
    [options] = mpx.scaling_options(scaling).values()
    names = {name for name in options if "." not in name}
    assert names == {"type", "kind", "names", "rows", "order"}
    assert (options["type"], options["rule.margin"]) == ("DerivativeScaling", 6)
    assert (options["kind"], options["names"], options["order"]) == want
    other = mpx.DerivativeScaling.per_direction("xt", order=2, terms=["u_x"])
    with pytest.raises(ValueError, match="rows was"):
        mpx.check_scaling_options({"": options}, other)
    copied = pickle.loads(pickle.dumps(scaling))
    assert eqx.tree_equal(copied, scaling)
    # Static parts are compared and hashed, so that a step is compiled once.
    assert jax.tree.structure(copied) == jax.tree.structure(make(mpx.DerivativeScaling))
    assert len({jax.tree.structure(x) for x in (copied, scaling)}) == 1
