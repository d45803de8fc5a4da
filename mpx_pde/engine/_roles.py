"""Finds the roles of variables: which depend on the point, where equations are linear in these,
which have no derivative, and which part of a loss is the network.

A residual is a small difference of large numbers. If these are rounded first, the residual is lost,
and its gradient too. So the part of a loss that follows the network is differentiated as it is. The
network ends with the last product, or the last loop, that takes parameters. A product with data
(quadrature weights, a metric), a product of values with each other (a squared norm) and a product
whose result is a single number (a sum with trainable weights) may belong to the loss.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ..interpret import _tables as tables
from ..interpret._flat import Flat, Step, variables
from ..interpret._lines import line_of
from ._plan import Index
from ._streams import DEEP, FIRST, RAW, WILD, takes_derivatives


_WRITES = ("WriteEffect", "AccumEffect")
"""The names of the effects of writing to a reference. JAX has no public names for them."""


def as_key(x: Any) -> Hashable:
    """Returns a key that distinguishes values in a program: the type of a JAX array, or the entries
    of an array that is known while tracing."""
    if isinstance(x, jax.Array):
        return jax.typeof(x)
    if not eqx.is_array_like(x):
        return x
    return np.asarray(x).tobytes(), np.result_type(x), np.shape(x)


class Role(NamedTuple):
    """Facts about the variables of a program before it is evaluated.

    **Attributes:**

    - `stage`: how far each variable that depends on the point is from it.
    - `final`: the variables that no product and no loop depends on.
    - `stored`: the variables that are kept in half when they leave a layer.
    - `asked`: the streams of each variable that the results depend on, and `()` if they depend on
        its value. After the last nonlinear function, streams that nobody asked for are dropped.
    - `ends`: the positions of the products and loops of the network, in a whole loss. `final` then
        holds the variables that none of these depends on.
    - `params`: the variables computed from parameters alone, if there are no streams.
    - `data`: the results of equations that take only data, if there are no streams.
    - `still`: the variables without a derivative, such as a result of `jax.lax.stop_gradient`.
    - `half`: the variables that do not depend on the point and are effectively half.
    - `apart`: the variables that lead from the point to a loop that has no derivative in reverse
        mode, and the results of the loop.
    - `rules`: the rule of each equation, by the `id` of its step, if each has its own precision.
        The next three attributes are for this case.
    - `numbers`: the masters that are numbers known while tracing.
    - `scores`: the results of products of many matrices, such as the scores of attention.
    - `near`: the variables that are not rounded when they leave a layer, see `near_numbers` and
        `wide_in`.
    - `solved`: the variables that reach a factorization or a solve, see `wide_in`.
    - `entering`: the variables that enter layers in half, where they are checked for overflow.
    """

    stage: dict[int, int]
    final: set[int]
    stored: set[int]
    asked: dict[int, frozenset[Index]]
    ends: frozenset[int] | None = None
    params: Collection[int] = ()
    data: Collection[int] = ()
    still: set[int] | frozenset[int] = frozenset()
    half: Collection[int] = ()
    apart: frozenset[int] = frozenset()
    rules: Any = None
    numbers: Any = None
    scores: Collection[int] = frozenset()
    near: set[int] | frozenset[int] = frozenset()
    solved: set[int] | frozenset[int] = frozenset()
    entering: set[int] | frozenset[int] = frozenset()

    def is_data(self, step: Step) -> bool:
        """Returns whether an equation of a loss takes data, and nothing from the model."""
        return bool(step.outputs) and step.outputs[0] in self.data

    def facts(self, x: int) -> tuple[Hashable, ...]:
        """Returns the facts about a variable by which layers are compared."""
        sets = self.final, self.stored, self.params, self.data, self.still, self.half, self.scores
        sets = *sets, self.near, self.entering
        number = None if self.numbers is None else as_key(self.numbers.get(x))
        return self.stage.get(x), self.asked.get(x), number, *(x in every for every in sets)


def stage_after(step: Step, stage: Mapping[int, int]) -> int | None:
    """Returns the stage of the results of an equation, given the `stage` of the operands that
    depend on the point; `None` if none does."""
    here = max((stage[x] for x in step.variables if x in stage), default=None)
    if here is not None and step.name in tables.PRODUCTS:
        return FIRST if here == RAW else DEEP
    return DEEP if here == FIRST and not is_linear(step, stage) else here


def is_wild(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether the results of an equation are derivatives, or are computed from derivatives
    by an unbounded function."""
    passes = step.name not in tables.BOUNDED and any(stage.get(x) == WILD for x in step.variables)
    return passes or takes_derivatives(step.eqn)


def by_stream(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether each stream of a result depends on that stream of the operands alone."""
    one = step.name in tables.PRODUCTS and len(moving_in(step, stage)) == 1
    return one or is_linear(step, stage)


def is_linear(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether an equation is linear in the operands that depend on the point."""
    name = step.name
    moving = moving_in(step, stage)
    scales = name in ("mul", "convert_element_type") and len(moving) == 1
    return name in tables.LINEAR or scales or (name == "div" and moving == [0])


def moving_in(step: Step, stage: Mapping[int, int]) -> list[int]:
    """Returns the positions of the operands that depend on the point."""
    return [i for i, x in enumerate(step.inputs) if x in stage]


def dependent(flat: Flat, on: Iterable[int]) -> set[int]:
    """Returns the variables `on`, and all variables that depend on any of them."""
    out = set(on)
    for step in flat.steps:
        if not out.isdisjoint(step.variables):
            out.update(step.outputs)
    return out


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


def ends_of(
    flat: Flat, params: Collection[int], stage: Collection[int], looped: bool
) -> tuple[frozenset[int], set[int]]:
    """Returns the positions of the products, loops and checkpoints of a network among the
    equations, and all variables that are computed from parameters alone.

    **Arguments:**

    - `params`: the operands of the program that are parameters.
    - `stage`: the variables that are computed from data.
    - `looped`: whether the program is the step of a loop. There a single number may be the output
        of a network at one of many points.
    """
    given = set(params)
    ends = set()
    for i, step in enumerate(flat.steps):
        values = step.values
        chosen = values and given.issuperset(values) and not step.alone  # even by data
        if chosen or not any(x in stage for x in step.variables):
            if not given.isdisjoint(values):
                given.update(step.outputs)
        elif not given.isdisjoint(values):
            # A product whose entries are single terms is elementwise.
            sums = step.name in tables.PRODUCTS and contracted(step) != 1
            out: Any = step.eqn.outvars[0].aval if sums else None
            if step.alone or (sums and (looped or out.size != 1)):
                ends.add(i)
    return frozenset(ends), given


def contracted(step: Step) -> int:
    """Returns the number of terms that each entry of a product sums."""
    avals: list[Any] = [v.aval for v in step.eqn.invars[:2]]
    if "dot_general" not in step.name:
        return math.prod(avals[1].shape[1:])
    ((axes, _), _) = step.eqn.params["dimension_numbers"]
    return math.prod(avals[0].shape[i] for i in axes)


def divided(flat: Flat, roles: Role) -> tuple[list[Step], list[Step]]:
    """Returns the equations of the network, and those that follow it. The network does not depend
    on what follows. Effects, such as those of callbacks, stay in order."""
    network: list[Step] = []
    rest: list[Step] = []
    made: set[int] = set()
    affected = False
    for i, step in enumerate(flat.steps):
        effects = bool(step.eqn.effects)
        follows = i not in (roles.ends or ()) and roles.final.issuperset(step.outputs)
        later = not made.isdisjoint(step.variables) or (effects and affected)
        if later or (follows and step.outputs):
            rest.append(step)
            made.update(step.outputs)
            affected |= effects
        else:
            network.append(step)
    return network, rest


def check_references(flat: Flat, network: Sequence[Step], roles: Role) -> None:
    """Raises a `ValueError` if a network writes a value that depends on its data or parameters to
    a reference that is read later. The value that is read would not depend on them."""
    inside, written = {id(step) for step in network}, dict[int, Step]()
    known = (roles.stage.keys() | set(roles.params)) - roles.still
    for step in flat.steps:
        effects = {type(x).__name__ for x in step.eqn.effects}
        pairs = zip(step.inputs, step.eqn.invars, strict=True)
        references = variables([x for x, v in pairs if hasattr(v.aval, "inner_aval")])
        writes = id(step) in inside and not effects.isdisjoint(_WRITES)
        if writes and not known.isdisjoint(step.variables):
            written.update(dict.fromkeys(references, step))
        reads = "ReadEffect" in effects or step.name == "freeze"
        if reads and (found := [written[x] for x in references if x in written]):
            raise ValueError(
                "`forward=` does not follow what a network writes into a reference, such as one of "
                f"`jax.new_ref`, at {line_of(found[0].eqn, found[0].calls)}. Pass it on as an "
                "array, or leave out `forward=`."
            )
