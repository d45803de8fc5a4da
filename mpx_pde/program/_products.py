"""Lists the products of a jaxpr: the precision that each requests, and their number, dtype, work
and place."""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from ..precision._dtypes import is_narrow
from ..precision._split import SPLIT_PRODUCTS
from ._jaxpr import aval_of, jaxprs_in, scopes_of
from ._lines import installed, line_of, site_of
from ._tables import MIXED, PRODUCTS


HALVES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """Products of one line, one primitive and one pair of dtypes.

    **Attributes:**

    - `line`: `file:line` in the user's code.
    - `primitive`: `"dot_general"`, `"mixed_dot_general"`, `"conv_general_dilated"`, ….
    - `dtype`: the multiplied dtype, such as `"float16"`; for split products the algorithm.
    - `out_dtype`: the dtype of the result.
    - `tensorfloat32`: whether they are products of float32 (or complex64) arrays that a GPU
        multiplies in TF32 and a TPU in bfloat16, since the program requests TF32 or does not
        request the highest precision. A CPU multiplies them in float32.
    - `inside`: whether they are inside of a `jax.custom_vjp` that is called on the line. JAX does
        not know the lines of a backward rule.
    - `backward`: whether they belong to the backward pass of a gradient in the program.
    - `count`: the number of times that these products run.
    - `flops`: their floating-point operations.
    """

    line: str
    primitive: str
    dtype: str
    out_dtype: str
    tensorfloat32: bool = False
    inside: bool = False
    backward: bool = False
    count: int = 0
    flops: int = 0

    @property
    def half(self) -> bool:
        """Returns whether the operands are halves or narrower."""
        names = self.dtype.split("*")
        return all(name.startswith(("BF16", "F16", "ANY_F8")) or _narrow(name) for name in names)

    @property
    def of_integers(self) -> bool:
        """Returns whether these are products of integers or bools."""
        return bool(re.search(r"int|bool", self.dtype))

    @property
    def real(self) -> bool:
        """Returns whether these products have a half-precision form. Products of complex numbers or
        integers do not.
        """
        return not self.of_integers and "complex" not in self.dtype


class Work(NamedTuple):
    """The number of times that products run, and their floating-point operations."""

    count: int = 0
    flops: int = 0


def says_its_dtype(eqn: JaxprEqn) -> bool:
    """Returns whether the program names the dtype that a mixed product multiplies in."""
    origin = eqn.params.get("origin")
    return origin is None or origin.dtype


def asks_for_more(eqn: JaxprEqn) -> bool:
    """Returns whether the program requests more than JAX's default precision for a product."""
    return any(p not in _DEFAULT for p in _precisions(eqn))


def is_half_product(eqn: JaxprEqn, half: str) -> bool:
    """Returns whether an equation is a product of two arrays of a half type."""
    return eqn.primitive.name in _PRODUCTS and _multiplied(eqn) == half


_TF32 = lax.DotAlgorithmPreset.TF32_TF32_F32
_DEFAULT = (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def _precisions(eqn: JaxprEqn) -> tuple:
    precision = eqn.params.get("precision")
    return precision if isinstance(precision, tuple) else (precision,)


def _narrow(name: str) -> bool:
    try:
        return is_narrow(jnp.dtype(name))
    except TypeError:  # the name of an algorithm
        return False


def _multiplied(eqn: JaxprEqn) -> str:
    if eqn.primitive.name in MIXED:
        algorithm = eqn.params.get("algorithm")
        return (SPLIT_PRODUCTS[algorithm] if algorithm else eqn.params["dtype"]).name
    precision = eqn.params.get("precision")
    if isinstance(precision, lax.DotAlgorithmPreset) and precision.name != "DEFAULT":
        return precision.name
    names = [aval_of(v).dtype.name for v in eqn.invars[:2]]
    return "*".join(dict.fromkeys(names))


def _tensorfloat32(eqn: JaxprEqn) -> bool:
    """Returns whether a product of float32 or complex64 arrays requests less than the highest
    precision, or TF32 by name. Among the library's own products only those in TF32 do.
    """
    dtypes = {aval_of(v).dtype.name for v in eqn.invars[:2]}
    if not (dtypes & {"float32", "complex64"} and dtypes <= {"complex64", "float32", *HALVES}):
        return False
    if eqn.primitive.name in MIXED:
        return SPLIT_PRODUCTS.get(eqn.params.get("algorithm") or "") is _TF32
    # `HIGH` is less than the highest precision, too.
    return all(p in (*_DEFAULT, lax.Precision.HIGH, _TF32) for p in _precisions(eqn))


def _number(sizes: Iterable[Any]) -> int:
    """Multiplies sizes. A size that is known only at run time, or is a symbol, counts as 1."""
    return math.prod([n for n in sizes if isinstance(n, int)])


def product_shape(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the sizes of a product: batch, rows, columns and contracted size. Those of a
    convolution are groups, positions, output channels, and window times input channels.
    """
    x, y, out = (aval_of(v).shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if "conv" not in eqn.primitive.name:
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        rows = len(x) - len(contracted)
        sizes = out[: len(batch)], out[len(batch) : rows], out[rows:], _summed(eqn)
        return tuple(map(_number, sizes))
    outputs = y[eqn.params["dimension_numbers"].rhs_spec[0]]
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    return groups, _number(out) // outputs, outputs // groups, _number(_summed(eqn))


def sums_nothing(eqn: JaxprEqn) -> bool:
    """Returns whether each entry of a product's result is the product of two numbers."""
    return eqn.primitive.name in PRODUCTS and all(
        isinstance(n, int) and n == 1 for n in _summed(eqn)
    )


def _summed(eqn: JaxprEqn) -> list:
    """Returns the sizes of the axes that a product sums over. Those of a convolution are its input
    channels and its window."""
    x, y = (aval_of(v).shape for v in eqn.invars[:2])
    numbers = eqn.params["dimension_numbers"]
    if "conv" in eqn.primitive.name:
        return [y[i] for i in numbers.rhs_spec[1:]]
    (contracted, _), _ = numbers
    return [x[i] for i in contracted]


def _scales(eqn: JaxprEqn) -> bool:
    """Returns whether a mixed product multiplies entry by entry, and in full. It rounds nothing, as
    a multiplication does, so it is not counted either."""
    return eqn.primitive.name in MIXED and sums_nothing(eqn) and not _narrow(_multiplied(eqn))


def _flops(eqn: JaxprEqn, shape: tuple[int, ...] | None) -> int:
    """Returns the number of multiplications and additions of a product. `shape` is `None` for a
    ragged one. Complex numbers take four of each."""
    out = aval_of(eqn.outvars[0])
    if shape is not None:
        terms = math.prod(shape)
    else:
        x, numbers = aval_of(eqn.invars[0]), eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        terms = _number(out.shape) * _number([x.shape[i] for i in contracted])
        # Groups along a contracted axis share it, and each has a result of its own.
        if set(contracted) & set(numbers.lhs_ragged_dimensions):
            terms /= _number(aval_of(eqn.invars[2]).shape[-1:])
    return int(terms * (8 if jnp.issubdtype(out.dtype, jnp.complexfloating) else 2))


_PRODUCTS = PRODUCTS | {"ragged_dot_general"}

KEPT_IN_HALF = "mpx_pde.kept_in_half"
"""The scope in which a loss with a full forward pass rounds what it keeps."""


def is_kept(eqn: JaxprEqn) -> bool:
    """Returns whether an equation rounds what a loss with a full forward pass keeps."""
    return KEPT_IN_HALF in scopes_of(eqn)


def _is_transposed(eqn: JaxprEqn) -> bool:
    return "transpose" in str(eqn.source_info.name_stack)


class Counter:
    """Counts the products of jaxprs.

    `loops` are the lines of loops of unknown length. `largest` is the shape of the largest product,
    as [`product_shape`][] returns it. `kept_bytes` is the number of bytes that losses keep in half.
    """

    def __init__(self):
        self.loops: dict[str, None] = {}
        self.largest: tuple[int, ...] = (0, 0)
        self.kept_bytes = 0
        self._known: dict[Jaxpr, tuple[Mapping[ProductRow, Work], int]] = {}

    def products(self, jaxpr: Jaxpr) -> Mapping[ProductRow, Work]:
        """Returns the products in a jaxpr that lead to its results, at any depth, as often as they
        run. The compiler drops the others. For example, a layer with its value in full and its
        derivative in half also computes its value in half.
        """
        if jaxpr not in self._known:
            before = self.kept_bytes
            total: dict[ProductRow, Work] = defaultdict(Work)
            # At each depth, because JAX leaves the bodies of `while` loops as they are.
            alive, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
            for eqn in alive.eqns:
                if eqn.primitive.name == "optimization_barrier" and is_kept(eqn):
                    avals = [aval_of(v) for v in eqn.outvars]
                    self.kept_bytes += sum(_number(x.shape) * x.dtype.itemsize for x in avals)
                if eqn.primitive.name in _PRODUCTS:
                    pairs = () if _scales(eqn) else [self._product(eqn)]
                else:
                    inside = jaxprs_in(eqn)
                    pairs = self._inside(eqn, inside) if inside else ()
                for product, work in pairs:
                    count, flops = total[product]
                    total[product] = Work(count + work.count, flops + work.flops)
            self._known[jaxpr] = total, self.kept_bytes - before
            self.kept_bytes = before
        products, kept_bytes = self._known[jaxpr]
        self.kept_bytes += kept_bytes
        return products

    def _product(self, eqn: JaxprEqn) -> tuple[ProductRow, Work]:
        name, site = eqn.primitive.name, site_of(eqn)
        dtypes = _multiplied(eqn), aval_of(eqn.outvars[0]).dtype.name, _tensorfloat32(eqn)
        shape = product_shape(eqn) if name in PRODUCTS else None
        if shape is not None:
            self.largest = max(self.largest, shape, key=math.prod)
        row = ProductRow(site.line or "unknown", name, *dtypes, site.inside, _is_transposed(eqn))
        return row, Work(1, _flops(eqn, shape))

    def _inside(self, eqn: JaxprEqn, jaxprs: list[Jaxpr]) -> Iterator[tuple[ProductRow, Work]]:
        name = eqn.primitive.name
        outside, self.loops = self.loops, {}
        before = self.kept_bytes
        inner, loops = list(map(self.products, jaxprs)), self.loops
        self.kept_bytes = before + self._times(eqn) * (self.kept_bytes - before)
        self.loops = outside
        if not any(inner):
            return
        # A trace inside of another, such as that of a checkpoint, does not record its caller.
        site = site_of(eqn)

        def unknown(line):
            return site.users and (installed(line) or line == "unknown")

        self.loops |= {site.line if unknown(line) else line: None for line in loops}
        if name == "cond":  # only one branch runs
            inner = [max(inner, key=lambda products: sum(w.flops for w in products.values()))]
        if name == "custom_linear_solve":  # the others are for its derivatives
            inner = [self.products(eqn.params["jaxprs"].solve.jaxpr)]
        if name == "while":
            self.loops[line_of(eqn)] = None
        times = self._times(eqn)
        for product, work in itertools.chain(*(products.items() for products in inner)):
            if unknown(product.line):
                product = dataclasses.replace(product, line=site.line)
            if _is_transposed(eqn):
                product = dataclasses.replace(product, backward=True)
            yield product, Work(times * work.count, times * work.flops)

    def _times(self, eqn: JaxprEqn) -> int:
        if eqn.primitive.name == "scan":
            return _number([eqn.params["length"]])
        if eqn.primitive.name == "pallas_call":
            return _number(getattr(eqn.params.get("grid_mapping"), "grid", ()))
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))
            return math.prod(mesh.shape[axis] for axis in axes)
        return 1
