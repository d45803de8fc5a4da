"""Evaluates equations that contain jaxprs: loops and branches, and, where there are no streams,
checkpoints and `shard_map`.

This module decides which streams cross the borders of a container. The caller passes in the
function that evaluates an inner jaxpr.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._util._varying import match_varying_axes
from ..checkpoint_policies import translate
from ..program._jaxpr import bodies_of
from ..program._rebind import carried_by, operands_in, rebind
from ._custom import custom_jvp, custom_vjp
from ._roles import takes_derivatives
from ._storage import DEEP, WILD, Staged, Value, array_of
from .taylor._jets import Jet, cast, is_inexact
from .taylor._plan import Index, Plan


@dataclasses.dataclass(frozen=True)
class Containers:
    """Evaluates equations that hold jaxprs, given a function that evaluates one jaxpr.

    **Attributes:**

    - `plan`: the streams.
    - `program`: evaluates a jaxpr.
    - `loaded`: casts a value to the dtype that it is computed in. Loops carry values in this form.
    - `shared`: returns a value in the form in which all steps of a loop take it.
    - `halves`: the positions of operands of the equation that are effectively half, such as
        masters.
    - `scaled`: the streams that are kept in half with a scale, if the forward pass is in full.
    - `overflows`: which of these overflowed in the last evaluation.
    """

    plan: Plan
    program: Callable[..., list[Value]]
    loaded: Callable[[Value], Value]
    shared: Callable[[Value], Value]
    halves: Collection[int] = ()
    scaled: Collection[Index] = ()
    overflows: dict[Index, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        return ENTERED[eqn.primitive.name](self, eqn, operands)

    def _inside(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Value],
        carried: Sequence[tuple[int, int]] | None = None,
        places: Iterable[int] | None = None,
    ) -> list[Value]:
        """Evaluates a body whose operands are those at `places` of the equation, by default all."""
        places = range(len(operands)) if places is None else places
        halves = {k for k, i in enumerate(places) if i in self.halves}
        return self.program(closed, operands, carried=carried, halves=halves)

    def _with_overflows(self, body: Callable[..., list]) -> Callable[..., list]:
        """Returns a body that appends to its results which streams overflowed in it."""

        def run(*values):
            out, no = body(*values), jnp.zeros((), bool)
            does = [self.overflows.pop(key, no) for key in self.scaled]
            # Branches must agree on the axes of a `shard_map`.
            marked = match_varying_axes(*does, *jax.tree.leaves(values)) if does else []
            return [*out, dict(zip(self.scaled, marked, strict=False))]

        return run

    def _rebound(
        self, eqn: JaxprEqn, operands: Sequence[Value], bodies: Sequence[Callable[..., list]]
    ) -> list[Value]:
        *out, overflows = rebind(eqn, operands, list(map(self._with_overflows, bodies)))
        self.overflows.update({key: jnp.any(x) for key, x in overflows.items()})
        return out

    def _shapes(self, body: Callable[..., list], *values: Any) -> list:
        return jax.eval_shape(self._with_overflows(body), *values)[:-1]

    # Loops.

    def _full(self, x: Any, stage: int) -> Any:
        """Returns a value with all streams, as a loop carries it."""
        if not is_inexact(array_of(x)):
            return x
        jet = x.jet if isinstance(x, Staged) else Jet(jnp.asarray(x))
        streams = {}
        for key in self.plan.keys:
            stream = jet.streams.get(key, np.zeros((), jet.primal.dtype))
            streams[key] = jnp.broadcast_to(stream, self.plan.shape(key, jnp.shape(jet.primal)))
        return Staged(Jet(jnp.asarray(jet.primal), streams), stage)

    def _carried(self, x: Any, init: Any, stage: int) -> Any:
        """Returns a value that a step hands on, in the same form as the `init` it was given."""
        if not isinstance(init, Staged):
            return array_of(x)
        x = x if isinstance(x, Staged) else Staged(Jet(jnp.asarray(x)), stage)
        stage = max(stage, x.stage)
        x = self.loaded(x)
        value = array_of(x)
        return self._full(x, stage) if is_inexact(value) else Staged(Jet(value), init.stage)

    def _scan(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        places = carried_by(eqn)
        n_consts, n, n_carry = places.start, places.stop, len(places)
        consts = list(map(self.shared, operands[:n_consts]))
        init = list(map(self.loaded, operands[n_consts:n]))
        top = _highest(eqn, operands)
        others = (s for s in _stages(operands) if s < WILD)
        stage = max((*_stages(init), *others), default=DEEP)
        scanned = self._turned(operands[n:])
        (body,), onward = bodies_of(eqn), list(enumerate(places))

        def step_at(stage, *values):
            out = self._inside(body, values, onward)
            pairs = zip(out[:n_carry], values[n_consts:n], strict=True)
            return [*(self._carried(y, x, stage) for y, x in pairs), *out[n_carry:]]

        for _ in range(3):
            # The stage of a carry rises from step to step until it stays.
            carried = [self._full(x, stage) for x in init]
            step = partial(step_at, stage)
            if stage == top:
                break
            first = jax.tree.map(lambda x: jax.typeof(x).update(shape=x.shape[1:]), scanned)
            carry = self._shapes(partial(step, *consts), *carried, *first)[:n_carry]
            rises = max(_stages(carry), default=stage)
            if rises == stage:
                break
            stage = rises
        out = self._rebound(eqn, [*consts, *carried, *scanned], [step])
        return [*out[:n_carry], *self._turned(out[n_carry:])]

    def _turned(self, values: Sequence[Value]) -> list[Value]:
        """Swaps the axis of stacked directions with the scanned axis. Stacked directions come first
        outside of a loop; the scanned axis comes first where a loop takes and returns it."""
        turn = lambda s, key: s if self.plan.size(key) is None else jnp.swapaxes(s, 0, 1)
        return [x.map(turn) if isinstance(x, Staged) else x for x in values]

    def _while(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        test, body = bodies_of(eqn)
        of_test, of_body = operands_in(eqn)
        n, top = carried_by(eqn).start, _highest(eqn, operands)

        def proceed(*values):
            # In the compute dtype, like the step, and from the values alone.
            bare = [x.only(()) if isinstance(x, Staged) else x for x in values]
            return list(map(array_of, self._inside(test, bare, (), of_test)))

        def step(*values):
            out = self._inside(body, values, (), of_body)
            self.overflows.clear()  # It has no backward pass.
            given = values[len(values) - len(out) :]
            return [self._carried(y, x, top) for y, x in zip(out, given, strict=True)]

        outside = map(self.shared, operands[:n])
        init = [self._full(self.loaded(x), top) for x in operands[n:]]
        return rebind(eqn, [*outside, *init], [proceed, step])

    # Branches.

    def _cond(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        index, *rest = operands
        pairs = zip(bodies_of(eqn), operands_in(eqn), strict=True)
        branches = [lambda *rest, b=b, at=at: self._inside(b, rest, places=at) for b, at in pairs]
        every = list(zip(*(self._shapes(b, *rest) for b in branches), strict=True))

        def alike(branch):
            def run(*rest):
                return [_like(x, options) for x, options in zip(branch(*rest), every, strict=True)]

            return run

        return self._rebound(eqn, [array_of(index), *rest], list(map(alike, branches)))

    # Others, entered only where there are no streams.

    def _checkpoint(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        policy = eqn.params.get("policy")
        if policy:
            # The policy was written for products that have become mixed ones.
            eqn = eqn.replace(params={**eqn.params, "policy": translate(policy)})
        return self._once(eqn, operands)

    def _once(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        return rebind(eqn, operands, [lambda *args: self._inside(bodies_of(eqn)[0], args)])


ENTERED = {
    "scan": Containers._scan,
    "while": Containers._while,
    "cond": Containers._cond,
    "remat2": Containers._checkpoint,
    "shard_map": Containers._once,
    "jit": Containers._once,
    "custom_jvp_call": lambda self, eqn, operands: custom_jvp(eqn, operands, self._inside),
    "custom_vjp_call": lambda self, eqn, operands: custom_vjp(eqn, operands, self._inside),
}


def _stages(values: Iterable[Value]) -> list[int]:
    return [x.stage for x in values if isinstance(x, Staged)]


def _highest(eqn: JaxprEqn, operands: Sequence[Value]) -> int:
    """Returns the highest stage that a value in a loop may have."""
    return WILD if WILD in _stages(operands) or takes_derivatives(eqn) else DEEP


def _like(x: Any, options: Sequence[Any]) -> Any:
    """Returns a result of one branch, with all the streams that any branch gives this result."""
    staged = [y for y in options if isinstance(y, Staged)]
    if not staged:
        return x
    jet = x.jet if isinstance(x, Staged) else Jet(jnp.asarray(x))
    shapes: Mapping[Index, Any] = {k: s for y in staged for k, s in y.jet.streams.items()}
    streams = {
        k: jet.streams.get(k, jnp.zeros(shape.shape, shape.dtype)) for k, shape in shapes.items()
    }
    widest = max((array_of(y).dtype for y in options), key=lambda dtype: dtype.itemsize)
    return Staged(Jet(cast(jet.primal, widest), streams), max(_stages(staged)))
