"""Evaluates a program without streams in which each equation has its own precision.

Between products, values are computed in float32. Results that are computed from halves
may be stored in half, between products and for the backward pass.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..products._order import rounded_cotangent
from ..program import _tables as tables
from ..program._flat import Flat, Step, flatten, variables
from ..program._jaxpr import bodies_of, contains, is_container, own_bind
from ..program._lines import source_of
from ._biases import is_biased
from ._containers import ENTERED, Containers
from ._custom import own_in_compute_dtype
from ._derivative_of import with_derivative_of
from ._evaluate import AbstractEvaluator, entering
from ._mixed_roles import (
    INTO_A_SOLVE,
    OF_DERIVATIVES,
    MixedRoles,
    PrecisionRule,
    full_in,
    instead_of_halves,
    moves_masters,
    rule_of,
    scores_in,
)
from ._near import near_numbers, summed_in
from ._products import FULL, full_product, gives_way, half_product, split_product
from ._roles import is_wild
from ._segments import Part, is_light, multiplied_only
from ._storage import DEEP, WILD, Staged, Storage, Value, array_of
from ._unrounded import Wide, wide_in
from .taylor._algebra import Algebra
from .taylor._jets import Jet, cast, is_inexact, primal_of
from .taylor._moments import moments_p, with_moments
from .taylor._plan import Plan
from .taylor._rules import Rules


_RULES_OF_VALUES = Rules(Algebra(Plan(())))
"""The rules for values without streams."""


@dataclasses.dataclass(frozen=True)
class Mixed(AbstractEvaluator[MixedRoles]):
    """An evaluation of a program without streams.

    A value is an array or a jet without streams. Arrays are masters, or masters that were moved.
    They stay in float32 until a product rounds them.

    **Attributes:**

    - `dtype`: the half type.
    - `algorithm`: the algorithm that splits products of float32; `None` for products of halves.
    - `listener`: an object that returns the `overrides` that ask for half and for float32, and is
        called with each `operation` and `program`; `None` without overrides and reports.
    - `around`: the containers whose inside is evaluated, outermost first.
    """

    dtype: np.dtype
    algorithm: lax.DotAlgorithmPreset | None = None
    listener: Any = None
    around: tuple[JaxprEqn, ...] = ()

    def __call__(self, closed: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr in its own dtypes. Its operands are masters, except those
        that it has in half."""
        operands = [
            Staged(Jet(x)) if is_inexact(v) and v.dtype == self.dtype else x
            for x, v in zip(arrays, closed.in_avals, strict=True)
        ]
        out = map(array_of, self.program(closed, operands))
        return [
            cast(jnp.asarray(x), v.dtype) if is_inexact(v) else x
            for x, v in zip(out, closed.out_avals, strict=True)
        ]

    @property
    def storage(self) -> Storage:
        return Storage(FULL, self.dtype)

    def program(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Any],
        unrounded: Sequence[int] | None = None,
        solved: Sequence[int] = (),
        carried: Sequence[tuple[int, int]] | None = None,
        **_: Any,
    ) -> list[Any]:
        flat = flatten(closed, forward_mode=False, sharded=True)
        env, stages = entering(flat, operands)
        if self.listener is None:
            # A listener overrides and reports the program as it is.
            flat = with_moments(flat, env)
        rounds = near_numbers(flat, unrounded or (), carried or ())
        wide = wide_in(flat, unrounded, solved, carried or ())
        roles = self._roles(flat, env, stages, rounds, wide)
        out = self._run(flat, env, roles)
        if self.listener is not None:
            self.listener.program(flat, roles)
        return out

    def _roles(
        self,
        flat: Flat,
        env: Mapping[int, Any],
        stages: dict[int, int],
        near: set[int],
        wide: Wide,
    ) -> MixedRoles:
        """Returns the roles of variables, given those that are `near` a number (`near_numbers`),
        and those that are `wide` because of what follows (`wide_in`).
        `stored` holds halves, and computed values that only half products read; the evaluation adds
        the others."""
        rules = {id(s): self._rule(s.eqn, (*self.around, *s.calls)) for s in flat.steps}
        for step in flat.steps:
            if not moves_masters(step, stages):
                # Derivatives would overflow or vanish in float16.
                wild = self.dtype == np.float16 and is_wild(step, stages)
                stages.update(dict.fromkeys(step.outputs, WILD if wild else DEEP))
            if any(stages.get(x) == WILD for x in step.variables):
                rules[id(step)] = instead_of_halves(step, rules[id(step)], OF_DERIVATIVES)
            if not wide.solved.isdisjoint(step.outputs):
                rules[id(step)] = instead_of_halves(step, rules[id(step)], INTO_A_SOLVE)
        stored = {k for k, x in env.items() if self._is_half(x)}
        if self.algorithm is None:
            outputs, is_half = variables(flat.outputs), lambda s: rules[id(s)].name == "product"
            stored |= stages.keys() & multiplied_only(flat.steps, outputs, is_half, tables.LAYOUT)
        full, scores = full_in(flat, bool(self.around)), scores_in(flat)
        unrounded = near - summed_in(flat, stages)
        if self.algorithm is None:
            unrounded |= wide.unrounded
        return MixedRoles(stages, full, stored, rules, unrounded, wide.solved, scores, {})

    def governs(self, aval: Any) -> bool:
        """Returns whether a value is float32 or half in the program. All others (integers, bools,
        keys, float64, complex, references) are left unchanged."""
        dtype = getattr(aval, "dtype", None)
        return hasattr(aval, "weak_type") and (dtype == FULL or dtype == self.dtype)

    def _rule(self, eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> PrecisionRule:
        half, full = self.listener.overrides(eqn, around) if self.listener else (None, None)
        name, asked = eqn.primitive.name, full is not None
        governed = sum(self.governs(v.aval) for v in eqn.invars)
        if not governed:
            return PrecisionRule("own", "none of its operands is float32 or half", asked=asked)
        rule = rule_of(eqn)
        if sum(is_inexact(v.aval) for v in eqn.invars) > governed:
            return rule._replace(name="own", asked=asked)
        if rule.name == "convert" and not self.governs(eqn.outvars[0].aval):
            return rule._replace(name="own")
        if rule.name in ("own", "convert"):
            return rule
        if asked:
            return PrecisionRule("full", f"full={full!r}", asked=True)
        if half is not None:
            return PrecisionRule(
                "product" if name in tables.JAX_PRODUCTS else "half", f"half={half!r}"
            )
        return rule

    def _part(self, part: Part, env: dict[int, Any], roles: MixedRoles, alike: dict) -> None:
        if part.alone:
            self._directly(part, env, roles)
        else:
            shared = self.listener is None and roles.stages.keys() >= set(part.outputs)
            values = [env[k] for k in part.inputs]
            self._layer(part, values, env, roles, alike if shared else {})
        roles.stored.update(k for k in part.outputs if self._is_half(env[k]))

    def _opened(
        self, part: Part, values: Sequence[Any], roles: MixedRoles, one: Any = None
    ) -> dict[int, Any]:
        # Each input is loaded once, so its cotangents are added in float32.
        env = dict(zip(part.inputs, map(self.storage.loaded, values), strict=True))
        if one is not None:
            scores = self._scores_in(part, values, roles)
            env |= {k: Jet(env[k].primal * one) for k in scores}
        return env

    def _scores_in(self, part: Part, values: Sequence[Any], roles: MixedRoles) -> list[int]:
        """Returns the scores that a layer takes in half."""
        pairs = zip(part.inputs, values, strict=True)
        return [k for k, x in pairs if k in roles.scores and self._is_half(x)]

    def _again(
        self, layer: Callable, part: Part, values: Sequence[Any], roles: MixedRoles
    ) -> Callable[[list], list]:
        """Returns a layer that the backward pass evaluates again, if it is checkpointed and takes
        halves.

        `jax.checkpoint` enforces this by barriers before all inputs of a layer and its cotangents.
        Instead, scores are multiplied by a factor of one that XLA does not know. XLA for GPUs pads
        products of many matrices to sizes that are multiples of 8. The kernels of the layer remove
        the padding as they read. A barrier there would take a copy.
        """
        pairs = zip(part.inputs, values, strict=True)
        stored = any(
            self._is_half(x) or (isinstance(x, Jet) and k in roles.unrounded) for k, x in pairs
        )
        if not (part.checkpointed and stored):
            return layer
        if not self._scores_in(part, values, roles):
            return jax.checkpoint(layer)

        def again(_, traced):
            one = lax.optimization_barrier(jnp.ones((), FULL))
            return layer(traced, partial(self._opened, one=one))

        forward = lambda traced: (layer(traced), ())
        run = with_derivative_of(forward, jax.checkpoint(again, prevent_cse=False))
        return lambda traced: run(traced)[0]

    def _kept(self, x: int, value: Any, part: Part, roles: MixedRoles) -> Any:
        stores = isinstance(value, Jet) and x in roles.stored and x not in roles.unrounded
        return self.storage.stored(value) if stores else value

    # One equation.

    def _source(self, step: Step) -> Any:
        return source_of(step.eqn, step.calls)

    def _result(self, x: int, value: Any, aval: Any, roles: MixedRoles) -> Any:
        value = primal_of(value)
        if x not in roles.stages:
            return value
        if value.dtype == self.dtype:
            roles.stored.add(x)
        return Jet(value)

    def _note(self, step: Step, roles: MixedRoles) -> None:
        if self.listener is not None:
            self.listener.operation(step, (*self.around, *step.calls), roles)

    def _governs(self, step: Step, operands: Sequence[Any], roles: MixedRoles) -> bool:
        return roles.rule(step).name != "own"

    def _computed(
        self, step: Step, operands: list[Any], held: Sequence[bool], roles: MixedRoles
    ) -> Sequence[Any]:
        self._follow(step, operands, roles)
        eqn, rule = step.eqn, roles.rule(step).name
        values = list(map(primal_of, operands))
        if not roles.stages.keys() & set(step.outputs) and step.outputs:
            return values if rule == "convert" else own_bind(eqn, values)
        stored = bool(step.outputs) and (roles.stored - roles.unrounded).issuperset(step.outputs)
        moves = rule != "convert" and not is_light(eqn) and not is_container(eqn)
        # A value may be gathered many times. Its cotangents are summed in float32.
        moves = moves and step.name not in tables.GATHERS
        if rule == "half" or (stored and moves):
            # Operations outside of layers, such as sorts and collectives, take halves.
            return own_bind(eqn, [cast(x, self.dtype) if is_inexact(x) else x for x in values])
        loaded = list(map(primal_of, map(self.storage.loaded, operands)))
        if rule == "convert":
            return loaded
        if eqn.primitive is moments_p:
            (x,) = loaded
            return _RULES_OF_VALUES.moments(eqn, [Jet(x)])
        out = own_in_compute_dtype(eqn, loaded, self.storage)
        if is_biased(eqn, operands, held):
            return [rounded_cotangent(x, self.dtype) for x in out]
        return out

    def _multiplied(self, step: Step, operands: list[Any], roles: MixedRoles) -> list[Any]:
        """Returns the results of a product of masters (arrays) and jets. A half product rounds a
        master inside, so its cotangent stays in float32. A jet is rounded before the product, so
        the backward pass keeps it in half. The result of a half product is in half, unless it is
        not to be rounded or the program names another dtype."""
        eqn, rule = step.eqn, roles.rule(step).name
        values = list(map(primal_of, operands))
        if rule == "product":
            # What follows from it may be stored in half, even where this result is not rounded.
            roles.stored.update(step.outputs)
        if rule == "mixed" and not gives_way(eqn):
            return own_bind(eqn, values)
        dtype = self.dtype if rule != "full" and self.algorithm is None else FULL
        arrays = [
            cast(x, dtype) if isinstance(y, Jet) else x
            for x, y in zip(values, operands, strict=True)
        ]
        if rule == "full":
            return full_product(eqn, arrays)
        if self.algorithm is None:
            out_dtype = FULL if step.outputs[0] in roles.unrounded else self.dtype
            return [half_product(eqn, arrays, self.dtype, out_dtype)]
        return [split_product(eqn, arrays, self.algorithm)]

    def _enters(self, step: Step, operands: Sequence[Any]) -> bool:
        # Its inside may change precision.
        if step.name not in ENTERED:
            return False
        multiplies = any(contains(x, tables.JAX_PRODUCTS) for x in bodies_of(step.eqn))
        if self.listener or multiplies or step.name in ("jit", "remat2", "shard_map"):
            return True
        return not is_light(step.eqn) and any(map(self._is_half, operands))

    def _entered(self, step: Step, operands: list[Any], roles: MixedRoles) -> list[Any]:
        self._follow(step, operands, roles)
        inner = dataclasses.replace(self, around=(*self.around, *step.calls, step.eqn))
        unrounded = [i for i, x in enumerate(step.outputs) if x in roles.unrounded]
        solved = [i for i, x in enumerate(step.outputs) if x in roles.solved]
        program = partial(inner.program, unrounded=unrounded, solved=solved)
        enter = Containers(Plan(()), program, self.storage.loaded, self._shared)
        staged = list(map(roles.staged, step.inputs, operands))
        return list(map(array_of, enter(step.eqn, staged)))

    def _shared(self, x: Value) -> Value:
        """Returns a value that all steps of a loop take, as a master: its cotangents add up over
        the steps. Values that may be of any size stay as they are."""
        loaded = self.storage.loaded(x)
        return loaded if getattr(loaded, "stage", None) == WILD else array_of(loaded)

    def _fits(self, number: Any) -> bool:
        """Returns whether a constant neither overflows nor underflows in half."""
        info, size = jnp.finfo(self.dtype), abs(float(number))
        normal = float(info.tiny) <= size <= float(info.max)
        return normal or size == 0 or not math.isfinite(size)

    def _follow(self, step: Step, operands: Sequence[Any], roles: MixedRoles) -> None:
        """Records which results of an equation count as half, and which ones are numbers that are
        known while tracing."""
        rule, outputs = roles.rule(step).name, step.outputs
        numbers = [_number(x, y, roles) for x, y in zip(step.inputs, operands, strict=True)]
        if rule == "layout" and len(numbers) == 1 and numbers[0] is not None:
            roles.numbers.update(dict.fromkeys(outputs, numbers[0]))
        if rule == "convert":
            half = step.eqn.params["new_dtype"] == self.dtype
        else:
            half = rule in ("follow", "layout") and roles.full.isdisjoint(outputs)
            half = half and self._gives_way(step, operands, numbers, roles)
        roles.stored.update(x for x in outputs if half and x in roles.stages)

    def _gives_way(
        self, step: Step, operands: Sequence, numbers: Sequence, roles: MixedRoles
    ) -> bool:
        """Returns whether an operand is half and no other one must stay in float32."""
        half = [x in roles.stored for x in step.inputs]
        for x, number, is_half in zip(operands, numbers, half, strict=True):
            if is_half or not is_inexact(primal_of(x)):
                continue
            # The difference of a prediction and its target is a residual, not a bias.
            residual = number is None and step.name in tables.SUBTRACTIONS | tables.DIVISIONS
            if isinstance(x, Jet) or residual:
                return False
            if number is not None and not self._fits(number):
                return False
        return any(half)


def _number(x: Any, operand: Any, roles: MixedRoles) -> Any:
    if x in roles.numbers:
        return roles.numbers[x]
    concrete = isinstance(operand, np.ndarray | np.generic) and np.ndim(operand) == 0
    return operand if concrete and is_inexact(operand) else None
