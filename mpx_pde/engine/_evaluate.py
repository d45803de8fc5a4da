"""Evaluates a program layer by layer, and layers equation by equation."""

import abc
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Flat, Step, read
from ..program._jaxpr import aval_of, own_bind
from ._roles import AbstractRoles
from ._segments import Part, parts_of, signature
from ._storage import Staged, Storage, Value, jet_of, typed
from .taylor._jets import Jet, is_traced, primal_of


_Roles = TypeVar("_Roles", bound=AbstractRoles)


class AbstractEvaluator(abc.ABC, Generic[_Roles]):
    """Evaluates a program. A subclass is a policy. It says in which dtype an equation multiplies
    (`_multiplied`), in which one it computes anything else (`_computed`), and what is kept of a
    result (`_kept`). It finds the roles of variables for that beforehand.

    **Attributes:**

    - `storage`: the dtypes that values are computed in and kept in.
    - `around`: the containers whose inside is evaluated, outermost first.
    """

    storage: Storage
    around: tuple[JaxprEqn, ...]

    def _run(self, flat: Flat, env: dict[int, Any], roles: _Roles) -> list[Value]:
        """Returns the results of a program, given its constants and operands in `env`."""
        alike: dict[Hashable, Callable] = {}
        for part in parts_of(flat, roles):
            self._part(part, env, roles, alike)
        return [roles.staged(x, read(x, env)) for x in flat.outputs]

    @abc.abstractmethod
    def _part(self, part: Part, env: dict[int, Any], roles: _Roles, alike: dict) -> None:
        """Evaluates a part of a program, as a layer (`_layer`) or directly (`_directly`)."""

    def _directly(self, part: Part, env: dict[int, Any], roles: _Roles) -> None:
        """Evaluates a part that is no layer. The backward pass keeps what JAX keeps of it."""
        halves = {k for k in part.inputs if self._is_half(env[k])}
        env.update(zip(part.outputs, self._inside(part, env, roles, halves), strict=True))

    def _layer(
        self, part: Part, values: list[Any], env: dict[int, Any], roles: _Roles, alike: dict
    ) -> None:
        """Evaluates a layer, the unit that the backward pass evaluates again, on the `values` that
        it takes. Layers that are `alike` are traced, differentiated and transposed once."""
        # Values known while tracing stay known: what made them may have no derivative.
        traced, known = eqx.partition(values, is_traced)
        halves = {k for k, x in zip(part.inputs, values, strict=True) if self._is_half(x)}

        def layer(traced, opened=self._opened):
            inner = opened(part, eqx.combine(traced, known), roles)
            return self._inside(part, inner, roles, halves)

        key = signature(part, roles, values)
        if key not in alike:
            alike[key] = self._again(layer, part, values, roles)
        env.update(zip(part.outputs, alike[key](traced), strict=True))

    def _inside(
        self, part: Part, env: dict[int, Any], roles: _Roles, halves: Collection[int]
    ) -> list[Any]:
        """Returns the results of a part of a program as they are kept. `halves` are the variables
        that enter it in half."""
        held, made = {*halves}, {x: step for step in part.steps for x in step.outputs}
        for step in part.steps:
            self._step(step, env, roles, held)
        out = []
        for k in part.outputs:
            with made[k].context(self._source(made[k])):
                out.append(self._kept(k, env[k], part, roles))
        return out

    def _step(self, step: Step, env: dict[int, Any], roles: _Roles, halves: set[int]) -> None:
        """Evaluates an equation. `halves` are variables that are half, that were loaded from half,
        and moves of such."""
        operands = [read(x, env) for x in step.inputs]
        held = [x in halves for x in step.inputs]
        with step.context(self._source(step)):
            out = self._results(step, operands, held, roles)
        moved = step.name in tables.MOVES and all(held)
        for k, x, v in zip(step.outputs, out, step.eqn.outvars, strict=True):
            env[k] = self._result(k, x, aval_of(v), roles)
            if moved or self._is_half(env[k]):
                halves.add(k)
        self._note(step, roles)

    def _results(
        self, step: Step, operands: list[Any], held: Sequence[bool], roles: _Roles
    ) -> Sequence[Any]:
        """Returns the results of an equation. An equation that the policy does not govern keeps the
        dtypes of the program."""
        if self._enters(step, operands):
            return self._entered(step, operands, roles)
        if not self._governs(step, operands, roles):
            return own_bind(step.eqn, typed(step.eqn, list(map(primal_of, operands))))
        if step.name in tables.PRODUCTS:
            return self._multiplied(step, operands, roles)
        return self._computed(step, operands, held, roles)

    def _is_half(self, x: Any) -> bool:
        return isinstance(x, Jet) and self.storage.is_stored(x.primal)

    # Layers.

    @abc.abstractmethod
    def _opened(self, part: Part, values: Sequence[Any], roles: _Roles) -> dict[int, Any]:
        """Returns the values that a layer takes, as its equations read them."""

    @abc.abstractmethod
    def _again(
        self, layer: Callable, part: Part, values: Sequence[Any], roles: _Roles
    ) -> Callable[[list], list]:
        """Returns a function of the traced values that a layer takes, as a function that the
        backward pass evaluates again. `values` are all that it takes."""

    # Equations.

    @abc.abstractmethod
    def _source(self, step: Step) -> Any:
        """Returns the source line to attribute an equation to; `None` for its own."""

    @abc.abstractmethod
    def _enters(self, step: Step, operands: Sequence[Any]) -> bool:
        """Returns whether the programs in an equation are evaluated by this policy, too."""

    @abc.abstractmethod
    def _entered(self, step: Step, operands: list[Any], roles: _Roles) -> list[Any]:
        """Returns the results of an equation, and evaluates the programs in it by this policy."""

    @abc.abstractmethod
    def _governs(self, step: Step, operands: Sequence[Any], roles: _Roles) -> bool:
        """Returns whether the policy, and not the program, chooses the dtypes of an equation."""

    @abc.abstractmethod
    def _multiplied(self, step: Step, operands: list[Any], roles: _Roles) -> list[Any]:
        """Returns the result of a product in the dtype that it is multiplied in."""

    @abc.abstractmethod
    def _computed(
        self, step: Step, operands: list[Any], held: Sequence[bool], roles: _Roles
    ) -> Sequence[Any]:
        """Returns the results of another equation in the dtype that it is computed in, given which
        operands are `held` in half."""

    @abc.abstractmethod
    def _result(self, x: int, value: Any, aval: Any, roles: _Roles) -> Any:
        """Returns the value of a variable, which has the type `aval` in the program."""

    @abc.abstractmethod
    def _kept(self, x: int, value: Any, part: Part, roles: _Roles) -> Any:
        """Returns the value of a variable as it leaves a part of the program."""

    def _note(self, step: Step, roles: _Roles) -> None:
        """Records an equation, if anybody asks for a report."""


def entering(flat: Flat, operands: Sequence[Value]) -> tuple[dict[int, Any], dict[int, int]]:
    """Returns the values of the constants and operands of a program, and the stages of those that
    depend on the point."""
    pairs = zip(flat.inputs, operands, strict=True)
    stages = {k: x.stage for k, x in pairs if isinstance(x, Staged)}
    return flat.env(list(map(jet_of, operands))), stages
