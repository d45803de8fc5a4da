"""Evaluates a program on streams: for derivatives at a point."""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad

from ..products._order import forward_only, gradients_in_turn, summed_apart
from ..program import _tables as tables
from ..program._flat import Step, flatten
from ..program._jaxpr import asks_what_moves, aval_of, bodies_of
from ..program._lines import line_of, site_of
from ..program._references import with_references_inside
from ._biases import is_biased, is_weighted
from ._containers import Containers
from ._custom import own_in_compute_dtype
from ._evaluate import AbstractEvaluator, entering
from ._segments import Part
from ._storage import Storage, add_overflow
from ._stream_products import Product
from ._stream_roles import StreamRoles, roles_of
from .taylor._jets import Jet, is_inexact, is_traced, primal_of
from .taylor._known import folded, only_moves
from .taylor._moments import with_moments
from .taylor._plan import Index, Plan, sum_key
from .taylor._rules import Rules, aligned
from .taylor._shifts import with_shifts


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Streams in a loss that keeps values rounded to half: they are multiplied by their scales from
    where they depend on more than the point, so that what is kept of them is in range.

    **Attributes:**

    - `scales`: the scale of each stream and its inverse. The scale of a derivative is the product
        of those of its directions.
    - `half`: the dtype that the loss keeps values in.
    - `overflows`: for each stream that is kept, whether it overflows.
    """

    scales: Mapping[Index, tuple[Any, Any]]
    half: np.dtype
    overflows: dict[Index, Any] = dataclasses.field(default_factory=dict)

    def weights(self, plan: Plan, weights: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Returns the factors of the summands of each sum, for summands with their scales. Seeds
        are not scaled, so neither are summands of order one."""
        out = []
        for k, (factors, indices) in enumerate(zip(weights, plan.sums, strict=True)):
            scale = self.scales[sum_key(k)][0]
            own = []
            for factor, index in zip(factors, indices, strict=True):
                inverse = [self.scales[i,][1] for i in index] if len(index) > 1 else []
                own.append(factor * ft.reduce(operator.mul, inverse, scale))
            out.append(own)
        return out

    def seeds(self, streams: Mapping[Index, Any]) -> dict[Index, Any]:
        """Scales directions that are drawn. Those known while tracing are scaled later."""
        traced = {k: s for k, s in streams.items() if is_traced(s)}
        return {**streams, **self.all_of(traced)}

    def entering(self, jet: Jet) -> Jet:
        """Scales streams that are known while tracing, before they meet others."""
        known = {k: s for k, s in jet.streams.items() if not is_traced(s)}
        return dataclasses.replace(jet, streams={**jet.streams, **self.all_of(known)})

    def leaving(self, jet: Jet) -> Jet:
        """Returns a value with its streams without their scales."""
        by = self._storage
        return jet.map(lambda x, key: by.unscaled(x, key) if is_traced(x) else x)

    def all_of(self, streams: Mapping[Index, Any]) -> dict[Index, Any]:
        """Scales streams."""
        return {k: self._storage.scaled(jnp.asarray(s), k) for k, s in streams.items()}

    @property
    def _storage(self) -> Storage:
        return Storage(np.dtype("float32"), None, self.scales)

    def watch(self, values: Iterable[Any]) -> None:
        """Records which streams of some values overflow if they are kept."""
        limit, out = float(jnp.finfo(self.half).max), {}
        for jet in values:
            for key, x in jet.streams.items() if isinstance(jet, Jet) else ():
                if is_traced(x):
                    largest = jnp.max(jnp.abs(x), initial=0.0)
                    add_overflow(out, key, largest > limit)
        for key, overflows in out.items():
            add_overflow(self.overflows, key, overflows)


@dataclasses.dataclass(frozen=True)
class Derivatives(AbstractEvaluator[StreamRoles]):
    """An evaluation of a program on streams.

    **Attributes:**

    - `rules`: how streams pass through equations.
    - `storage`: how streams are kept.
    - `product`: how streams are multiplied. If they are `open`, a loss around this evaluation
        chooses their precision and what is kept.
    - `note`: called for each equation that depends on the point, with its line, the rule, and the
        precision of a product. If given, equal layers are not shared.
    - `scaled`: the scales of streams that the loss around keeps in half.
    - `caller`: the place where the derivatives are asked for. A product in a layer of a library,
        which has no line of the user's, is attributed to it.
    - `around`: the containers whose inside is evaluated, outermost first.
    """

    rules: Rules
    storage: Storage
    product: Product
    note: Callable[[Step, str, str, str], None] | None = None
    scaled: Scaled | None = None
    caller: Any = None
    around: tuple[JaxprEqn, ...] = ()

    def program(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Any],
        asked: Collection[Index] | None = None,
        carried: Collection[tuple[int, int]] | None = None,
        halves: Collection[int] = (),
    ) -> list[Any]:
        """Returns the results of a jaxpr. Operands and results are [`Staged`][] or arrays.

        Only the streams that are `asked` for are valid, by default all (see `StreamRoles`). If the
        jaxpr is the step of a loop, `carried` pairs results with the operands that they become.
        """
        flat = with_references_inside(flatten(closed, forward_mode=True))
        env, stages = entering(flat, operands)
        flat = with_shifts(with_moments(flat, stages, by_deviations=self.product.open), stages)
        plan, narrow = self.rules.algebra.plan, {flat.inputs[i] for i in halves}
        roles = roles_of(
            flat,
            stages,
            plan,
            asked or plan.everything,
            carried,
            halves=lambda moving: self.product.halves(flat, env, moving, narrow),
            traced=[k for k, x in env.items() if isinstance(x, Tracer)],
            streams=[k for k, x in env.items() if isinstance(x, Jet) and x.streams],
        )
        _hold(env, tuple(env), roles)
        return self._run(flat, env, roles)

    def _part(self, part: Part, env: dict[int, Any], roles: StreamRoles, alike: dict) -> None:
        for step in part.steps:
            roles.reach(step)
        if not part.alone and self.scaled is not None:
            # A loss may keep the values that enter a layer.
            self.scaled.watch(env[k] for k in part.inputs if k in roles.stored)
        if part.alone or self.product.open or not (part.multiplies or part.checkpointed):
            self._directly(part, env, roles)
        else:
            values = [_asked_for(env[k], roles.asked.get(k, ())) for k in part.inputs]
            self._layer(part, values, env, roles, alike if self.note is None else {})
        # Values computed from held values alone have no derivative either.
        if not roles.still.issuperset(part.inputs):
            _hold(env, part.outputs, roles)

    def _opened(self, part: Part, values: Sequence[Any], roles: StreamRoles) -> dict[int, Any]:
        # Some functions insist on having no derivative, and a derivative of zeros is one.
        env = dict(zip(part.inputs, map(_whole, values), strict=True))
        _hold(env, part.inputs, roles)
        return env

    def _again(
        self, layer: Callable, part: Part, values: Sequence[Any], roles: StreamRoles
    ) -> Callable[[list], list]:
        run = jax.checkpoint(layer) if part.checkpointed else layer
        return (lambda traced: run(_after_gradients(traced))) if part.multiplies else run

    def _kept(self, x: int, value: Any, part: Part, roles: StreamRoles) -> Any:
        leaves = not part.alone and x in roles.stored and isinstance(value, Jet)
        return self.storage.stored(value) if leaves else value

    # One equation.

    def _source(self, step: Step) -> Any:
        outside = step.name in tables.PRODUCTS and not site_of(step.eqn).users
        return self.caller if outside else None

    def _result(self, x: int, value: Any, aval: Any, roles: StreamRoles) -> Any:
        if not isinstance(value, Jet):
            return value
        for key, stream in value.streams.items():
            # Otherwise it would be broadcast the wrong way.
            want = self.rules.algebra.plan.shape(key, aval.shape)
            assert np.shape(stream) == want, (key, np.shape(stream), want)
        return self.storage.computed(value.only(roles.asked_of(x)), aval.dtype)

    def _record(self, step: Step, rule: str, precision: str = "") -> None:
        """Notes the rule of an equation, and the precision that a product was multiplied in."""
        if self.note is not None:
            self.note(step, self._line(step), rule, precision)

    def _line(self, step: Step) -> str:
        return line_of(step.eqn, (*self.around, *step.calls))

    def _governs(self, step: Step, operands: Sequence[Any], roles: StreamRoles) -> bool:
        return any(isinstance(x, Jet) for x in operands)

    def _computed(
        self, step: Step, operands: list[Any], held: Sequence[bool], roles: StreamRoles
    ) -> Sequence[Any]:
        eqn, name = step.eqn, step.name
        if _only_names(eqn, operands, self.storage):
            # The value stays as it is and is loaded each time that it is used.
            self._record(step, "convert")
            return operands
        biased = is_biased(eqn, operands, held)
        operands = aligned(eqn, self._loaded(step, operands, roles))
        rule = None if _applies(eqn) else self.rules.find(eqn, operands)
        if rule is None:
            return self._without_rule(step, operands, roles)
        stages = list(map(roles.stage_of, step.inputs))
        weighted = is_weighted(eqn, operands, stages, self.storage)
        multiplies = name in tables.MULTIPLICATIONS
        if weighted and multiplies:
            # The gradient of the weight is summed over the points separately.
            (jet,) = (x for x in operands if isinstance(x, Jet))
            operands = [x if x is jet else summed_apart(x, jet.primal) for x in operands]
        apply = partial(rule.apply, self.rules)
        if only_moves(step, operands):
            out = folded(apply, eqn, operands, self.rules.algebra.plan)
        else:
            out = apply(eqn, operands)
        if biased or weighted:
            # A bias is added to the value only, not to its streams.
            out = [self.storage.rounding(x, () if multiplies else x.streams) for x in out]
        self._record(step, rule.name)
        return out

    def _loaded(self, step: Step, operands: Sequence[Any], roles: StreamRoles) -> list[Any]:
        """Returns operands as rules and loops take them: in the compute dtype, scaled."""
        operands = roles.needed(step, operands)
        if self.scaled is not None and not only_moves(step, operands):
            operands = [self.scaled.entering(x) if isinstance(x, Jet) else x for x in operands]
        pairs = zip(operands, step.eqn.invars, strict=True)
        return [self.storage.loaded(x, aval_of(v).dtype) for x, v in pairs]

    def _enters(self, step: Step, operands: Sequence[Any]) -> bool:
        return step.name in tables.LOOPS and any(isinstance(x, Jet) for x in operands)

    def _entered(self, step: Step, operands: list[Any], roles: StreamRoles) -> list[Any]:
        eqn, around = step.eqn, (*self.around, *step.calls)
        operands = self._loaded(step, operands, roles)
        scaled = self.scaled and dataclasses.replace(self.scaled, overflows={})
        inner = dataclasses.replace(self, scaled=scaled, around=(*around, eqn))

        def program(closed, operands, **options):
            out = inner.program(closed, operands, **options)
            pairs = zip(out, closed.out_avals, strict=True)
            return [self.storage.loaded(x, aval.dtype) for x, aval in pairs]

        enter = Containers(
            self.rules.algebra.plan,
            program,
            self.storage.loaded,
            shared=lambda x: x,
            halves=self.product.half_operands(step, operands, roles),
            scaled=tuple(scaled.scales) if scaled else (),
            overflows=scaled.overflows if scaled else {},
        )
        staged = list(map(roles.staged, step.inputs, operands))
        out = roles.received(step, enter(eqn, staged))
        while scaled and self.scaled and scaled.overflows:
            add_overflow(self.scaled.overflows, *scaled.overflows.popitem())
        self._record(step, step.name)
        if step.name not in tables.UNBOUNDED:
            return out
        why = _NO_REVERSE.format(line_of(eqn, around))
        return [jax.tree.map(partial(_forward_only, why), x) for x in out]

    def _without_rule(self, step: Step, operands: list[Any], roles: StreamRoles) -> list[Jet]:
        """Returns the results of an equation by nested forward mode. Those of a solve are linear in
        its right-hand side."""
        eqn, name = step.eqn, step.name
        moving = [isinstance(x, Jet) and bool(x.streams) for x in operands]
        known = eqn.primitive in ad.primitive_jvps or name in tables.PUSHES | {"shard_map"}
        if (name in tables.OPAQUE or _applies(eqn) or not known) and any(moving):
            raise _no_derivatives(eqn, self._line(step))
        own = lambda *args: own_in_compute_dtype(eqn, args, self.storage)
        if name == "custom_linear_solve":
            lengths = eqn.params["const_lengths"]
            # Parameters of the solver, such as a tolerance, do not enter the derivative.
            if not any(moving[: lengths.matvec + lengths.vecmat]):
                self._record(step, "linear")
                return self.rules.solved(own, operands, sum(lengths))
        asked = asks_what_moves(eqn)
        moves = [i for i, x in enumerate(step.inputs) if asked and x in roles.moving]
        self._record(step, "nested", "no rule: by nested forward mode")
        return self.rules.algebra.nested(own, operands, moves, in_turn=name in tables.CUSTOM)

    def _multiplied(self, step: Step, operands: list[Any], roles: StreamRoles) -> list[Any]:
        operands = roles.needed(step, operands)
        jets = [x for x in operands if isinstance(x, Jet)]
        known = {k for x in jets for k, s in x.streams.items() if not is_traced(s)}
        late = len(jets) == 1
        if self.scaled is not None and not late:
            operands = [self.scaled.entering(x) if isinstance(x, Jet) else x for x in operands]
        (out,), how = self.product(step, operands, roles, self.storage, self.rules.algebra)
        if self.scaled is not None and late:
            # The product with a known direction is cheaper than that with a scaled one.
            scaled = self.scaled.all_of({k: s for k, s in out.streams.items() if k in known})
            out = dataclasses.replace(out, streams={**out.streams, **scaled})
        self._record(step, "product", how)
        return [out]


def _only_names(eqn: JaxprEqn, operands: Sequence[Any], storage: Storage) -> bool:
    """Returns whether an equation is a cast of a stored value to the compute dtype, which
    needs no computation."""
    if eqn.primitive.name not in tables.CASTS:
        return False
    x, new = primal_of(operands[0]), eqn.params["new_dtype"]
    return new == storage.compute and isinstance(operands[0], Jet) and storage.is_stored(x)


def _applies(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is `x.at[i].apply(f)`."""
    return eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None


def _no_derivatives(eqn: JaxprEqn, where: str) -> ValueError:
    """Returns the error for an equation that depends on the point and has no derivatives."""
    name = eqn.primitive.name
    if _applies(eqn):
        return ValueError(
            f"JAX has no derivatives of `x.at[i].apply(f)`, which depends on the point at "
            f"{where}. Write `x.at[i].set(f(x[i]))`."
        )
    if name in tables.CUSTOM:
        own_name = bodies_of(eqn)[0].jaxpr.debug_info.func_name
        return ValueError(
            f"The `custom_vjp` function `{own_name}` at {where} depends on the point, but "
            "what it computes has the derivative zero, and its own derivative serves "
            "reverse mode alone. Give it by `jax.custom_jvp`, or, for rounding whose "
            "derivative is that of the identity, write "
            "`x + jax.lax.stop_gradient(jnp.round(x) - x)`."
        )
    return ValueError(
        f"There are no derivatives of the primitive {name!r} at {where}, which "
        "depends on the point. Take it out of the function that is differentiated, or "
        "put `jax.lax.stop_gradient` around its operands."
    )


_NO_REVERSE = (
    "Reverse-mode differentiation does not work for derivatives in the coordinates of the "
    "`while_loop` at {}. A loss that contains them needs a loop with a bounded number of steps: "
    "`adjoint=diffrax.DirectAdjoint()` for Diffrax, `optimistix.ImplicitAdjoint()` for Optimistix, "
    "`kind='bounded'` for the loops of Equinox, or `jax.lax.scan`."
)


def _forward_only(why: str, x: Any) -> Any:
    return forward_only(x, why) if is_traced(x) and is_inexact(x) else x


def _hold(env: dict[int, Any], keys: Iterable[int], roles: StreamRoles) -> None:
    """Stops the gradients of values whose derivatives lead nowhere. Known values stay known."""
    hold = lambda x: lax.stop_gradient(x) if is_traced(x) else x
    env.update((k, jax.tree.map(hold, env[k])) for k in keys if k in roles.still)


def _asked_for(x: Any, asked: Collection[Index]) -> Any:
    """Returns a jet that enters a layer. A value that nobody asks for is replaced by its shape."""
    if not isinstance(x, Jet) or () in asked:
        return x
    return dataclasses.replace(x, primal=jax.ShapeDtypeStruct(x.primal.shape, x.primal.dtype))


def _whole(x: Any) -> Any:
    """Replaces a shape from `_asked_for` by zeros, inside the layer."""
    shape = x.primal if isinstance(x, Jet) else None
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return x
    return dataclasses.replace(x, primal=jnp.zeros(shape.shape, shape.dtype))


def _after_gradients(values: Sequence[Any]) -> list[Any]:
    """Returns the inputs of a layer. In the backward pass the gradients of its arrays come before
    the cotangents that go on: XLA for GPUs chooses layouts by this order."""
    is_jet = lambda x: isinstance(x, Jet)
    parts = eqx.partition(list(values), lambda x: not is_jet(x), is_leaf=is_jet)
    return eqx.combine(*gradients_in_turn(*parts), is_leaf=is_jet)
