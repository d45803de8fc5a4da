"""Derivative scaling: keeping the derivatives that a loss asks for in range."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from .._dtypes import half_precision_datatype
from .._repr import by_name, described, number
from .._types import DTypeLike, Names
from ._names import (
    DEFAULTS,
    exponent_of,
    names_of,
    positive_integer,
    split_names,
    spread,
    term_list,
)
from ._probe import COLUMNS
from ._rules import Rule, paper, predictive


_LOWEST_TOTAL, _HIGHEST_TOTAL = -120, 120
"""No product of scales leaves these powers of two: its inverse must be a float32."""


class Row(NamedTuple):
    """What one histogram counts: the derivatives that are scaled alike."""

    name: str
    weights: tuple[tuple[int, int], ...]
    """Which scaler enters how often."""
    smallest: bool = False
    """Whether all directions take the smallest of the scales, as a Laplacian does."""

    @property
    def order(self) -> int:
        return max(w for _, w in self.weights) if self.smallest else sum(w for _, w in self.weights)

    def shift(self, exponents: Any) -> Any:
        """The exponent of two by which the derivatives are scaled."""
        if self.smallest:
            smallest = exponents[self.weights[0][0]]
            for i, _ in self.weights[1:]:
                smallest = jnp.minimum(smallest, exponents[i])
            return self.order * smallest
        return sum(w * exponents[i] for i, w in self.weights)


class DerivativeScaling(eqx.Module):
    """Scales for the derivatives inside a loss, and how they follow what they see.

    A physics-informed loss differentiates the network in the forward pass, and in float16 these
    derivatives overflow or vanish before any loss exists. So the seeds of the derivatives are
    multiplied by powers of two, the chain runs in half precision, and the results are unscaled
    once, in float32, after the last order has been taken (*deferred unscaling*).

    Make one with [`per_direction`][mpx_pde.DerivativeScaling.per_direction] (the one to start
    with), [`per_order`][mpx_pde.DerivativeScaling.per_order] or
    [`per_term`][mpx_pde.DerivativeScaling.per_term], put it into a [`mpx_pde.Scaling`][], and pass
    what the loss receives as `derivatives` on to [`mpx_pde.partials`][].

    In bfloat16 and float32, whose range is enough, nothing is scaled.

    **Update rules.** A step in which a derivative overflowed is skipped, and the scalers that are
    responsible shrink by `factor`. With `mode="paper"` a scaler grows by `factor` after
    `growth_interval` clean steps in a row, up to 1; at or below `recover_threshold` (the *recovery
    mode*) after `recover_growth_interval`. With `mode="predictive"` the scale follows
    the histogram of the last step: as large as possible while the largest exponent stays `margin`
    powers of two below overflow, so that derivatives may grow by `2**margin` within a step before
    one is lost.

    Derivatives can be too small for float16 as well, such as those of a network of coordinates in
    micrometers. So in either mode a scale rises above 1, up to `max_scale`, while the histogram
    shows a derivative whose largest values lie within `margin` powers of two of float16's subnormal
    numbers, or that is zero everywhere, as long as no other that it scales comes within `margin`
    of overflow; and it falls back towards 1 when one does. What is lost all the same is the entry
    `"underflow"` of [`mpx_pde.derivatives.telemetry`][].

    The rule and its constants are those of Xue et al., *A Novel Automatic Mixed Precision Approach
    For Physics Informed Training*, section 3.2, and of its implementation in PhysicsNeMo-Sym. Other
    than there, each scaler backs off for its own overflows only, never falls below `min_scale`,
    rises above 1 where it must, and may have a cap below 1.

    **Attributes:**

    - `exponents`: log2 of the scale of each scaler, int32.
    - `tracker`: clean steps since each last changed, int32.
    - `caution`: what the predictive rule has learned to keep free besides `margin`, int32; with the
        paper's, 1 while an overflow forbids to rise for small derivatives.
    - `overflows`: steps in which each scaler overflowed, int32.
    - `skipped_steps`: steps in which any did, an int32 scalar.
    - `counts`: the histograms of the last step, float32, a row for each of `row_names`; see
        [`mpx_pde.derivatives.telemetry`][].
    - `shifts`: log2 of the scale that the values in each row of `counts` carried, int32.
    - `names`, `row_names`: what the scalers and the rows are called; static.
    """

    exponents: Int32[Array, "*batch scalers"]
    tracker: Int32[Array, "*batch scalers"]
    caution: Int32[Array, "*batch scalers"]
    overflows: Int32[Array, "*batch scalers"]
    skipped_steps: Int32[Array, "*batch"]
    shifts: Int32[Array, "*batch rows"]
    counts: Float32[Array, "*batch rows columns"]
    kind: str = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    order: int | None = eqx.field(static=True)
    rows: tuple[Row, ...] = eqx.field(static=True)
    rule: Rule = eqx.field(static=True)

    def __init__(self, kind, names, order, rows, call, special=None, **options):
        """Use `per_direction`, `per_order` or `per_term`."""
        options = {**DEFAULTS, **options}
        unknown = sorted(set(options) - set(DEFAULTS))
        if unknown:
            raise TypeError(
                f"`{call}` got the unknown options {', '.join(unknown)}; it knows "
                f"{', '.join(sorted(DEFAULTS))}."
            )
        common = tuple(n for n in names if n not in (special or {}))
        scales = {}
        for key in ("init_scale", "max_scale", "min_scale"):
            scales[key] = dict(zip(common, spread(options[key], common, call, key), strict=True))
            for name, own in (special or {}).items():
                default = DEFAULTS[key] if isinstance(options[key], Mapping) else options[key]
                scales[key][name] = exponent_of(own.get(key, default), call, key)
        # Without a start of its own a scaler starts at 1, or at its cap if that is lower.
        given = "init_scale" in options and options["init_scale"] is not DEFAULTS["init_scale"]
        start = []
        for i, name in enumerate(names):
            low, init, high = (scales[k][name] for k in ("min_scale", "init_scale", "max_scale"))
            most = max((w for r in rows for j, w in r.weights if j == i), default=1)
            most = max(most, *(r.order for r in rows))
            low = max(low, math.ceil(_LOWEST_TOTAL / most))
            high = scales["max_scale"][name] = min(high, _HIGHEST_TOTAL // most)
            own = given or "init_scale" in (special or {}).get(name, {})
            init = init if own else min(init, high)
            if not low <= init <= high:
                raise ValueError(
                    f"`{call}` needs `init_scale` between `min_scale` and `max_scale`, but got "
                    f"2^{init} outside of [2^{low}, 2^{high}] for {name!r}."
                )
            scales["min_scale"][name] = low
            start.append(init)
        factor = exponent_of(options["factor"], call, "factor")
        if factor < 1 or 2.0**factor != options["factor"]:
            raise ValueError(
                f"`{call}` needs a power of two above 1 as `factor`, since other factors round "
                f"every derivative, but got {options['factor']!r}."
            )
        if options["mode"] not in ("paper", "predictive"):
            raise ValueError(
                f"`{call}` knows the modes 'paper' and 'predictive', but got {options['mode']!r}."
            )
        weights = np.zeros((len(rows), len(names)), np.int32)
        for r, row in enumerate(rows):
            for i, w in row.weights:
                weights[r, i] = w
        self.rule = Rule(
            mode=options["mode"],
            step=factor,
            lowest=tuple(scales["min_scale"][n] for n in names),
            highest=tuple(scales["max_scale"][n] for n in names),
            growth_interval=positive_integer(options["growth_interval"], call, "growth_interval"),
            recover_threshold=exponent_of(options["recover_threshold"], call, "recover_threshold"),
            recover_growth_interval=positive_integer(
                options["recover_growth_interval"], call, "recover_growth_interval"
            ),
            margin=positive_integer(options["margin"], call, "margin", least=0),
            members=tuple(tuple(bool(w) for w in row) for row in weights),
            orders=tuple(r.order for r in rows),
        )
        self.kind, self.names, self.order, self.rows = kind, names, order, rows
        self.exponents = jnp.array(start, jnp.int32)
        self.tracker = jnp.zeros(len(names), jnp.int32)
        self.caution = jnp.zeros(len(names), jnp.int32)
        self.overflows = jnp.zeros(len(names), jnp.int32)
        self.skipped_steps = jnp.zeros((), jnp.int32)
        self.shifts = jnp.zeros(len(rows), jnp.int32)
        self.counts = jnp.zeros((len(rows), COLUMNS), jnp.float32)

    @classmethod
    def per_direction(
        cls, coords: Names, *, order: int = 4, terms: Sequence[str] = (), **options: Any
    ) -> "DerivativeScaling":
        """One scale `s` for each coordinate: a derivative of order k in it carries `s**k`.

        The default to take: it follows the unit of each coordinate, whatever the terms are.

        **Arguments:**

        - `coords`: the coordinates, such as `"xt"` or `["x", "t"]`.
        - `order`: the highest total order that will be asked for.
        - `terms`: terms with a histogram of their own, such as `["u_x", "v_x"]`; the others share
            one for each derivative, whatever the output.
        - `init_scale`, `max_scale`, `min_scale`: numbers, or mappings from coordinates to
            numbers; by default 1, 2^15 and 2^-24. What is no power of two is rounded down to one.
        - `factor`, `growth_interval`, `recover_threshold`, `recover_growth_interval`, `mode`,
            `margin`: see above; by default 2, 1000, 2^-6, 100, `"paper"` and 6.

        **Returns:** a `DerivativeScaling`.

        **Raises:** `ValueError` or `TypeError` for coordinates named twice and for options that
        make no sense.
        """
        call = "DerivativeScaling.per_direction"
        names = names_of(coords, call, "the coordinates")
        order = positive_integer(order, call, "order")
        rows = []
        for k in range(1, order + 1):
            for dirs in combinations_with_replacement(range(len(names)), k):
                rows.append(Row("_" + "".join(names[i] for i in dirs), weights_of(dirs)))
        if order >= 2:
            every = tuple((i, 2) for i in range(len(names)))
            rows.append(Row("laplacian", every, smallest=True))
        for term in term_list(terms, call, empty=True):
            _, _, suffix = term.rpartition("_")
            dirs = split_names(suffix, names)
            if dirs is None or not 1 <= len(dirs) <= order:
                raise ValueError(
                    f"`{call}` cannot read the term {term!r}: it must end in an underscore and 1 "
                    f"to {order} of the coordinates {', '.join(names)}."
                )
            rows.append(Row(term, weights_of(dirs)))
        return cls("direction", names, order, tuple(rows), call, **options)

    @classmethod
    def per_order(
        cls,
        order: int,
        *,
        special: Any = (),
        terms: Sequence[str] = (),
        coords: Any = None,
        **options: Any,
    ) -> "DerivativeScaling":
        """One scaler for each order of derivatives, as in section 3.1 of the paper.

        Derivatives of an order that no term asks for, on the way to a higher one, are scaled in
        proportion to that one.

        **Arguments:**

        - `order`: the highest order. Its scalers are called `"order 1"` to `"order n"`.
        - `special`: terms with a scaler of their own, whatever their order: a list of names, or a
            mapping from names to a cap, or to a mapping with any of `init_scale`, `max_scale` and
            `min_scale`.
        - `terms`: as for `per_direction`.
        - `coords`: the coordinates, which tell the order of `terms`. Needed only where their names
            have more than one letter.
        - options: as for `per_direction`.

        **Returns:** a `DerivativeScaling`.
        """
        call = "DerivativeScaling.per_order"
        order = positive_integer(order, call, "order")
        orders = tuple(f"order {k}" for k in range(1, order + 1))
        if not isinstance(special, Mapping):
            special = {name: {} for name in term_list(special, call, empty=True)}
        own = {}
        for name, value in special.items():
            term_list([name], call)
            if value is not None and not isinstance(value, Mapping):
                value = {"max_scale": value}
            own[name] = dict(value or {})
            unknown = sorted(set(own[name]) - {"init_scale", "max_scale", "min_scale"})
            if unknown:
                raise ValueError(
                    f"`{call}` takes 'init_scale', 'max_scale' and 'min_scale' for the special "
                    f"term {name!r}, but got {', '.join(map(repr, unknown))}."
                )
        names = orders + tuple(own)
        rows = [Row(name, ((i, 1),)) for i, name in enumerate(names)]
        if order >= 2 and "laplacian" not in own:
            rows.append(Row("laplacian", ((1, 1),)))
        known = None if coords is None else names_of(coords, call, "the coordinates")
        for term in term_list(terms, call, empty=True):
            suffix = term.rpartition("_")[2]
            dirs = tuple(suffix) if known is None else split_names(suffix, known)
            if term in own or dirs is None or not 1 <= len(dirs) <= order:
                raise ValueError(
                    f"`{call}` cannot give the term {term!r} a histogram of its own: it is "
                    f"special, or does not end in 1 to {order} coordinates. Give the names of "
                    "coordinates as `coords` where they have more than one letter."
                )
            rows.append(Row(term, ((len(dirs) - 1, 1),)))
        return cls("order", names, order, tuple(rows), call, special=own, **options)

    @classmethod
    def per_term(cls, terms: Sequence[str], **options: Any) -> "DerivativeScaling":
        """One scaler for each term.

        **Arguments:**

        - `terms`: the derivatives, such as `["u_x", "u_xx"]`; `"laplacian"` for
            [`mpx_pde.laplacian`][].
        - options: as for `per_direction`, with mappings from terms.

        **Returns:** a `DerivativeScaling`.
        """
        call = "DerivativeScaling.per_term"
        names = term_list(terms, call)
        rows = tuple(Row(name, ((i, 1),)) for i, name in enumerate(names))
        return cls("term", names, None, rows, call, **options)

    def __repr__(self) -> str:
        rule = self.rule
        pairs = zip(rule.lowest, rule.highest, strict=True)
        bounds = by_name(self.names, [f"2^{low} to 2^{high}" for low, high in pairs])
        scales = by_name(self.names, self.exponents, "2^")
        tracker, caution, overflows = (
            by_name(self.names, x) for x in (self.tracker, self.caution, self.overflows)
        )
        order = "" if self.order is None else f" up to order {self.order}"
        return described(
            self,
            f"scales={scales} ({bounds}, factor {2**rule.step})",
            f"per_{self.kind}{order}, {len(self.rows)} rows",
            f"tracker={tracker} of {rule.growth_interval}, {rule.recover_growth_interval} at or "
            f"below 2^{rule.recover_threshold}",
            f"mode={rule.mode!r}, margin={rule.margin}, caution={caution}",
            f"overflows={overflows}, skipped_steps={number(self.skipped_steps)}",
        )

    @property
    def row_names(self) -> tuple[str, ...]:
        """What the rows of `counts` are called."""
        return tuple(row.name for row in self.rows)

    @property
    def scales(self) -> Float32[Array, "*batch scalers"]:
        """The scale of each scaler."""
        return jnp.ldexp(jnp.ones_like(self.exponents, jnp.float32), self.exponents)

    @property
    def active(self) -> bool:
        """Whether the present half precision needs scaling: it does in float16."""
        return half_precision_datatype() == jnp.float16

    def finite(self, counts: Any) -> Bool[Array, ""]:
        """Whether no derivative overflowed, by the cotangent of `counts`."""
        return ~jnp.any(_counts(counts)[:, -1] > 0)

    @property
    def at_minimum(self) -> Bool[Array, "*scalers"]:
        """For each scaler, whether a derivative that it scales overflowed in the last step and it
        cannot fall any further: no scale can help."""
        low = jnp.array(self.rule.lowest, jnp.int32)
        return (self.exponents <= low) & self.rule.of_scalers(self.counts[:, -1] > 0)

    def adjust(self, counts: Any) -> "DerivativeScaling":
        """The scaling for the next step.

        **Arguments:**

        - `counts`: the cotangent that a loss left on `counts` of this scaling: the array, or the
            gradient of the whole `DerivativeScaling`.

        **Returns:**

        A `DerivativeScaling` of the same structure, shapes and dtypes.
        """
        counts = _counts(counts)
        active = self.active
        exponents = self.exponents if active else jnp.zeros_like(self.exponents)
        shifts = jnp.stack([jnp.asarray(row.shift(exponents)) for row in self.rows])
        update = predictive if self.rule.mode == "predictive" else paper
        state = (self.exponents, self.tracker, self.caution)
        if active:
            state = update(self.rule, counts, shifts, *state)
        lost = self.rule.of_scalers(counts[:, -1] > 0)
        return eqx.tree_at(
            lambda s: (
                s.exponents,
                s.tracker,
                s.caution,
                s.overflows,
                s.skipped_steps,
                s.shifts,
                s.counts,
            ),
            self,
            (
                *state,
                self.overflows + lost.astype(jnp.int32),
                self.skipped_steps + jnp.any(lost).astype(jnp.int32),
                shifts.astype(jnp.int32),
                counts,
            ),
        )

    def calibrate(
        self,
        fun: Any,
        points: Float[Array, "points coords"],
        terms: Names,
        *,
        coords: Names,
        outputs: Names,
        over: Names | None = None,
        dtype: DTypeLike | None = None,
    ) -> "DerivativeScaling":
        """First scales from a trial on a few points, so that a run need not skip its first steps.

        The terms are evaluated once in float32 and then in half precision at every scale. Their
        error is flat inside a window of scales, beyond which hidden layers underflow or overflow;
        the scale is the nearest to 1 that lies between the middle of the window and `margin` powers
        of two below its upper end.

        **Arguments:**

        - `fun`: the network in float32, as a PyTree: it is cast as [`mpx_pde.filter_grad`][] casts
            it.
        - `points`: shape `[points, coords]`; some hundred are enough.
        - `terms`: the terms of the loss, as for [`mpx_pde.partials`][], and `"laplacian"` for
            [`mpx_pde.laplacian`][].
        - `coords`, `outputs`, `dtype`: as for [`mpx_pde.partials`][].
        - `over`: as for [`mpx_pde.laplacian`][].

        **Returns:**

        The same scaling at these scales, within the bounds of each scaler. In bfloat16, the scaling
        itself. Not for use inside `jax.jit`.

        ```python
        derivatives = mpx.DerivativeScaling.per_direction("xt").calibrate(
            model, points[:256], ["u_t", "u_xx"], coords="xt", outputs="u"
        )
        ```
        """
        from ._calibrate import calibrated  # it needs `partials`, which needs this class

        return calibrated(
            self, fun, points, terms, coords=coords, outputs=outputs, over=over, dtype=dtype
        )

    def raised(self) -> "DerivativeScaling":
        """All scales a `factor` larger, within their caps.

        Cotangents carry the inverse of the scale. So where gradients overflow and the loss scale
        can fall no further, larger derivative scales are the way out.
        """
        highest = jnp.array(self.rule.highest, jnp.int32)
        grown = jnp.minimum(self.exponents + self.rule.step, highest)
        return eqx.tree_at(lambda s: s.exponents, self, jnp.maximum(grown, self.exponents))

    def with_exponents(self, exponents: Any) -> "DerivativeScaling":
        """The same scaling at other scales, which are clipped to the bounds of each scaler."""
        low, high = (jnp.array(b, jnp.int32) for b in (self.rule.lowest, self.rule.highest))
        new = jnp.clip(jnp.asarray(exponents, jnp.int32), low, high)
        return eqx.tree_at(lambda s: s.exponents, self, jnp.broadcast_to(new, low.shape))


def _counts(counts: Any) -> Float32[Array, "rows columns"]:
    return counts.counts if isinstance(counts, DerivativeScaling) else counts


def weights_of(dirs: Iterable[int]) -> tuple[tuple[int, int], ...]:
    dirs = tuple(dirs)
    return tuple((i, dirs.count(i)) for i in sorted(set(dirs)))
