"""The roles of operands: what of an equation depends on the point, whether it is linear in that,
what is still; and which part of a loss is the network, and which is what that is measured by.

A residual is a difference of large numbers, and small. Rounded before the difference is taken, it
would be lost, and with it the gradient; so what follows the network is differentiated as it stands.
The network ends with the last product, or the last loop, that parameters go into. A product with
data (weights of a quadrature, a metric), one of values with each other (a squared norm) and one
that comes to a single number (a sum by trainable weights) may be of the loss.
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
"""Names of the effects of writing into a reference, for which JAX has no public one."""


def as_key(x: Any) -> Hashable:
    """Returns what tells a value from others in a program: of an array that is not known its type,
    of one that is known its entries."""
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
    - `stored`: those that are kept in half where they leave a layer.
    - `asked`: the streams of each variable that the results depend on, and `()` where they depend
        on its value. Behind the last function that is not linear, what nobody asked for is not
        carried on.
    - `ends`: the products and loops of a network, by position, where a whole loss is evaluated;
        `final` is then what none of these depends on.
    - `params`: what is made of parameters alone, where there are no streams.
    - `data`: the results of equations that take nothing but data there.
    - `still`: what has no derivative, such as what comes of `jax.lax.stop_gradient`.
    - `half`: the variables that do not depend on the point and are effectively half.
    - `apart`: what leads from the point to a loop that has no derivative in reverse mode, and what
        the loop returns.
    - `rules`: what is decided for each equation, by its identity, where that is known.
    - `numbers`: the masters there that are numbers known while tracing.
    - `scores`: the results of products of many matrices there, such as the scores of attention.
    - `near`: what is not rounded there where it leaves a layer, see `near_numbers`.
    - `entering`: what enters layers in half, and is looked through for overflows there.
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
    entering: set[int] | frozenset[int] = frozenset()

    def is_data(self, step: Step) -> bool:
        """Returns whether an equation of a loss takes data, and nothing of the model."""
        return bool(step.outputs) and step.outputs[0] in self.data

    def facts(self, x: int) -> tuple[Hashable, ...]:
        """Returns what is known of a variable."""
        sets = self.final, self.stored, self.params, self.data, self.still, self.half, self.scores
        sets = *sets, self.near, self.entering
        number = None if self.numbers is None else as_key(self.numbers.get(x))
        return self.stage.get(x), self.asked.get(x), number, *(x in every for every in sets)


def stage_after(step: Step, stage: Mapping[int, int]) -> int | None:
    """How far from the point the results of an equation are, by the `stage` of those operands that
    depend on it; `None` if none does."""
    here = max((stage[x] for x in step.variables if x in stage), default=None)
    if here is not None and step.name in tables.PRODUCTS:
        return FIRST if here == RAW else DEEP
    return DEEP if here == FIRST and not is_linear(step, stage) else here


def is_wild(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether the results of an equation are derivatives, or made of these by what has no
    bounds."""
    passes = step.name not in tables.BOUNDED and any(stage.get(x) == WILD for x in step.variables)
    return passes or takes_derivatives(step.eqn)


def by_stream(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether each stream of a result comes of the same stream of the operands alone."""
    one = step.name in tables.PRODUCTS and len(moving_in(step, stage)) == 1
    return one or is_linear(step, stage)


def is_linear(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether an equation is linear in what depends on the point."""
    name = step.name
    moving = moving_in(step, stage)
    scales = name in ("mul", "convert_element_type") and len(moving) == 1
    return name in tables.LINEAR or scales or (name == "div" and moving == [0])


def moving_in(step: Step, stage: Mapping[int, int]) -> list[int]:
    """Which operands of an equation depend on the point."""
    return [i for i, x in enumerate(step.inputs) if x in stage]


def dependent(flat: Flat, on: Iterable[int]) -> set[int]:
    """Some variables, and all that depends on any of them."""
    out = set(on)
    for step in flat.steps:
        if not out.isdisjoint(step.variables):
            out.update(step.outputs)
    return out


def still_in(flat: Flat) -> set[int]:
    """The variables of a program that have no derivative, whatever it is taken by, and those whose
    derivative leads to nothing, such as what goes into `jax.lax.stop_gradient` alone."""
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
    """The products, loops and checkpoints of a network, by the positions of their equations, and
    all variables that are made of parameters alone.

    **Arguments:**

    - `params`: the operands of the program that are parameters.
    - `stage`: the variables that are computed of data.
    - `looped`: whether it is the step of a loop, where a single number may be the output of a
        network at one of many points.
    """
    given = set(params)
    ends = set()
    for i, step in enumerate(flat.steps):
        values = step.values
        chosen = values and given.issuperset(values) and not step.alone  # be it by data
        if chosen or not any(x in stage for x in step.variables):
            if not given.isdisjoint(values):
                given.update(step.outputs)
        elif not given.isdisjoint(values):
            # An elementwise product may be written as one that sums nothing up.
            sums = step.name in tables.PRODUCTS and contracted(step) != 1
            out: Any = step.eqn.outvars[0].aval if sums else None
            if step.alone or (sums and (looped or out.size != 1)):
                ends.add(i)
    return frozenset(ends), given


def contracted(step: Step) -> int:
    """How many terms each entry of a product sums up."""
    avals: list[Any] = [v.aval for v in step.eqn.invars[:2]]
    if "dot_general" not in step.name:
        return math.prod(avals[1].shape[1:])
    ((axes, _), _) = step.eqn.params["dimension_numbers"]
    return math.prod(avals[0].shape[i] for i in axes)


def divided(flat: Flat, roles: Role) -> tuple[list[Step], list[Step]]:
    """The network, and what follows it: nothing of the one depends on the other. Effects, such as
    those of callbacks, stay in their order."""
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
    """Raises a `ValueError` where a network writes into a reference, which is read again, what
    depends on its data or parameters: what is read would not."""
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
