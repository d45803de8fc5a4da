"""The products of a jaxpr: how many, in which dtype, how much work, and where."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jaxtyping
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from .._dtypes import is_half
from .._split import SPLIT_PRODUCTS
from ._jaxpr import aval_of, jaxprs_in
from ._primitives import MIXED, PRODUCTS, leaves_it_to_tensorfloat32


HOME = os.path.join(Path(__file__).parents[1], "")  # of this library
# Whose frames tell nothing: the layers that everyone uses, and the checker of annotations.
_PLUMBING = tuple(f"{m.__path__[0]}/" for m in (eqx, jaxtyping))
_HALVES = ("float16", "bfloat16")
_FRAME = re.compile(r"^(.*?:\d+)(?::\d+)? \(")


class Product(NamedTuple):
    """Products that are alike: of one line, one primitive and one pair of dtypes.

    **Attributes:**

    - `line`: `file:line` in the user's code.
    - `primitive`: the name of the primitive.
    - `dtype`: what is multiplied in: the dtype that operands are rounded to (joined by `*` where
        they differ), or the name of the algorithm that splits them.
    - `out_dtype`: the dtype of the result.
    - `tensorfloat32`: whether the program leaves it to a GPU to multiply float32 in TF32.
    """

    line: str
    primitive: str
    dtype: str
    out_dtype: str
    tensorfloat32: bool = False

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


def installed(path: str) -> bool:
    """Whether a file belongs to this library or to another that is installed."""
    return path.startswith((HOME, "<")) or "-packages/" in path


def _line(eqn: JaxprEqn) -> str:
    """The innermost `file:line` that is the user's. Where none is, as for a loss object of another
    library, the innermost of an installed library, other than Equinox's layers if there is one."""
    frames = _frames(eqn.source_info)
    users = [frame for frame in frames if not installed(frame)]
    libraries = [frame for frame in frames if not frame.startswith(_PLUMBING)]
    return next(iter(users or libraries or frames), "unknown")


def _frames(source: Any) -> list[str]:
    """The lines that an equation comes from, the innermost first, without those in here."""
    text = source_info_util.summarize(source, num_frames=100)
    # "file:line:column (function)", without the column in older versions.
    frames = [match for line in text.splitlines() if (match := _FRAME.match(line))]
    return [match[1] for match in reversed(frames) if not match[1].startswith(HOME)]


def is_users(source: Any) -> bool:
    """Whether an equation comes from a line of the user's."""
    return any(not installed(frame) for frame in _frames(source))


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


_PRODUCTS = (*PRODUCTS, *MIXED, "ragged_dot", "ragged_dot_general")


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
            product = Product(_line(eqn), name, _multiplied(eqn), out_dtype, _tensorfloat32(eqn))
            return {product: Work(1, _flops(eqn))}
        inner = [self.products(jaxpr) for jaxpr in jaxprs_in(eqn)]
        if not any(inner):
            return {}
        if name == "cond":  # one of them runs
            inner = [max(inner, key=lambda products: sum(w.flops for w in products.values()))]
        if name == "custom_linear_solve":  # the rest are for its derivatives
            inner = [self.products(eqn.params["jaxprs"].solve.jaxpr)]
        if name == "while":
            self.loops[_line(eqn)] = None
        times = self._times(eqn)
        # A trace inside of another, such as that of a checkpoint, does not see who called it.
        line = _line(eqn) if is_users(eqn.source_info) else None
        total: dict[Product, Work] = defaultdict(Work)
        for products in inner:
            for product, work in products.items():
                if line is not None and (installed(product.line) or product.line == "unknown"):
                    product = product._replace(line=line)
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
