"""Finds the roles of variables: which depend on the point, where equations are linear in these,
and which have no derivative."""

import abc
from collections.abc import Hashable, Mapping, Set
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, variables
from ..program._jaxpr import bodies_of
from ._storage import WILD, Staged, Value
from .taylor._jets import Jet, Operand


def as_key(x: Any) -> Hashable:
    """Returns a key that distinguishes values in a program: the type of a JAX array, or the entries
    of an array that is known while tracing."""
    if isinstance(x, jax.Array):
        return jax.typeof(x)
    if not eqx.is_array_like(x):
        return x
    return np.asarray(x).tobytes(), np.result_type(x), np.shape(x)


class AbstractRoles(abc.ABC):
    """The roles of the variables of a program, which a policy collects before it is evaluated.

    **Attributes:**

    - `stages`: how far each variable that depends on the point is from it.
    - `final`: the variables that no product and no loop depends on.
    - `stored`: the variables that are kept in half when they leave a layer.
    - `unlayered`: the variables that are in no layer with others.
    """

    stages: dict[int, int]
    final: Set[int]
    stored: set[int]
    unlayered: frozenset[int]

    @abc.abstractmethod
    def of(self, x: int) -> tuple[Hashable, ...]:
        """Returns the facts about a variable by which layers are compared."""

    @abc.abstractmethod
    def rule(self, step: Step) -> Hashable:
        """Returns the rule of an equation by which layers are compared."""

    @abc.abstractmethod
    def kind(self, step: Step) -> str:
        """Returns the place of an equation among layers: `"light"` and `"product"` are in one,
        `"raw"` and `"constant"` are outside without an end of one, `"alone"` ends one."""

    @abc.abstractmethod
    def stage_of(self, x: int | Constant) -> int | None:
        """Returns how far an operand is from the point; `None` if it does not depend on it."""

    def staged(self, x: int | Constant, value: Operand) -> Value:
        """Returns the value of an operand as it enters a program."""
        if not isinstance(value, Jet):
            return value
        stage = self.stage_of(x)
        assert stage is not None, x
        return Staged(value, stage)


def takes_derivatives(eqn: JaxprEqn) -> bool:
    """Returns whether results of an equation, or of one inside it, are derivatives."""
    inside = (inner for body in bodies_of(eqn) for inner in body.jaxpr.eqns)
    return eqn.primitive.name in tables.DERIVATIVES or any(map(takes_derivatives, inside))


def is_wild(step: Step, stages: Mapping[int, int]) -> bool:
    """Returns whether the results of an equation are derivatives, or are computed from derivatives
    by an unbounded function."""
    passes = step.name not in tables.BOUNDED and any(stages.get(x) == WILD for x in step.variables)
    return passes or takes_derivatives(step.eqn)


def is_linear(step: Step, stages: Mapping[int, int]) -> bool:
    """Returns whether an equation is linear in the operands that depend on the point."""
    name = step.name
    moving = moving_in(step, stages)
    scales = name in tables.MULTIPLICATIONS | tables.CASTS and len(moving) == 1
    return name in tables.LINEAR or scales or (name in tables.DIVISIONS and moving == [0])


def moving_in(step: Step, stages: Mapping[int, int]) -> list[int]:
    """Returns the positions of the operands that depend on the point."""
    return [i for i, x in enumerate(step.inputs) if x in stages]


def still_in(flat: Flat) -> set[int]:
    """Returns the variables of a program that have no derivative at all, and those with respect to
    which no result has one, such as a variable that only `jax.lax.stop_gradient` takes."""
    out = set[int]()
    every, read = set(flat.inputs), set(variables(flat.outputs))
    for step in flat.steps:
        every.update(step.outputs)
        if step.name in tables.CONSTANT or step.values <= out:
            out.update(step.outputs)
    for step in reversed(flat.steps):
        asked = step.eqn.effects or not read.isdisjoint(step.outputs)
        if asked and step.name not in tables.CONSTANT:
            read.update(step.values)
    return out | (every - read)
