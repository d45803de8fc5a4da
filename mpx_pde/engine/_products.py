"""Chooses the precision of products, and computes them."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._util._varying import match_varying_axes
from ..precision._dtypes import is_half, wide
from ..precision._forward import in_full_forward
from ..precision._split import SPLIT_PRODUCTS
from ..products._bilinear import Origin
from ..products._conv import mixed_conv_general_dilated_p
from ..products._dot import mixed_dot_general_p
from ..products._order import shared
from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step
from ..program._jaxpr import aval_of, own_bind
from ..program._products import asks_for_more, says_its_dtype
from ._program import exchanged, orders_products
from ._storage import DEEP, RAW, WILD, Storage
from ._stream_roles import StreamRoles
from .taylor import _together as together
from .taylor._algebra import Algebra
from .taylor._jets import Jet, bind, cast, is_inexact, primal_of, total


FULL = np.dtype("float32")

_APART = Origin(apart=True)

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
            own = _mixed(step.eqn, dtype, storage.compute if both else out_dtype)
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
        if not _is_real(eqn):
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
        plain = name in tables.DOTS - tables.MIXED and is_open and _is_real(eqn)
        if plain or name in tables.MIXED:
            return _mixed(eqn, wide, wide, origin=Origin(apart=several or not plain))
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


def precise(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a product that asks for full precision."""
    if eqn.primitive.name in tables.MIXED:
        dtype = wide(eqn.params["dtype"])
        return eqn.replace(params={**eqn.params, "dtype": dtype, "origin": Origin()})
    precision = eqn.params["precision"] or (lax.Precision.HIGHEST,) * 2
    return eqn.replace(params={**eqn.params, "precision": precision})


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


def _is_real(eqn: JaxprEqn) -> bool:
    """Returns whether the result of a product is real, and not complex or an integer."""
    return jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.floating)


def only_names(eqn: JaxprEqn, operands: Sequence[Any], storage: Storage) -> bool:
    """Returns whether an equation is a cast of a stored value to the compute dtype, which
    needs no computation."""
    if eqn.primitive.name not in tables.CASTS:
        return False
    x, new = primal_of(operands[0]), eqn.params["new_dtype"]
    return new == storage.compute and isinstance(operands[0], Jet) and storage.is_stored(x)


def is_biased(eqn: JaxprEqn, operands: Sequence[Any], halves: Sequence[bool]) -> bool:
    """Returns whether an equation adds an array that does not depend on the point, such as a bias,
    to an operand that is half according to `halves`."""
    x = _met_by_an_array(eqn, operands, tables.ADDITIONS)
    return x is not None and any(h for y, h in zip(operands, halves, strict=True) if y is x)


def _met_by_an_array(eqn: JaxprEqn, operands: Sequence[Any], names: Collection[str]) -> Jet | None:
    """Returns the operand that depends on the point, in an equation named in `names` whose other
    operand is an array that does not; `None` for others. A scalar is not an array here."""
    moving = [x for x in operands if isinstance(x, Jet)]
    others = [x for x in operands if isinstance(x, jax.Array) and x.ndim]
    alike = len(operands) == 2 and len(moving) == len(others) == 1
    return moving[0] if alike and eqn.primitive.name in names else None


def is_weighted(
    eqn: JaxprEqn, operands: Sequence[Any], stages: Sequence[int | None], storage: Storage
) -> bool:
    """Returns whether an equation multiplies or adds a value of stage `DEEP` in the compute dtype
    and an array that does not depend on the point, as a norm does with its weight and its bias.
    `False` if values are not stored in another dtype than that."""
    x = _met_by_an_array(eqn, operands, tables.ADDITIONS | tables.MULTIPLICATIONS)
    narrows = storage.dtype not in (None, storage.compute)
    if not narrows or x is None or x.primal.dtype != storage.compute:
        return False
    return any(y is x and stage == DEEP for y, stage in zip(operands, stages, strict=True))


def _mixed(
    eqn: JaxprEqn, dtype: Any, out_dtype: Any, algorithm: str | None = None, origin: Origin = _APART
) -> Any:
    new = mixed_form(eqn, dtype, out_dtype, algorithm, origin)
    return lambda x, y: new.primitive.bind(*match_varying_axes(x, y), **new.params)


def mixed_form(
    eqn: JaxprEqn, dtype: Any, out_dtype: Any, algorithm: str | None = None, origin: Origin = _APART
) -> JaxprEqn:
    """Returns a product as a mixed one with these dtypes and this algorithm."""
    dropped = ("precision", "preferred_element_type", "algorithm")
    params = {k: v for k, v in eqn.params.items() if k not in dropped}
    params |= {"dtype": jnp.dtype(dtype), "out_dtype": jnp.dtype(out_dtype), "origin": origin}
    is_dot = eqn.primitive.name in tables.DOTS
    if is_dot:
        params["algorithm"] = algorithm
    primitive = mixed_dot_general_p if is_dot else mixed_conv_general_dilated_p
    return eqn.replace(primitive=primitive, params=params)


# Products of a program and of its backward pass, for a forward pass in full.


def forward_product(eqn: JaxprEqn, algorithm: str | None) -> JaxprEqn:
    """Returns a product in full, by the algorithm unless the program asks for a precision."""
    dtype, mixed = aval_of(eqn.outvars[0]).dtype, eqn.primitive.name in tables.MIXED
    if mixed and (is_half(eqn.params["dtype"]) or not says_its_dtype(eqn)):
        own = algorithm if dtype == FULL and eqn.primitive.name in tables.DOTS else None
        return mixed_form(eqn, wide(dtype), dtype, own)
    if mixed or algorithm is None or asks_for_more(eqn) or not _is_real(eqn):
        return eqn
    takes = dtype == FULL and eqn.primitive.name in tables.DOTS
    return mixed_form(eqn, FULL, FULL, algorithm) if takes else eqn


def backward_product(eqn: JaxprEqn, half: np.dtype) -> JaxprEqn:
    """Returns a product of operands rounded to half, unless it asks for a precision itself."""
    mixed = eqn.primitive.name in tables.MIXED and eqn.params.get("algorithm") is None
    if not _is_real(eqn) or asks_for_more(eqn) or (mixed and says_its_dtype(eqn)):
        return eqn
    return mixed_form(eqn, half, aval_of(eqn.outvars[0]).dtype, origin=Origin())


# Products without streams, for `autocast`.


def gives_way(eqn: JaxprEqn) -> bool:
    """Returns whether a mixed product is in float32 because no dtype was asked for."""
    return eqn.params["dtype"] == FULL and not says_its_dtype(eqn)


def half_product(eqn: JaxprEqn, arrays: Sequence[Any], dtype: np.dtype, out_dtype: np.dtype) -> Any:
    """Returns a product of halves, accumulated in float32 and returned in `out_dtype`, unless the
    program names another dtype."""
    if eqn.primitive.name in tables.MIXED:
        origin = eqn.params.get("origin", Origin())
        out_dtype = eqn.params["out_dtype"] if origin.out_dtype else out_dtype
    else:
        # A program that multiplies halves into float32 gets float32.
        widens = aval_of(eqn.invars[0]).dtype == dtype and aval_of(eqn.outvars[0]).dtype == FULL
        out_dtype = FULL if widens else out_dtype
    return _mixed(eqn, dtype, out_dtype, origin=Origin())(*arrays)


def split_product(eqn: JaxprEqn, arrays: Sequence[Any], algorithm: lax.DotAlgorithmPreset) -> Any:
    """Returns a product of float32 arrays by an algorithm that splits them into halves, and adds
    the products of these. Convolutions have no such algorithm, and are taken in float32."""
    name = next((k for k, v in SPLIT_PRODUCTS.items() if v is algorithm), None)
    if name is not None or eqn.primitive.name not in tables.DOTS:
        return _mixed(eqn, FULL, FULL, name, Origin())(*arrays)
    # A JAX preset that is not in `SPLIT_PRODUCTS`.
    params = {name: eqn.params[name] for name in ("dimension_numbers", "out_sharding")}
    return lax.dot_general(*arrays, **params, precision=algorithm, preferred_element_type=FULL)


def full_product(eqn: JaxprEqn, arrays: Sequence[Any]) -> list:
    """Returns a product in float32, or in a higher precision if the program asks for it."""
    if eqn.primitive.name in tables.MIXED:
        params: dict[str, Any] = {name: wide(eqn.params[name]) for name in ("dtype", "out_dtype")}
        params["origin"] = Origin()
    else:
        dtype = aval_of(eqn.outvars[0]).dtype
        params = {} if dtype == FULL else {"preferred_element_type": wide(dtype)}
    return own_bind(eqn.replace(params={**eqn.params, **params}), arrays)


def multiplied_in(eqn: JaxprEqn, rule: str, dtype: np.dtype, algorithm: Any) -> str | None:
    """Returns the name of the dtype to which a product rounds its operands, or of the algorithm
    that splits them; `None` for other operations."""
    name = eqn.primitive.name
    if name not in tables.PRODUCTS:
        return None
    own = eqn.params.get("dtype", aval_of(eqn.invars[0]).dtype)
    if rule == "own" or (rule == "mixed" and not gives_way(eqn)):
        return own.name
    if rule == "full":
        return wide(own if name in tables.MIXED else FULL).name
    if algorithm is None:
        return dtype.name
    return algorithm.name if name in tables.DOTS else FULL.name
