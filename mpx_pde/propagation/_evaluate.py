"""Evaluating a program on streams."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters import ad

from .._flat import Constant, Step, flatten
from .._jaxpr import bodies_of, in_context_of, line_of, own_bind, rebind, scan_counts
from .._order import gradients_in_turn, rounded_cotangent
from .._products import is_users
from . import _tables as tables
from ._fallback import nested
from ._full import with_derivative_of
from ._known import folded
from ._plan import Index
from ._products import Product, is_biased, widens
from ._rules import Rules
from ._segments import parts_of, roles_of
from ._streams import DEEP, Jet, Storage, is_inexact, zeros_of


LOOPS = ("scan", "while", "cond")
_CONTAINERS = {
    **{name: name for name in LOOPS},
    "remat2": "checkpoint",
    "checkpoint": "checkpoint",
    "shard_map": "shard_map",
}
"""By the name of a primitive, the method that enters it."""

Note = Callable[[Step, str, str], None]


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
    """

    rules: Rules
    storage: Storage
    product: Product
    note: Note | None = None
    lost: Callable[[Index, Any], None] | None = None
    full: "Evaluator | None" = None
    caller: Any = None

    def program(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr; operands and results are jets or arrays."""
        flat = flatten(closed, forward_mode=not self.plain)
        env: dict[int, Any] = {k: self._given(c.value) for k, c in flat.constants.items()}
        env.update(zip(flat.inputs, operands, strict=True))
        halves = self.product.halves(flat, env)
        roles = roles_of(flat, {k: x.stage for k, x in env.items() if isinstance(x, Jet)}, halves)
        for part in parts_of(flat, roles):
            if part.alone:
                self._step(part.steps[0], env, roles)
            else:
                self._layer(part, env, roles)
        return [_read(x, env) for x in flat.outputs]

    def _given(self, x: Any) -> Any:
        """A constant of a program. Without streams there is no point: arrays are data, which is
        kept in half as what is computed from it."""
        return Jet(x, {}, DEEP) if self.plain and is_inexact(x) and np.ndim(x) else x

    @property
    def plain(self) -> bool:
        """Whether there are no streams, but values alone."""
        return not self.rules.plan.keys

    # One layer: what the backward pass evaluates again.

    def _layer(self, part, env, roles) -> None:
        jets = {k: env[k] for k in part.inputs if isinstance(env[k], Jet)}
        arrays = {k: env[k] for k in part.inputs if k not in jets}
        # What is known while tracing stays so.
        known, traced = _split(jets)
        known_arrays = {k: x for k, x in arrays.items() if not isinstance(x, jax.Array)}
        arrays = {k: x for k, x in arrays.items() if k not in known_arrays}

        def layer(evaluator, arrays, traced):
            inner: dict[int, Any] = {**known_arrays, **arrays, **_join(known, traced)}
            for step in part.steps:
                evaluator._step(step, inner, roles)
            return {k: evaluator._leaving(inner[k], k, roles) for k in part.outputs}

        if self.full is None:
            if part.multiplies:
                arrays, traced = gradients_in_turn(arrays, traced)
            run = (
                jax.checkpoint(partial(layer, self)) if part.checkpointed else partial(layer, self)
            )
            env.update(run(arrays, traced))
        elif part.multiplies:
            env.update(self._in_full(layer, arrays, traced, roles))
        else:
            env.update(layer(self.full, arrays, traced))

    def _in_full(self, layer: Callable, arrays: dict, traced: dict, roles) -> dict:
        """A layer whose values are those of the full evaluation, and whose derivative is that of
        the half one, at what entered it rounded to half: this alone is kept."""
        full = self.full
        assert full is not None
        # A rule that is kept for later may hold no value of the trace that it was made in.
        known = {k: x for k, x in self.rules.factors.items() if not isinstance(x, jax.Array)}
        factors = {k: x for k, x in self.rules.factors.items() if k not in known}

        def value_of(arrays, traced, factors, scales):
            del scales
            rules = self.rules.with_factors({**known, **factors})
            return layer(dataclasses.replace(full, rules=rules), arrays, traced)

        def derivative_of(arrays, traced, factors, scales):
            rules = self.rules.with_factors({**known, **factors})
            storage = dataclasses.replace(self.storage, scales=scales)
            half = dataclasses.replace(self, rules=rules, storage=storage, full=None, note=None)
            kept = {k: storage.stored(x) if k in roles.stored else x for k, x in traced.items()}
            # In turn as halves: what passes is written to memory.
            arrays, kept = gradients_in_turn(arrays, kept)
            out = jax.checkpoint(partial(layer, half))(arrays, kept)
            out = {k: half._loaded(x) for k, x in out.items()}
            return {k: self._loaded(x) for k, x in out.items()}

        if self.lost is not None:
            for k, x in traced.items():
                for key, does in (self.storage.overflows(x) if k in roles.stored else {}).items():
                    self.lost(key, does)
        run = with_derivative_of(value_of, derivative_of)
        return run(arrays, traced, factors, dict(self.storage.scales))

    def _leaving(self, value: Any, k: int, roles) -> Any:
        """What a layer hands on, as it is kept."""
        if isinstance(value, Jet) and k in roles.stored:
            return self.storage.stored(value)
        return value

    # One equation.

    def _step(self, step: Step, env: dict[int, Any], roles) -> None:
        operands = [_read(x, env) for x in step.inputs]
        with in_context_of(step.eqn, self._caller_of(step.eqn)):
            out = self._results(step, operands, roles)
        env.update(zip(step.outputs, out, strict=True))

    def _caller_of(self, eqn: Any) -> Any:
        is_product = eqn.primitive.name in tables.PRODUCTS
        return self.caller if is_product and not is_users(eqn.source_info) else None

    def _results(self, step: Step, operands: list[Any], roles) -> list[Any]:
        eqn = step.eqn
        if not any(isinstance(x, Jet) for x in operands):
            return own_bind(eqn, operands)
        name = eqn.primitive.name
        if name in tables.PRODUCTS:
            out, how = self.product(step, operands, roles, self.storage, self.rules)
            return self._noted(step, out, "product", how)
        if widens(eqn, operands, self.storage):
            # So it is loaded, each time that it is used.
            return self._noted(step, operands, "convert", "")
        biased = is_biased(eqn, operands, self.storage)
        # Loops and rules take values as they are.
        operands = [self._loaded(x) for x in operands]
        if name in LOOPS or (self.plain and name in _CONTAINERS):
            # What is lost in there cannot be told out here.
            inner = dataclasses.replace(self, lost=None)
            out = getattr(inner, f"_{_CONTAINERS[name]}")(eqn, operands)
            return self._noted(step, out, name, "")
        if self.plain:
            out = self._own(eqn, [x.primal if isinstance(x, Jet) else x for x in operands])
            if biased:
                out = [rounded_cotangent(x, self.storage.dtype) for x in out]
            return self._noted(step, [Jet(x, {}, DEEP) for x in out], "plain", "")
        rule = self.rules.find(eqn, operands)
        if rule is not None:
            if roles.known(step, operands):
                out = folded(rule, eqn, operands, self.rules.plan)
            else:
                out = rule(eqn, operands)
            if biased:
                (x,), dtype = out, self.storage.dtype
                out = [dataclasses.replace(x, primal=rounded_cotangent(x.primal, dtype))]
            return self._noted(step, out, rule.__name__.strip("_"), "")
        known = eqn.primitive in ad.primitive_jvps or name in _WITH_OWN_JVP
        if name in tables.CALLBACKS or not known:
            raise ValueError(
                f"There are no derivatives of the primitive {name!r} at {line_of(eqn)}, which "
                "depends on the point. Take it out of the function that is differentiated, or "
                "put `jax.lax.stop_gradient` around its operands."
            )
        out = nested(lambda *args: self._own(eqn, args), operands, self.rules)
        return self._noted(step, out, "nested", "no rule: by nested forward mode")

    def _own(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        """An equation on values in registers. One that holds a program is that program in its own
        dtypes, and so is one of float64 that registers do not hold."""
        storage = self.storage if self.full is None else self.full.storage
        wide = {x.dtype for x in args if is_inexact(x)} - {storage.registers}
        if name_of_inner(eqn) is None and not any(d.itemsize > 4 for d in wide if d.kind == "f"):
            return own_bind(eqn, args)
        typed = [
            x.astype(v.aval.dtype) if is_inexact(x) else x
            for x, v in zip(args, eqn.invars, strict=True)
        ]
        return [storage.constant(x) for x in own_bind(eqn, typed)]

    def _noted(self, step: Step, out: list[Any], rule: str, how: str) -> list[Any]:
        if self.note is not None:
            self.note(step, rule, how)
        return out

    def _loaded(self, x: Any) -> Any:
        """A value as it is computed with."""
        storage = self.storage if self.full is None else self.full.storage
        return storage.loaded(x) if isinstance(x, Jet) else storage.constant(x)

    # Loops and branches.

    def _full(self, x: Any, stage: int) -> Any:
        """A value with all streams, as a loop carries it."""
        if not is_inexact(x.primal if isinstance(x, Jet) else x):
            return x
        jet = x if isinstance(x, Jet) else Jet(jnp.asarray(x), {}, stage)
        plan = self.rules.plan
        streams = {}
        for key in plan.keys:
            like = zeros_of(jet, plan.size(key))
            stream = jet.streams.get(key)
            streams[key] = like if stream is None else jnp.broadcast_to(stream, like.shape)
        return Jet(jnp.asarray(jet.primal), streams, stage)

    def _carried(self, x: Any, init: Any, stage: int) -> Any:
        """What a step hands on, of the kind of what it was given."""
        if not isinstance(init, Jet):
            return x.primal if isinstance(x, Jet) else x
        x = x if isinstance(x, Jet) else Jet(jnp.asarray(x), {}, stage)
        return self._full(x, stage) if is_inexact(x.primal) else Jet(x.primal, {}, init.stage)

    def _scan(self, eqn, operands):
        closed = bodies_of(eqn)[0]
        n_consts, n_carry = scan_counts(eqn)
        consts, init, xs = (
            operands[:n_consts],
            operands[n_consts : n_consts + n_carry],
            operands[n_consts + n_carry :],
        )
        stage = max(x.stage for x in operands if isinstance(x, Jet))
        # Streams of what is scanned over have that axis behind the one of stacked directions.
        scanned = self._axis(xs, front=True)
        for _ in range(3):
            # The stage of a carry rises from step to step until it stays.
            carried = [self._full(x, stage) for x in init]
            step = self._scan_step(closed, consts, stage, n_carry)
            first = jax.tree.map(lambda x: x[0], scanned)
            carry, _ = jax.eval_shape(step, carried, first)
            rises = max((x.stage for x in carry if isinstance(x, Jet)), default=stage)
            if rises == stage:
                break
            stage = rises
        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, carried, scanned, **options)
        return [*carry, *self._axis(ys, front=False)]

    def _axis(self, values: list[Any], *, front: bool) -> list[Any]:
        plan = self.rules.plan

        def move(x):
            if not isinstance(x, Jet):
                return x
            source, target = (1, 0) if front else (0, 1)
            streams = {
                k: s if plan.size(k) is None else jnp.moveaxis(s, source, target)
                for k, s in x.streams.items()
            }
            return Jet(x.primal, streams, x.stage)

        return [move(x) for x in values]

    def _scan_step(self, closed, consts, stage, n_carry):
        def step(carry, x):
            out = self.program(closed, [*consts, *carry, *x])
            out = [self._loaded(y) for y in out]
            carried = [
                self._carried(y, init, max(stage, y.stage if isinstance(y, Jet) else stage))
                for y, init in zip(out[:n_carry], carry, strict=True)
            ]
            return carried, out[n_carry:]

        return step

    def _while(self, eqn, operands):
        test, body = bodies_of(eqn)
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, body_consts = operands[:n_test], operands[n_test : n_test + n_body]
        stage = DEEP
        init = [self._full(x, stage) for x in operands[n_test + n_body :]]

        def proceed(carry):
            values = [x.primal if isinstance(x, Jet) else x for x in (*test_consts, *carry)]
            (out,) = jaxpr_as_fun(test)(*values)
            return out

        def step(carry):
            out = map(self._loaded, self.program(body, [*body_consts, *carry]))
            return [self._carried(y, x, stage) for y, x in zip(out, carry, strict=True)]

        return list(lax.while_loop(proceed, step, init))

    def _cond(self, eqn, operands):
        index, *rest = operands
        index = index.primal if isinstance(index, Jet) else index
        branches = [
            lambda rest, b=b: [self._loaded(x) for x in self.program(b, rest)]
            for b in bodies_of(eqn)
        ]
        shapes = [jax.eval_shape(b, rest) for b in branches]
        every = list(zip(*shapes, strict=True))

        def alike(branch):
            def run(*rest):
                out = branch(list(rest))
                return [_like(x, options) for x, options in zip(out, every, strict=True)]

            return run

        return rebind(eqn, [index, *rest], list(map(alike, branches)))

    # Containers of reverse mode, which matter to values alone.

    def _checkpoint(self, eqn, operands):
        options = {k: eqn.params[k] for k in ("policy", "prevent_cse") if k in eqn.params}
        run = jax.checkpoint(partial(self.program, bodies_of(eqn)[0]), **options)
        return run(operands)

    def _shard_map(self, eqn, operands):
        moving = [isinstance(x, Jet) for x in operands]

        def body(*arrays):
            inside = [Jet(x, {}, DEEP) if m else x for m, x in zip(moving, arrays, strict=True)]
            out = self.program(bodies_of(eqn)[0], inside)
            return [x.primal if isinstance(x, Jet) else x for x in map(self._loaded, out)]

        out = rebind(eqn, [x.primal if isinstance(x, Jet) else x for x in operands], [body])
        return [Jet(x, {}, DEEP) for x in out]


def name_of_inner(eqn: Any) -> str | None:
    """The parameter of an equation that holds a jaxpr; `None` without one."""
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return name
    return None


_WITH_OWN_JVP = frozenset({"custom_jvp_call", "shard_map", "scan", "while", "cond"})


def _like(x: Any, options: Sequence[Any]) -> Any:
    """A result of a branch with the streams that any of the branches gives it."""
    jets = [y for y in options if isinstance(y, Jet)]
    if not jets:
        return x
    jet = x if isinstance(x, Jet) else Jet(jnp.asarray(x), {}, 0)
    shapes: Mapping[Index, Any] = {k: s for y in jets for k, s in y.streams.items()}
    streams = {
        k: jet.streams.get(k, jnp.zeros(shape.shape, shape.dtype)) for k, shape in shapes.items()
    }
    return Jet(jet.primal, streams, max(y.stage for y in jets))


def _read(x: Any, env: Mapping[int, Any]) -> Any:
    if not isinstance(x, Constant):
        return env[x]
    if hasattr(x.value, "dtype"):
        return x.value
    return np.asarray(x.value, x.aval.dtype)


def _split(jets: dict[int, Jet]) -> tuple[dict[int, Jet], dict[int, Jet]]:
    """The arrays of NumPy in the streams of jets, and all others."""
    known, traced = {}, {}
    for k, jet in jets.items():
        constant = {i: s for i, s in jet.streams.items() if isinstance(s, np.ndarray)}
        rest = {i: s for i, s in jet.streams.items() if i not in constant}
        known[k] = Jet(None, constant, jet.stage)
        traced[k] = Jet(jet.primal, rest, jet.stage)
    return known, traced


def _join(known: dict[int, Jet], traced: dict[int, Jet]) -> dict[int, Jet]:
    return {k: Jet(x.primal, {**known[k].streams, **x.streams}, x.stage) for k, x in traced.items()}
