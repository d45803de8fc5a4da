"""Evaluating a program on streams."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad

from .._derivative_of import with_derivative_of
from .._order import gradients_in_turn, read_at_once, rounded_cotangent
from ..interpret import _tables as tables
from ..interpret._flat import Constant, Step, flatten, read
from ..interpret._jaxpr import LOOPS, aval_of, in_context_of, own_bind
from ..interpret._lines import line_of, site_of
from ._containers import Containers, enters
from ._custom import own_in_registers
from ._fallback import nested
from ._known import folded
from ._moments import with_moments
from ._plan import Index
from ._products import Product, is_biased, is_weighted, widens
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
)
from ._streams import DATA, DEEP, Jet, Storage, is_inexact, primal_of, typed


Note = Callable[[Step, str, str, str], None]
"""Takes an equation, its line, the rule, and what a product was multiplied in."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """One evaluation.

    **Attributes:**

    - `rules`: how streams pass.
    - `storage`: how they are kept.
    - `product`: how they are multiplied.
    - `note`: told of each equation that depends on the point.
    - `lost`: told of each stream that does not fit where it is kept, with whether it does not.
    - `full`: where values are those of another evaluation, in full precision, that one; this one
        then says what is kept for the backward pass, and how it is run.
    - `caller`: where the derivatives are asked for. A product in a layer of a library, which has no
        line of the user's, is attributed to it.
    - `around`: the containers that it evaluates the inside of, outermost first.
    """

    rules: Rules
    storage: Storage
    product: Product
    note: Note | None = None
    lost: Callable[[Index, Any], None] | None = None
    full: "Evaluator | None" = None
    caller: Any = None
    around: tuple[JaxprEqn, ...] = ()

    def program(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Any],
        asked: Collection[Index] | None = None,
        carried: Collection[tuple[int, int]] | None = None,
        operand_kinds: Kinds = NO_KINDS,
    ) -> list[Any]:
        """Returns the results of a jaxpr, of which is right what is `asked` for (see `Role`), or
        all; operands and results are jets or arrays. Of the step of a loop some are `carried` on.
        """
        flat = flatten(closed, forward_mode=not self.plain)
        env: dict[int, Any] = {k: self._given(c.value) for k, c in flat.constants.items()}
        env.update(zip(flat.inputs, operands, strict=True))
        if not self.plain:
            flat = with_moments(flat, [k for k, x in env.items() if isinstance(x, Jet)])
        kinds = operand_kinds.by_variable(flat.inputs)
        stages = {k: x.stage for k, x in env.items() if isinstance(x, Jet)}
        plan = self.rules.plan
        params = kinds.params if self.plain else None
        asked = asked or plan.everything
        roles = roles_of(flat, stages, plan, asked, params, carried, whole=self.full is not None)
        half = self.product.halves(flat, env, roles.stage, kinds.half)
        roles = roles._replace(half=half)
        if not self.plain:
            traced = (k for k, x in env.items() if isinstance(x, Tracer))
            roles = roles._replace(apart=apart_of(flat, roles.stage, traced))
        for part in parts_of(flat, roles):
            if part.alone:
                self._step(part.steps[0], env, roles)
            else:
                self._layer(part, env, roles)
        return [read(x, env) for x in flat.outputs]

    def _given(self, x: Any) -> Any:
        """Returns a constant of a program. Without streams there is no point: arrays are data."""
        return Jet(x, {}, DATA) if self.plain and is_inexact(x) and np.ndim(x) else x

    @cached_property
    def plain(self) -> bool:
        """Returns whether there are no streams, but values alone."""
        return not self.rules.plan.keys

    # One layer: what the backward pass evaluates again.

    def _layer(self, part, env, roles) -> None:
        jets = {k: env[k] for k in part.inputs if isinstance(env[k], Jet)}
        arrays = {k: env[k] for k in part.inputs if k not in jets}
        # What is known while tracing stays so.
        known, traced = _split(jets, roles.asked)
        known_arrays = {k: x for k, x in arrays.items() if not isinstance(x, jax.Array)}
        arrays = {k: x for k, x in arrays.items() if k not in known_arrays}

        def held(values):
            # A derivative of zeros is not none, which some functions insist on.
            return {k: lax.stop_gradient(x) if k in roles.still else x for k, x in values.items()}

        # What made them may have no derivative.
        arrays, traced = held(arrays), held(traced)
        choices = () if self.full is None else choices_of(part, roles)

        def layer(evaluator, arrays, traced, chosen=None):
            values = {**arrays, **_join(known, traced)}
            inner: dict[int, Any] = {**known_arrays, **held(values)}
            for step in part.steps:
                if chosen is None or not chosen.keys() >= set(step.outputs):
                    evaluator._step(step, inner, roles)
                else:
                    inner.update((k, chosen[k]) for k in step.outputs)
            out = {k: evaluator._leaving(inner[k], k, roles) for k in part.outputs}
            return out, {k: _chosen(inner[k]) for k in choices}

        if self.full is None:
            if part.multiplies:
                arrays, traced = gradients_in_turn(arrays, traced)
            run = partial(layer, self)
            run = jax.checkpoint(run) if part.checkpointed else run
            env.update(held(run(arrays, traced)[0]))
        elif part.multiplies or (part.checkpointed and roles.final.isdisjoint(part.outputs)):
            # A loss is differentiated as it stands: the residual decides.
            env.update(held(self._in_full(layer, arrays, traced, part, roles)))
        else:
            env.update(layer(self.full, arrays, traced)[0])

    def _in_full(self, layer: Callable, arrays: dict, traced: dict, part: Part, roles) -> dict:
        """A layer whose values are those of the full evaluation, and whose derivative is that of
        the half one, at what entered it rounded to half: this alone is kept."""
        # A rule that is kept for later may hold no value of the trace that it was made in.
        bare = self._without_values()
        full = bare.full
        assert full is not None
        known = {k: x for k, x in self.rules.factors.items() if not isinstance(x, jax.Array)}
        factors = {k: x for k, x in self.rules.factors.items() if k not in known}
        pairs = (zip(s.outputs, s.eqn.outvars, strict=True) for s in part.steps)
        dtypes = {k: aval_of(v).dtype for k, v in itertools.chain(*pairs)}

        def value_of(arrays, traced, factors, scales):
            del scales
            rules = bare.rules.with_factors({**known, **factors})
            out, chosen = layer(dataclasses.replace(full, rules=rules), arrays, traced)
            # What the program itself has in half is of the type that its derivative has.
            return {k: full._loaded(x, dtypes[k]) for k, x in out.items()}, chosen

        def derivative_of(chosen, arrays, traced, factors, scales):
            rules = bare.rules.with_factors({**known, **factors})
            storage = dataclasses.replace(bare.storage, scales=scales)
            half = dataclasses.replace(bare, rules=rules, storage=storage, full=None, note=None)
            kept = {k: storage.stored(x) if k in stored else x for k, x in traced.items()}
            arrays, kept = _in_turn(arrays, kept, scales)
            out, _ = jax.checkpoint(partial(layer, half))(arrays, kept, chosen)
            out = {k: half._loaded(x, dtypes[k]) for k, x in out.items()}
            return {k: bare._loaded(x, dtypes[k]) for k, x in out.items()}

        stored = {k for k in traced if k in roles.stored} | self._rounded(part, roles)
        # As it is evaluated, stored, and looked through for what does not fit.
        moves = lambda x: isinstance(x, jax.Array) and is_inexact(x)
        once = lambda x: read_at_once(x) if moves(x) else x
        # What products alone read is read by each of them, and rounded by what made it.
        is_product = lambda step: step.name in tables.PRODUCTS
        shared = stored - multiplied_only(part.steps, part.outputs, is_product, tables.MOVES)
        traced = {k: jax.tree.map(once, x) if k in shared else x for k, x in traced.items()}
        if self.lost is not None:
            for k, x in traced.items():
                for key, does in (self.storage.overflows(x) if k in stored else {}).items():
                    self.lost(key, does)
        run = with_derivative_of(value_of, derivative_of)
        return run(arrays, traced, factors, dict(self.storage.scales))

    def _rounded(self, part: Part, roles) -> set[int]:
        """Returns the data that enters a layer for half products alone, which round it anyway."""
        kind = lambda x, v: Jet(None, {}, roles.stage[x]) if x in roles.stage else v.aval

        def is_half(step: Step) -> bool:
            if step.name not in tables.PRODUCTS:
                return False
            pairs = zip(step.inputs, step.eqn.invars, strict=True)
            operands = [v.aval if isinstance(x, Constant) else kind(x, v) for x, v in pairs]
            return self.product.dtype_of(step, operands, roles, self.storage) == self.storage.dtype

        given = {k for k in part.inputs if self.plain and roles.stage.get(k) == DATA}
        return given & multiplied_only(part.steps, part.outputs, is_half, tables.MOVES)

    def _without_values(self) -> "Evaluator":
        """The same without factors and scales, which a trace may have made, and with nobody to tell
        of what is lost in it."""
        rules = self.rules.with_factors(dict.fromkeys(self.rules.factors, 0))
        storage = dataclasses.replace(self.storage, scales={})
        full = None if self.full is None else self.full._without_values()
        return dataclasses.replace(self, rules=rules, storage=storage, lost=None, full=full)

    def _leaving(self, value: Any, k: int, roles) -> Any:
        """Returns what a layer hands on, as it is kept."""
        if isinstance(value, Jet) and k in roles.stored:
            return self.storage.stored(value)
        return value

    # One equation.

    def _step(self, step: Step, env: dict[int, Any], roles) -> None:
        operands = [read(x, env) for x in step.inputs]
        with in_context_of(step.eqn, self._caller_of(step.eqn)):
            out = self._results(step, operands, roles)
        for k, x, v in zip(step.outputs, out, step.eqn.outvars, strict=True):
            if isinstance(x, Jet) and self.plain:
                # Integers that are computed of data have no stage: they are exact.
                x = Jet(x.primal, {}, roles.stage[k]) if k in roles.stage else x.primal
            if isinstance(x, Jet):
                self._check_aligned(x, aval_of(v), step.eqn)
                x = self._register_storage.computed(
                    x.only(roles.asked.get(k, ())), aval_of(v).dtype
                )
            env[k] = x

    def _check_aligned(self, x: Jet, aval: Any, eqn: JaxprEqn) -> None:
        """Fails where a rule has returned a stream that is not shaped as its value: elsewhere it
        would be broadcast the wrong way."""
        for key, stream in x.streams.items():
            size = self.rules.plan.size(key)
            want = aval.shape if size is None else (size, *aval.shape)
            assert np.shape(stream) == want, (eqn.primitive.name, key, np.shape(stream), want)

    def _caller_of(self, eqn: JaxprEqn) -> Any:
        is_product = eqn.primitive.name in tables.PRODUCTS
        return self.caller if is_product and not site_of(eqn).users else None

    def _results(self, step: Step, operands: list[Any], roles) -> list[Any]:
        eqn = step.eqn
        if not any(isinstance(x, Jet) for x in operands):
            return own_bind(eqn, typed(eqn, operands))
        name = eqn.primitive.name
        if self.full is not None and roles.is_data(step):
            return self.full._results(step, operands, roles)
        if name in tables.PRODUCTS:
            out, how = self.product(step, operands, roles, self.storage, self.rules)
            return self._noted(step, out, "product", how)
        if widens(eqn, operands, self.storage):
            # So it is loaded, each time that it is used.
            return self._noted(step, operands, "convert", "")
        halves = [isinstance(x, Jet) and self.storage.is_stored(x.primal) for x in operands]
        biased = is_biased(eqn, operands, halves)
        # Loops and rules take values as they are.
        operands = [
            self._loaded(x, aval_of(v).dtype) if isinstance(x, Jet) else self._loaded(x)
            for x, v in zip(operands, eqn.invars, strict=True)
        ]
        if enters(eqn, self.plain):
            # What is lost in there cannot be told out here.
            around = (*self.around, *step.calls, eqn)
            inner = dataclasses.replace(self, lost=None, around=around)
            params = {i for i, x in enumerate(step.inputs) if roles.is_param(x)}
            kinds = Kinds(self.product.half_operands(step, operands, roles), params)
            enter = Containers(self.rules.plan, inner.program, self._loaded, kinds)
            out = enter(eqn, operands)
            return self._noted(step, out, name, "")
        if self.plain:
            out = own_in_registers(eqn, list(map(primal_of, operands)), self._register_storage)
            if biased:
                out = [rounded_cotangent(x, self.storage.dtype) for x in out]
            return self._noted(step, [Jet(x, {}, DEEP) for x in out], "plain", "")
        operands = aligned(eqn, operands)
        rule = self.rules.find(eqn, operands)
        if rule is not None:
            if roles.known(step, operands):
                out = folded(rule, eqn, operands, self.rules.plan)
            else:
                out = rule(eqn, operands)
            if biased:
                (x,), dtype = out, self.storage.dtype
                out = [dataclasses.replace(x, primal=rounded_cotangent(x.primal, dtype))]
            elif is_weighted(eqn, operands, self.storage):
                both = eqn.primitive.name == "mul"
                out = [self.storage.rounding(x, () if both else x.streams) for x in out]
            return self._noted(step, out, rule.__name__.strip("_"), "")
        known = eqn.primitive in ad.primitive_jvps or name in _WITH_OWN_JVP
        if name in tables.OPAQUE or not known:
            raise ValueError(
                f"There are no derivatives of the primitive {name!r} at "
                f"{line_of(eqn, (*self.around, *step.calls))}, which "
                "depends on the point. Take it out of the function that is differentiated, or "
                "put `jax.lax.stop_gradient` around its operands."
            )
        own = lambda *args: own_in_registers(eqn, args, self._register_storage)
        out = nested(own, operands, self.rules)
        return self._noted(step, out, "nested", "no rule: by nested forward mode")

    def _noted(self, step: Step, out: list[Any], rule: str, how: str) -> list[Any]:
        if self.note is not None:
            self.note(step, line_of(step.eqn, (*self.around, *step.calls)), rule, how)
        return out

    @cached_property
    def _register_storage(self) -> Storage:
        """Returns what values are computed in: of two evaluations the one in full says it."""
        return self.storage if self.full is None else self.full.storage

    def _loaded(self, x: Any, dtype: Any = None) -> Any:
        """Returns a value that the program has in `dtype` as it is computed with."""
        return self._register_storage.loaded(x, dtype)


_WITH_OWN_JVP = LOOPS | {"custom_jvp_call", "shard_map"}


def _chosen(x: Any) -> Any:
    """Returns what is chosen by a value, which has no derivatives."""
    return x.only(()) if isinstance(x, Jet) else x


def _split(
    jets: dict[int, Jet], asked: Mapping[int, Collection[Index]]
) -> tuple[dict[int, Jet], dict[int, Jet]]:
    """Splits jets into what is known and all else: the arrays of NumPy in their streams are, and
    the shape of a value that nobody asked for."""
    known, traced = {}, {}
    for k, jet in jets.items():
        constant = {i: s for i, s in jet.streams.items() if isinstance(s, np.ndarray)}
        rest = {i: s for i, s in jet.streams.items() if i not in constant}
        x = jet.primal
        shape = None if () in asked[k] else jax.ShapeDtypeStruct(x.shape, x.dtype)
        known[k] = Jet(shape, constant, jet.stage)
        traced[k] = Jet(x if shape is None else None, rest, jet.stage)
    return known, traced


def _in_turn(
    arrays: dict, kept: dict[int, Jet], scales: Mapping[Index, Any]
) -> tuple[dict, dict[int, Jet]]:
    """A layer's arrays and what enters it, whose cotangent goes on when the gradient of the layer
    is there. In turn as halves: what passes is written to memory.

    The cotangents of streams that are scaled do not wait, since the layer before waits for that of
    the value: they are scaled as they are computed, and not by a kernel of its own.
    """
    waiting = {k: x.only(x.streams.keys() - scales.keys()) for k, x in kept.items()}
    if not any(is_inexact(x) for x in jax.tree.leaves(waiting)):
        waiting = kept
    arrays, waiting = gradients_in_turn(arrays, waiting)
    join = lambda x, y: dataclasses.replace(y, streams={**x.streams, **y.streams})
    return arrays, {k: join(x, waiting[k]) for k, x in kept.items()}


def _join(known: dict[int, Jet], traced: dict[int, Jet]) -> dict[int, Jet]:
    out = {}
    for k, x in traced.items():
        shape = known[k].primal
        primal = x.primal if shape is None else jnp.zeros(shape.shape, shape.dtype)
        out[k] = Jet(primal, {**known[k].streams, **x.streams}, x.stage)
    return out
