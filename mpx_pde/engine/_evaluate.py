"""Evaluates a program layer by layer, and layers equation by equation."""

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
from jax.extend.core import JaxprEqn

from ..program._flat import Flat, read
from ._roles import AbstractRole
from ._segments import Part, parts_of, signature
from ._storage import Given, Staged, jet_of
from .taylor._jets import is_traced


_Role = TypeVar("_Role", bound=AbstractRole)


class AbstractEvaluator(abc.ABC, Generic[_Role]):
    """Evaluates a program. A subclass says of each equation what it is multiplied in, what it is
    computed in, and what is kept of it. It collects the facts for that beforehand, in a role.

    **Attributes:**

    - `around`: the containers whose inside is evaluated, outermost first.
    """

    around: tuple[JaxprEqn, ...]

    def _run(self, flat: Flat, env: dict[int, Any], roles: _Role) -> list[Given]:
        """Returns the results of a program, given its constants and operands in `env`."""
        alike: dict[Hashable, Callable] = {}
        for part in parts_of(flat, roles):
            self._part(part, env, roles, alike)
        return [roles.staged(x, read(x, env)) for x in flat.outputs]

    def _layer(self, part: Part, env: dict[int, Any], roles: _Role, alike: dict) -> None:
        """Evaluates a layer, the unit that the backward pass evaluates again. Equal layers are
        traced, differentiated and transposed once."""
        values = self._entering(part, env, roles)
        # Values known while tracing stay known: what made them may have no derivative.
        traced, known = eqx.partition(values, is_traced)
        key = signature(part, roles, values) if self._may_share(part, roles) else object()
        if key not in alike:
            alike[key] = self._as_layer(part, values, known, roles)
        env.update(zip(part.outputs, alike[key](traced), strict=True))

    @abc.abstractmethod
    def _part(self, part: Part, env: dict[int, Any], roles: _Role, alike: dict) -> None:
        """Evaluates a part of a program: a layer, or an equation by itself."""

    @abc.abstractmethod
    def _entering(self, part: Part, env: dict[int, Any], roles: _Role) -> list[Any]:
        """Returns the values that a layer takes."""

    @abc.abstractmethod
    def _may_share(self, part: Part, roles: _Role) -> bool:
        """Returns whether equal layers are traced once."""

    @abc.abstractmethod
    def _as_layer(
        self, part: Part, values: list[Any], known: list[Any], roles: _Role
    ) -> Callable[[list], list]:
        """Returns a layer as a function of its values that are traced, given those that are not,
        and all of them as they enter."""


def entering(flat: Flat, operands: Sequence[Given]) -> tuple[dict[int, Any], dict[int, int]]:
    """Returns the values of the constants and operands of a program, and the stages of those that
    depend on the point."""
    env: dict[int, Any] = {k: c.value for k, c in flat.constants.items()}
    env.update(zip(flat.inputs, map(jet_of, operands), strict=True))
    pairs = zip(flat.inputs, operands, strict=True)
    return env, {k: x.stage for k, x in pairs if isinstance(x, Staged)}
