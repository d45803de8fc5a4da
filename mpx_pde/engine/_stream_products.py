"""Chooses the precision of products of streams, and computes them."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..precision._dtypes import is_half
from ..precision._forward import in_full_forward
from ..products._bilinear import Origin
from ..products._order import shared
from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step
from ..program._jaxpr import aval_of
from ..program._products import asks_for_more, says_its_dtype
from ._products import FULL, is_real, mixed_product, precise
from ._program import exchanged, orders_products
from ._storage import RAW, WILD, Storage
from ._stream_roles import StreamRoles
from .taylor import _together as together
from .taylor._algebra import Algebra
from .taylor._jets import Jet, bind, cast, is_inexact, total


_FEW = 4
"""The largest number of coordinates that are multiplied one by one."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The products of one evaluation.

    **Attributes:**

    - `masters`: whether constants of any dtype count as half, as in a network that is multiplied in
        half precision but was not cast.
    - `open`: whether products are left as they are in the program. An evaluation around this one
        then chooses their precision.
    """

    masters: bool = False
    open: bool = False

    def halves(
        self, flat: Flat, env: Mapping[int, Any], stages: Collection[int], narrow: Iterable[int]
    ) -> set[int]:
        """Returns the variables that are effectively half, and have no stage because they do not
        depend on the point. These are half arrays, constants if they are `masters`, the variables
        `narrow`, and results computed from these alone, even in float32."""
        known = {k: x for k, x in env.items() if not isinstance(x, Jet) and is_inexact(x)}
        masters = flat.constants if self.masters else ()
        out = {*narrow, *(k for k, x in known.items() if k in masters or is_half(x.dtype))}
        for step in flat.steps:
            numbers = step.values
            made = bool(numbers) and numbers <= out
            for x, v in zip(step.outputs, step.eqn.outvars, strict=True):
                if x not in stages and is_inexact(v.aval) and (made or is_half(aval_of(v).dtype)):
                    out.add(x)
        return out

    def __call__(
        self,
        step: Step,
        operands: Sequence[Any],
        roles: StreamRoles,
        storage: Storage,
        algebra: Algebra,
    ) -> tuple[list[Jet], str]:
        """Returns the result with its streams, and the dtypes of the product as a string."""
        dtype = self.dtype_of(step, operands, roles, storage)
        half = dtype is not None
        as_stored = half and dtype == storage.dtype
        out_dtype = storage.compute
        if as_stored and step.outputs[0] not in roles.final:
            out_dtype = dtype
        both = all(isinstance(x, Jet) for x in operands)
        if half:
            # The terms of a product of jets are added in the compute dtype.
            own = mixed_product(step.eqn, dtype, storage.compute if both else out_dtype)
        else:
            several = any(x.streams for x in operands if isinstance(x, Jet))
            first = RAW in _stages(step, operands, roles)
            own = self._full(step.eqn, storage, several, first)
        name = jnp.dtype(dtype or FULL).name
        how = f"{name} × {name} → {jnp.dtype(out_dtype).name}"

        def prepared(x, dtype):
            # A half weight is widened: its gradient is summed over the streams in float32.
            stores = as_stored and isinstance(x, Jet)
            return storage.stored(x) if stores else storage.loaded(x, dtype)

        def times(x, y, left, right):
            out = algebra.plan.each(own, (left, right))(x, y)
            for array, key in ((x, left), (y, right)):
                if key and storage.is_stored(array) and not storage.is_stored(out):
                    out = storage.unscaled(out, key)
            return out

        a, b = map(prepared, operands, [aval_of(v).dtype for v in step.eqn.invars])
        if both:
            jet = Jet(times(a.primal, b.primal, (), ()), algebra.leibniz(times, a, b))
            return [storage.stored(jet) if out_dtype != storage.compute else jet], how

        jet, weight = (a, b) if isinstance(a, Jet) else (b, a)
        raw = RAW in _stages(step, operands, roles) and not (half or self.open)
        rows = _rows(step.eqn, jet, weight, jet is a) if raw else ()
        if rows:
            combined = lambda x: _combined(cast(x, rows[0].dtype), rows)
            streams = {k: combined(s) for k, s in jet.streams.items() if np.any(s)}
            return [Jet(combined(jet.primal), streams)], how
        weights = dict(zip(((), *jet.streams), shared(weight, 1 + len(jet.streams)), strict=True))

        def weighted(x, key):
            w = weights[key]
            return times(x, w, key, ()) if jet is a else times(w, x, (), key)

        return [jet.map(weighted)], how

    def dtype_of(self, step, operands, roles: StreamRoles, storage: Storage) -> Any:
        """Returns the dtype that a mixed product multiplies in; `None` for a product in full."""
        eqn = step.eqn
        if not is_real(eqn):
            return None
        meets_point = not {RAW, WILD}.isdisjoint(_stages(step, operands, roles))
        full = meets_point or storage.dtype is None
        if eqn.primitive.name in tables.MIXED and says_its_dtype(eqn):
            dtype = eqn.params["dtype"]
            # In a pass in full precision, a product of halves is in full.
            return None if full or not is_half(dtype) else dtype
        if full or asks_for_more(eqn):
            return None
        fixed = [i for i, x in enumerate(operands) if not isinstance(x, Jet)]
        halves = self.half_operands(step, operands, roles)
        return storage.dtype if halves.issuperset(fixed) else None

    def half_operands(self, step: Step, operands: Sequence[Any], roles: StreamRoles) -> set[int]:
        """Returns the positions of operands that are effectively half and not jets."""
        known = lambda x: self.masters or is_half(x.dtype)
        return {
            i
            for i, (x, atom) in enumerate(zip(operands, step.inputs, strict=True))
            if not isinstance(x, Jet)
            and is_inexact(x)
            and (known(x) if isinstance(atom, Constant) else atom in roles.half)
        }

    def _full(self, eqn: JaxprEqn, storage: Storage, several: bool, first: bool) -> Any:
        """Returns a function that multiplies arrays in the compute dtype. It does not use
        TF32 unless the program asks for it. XLA does not merge its products of `several` streams.
        The `first` product, which meets the point, asks for full precision in any evaluation
        around.
        """
        if self.open:
            eqn = precise(eqn) if first else eqn
            if _has_vector(eqn) and orders_products():
                # A `vmap` over vectors then adds the first axis of the result.
                by_vector = exchanged(eqn)
                return lambda x, y: bind(by_vector, [y, x])[0]
            return lambda x, y: bind(eqn, [x, y])[0]
        kind = aval_of(eqn.outvars[0]).dtype
        wide: Any = storage.width_of(kind)
        if jnp.issubdtype(kind, jnp.complexfloating):
            wide = None  # the dtype that the operands have
        # A mixed product without a dtype of its own, or in half, is in full here.
        name, is_open = eqn.primitive.name, eqn.params.get("precision") is None
        if name in tables.MIXED:
            is_open = not says_its_dtype(eqn) or is_half(eqn.params["dtype"])
        plain = name in tables.DOTS - tables.MIXED and is_open and is_real(eqn)
        if plain or name in tables.MIXED:
            return mixed_product(eqn, wide, wide, origin=Origin(apart=several or not plain))
        params = {**eqn.params, "preferred_element_type": wide}
        if params["precision"] is None:
            params["precision"] = (lax.Precision.HIGHEST,) * 2
        eqn = eqn.replace(params=params)
        return lambda x, y: bind(eqn, [x, y])[0]


def _has_vector(eqn: JaxprEqn) -> bool:
    """Returns whether the second operand of an equation is a vector for a plain product."""
    if eqn.primitive.name != "dot_general":
        return False
    (_, contracted), (_, batched) = eqn.params["dimension_numbers"]
    return len(aval_of(eqn.invars[1]).shape) == len(contracted) + len(batched)


def _stages(step: Step, operands: Sequence[Any], roles: StreamRoles) -> set[int | None]:
    """Returns the stages of the operands that depend on the point."""
    pairs = zip(step.inputs, operands, strict=True)
    return {roles.stage_of(x) for x, value in pairs if isinstance(value, Jet)}


def _rows(eqn: JaxprEqn, jet: Jet, weight: Any, first: bool) -> Sequence[Any]:
    """Returns the rows of a weight at each point, if the few coordinates of a raw value are
    multiplied with it; none for other products. The result is a sum of rows. Its factors are the
    coordinates, and for streams known derivatives. The sum is evaluated where it is read. The
    gradient of a row is one sum over points of its cotangents from the value and all streams."""
    known = all(isinstance(s, np.ndarray) and s.ndim == 1 for s in jet.streams.values())
    dtypes = {jet.primal.dtype, weight.dtype}
    known = known and dtypes <= {FULL, np.dtype("float64")} and np.ndim(weight) == 2
    if not jet.streams or not known or jet.primal.ndim != 1:
        return ()
    if eqn.primitive.name not in tables.DOTS or jet.primal.size > _FEW:
        return ()
    precision = eqn.params.get("precision")
    if precision not in (None, (lax.Precision.HIGHEST,) * 2) or eqn.params["out_sharding"]:
        return ()
    (axes, _) = eqn.params["dimension_numbers"]
    if not axes[0]:  # an outer product, or one by entries
        return ()
    weight = jnp.moveaxis(weight, axes[1 if first else 0][0], 0)
    weight = cast(weight, max(dtypes, key=lambda dtype: dtype.itemsize))
    return broadcast_like(list(weight), jnp.broadcast_to(jet.primal[0], weight.shape[1:]))


def broadcast_like(arrays: Sequence[Any], like: Any, *, leading: bool = False) -> list[Any]:
    """Broadcasts arrays for use with several streams. Their gradients are summed in one pass,
    except in a loss with a full forward pass, which orders its backward pass by itself."""
    return together.broadcast_like(arrays, like, leading=leading, summed=not in_full_forward())


def _combined(factors: Any, rows: Sequence[Any]) -> Any:
    """Returns the sum of the rows times their factors. Known zeros and ones cost nothing."""
    known = isinstance(factors, np.ndarray)
    terms = [
        row if known and factor == 1 else factor * row
        for factor, row in zip(factors, rows, strict=True)
        if not (known and factor == 0)
    ]
    return total(terms)
