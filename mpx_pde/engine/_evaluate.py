"""Evaluates a program on streams."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad

from .._derivative_of import with_derivative_of
from .._order import forward_only, gradients_in_turn, read_at_once, rounded_cotangent, summed_apart
from .._split import IN_HALVES, is_taken_by_halves
from ..interpret import _tables as tables
from ..interpret._flat import Step, flatten, moving_from, read
from ..interpret._jaxpr import asks_what_moves, aval_of, bodies_of, in_context_of, own_bind
from ..interpret._lines import line_of, site_of
from ..interpret._references import with_references_inside
from ._containers import Containers, enters
from ._custom import own_in_registers
from ._known import folded, only_moves
from ._moments import with_moments
from ._plan import Index
from ._products import Product, is_biased, is_weighted, only_names
from ._roles import Role, stage_after
from ._rules import Rules, aligned
from ._segments import (
    NO_KINDS,
    Kinds,
    Part,
    apart_of,
    choices_of,
    multiplied_only,
    parts_of,
    roles_of,
    signature,
)
from ._streams import DATA, Jet, Storage, is_inexact, is_traced, primal_of, tell, typed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evaluator:
    """One evaluation: a PyTree whose leaves are the factors of its sums and the stream scales.

    **Attributes:**

    - `rules`: how streams pass through equations.
    - `storage`: how streams are kept.
    - `product`: how streams are multiplied.
    - `note`: called for each equation that depends on the point, with its line, the rule, and the
        precision of a product. If given, equal layers are not shared.
    - `lost`: called with a stream and whether it overflows the dtype it is kept in.
    - `full`: the storage and the products of an evaluation in full precision that provides the
        values. This evaluator then determines what is kept for the backward pass and how that runs.
    - `caller`: the place where the derivatives are asked for. A product in a layer of a library,
        which has no line of the user's, is attributed to it.
    - `around`: the containers whose inside is evaluated, outermost first.
    """

    rules: Rules
    storage: Storage
    product: Product = eqx.field(static=True)
    note: Callable[[Step, str, str, str], None] | None = eqx.field(static=True, default=None)
    lost: Callable[[Index, Any], None] | None = eqx.field(static=True, default=None)
    full: tuple[Storage, Product] | None = eqx.field(static=True, default=None)
    caller: Any = eqx.field(static=True, default=None)
    around: tuple[JaxprEqn, ...] = eqx.field(static=True, default=())

    def program(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Any],
        asked: Collection[Index] | None = None,
        carried: Collection[tuple[int, int]] | None = None,
        operand_kinds: Kinds = NO_KINDS,
    ) -> list[Any]:
        """Returns the results of a jaxpr. Operands and results are jets or arrays.

        Only the streams that are `asked` for are valid, by default all (see `Role`). If the jaxpr
        is the step of a loop, `carried` pairs results with the operands that they become.
        """
        flat = flatten(closed, forward_mode=not self.plain)
        flat = flat if self.plain else with_references_inside(flat)
        env: dict[int, Any] = {k: c.value for k, c in flat.constants.items()}
        if self.plain:
            # Without a point, constant arrays are data.
            env |= {k: _as_data(x) for k, x in env.items() if np.ndim(x)}
        env.update(zip(flat.inputs, operands, strict=True))
        if not self.plain:
            flat = with_moments(flat, [k for k, x in env.items() if isinstance(x, Jet)])
        kinds = operand_kinds.named(dict(enumerate(flat.inputs)))
        stages = {k: x.stage for k, x in env.items() if isinstance(x, Jet)}
        plan = self.rules.plan
        params = kinds.params if self.plain else None
        asked = asked or plan.everything
        wild = self.storage.dtype == np.float16
        whole = self.full is not None
        roles = roles_of(flat, stages, plan, asked, params, carried, whole=whole, wild=wild)
        if self.plain:
            env.update((k, _as_data(x)) for k, x in env.items() if k in roles.stage)
        half = self.product.halves(flat, env, roles.stage, kinds.half)
        roles = roles._replace(half=half)
        if not self.plain:
            traced = (k for k, x in env.items() if isinstance(x, Tracer))
            streams = [k for k, x in env.items() if isinstance(x, Jet) and x.streams]
            moving = frozenset(moving_from(flat, streams))
            roles = roles._replace(apart=apart_of(flat, roles, traced), moving=moving)
        _hold(env, tuple(env), roles)
        parts = parts_of(flat, roles)
        entering = {k for part in parts if self._is_layer(part, roles) for k in part.inputs}
        roles = roles._replace(entering=entering & roles.stored)
        alike: dict[Hashable, Callable] = {}
        for part in parts:
            if part.alone:
                self._step(part.steps[0], env, roles)
            else:
                self._layer(part, env, roles, alike)
            # Values computed from held values alone have no derivative either.
            if not roles.still.issuperset(part.inputs):
                _hold(env, part.outputs, roles)
        return [read(x, env) for x in flat.outputs]

    @cached_property
    def plain(self) -> bool:
        """Returns whether there are only values and no streams."""
        return not self.rules.plan.keys

    @cached_property
    def above(self) -> "Evaluator":
        """Returns the evaluator that computes the values."""
        if self.full is None:
            return self
        storage, product = self.full
        return dataclasses.replace(self, storage=storage, product=product, lost=None, full=None)

    # One layer: the unit that the backward pass evaluates again.

    def _is_layer(self, part: Part, roles: Role) -> bool:
        """Returns whether the backward pass evaluates a part again."""
        # A loss is differentiated as it stands, and its residual decides.
        residual = self.full is not None and not roles.final.isdisjoint(part.outputs)
        return not part.alone and (part.multiplies or (part.checkpointed and not residual))

    def _layer(self, part: Part, env: dict[int, Any], roles: Role, alike: dict) -> None:
        """Evaluates a layer. Equal layers are traced and differentiated once."""
        values = [env[x] for x in part.inputs]
        if self._is_layer(part, roles):
            asked = [roles.asked.get(k, ()) for k in part.inputs]
            values = list(map(_asked_for, values, asked))
            # Values known while tracing stay known: what made them may have no derivative.
            traced, known = eqx.partition(values, is_traced)
            key = object() if self.note else signature(part, roles, values)
            if key not in alike:
                alike[key] = self._as_layer(part, known, roles)
            env.update(zip(part.outputs, alike[key](traced), strict=True))
        else:
            env.update(zip(part.outputs, self.above._inside(part, env, roles), strict=True))

    def _inside(
        self, part: Part, env: dict[int, Any], roles: Role, chosen: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """Returns the results of a layer as they are kept; those in `chosen` are not recomputed."""
        for step in part.steps:
            if chosen is None or not chosen.keys() >= set(step.outputs):
                self._step(step, env, roles)
            else:
                env.update((k, chosen[k]) for k in step.outputs)
        kept = lambda k: k in roles.stored and isinstance(env[k], Jet)
        return [self.storage.stored(env[k]) if kept(k) else env[k] for k in part.outputs]

    def _as_layer(self, part: Part, known: list[Any], roles: Role) -> Callable[[list], list]:
        def layer(evaluator, traced, chosen=None):
            # Some functions insist on having no derivative, and a derivative of zeros is one.
            values = map(_whole, eqx.combine(traced, known))
            inner = dict(zip(part.inputs, values, strict=True))
            _hold(inner, part.inputs, roles)
            return evaluator._inside(part, inner, roles, chosen), inner

        if self.full is not None:
            return self._in_full(layer, part, known, roles)
        run = lambda traced: layer(self, traced)[0]
        run = jax.checkpoint(run) if part.checkpointed else run
        return (lambda traced: run(_after_gradients(traced))) if part.multiplies else run

    def _in_full(
        self, layer: Callable, part: Part, known: list[Any], roles: Role
    ) -> Callable[[list], list]:
        """Returns a layer whose values come from the full evaluation and whose derivative comes
        from the half one, taken at the inputs rounded to half. Only these inputs are kept."""
        # A rule that is kept for later must not hold a value of the trace it was made in.
        own, fixed = eqx.partition(dataclasses.replace(self, lost=None), is_traced)
        tells = self.lost is not None
        made = {k: v for s in part.steps for k, v in zip(s.outputs, s.eqn.outvars, strict=True)}
        dtypes = [aval_of(made[k]).dtype for k in part.outputs]
        loaded = lambda by, out: list(map(by.above.storage.loaded, out, dtypes))

        def value_of(own, traced):
            both = eqx.combine(own, fixed)
            full = both.above
            out, inner = layer(full, traced)
            # A choice made by a value has no derivatives.
            bare = lambda x: x.only(()) if isinstance(x, Jet) else x
            chosen = {k: bare(inner[k]) for k in choices_of(part, roles)}
            lost = both._kept_of(part, inner, roles, inputs) if tells else ()
            # A value that the program has in half gets the type of its derivative.
            return loaded(full, out), (chosen, both.storage.overflows(lost))

        @jax.checkpoint
        def again(own, traced, chosen):
            half = dataclasses.replace(eqx.combine(own, fixed), full=None, note=None)
            return layer(half, traced, chosen)[0]

        def derivative_of(found, own, traced):
            both = eqx.combine(own, fixed)
            half = dataclasses.replace(both, full=None)
            traced = [half.storage.stored(x) if i in stored else x for i, x in enumerate(traced)]
            out = again(own, _in_turn(traced, half.storage.scales), found[0])
            return loaded(both, loaded(half, out))

        kept = roles.stored | self._rounded(part, roles)
        stored = {i for i, k in enumerate(part.inputs) if k in kept and isinstance(known[i], Jet)}
        # An input is read three times: evaluated, stored, and checked for overflow. A product taken
        # by halves is a sum, which is fused into its readers.
        by_halves = self.above.product.algorithm == IN_HALVES
        is_sum = lambda x: by_halves and is_taken_by_halves(np.shape(x))
        moves = lambda x: read_at_once(x) if is_inexact(x) and not is_sum(x) else x
        # An input that only products read is read by each of them, and rounded where it was made.
        is_product = lambda step: step.name in tables.PRODUCTS
        single = multiplied_only(part.steps, part.outputs, is_product, tables.MOVES)
        shared = {i for i in stored if part.inputs[i] not in single}
        inputs = [part.inputs[i] for i in stored]
        of_derivative, lost = with_derivative_of(value_of, derivative_of), self.lost

        def run(traced):
            traced = [jax.tree.map(moves, x) if i in shared else x for i, x in enumerate(traced)]
            out, (_, found) = of_derivative(own, traced)
            if lost is not None:
                for key, does in found.items():
                    lost(key, does)
            return out

        return run

    def _kept_of(
        self, part: Part, inner: Mapping[int, Any], roles: Role, inputs: Iterable[int]
    ) -> list[Jet]:
        """Returns what a layer keeps in half: its `inputs`, and, for its evaluation in the backward
        pass, the operands and results of its half products. Results that another layer checks for
        overflow, and those of the network, are left out."""
        read_here = {x for step in part.steps for x in step.variables}
        kept = dict.fromkeys(inputs)
        for step in part.steps:
            if self._multiplies_in_half(step, [read(x, inner) for x in step.inputs], roles):
                # Values that leave the network are kept in full.
                elsewhere = roles.final | roles.entering - read_here
                kept.update(dict.fromkeys((*step.variables, *{*step.outputs} - elsewhere)))
        return [inner[k] for k in kept if isinstance(inner[k], Jet)]

    def _multiplies_in_half(self, step: Step, operands: Sequence[Any], roles: Role) -> bool:
        """Returns whether an equation is a product of operands stored in half."""
        if step.name not in tables.PRODUCTS:
            return False
        return self.product.dtype_of(step, operands, roles, self.storage) == self.storage.dtype

    def _rounded(self, part: Part, roles) -> set[int]:
        """Returns the data that only half products in a layer read, which round it anyway."""

        def is_half(step: Step) -> bool:
            pairs = zip(step.inputs, step.eqn.invars, strict=True)
            kind = lambda x, v: Jet(None, {}, roles.stage[x]) if x in roles.stage else v.aval
            operands = [kind(x, v) for x, v in pairs]
            return self._multiplies_in_half(step, operands, roles)

        given = {k for k in part.inputs if self.plain and roles.stage.get(k) == DATA}
        return given & multiplied_only(part.steps, part.outputs, is_half, tables.MOVES)

    # One equation.

    def _step(self, step: Step, env: dict[int, Any], roles) -> None:
        operands = [read(x, env) for x in step.inputs]
        outside = step.name in tables.PRODUCTS and not site_of(step.eqn).users
        with in_context_of(step.eqn, self.caller if outside else None):
            out, *told = self._results(step, operands, roles)
        if self.note is not None and told:
            self.note(step, line_of(step.eqn, (*self.around, *step.calls)), *told)
        stages = {x: env[x].stage for x in step.variables if isinstance(env[x], Jet)}
        stage = stage_after(step, stages)
        for k, x, v in zip(step.outputs, out, step.eqn.outvars, strict=True):
            if self.plain and k in roles.stage:
                x = _as_data(x)
            if isinstance(x, Jet) and self.plain:
                # Integers computed from data have no stage, because they are exact.
                x = Jet(x.primal, {}, roles.stage[k]) if k in roles.stage else x.primal
            elif isinstance(x, Jet) and not enters(step.eqn, False):
                x = dataclasses.replace(x, stage=stage)
            if isinstance(x, Jet):
                for key, stream in x.streams.items():
                    # Otherwise it would be broadcast the wrong way.
                    want = self.rules.plan.shape(key, aval_of(v).shape)
                    assert np.shape(stream) == want, (step.name, key, np.shape(stream), want)
                x = self.above.storage.computed(x.only(roles.asked.get(k, ())), aval_of(v).dtype)
            env[k] = x

    def _results(self, step: Step, operands: list[Any], roles) -> tuple[Any, ...]:
        """Returns the results of an equation. If it depends on the point, also returns the rule
        that gave them and the precision that a product was multiplied in."""
        eqn, name = step.eqn, step.name
        moves = any(isinstance(x, Jet) for x in operands)
        if only_names(eqn, operands, self.storage, self.above.storage):
            # The value stays as it is and is loaded each time that it is used.
            return (operands, "convert", "") if moves else (operands,)
        if not moves:
            if self.full is not None:
                # Values computed from masters alone are in full, too.
                wide = list(map(self.above.storage.constant, operands))
                return (own_in_registers(eqn, wide, self.above.storage),)
            return (own_bind(eqn, typed(eqn, operands)),)
        if self.full is not None and roles.is_data(step):
            return self.above._results(step, operands, roles)
        if name in tables.PRODUCTS:
            out, how = self.product(step, operands, roles, self.storage, self.rules)
            return out, "product", how
        halves = [isinstance(x, Jet) and self.storage.is_stored(x.primal) for x in operands]
        biased = is_biased(eqn, operands, halves)
        # Loops and rules take values as they are.
        loaded = self.above.storage.loaded
        operands = [loaded(x, aval_of(v).dtype) for x, v in zip(operands, eqn.invars, strict=True)]
        if enters(eqn, self.plain):
            found: dict[Index, Any] = {}
            lost = self.lost and partial(tell, found)
            inner = dataclasses.replace(self, lost=lost, around=(*self.around, *step.calls, eqn))
            params = {i for i, x in enumerate(step.inputs) if x in roles.params}
            kinds = Kinds(self.product.half_operands(step, operands, roles), params)
            scaled = tuple(self.storage.scales) if lost else ()
            options = {"kinds": kinds, "scaled": scaled, "found": found}
            out = Containers(self.rules.plan, inner.program, loaded, **options)(eqn, operands)
            while found and self.lost:
                self.lost(*found.popitem())
            if name == "while" and not self.plain:
                why = _NO_REVERSE.format(line_of(eqn, (*self.around, *step.calls)))
                out = [jax.tree.map(partial(_forward_only, why), x) for x in out]
            return out, name, ""
        if self.plain:
            out = own_in_registers(eqn, list(map(primal_of, operands)), self.above.storage)
            if biased:
                out = [rounded_cotangent(x, self.storage.dtype) for x in out]
            return list(map(Jet, out)), "plain", ""
        operands = aligned(eqn, operands)
        weighted = is_weighted(eqn, operands, self.storage)
        if weighted and name == "mul":
            operands = _met_by_points(operands)
        applies = name == "scatter" and eqn.params["update_jaxpr"] is not None
        rule = None if applies else self.rules.find(eqn, operands)
        if rule is not None:
            if only_moves(step, operands):
                out = folded(rule, eqn, operands, self.rules.plan)
            else:
                out = rule(eqn, operands)
            if biased or weighted:
                # A bias is added to the value only, not to its streams.
                out = [self.storage.rounding(x, () if name == "mul" else x.streams) for x in out]
            return out, rule.__name__.strip("_"), ""
        known = eqn.primitive in ad.primitive_jvps or name in ("custom_jvp_call", "shard_map")
        moving = [isinstance(x, Jet) and bool(x.streams) for x in operands]
        if (name in tables.OPAQUE or applies or not known) and any(moving):
            where = line_of(eqn, (*self.around, *step.calls))
            if applies:
                raise ValueError(
                    f"JAX has no derivatives of `x.at[i].apply(f)`, which depends on the point at "
                    f"{where}. Write `x.at[i].set(f(x[i]))`."
                )
            if name == "custom_vjp_call":
                own_name = bodies_of(eqn)[0].jaxpr.debug_info.func_name
                raise ValueError(
                    f"The `custom_vjp` function `{own_name}` at {where} depends on the point, but "
                    "what it computes has the derivative zero, and its own derivative serves "
                    "reverse mode alone. Give it by `jax.custom_jvp`, or, for rounding whose "
                    "derivative is that of the identity, write "
                    "`x + jax.lax.stop_gradient(jnp.round(x) - x)`."
                )
            raise ValueError(
                f"There are no derivatives of the primitive {name!r} at {where}, which "
                "depends on the point. Take it out of the function that is differentiated, or "
                "put `jax.lax.stop_gradient` around its operands."
            )
        own = lambda *args: own_in_registers(eqn, args, self.above.storage)
        if name == "custom_linear_solve":
            lengths = eqn.params["const_lengths"]
            # Parameters of the solver, such as a tolerance, do not enter the derivative.
            if not any(moving[: lengths.matvec + lengths.vecmat]):
                return self.rules.solved(own, operands, sum(lengths)), "linear", ""
        asked = asks_what_moves(eqn)
        moves = [i for i, x in enumerate(step.inputs) if asked and x in roles.moving]
        out = self.rules.nested(own, operands, moves)
        return out, "nested", "no rule: by nested forward mode"


_NO_REVERSE = (
    "Reverse-mode differentiation does not work for derivatives in the coordinates of the "
    "`while_loop` at {}. A loss that contains them needs a loop with a bounded number of steps: "
    "`adjoint=diffrax.DirectAdjoint()` for Diffrax, `optimistix.ImplicitAdjoint()` for Optimistix, "
    "`kind='bounded'` for the loops of Equinox, or `jax.lax.scan`."
)


def _forward_only(why: str, x: Any) -> Any:
    return forward_only(x, why) if is_traced(x) and is_inexact(x) else x


def _as_data(x: Any) -> Any:
    """Marks an array that a loss closes over or creates as data, like its arguments."""
    return x if isinstance(x, Jet) or not is_inexact(x) else Jet(x, {}, DATA)


def _hold(env: dict[int, Any], keys: Iterable[int], roles: Role) -> None:
    """Stops the gradients of values whose derivatives lead nowhere. Known values stay known."""
    hold = lambda x: lax.stop_gradient(x) if is_traced(x) else x
    env.update((k, jax.tree.map(hold, env[k])) for k in keys if k in roles.still)


def _met_by_points(operands: Sequence[Any]) -> list[Any]:
    """Returns the operands, with the weight's gradient summed over the points separately."""
    (jet,) = (x for x in operands if isinstance(x, Jet))
    return [x if x is jet else summed_apart(x, jet.primal) for x in operands]


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


def _in_turn(values: Sequence[Any], scales: Mapping[Index, Any]) -> list[Any]:
    """Returns the inputs of a layer, whose cotangents go on only once the gradient of the layer is
    computed. Pass the inputs as halves, since the cotangents are written to memory.

    The cotangents of scaled streams do not wait, because the layer before already waits for the
    cotangent of the value. So they are scaled as they are computed, without a separate kernel.
    """
    waits = lambda x: x.only(x.streams.keys() - scales.keys()) if isinstance(x, Jet) else x
    waiting = list(map(waits, values))
    if not any(map(is_inexact, jax.tree.leaves([x for x in waiting if isinstance(x, Jet)]))):
        waiting = values
    waiting = _after_gradients(waiting)
    join = lambda x, y: dataclasses.replace(y, streams={**x.streams, **y.streams})
    return [join(x, y) if isinstance(x, Jet) else y for x, y in zip(values, waiting, strict=True)]
