"""The examples and problems that benchmarks train: in the precisions of their runner, in TF32
(emulated on a CPU), and with derivatives from two evaluations."""

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
from mpx_pde.program._jaxpr import bodies_of, is_container, own_bind, walk
from mpx_pde.program._rebind import rebind


EXAMPLES = Path(__file__).parent.parent / "examples"
PRODUCTS = ("dot_general", "mixed_dot_general")


def load_example(name: str) -> ModuleType:
    """Imports a module of `examples/` by its file name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def emulate_tf32(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Rounds the operands of all products in `fun`, a function of PyTrees of arrays, to TF32's 10
    bits.

    The result has the arithmetic of an NVIDIA GPU's default float32 product, but not its speed.
    Take derivatives inside `fun`, so that their products are rounded as well.
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
    """Refines each derivative term of a step by a second evaluation."""

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
"""Transforms of the float32 step into precisions that the runner does not know."""


def trainer(
    name: str, precision: str, *, optimizer: str | None, steps: int | None, quick: bool = False
) -> Trainer:
    """Builds the trainer of a problem in a precision of the runner or of `OTHERS`."""
    if precision not in (*PRECISIONS, *OTHERS):
        choice = ", ".join((*PRECISIONS, *OTHERS))
        raise ValueError(f"there is no precision `{precision}`; there are {choice}.")
    problem = problems.load(name)
    given = {"optimizer": optimizer, "steps": steps or (QUICK_STEPS if quick else None)}
    known = "float32" if precision in OTHERS else precision
    given["transform"] = OTHERS.get(precision, lambda step: step)
    return Trainer((problem.quick if quick else None) or problem, known, **given)
