"""The examples and problems that benchmarks train: in the precisions of their runner, in TF32,
which a CPU only emulates, and by derivatives of two evaluations."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
from jax import lax

import mpx_pde as mpx
from examples import problems as problems
from examples.problems._runner import PRECISIONS, QUICK_STEPS, Trainer
from mpx_pde.interpret._jaxpr import bodies_of, is_container, own_bind, walk
from mpx_pde.interpret._rebind import rebind


EXAMPLES = Path(__file__).parent.parent / "examples"
PRODUCTS = ("dot_general", "mixed_dot_general")


def load_example(name: str) -> ModuleType:
    """A module of `examples/` by its file name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def emulate_tf32(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` of PyTrees of arrays, with the operands of all products rounded to the 10 bits of TF32:
    the arithmetic of an NVIDIA GPU's default float32 product, without its speed.

    Derivatives are taken inside `fun`, so that their products are rounded like all others.
    """

    def emulated(*args):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        out = _evaluate(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return emulated


def _evaluate(closed: Any, *args: Any) -> list[Any]:
    def evaluate(_, eqn, inputs):
        if is_container(eqn):
            return rebind(eqn, inputs, [partial(_evaluate, body) for body in bodies_of(eqn)])
        if eqn.primitive.name in PRODUCTS:
            inputs = [lax.reduce_precision(x, 8, 10) for x in inputs]
        return own_bind(eqn, inputs)

    return walk(closed.jaxpr, closed.consts, args, lambda literal: literal.val, evaluate)


def _refined(step: Callable) -> Callable:
    """A step whose derivative terms are refined, one by one, by a second evaluation."""

    def refined(derivatives: Callable) -> Callable:
        def terms(fun, *args, **given):
            at = lambda fun, point: derivatives(fun, *args, **given)(point)
            return partial(mpx.refined(at, dtype="bfloat16", keep_full=(False, True)), fun)

        return terms

    for name in ("partials", "laplacian", "linear_operator"):
        step = mock.patch.object(mpx, name, refined(getattr(mpx, name)))(step)
    return step


OTHERS: dict[str, Callable[[Callable], Callable]] = {
    "tensorfloat32": emulate_tf32,
    "refined-bfloat16": _refined,
}
"""What makes the step in float32 one in a precision that the runner does not know."""


def trainer(
    name: str, precision: str, *, optimizer: str | None, steps: int | None, quick: bool = False
) -> Trainer:
    """What trains a problem in a precision, those of `OTHERS` too."""
    if precision not in (*PRECISIONS, *OTHERS):
        choice = ", ".join((*PRECISIONS, *OTHERS))
        raise ValueError(f"there is no precision `{precision}`; there are {choice}.")
    problem = problems.load(name)
    given = {"optimizer": optimizer, "steps": steps or (QUICK_STEPS if quick else None)}
    known = "float32" if precision in OTHERS else precision
    given["transform"] = OTHERS.get(precision, lambda step: step)
    return Trainer((problem.quick if quick else None) or problem, known, **given)
