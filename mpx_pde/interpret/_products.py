"""The products of a jaxpr: how many, in which dtype, how much work, and where."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from .._dtypes import is_half
from .._split import SPLIT_PRODUCTS
from ._asks import leaves_it_to_tensorfloat32
from ._jaxpr import aval_of, jaxprs_in
from ._lines import HOME, installed, line_of, site_of
from ._tables import MIXED, PRODUCTS


_HALVES = ("float16", "bfloat16")


class Product(NamedTuple):
    """Products that are alike: of one line, one primitive and one pair of dtypes.

    **Attributes:**

    - `line`: `file:line` in the user's code.
    - `primitive`: the name of the primitive.
    - `dtype`: what is multiplied in: the dtype that operands are rounded to (joined by `*` where
        they differ), or the name of the algorithm that splits them.
    - `out_dtype`: the dtype of the result.
    - `tensorfloat32`: whether the program leaves it to a GPU to multiply float32 in TF32.
    - `inside`: whether it is inside of a `jax.custom_vjp` that is called on that line.
    """

    line: str
    primitive: str
    dtype: str
    out_dtype: str
    tensorfloat32: bool = False
    inside: bool = False

    @property
    def half(self) -> bool:
        """Whether halves, or what is narrower, are multiplied."""
        names = self.dtype.split("*")
        return all(name.startswith(("BF16", "F16", "ANY_F8")) or _narrow(name) for name in names)


class Work(NamedTuple):
    """How often products run, and their floating-point operations."""

    count: int = 0
    flops: int = 0


def _narrow(name: str) -> bool:
    try:
        dtype = jnp.dtype(name)
    except TypeError:  # the name of an algorithm
        return False
    return is_half(dtype) or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1)


def _multiplied(eqn: JaxprEqn) -> str:
    if "dtype" in eqn.params and eqn.primitive.name.startswith("mixed"):
        algorithm = eqn.params.get("algorithm")
        if algorithm is not None:
            return SPLIT_PRODUCTS[algorithm].name
        return eqn.params["dtype"].name
    precision = eqn.params.get("precision")
    if isinstance(precision, lax.DotAlgorithmPreset) and precision.name != "DEFAULT":
        return precision.name
    names = [aval_of(v).dtype.name for v in eqn.invars[:2]]
    return "*".join(dict.fromkeys(names))


def _tensorfloat32(eqn: JaxprEqn) -> bool:
    """Whether a product of float32 or complex64 arrays asks for less than the highest precision.
    The library's own do not."""
    dtypes = {aval_of(v).dtype.name for v in eqn.invars[:2]}
    wide = dtypes & {"float32", "complex64"} and dtypes <= {"complex64", "float32", *_HALVES}
    return bool(wide) and eqn.primitive.name not in MIXED and leaves_it_to_tensorfloat32(eqn)


def _number(sizes: Iterable[Any]) -> int:
    """A product of sizes. One that is known at run time only, or a symbol, counts once."""
    return math.prod(n for n in sizes if isinstance(n, int))


def _flops(eqn: JaxprEqn) -> int:
    """Multiplications and additions; four of each for complex numbers."""
    x, y = (aval_of(v) for v in eqn.invars[:2])
    out = aval_of(eqn.outvars[0])
    name = eqn.primitive.name
    if "conv" in name:
        spec = eqn.params["dimension_numbers"].rhs_spec
        terms = _number(n for i, n in enumerate(y.shape) if i != spec[0])
    elif "dimension_numbers" in eqn.params:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = _number(x.shape[i] for i in contracted)
    elif "ragged_dot_dimension_numbers" in eqn.params:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        terms = _number(x.shape[i] for i in contracted)
        # Groups of what is summed over share it: each has a result of its own.
        if set(contracted) & set(numbers.lhs_ragged_dimensions):
            terms /= _number(aval_of(eqn.invars[2]).shape[-1:])
    else:  # groups of rows, each with a matrix of its own
        terms = _number(x.shape[-1:])
    parts = 4 if jnp.issubdtype(out.dtype, jnp.complexfloating) else 1
    return int(2 * parts * _number(out.shape) * terms)


def _is_one_step(eqn: JaxprEqn) -> bool:
    """Whether a `while` is this library's own around a training step, whose work is that step's: a
    first step that overflows is evaluated again."""
    info = eqn.params["body_jaxpr"].jaxpr.debug_info
    ours = (info.func_filename or "").startswith(HOME)
    return ours and info.func_name.rpartition(".")[2] == "one_step"


_PRODUCTS = PRODUCTS | {"ragged_dot", "ragged_dot_general"}


class Counter:
    """Counts the products of jaxprs; `loops` are the lines of loops whose length is not known."""

    def __init__(self):
        self.loops: dict[str, None] = {}
        # By the identity of a jaxpr, which is kept alive beside its products.
        self._known: dict[int, tuple[Jaxpr, Mapping[Product, Work]]] = {}

    def products(self, jaxpr: Jaxpr) -> Mapping[Product, Work]:
        """The products in a jaxpr that lead to its results, at any depth, as often as they run. The
        compiler drops the others: a layer that is evaluated in full for its value, and
        differentiated in half, has a half value too."""
        if id(jaxpr) not in self._known:
            total: dict[Product, Work] = defaultdict(Work)
            # At each depth, since JAX leaves the bodies of `while` loops as they are.
            alive, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
            for eqn in alive.eqns:
                for product, work in self._of(eqn).items():
                    before = total[product]
                    total[product] = Work(before.count + work.count, before.flops + work.flops)
            self._known[id(jaxpr)] = jaxpr, dict(total)
        return self._known[id(jaxpr)][1]

    def _of(self, eqn: JaxprEqn) -> Mapping[Product, Work]:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            out_dtype = aval_of(eqn.outvars[0]).dtype.name
            dtypes = _multiplied(eqn), out_dtype, _tensorfloat32(eqn)
            site = site_of(eqn)
            product = Product(site.line or "unknown", name, *dtypes, site.inside)
            return {product: Work(1, _flops(eqn))}
        inner = [self.products(jaxpr) for jaxpr in jaxprs_in(eqn)]
        if not any(inner):
            return {}
        if name == "cond":  # one of them runs
            inner = [max(inner, key=lambda products: sum(w.flops for w in products.values()))]
        if name == "custom_linear_solve":  # the rest are for its derivatives
            inner = [self.products(eqn.params["jaxprs"].solve.jaxpr)]
        if name == "while" and not _is_one_step(eqn):
            self.loops[line_of(eqn)] = None
        times = self._times(eqn)
        # A trace inside of another, such as that of a checkpoint, does not see who called it.
        site = site_of(eqn)
        total: dict[Product, Work] = defaultdict(Work)
        for products in inner:
            for product, work in products.items():
                if site.users and (installed(product.line) or product.line == "unknown"):
                    product = product._replace(line=site.line)
                count, flops = total[product]
                total[product] = Work(count + times * work.count, flops + times * work.flops)
        return total

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
