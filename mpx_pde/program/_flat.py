"""A jaxpr as one flat list of equations."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Sharding

from . import _tables as tables
from ._jaxpr import (
    aval_of,
    bodies_of,
    contains,
    differentiable,
    in_context_of,
    is_key,
    scopes_of,
    walk,
)
from ._lines import source_of


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, because not all values have a hash
class Constant:
    """An operand that is not a variable, and so is in no set of variables."""

    value: Any
    aval: Any

    @property
    def number(self) -> Any:
        """Returns the number that it is; `None` for an array, for the key of random numbers, and
        for what is not known while tracing."""
        if np.ndim(self.value) or isinstance(self.value, Tracer):
            return None
        return None if is_key(self.aval) else self.value


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation with its operands and results by their numbers in the whole program, and with the
    inlined calls around it, outermost first."""

    eqn: JaxprEqn
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]
    calls: tuple[JaxprEqn, ...] = ()

    @cached_property
    def name(self) -> str:
        """Returns the name of the primitive."""
        return self.eqn.primitive.name

    @cached_property
    def variables(self) -> tuple[int, ...]:
        """Returns the operands that are variables."""
        return tuple(x for x in self.inputs if not isinstance(x, Constant))

    @cached_property
    def values(self) -> frozenset[int]:
        """Returns the variables among the operands that can have derivatives. Integers cannot."""
        live = differentiable(self.eqn.invars)
        return frozenset(x for i in live if not isinstance(x := self.inputs[i], Constant))

    @cached_property
    def power(self) -> int | None:
        """Returns the whole number to whose power the equation raises its operand, if any."""
        return tables.power_of(self.name, self.eqn.params)

    def exponent(self, given: Sequence[float]) -> float | None:
        """Returns the exponent of the result of a product, quotient, power or root of operands with
        the `given` exponents; `None` for other equations."""
        if self.name in tables.MULTIPLICATIONS | tables.PRODUCTS:
            return sum(given)
        if self.name in tables.DIVISIONS:
            return given[0] - given[1]
        power = tables.exponent_of(self.name, self.eqn.params)
        return None if power is None else power * given[0]

    @cached_property
    def holds_products(self) -> bool:
        """Returns whether the equation contains products."""
        return any(contains(inner, tables.PRODUCTS) for inner in bodies_of(self.eqn))

    @contextmanager
    def context(self, source: Any = None) -> Iterator[None]:
        """A context in which new equations keep the name scopes, the settings and the source line
        of the equation and of the calls around it. If `source` is given, its line is kept."""
        with ExitStack() as stack:
            for eqn in (*self.calls, self.eqn):
                stack.enter_context(in_context_of(eqn, source))
            yield

    @cached_property
    def alone(self) -> bool:
        """Returns whether the equation is kept out of layers that are evaluated again."""
        refers = any(contains(inner, ("new_ref",)) for inner in bodies_of(self.eqn))
        return self.holds_products or refers or self.name in tables.ALONE


class Flat(NamedTuple):
    """A program without calls: their bodies, such as that of a `jit`, stand in their place."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    constants: dict[int, Constant]

    @property
    def made(self) -> dict[int, Step]:
        """Returns the equation that makes each variable."""
        return {x: step for step in self.steps for x in step.outputs}

    def env(self, operands: Sequence[Any]) -> dict[int, Any]:
        """Returns the values of its constants and operands, to be extended by its equations."""
        out: dict[int, Any] = {k: c.value for k, c in self.constants.items()}
        out.update(zip(self.inputs, operands, strict=True))
        return out


def flatten(
    closed: ClosedJaxpr,
    *,
    forward_mode: bool,
    sharded: bool = False,
    numbers: Iterator[int] | None = None,
) -> Flat:
    """Inlines the calls of a jaxpr, and keeps the equations that its results depend on.

    With `forward_mode`, checkpoints and `custom_vjp` functions are inlined too, because they
    describe reverse mode. A function whose derivative only its backward rule knows, such as
    rounding that passes its cotangent through, is left as it is. Barriers are left out then,
    because they tie unrelated arrays together.
    With `sharded`, a call that names the shardings of its arrays is not inlined.
    `numbers` are those of the variables, by default from 0 on.
    """
    numbers = itertools.count() if numbers is None else numbers
    calls = tables.CALLS | tables.OF_REVERSE_MODE if forward_mode else tables.CALLS
    steps: list[Step] = []
    constants: dict[int, Constant] = {}

    def inline(
        closed: ClosedJaxpr, operands: Sequence[int | Constant], around: tuple[JaxprEqn, ...] = ()
    ) -> list[int | Constant]:
        jaxpr = closed.jaxpr
        own = [next(numbers) for _ in closed.consts]
        pairs = zip(own, closed.consts, jaxpr.constvars, strict=True)
        constants.update((k, Constant(value, var.aval)) for k, value, var in pairs)
        known = lambda atom: Constant(atom.val, atom.aval)
        return walk(jaxpr, own, operands, known, partial(step, around))

    def step(around: tuple[JaxprEqn, ...], _: int, eqn: JaxprEqn, inputs: list) -> Sequence:
        name = eqn.primitive.name
        own = forward_mode and name in tables.CUSTOM - tables.PUSHES and _is_flat(eqn)
        if name in calls and not own and not (sharded and _is_sharded(eqn)):
            return inline(bodies_of(eqn)[0], inputs, (*around, eqn))
        if forward_mode and name in tables.BARRIERS:
            return inputs
        out = tuple(next(numbers) for _ in eqn.outvars)
        eqn, inputs = _named(eqn, inputs)
        steps.append(Step(eqn, tuple(inputs), out, around))
        return out

    inputs = tuple(next(numbers) for _ in closed.jaxpr.invars)
    outputs = tuple(inline(closed, inputs))
    return Flat(needed(steps, outputs), inputs, outputs, constants)


def _named(eqn: JaxprEqn, inputs: list) -> tuple[JaxprEqn, list]:
    """Returns a reduction by a program that only adds, or takes the larger or smaller, as the
    operation that JAX has for it, with its operands. JAX itself does so where it sees the number
    that the reduction starts with, which it does not inside a trace."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("reduce", "reduce_window") or len(inputs) != 2:
        return eqn, inputs
    x, start = eqn.invars
    program = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    ops = [(e.primitive.name, {id(atom) for atom in e.invars}) for e in program.eqns]
    operands = {id(var) for var in program.invars}
    known = isinstance(inputs[1], Constant) and not isinstance(inputs[1].value, Tracer)
    if not known or len(ops) != 1 or ops[0][0] not in _MONOIDS or ops[0][1] != operands:
        return eqn, inputs
    first = np.asarray(inputs[1].value, aval_of(start).dtype)[()]

    def again(x):
        if name == "reduce":
            return lax.reduce(x, first, _MONOIDS[ops[0][0]], params["dimensions"])
        names = ("window_dimensions", "window_strides", "padding", "base_dilation")
        options = {k: params[k] for k in (*names, "window_dilation")}
        return lax.reduce_window(x, first, _MONOIDS[ops[0][0]], **options)

    traced = jax.make_jaxpr(again)(x.aval).jaxpr.eqns
    if len(traced) != 1 or traced[0].primitive.name == name:
        return eqn, inputs
    new = eqn.replace(primitive=traced[0].primitive, params=traced[0].params, invars=eqn.invars[:1])
    return new, inputs[:1]


_MONOIDS = {"add": lax.add, "max": lax.max, "min": lax.min}


def _is_sharded(eqn: JaxprEqn) -> bool:
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(x, Sharding) for x in shardings)


def variables(atoms: Sequence[int | Constant]) -> list[int]:
    return [x for x in atoms if not isinstance(x, Constant)]


def renamed(atoms: Sequence[int | Constant], same: Mapping[int, int]) -> tuple[int | Constant, ...]:
    """Returns operands with variables replaced by those that have the same value."""
    return tuple(x if isinstance(x, Constant) else same.get(x, x) for x in atoms)


def needed(steps: Sequence[Step], outputs: Sequence[int | Constant]) -> tuple[Step, ...]:
    """Returns the equations that the `outputs` depend on, and those that have effects."""
    wanted = set(variables(outputs))
    out = []
    for step in reversed(steps):
        if step.eqn.effects or not wanted.isdisjoint(step.outputs):
            out.append(step)
            wanted.update(step.variables)
    return tuple(reversed(out))


def merged(flat: Flat) -> Flat:
    """Returns a program without the equations that compute again what an earlier one does, such as
    the mean in a variance and that in a norm, or the layers of a network that a loss calls twice
    for the same points. Containers, functions with a backward rule, and what has effects stay. So
    does a function with a `custom_jvp` rule, unless JAX has traced both calls at once."""
    names = {k: ("array", id(c.value)) for k, c in flat.constants.items()}

    def name(x):
        return _name_of(x) if isinstance(x, Constant) else names.get(x, x)

    first: dict[Hashable, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    steps = []
    for step in flat.steps:
        step = dataclasses.replace(step, inputs=renamed(step.inputs, same))
        key = _key_of(step, tuple(map(name, step.inputs)))
        if key is not None and key in first:
            same.update(zip(step.outputs, first[key], strict=True))
            continue
        if key is not None:
            first[key] = step.outputs
        steps.append(step)
    return flat._replace(steps=tuple(steps), outputs=renamed(flat.outputs, same))


def _key_of(step: Step, inputs: tuple[Hashable, ...]) -> Hashable | None:
    """Returns what two equations have in common if they compute the same; `None` for an equation
    that is not compared."""
    if step.eqn.effects or step.name not in tables.MERGED or None in inputs:
        return None
    # A checkpoint, and a rule for derivatives, say what may be computed again.
    scopes = tuple(x for x in scopes_of(step.eqn) if x.startswith("mpx_pde."))
    params = tuple(sorted(step.eqn.params.items()))
    key = step.name, params, inputs, scopes, tuple(map(aval_of, step.eqn.outvars))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _name_of(x: Constant) -> Hashable | None:
    """Returns the dtype and the bits of a number, and `None` for an array."""
    if x.number is None:
        return None
    value = np.asarray(x.number, x.aval.dtype)
    return str(value.dtype), value.tobytes()


def read(x: int | Constant, env: Mapping[int, Any]) -> Any:
    """Returns the value of an operand."""
    if not isinstance(x, Constant):
        return env[x]
    if isinstance(x.value, int | float | complex):  # also JAX's literals, which have a dtype
        return np.asarray(x.value, x.aval.dtype)
    return x.value


def evaluated(
    flat: Flat, operands: Sequence[Any], bind: Callable[[Step, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Evaluates a program on arrays. `bind` evaluates an equation, in the context of this equation
    and of the calls around it."""
    env = flat.env(operands)
    for step in flat.steps:
        with step.context(source_of(step.eqn, step.calls)):
            out = bind(step, [read(x, env) for x in step.inputs])
        env.update(zip(step.outputs, out, strict=True))
    return [read(x, env) for x in flat.outputs]


def dependent(flat: Flat, on: Iterable[int]) -> set[int]:
    """Returns the variables `on`, and all variables that depend on any of them."""
    out = set(on)
    for step in flat.steps:
        if not out.isdisjoint(step.variables):
            out.update(step.outputs)
    return out


def reaching(
    flat: Flat,
    out: set[int],
    carried: Collection[tuple[int, int]],
    operands_of: Callable[[Step], Iterable[int]],
) -> set[int]:
    """Adds to `out`, from the end of a program to its beginning, what `operands_of` yields for each
    equation. `carried` pairs the position of a result with that of the operand that it becomes in
    the next step of a loop: the result is added if the operand is."""
    while True:
        for step in reversed(flat.steps):
            out.update(operands_of(step))
        more = variables([flat.outputs[i] for i, j in carried if flat.inputs[j] in out])
        if out.issuperset(more):
            return out
        out.update(more)


def moving_from(flat: Flat, on: Iterable[int]) -> set[int]:
    """Returns the variables `on`, and all variables that JAX gives a tangent if these have one."""
    out = set(on)
    for step in flat.steps:
        if step.name not in tables.CONSTANT and not out.isdisjoint(step.values):
            out.update(step.outputs[i] for i in differentiable(step.eqn.outvars))
    return out


def _is_flat(eqn: JaxprEqn) -> bool:
    """Returns whether a function with its own derivative computes what has none but zero: its
    results depend on its operands only through steps, such as rounding."""
    flat = flatten(bodies_of(eqn)[0], forward_mode=True)
    on = [flat.inputs[i] for i in differentiable(eqn.invars)]
    out = {x for i in differentiable(eqn.outvars) if (x := flat.outputs[i]) in dependent(flat, on)}
    return bool(out) and out.isdisjoint(moving_from(flat, on))
