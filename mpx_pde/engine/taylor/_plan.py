"""Plans which derivatives are computed together, and how products and functions combine them.

A *stream* is a derivative of a value with respect to the point. Its name is its *index*, the sorted
tuple of its directions: `(0, 0, 1)` is u_xxy. An index requires all those below it (u_x, u_y, u_xx,
u_xy), because the rules of Leibniz and of Faà di Bruno use them.

A *sum* is a stream too: a linear combination of derivatives of which only the total is needed, such
as a Laplacian. Linear operations treat it like any other stream, so its summands need no streams of
their own (*collapsed Taylor mode*: Dangel et al., arXiv 2505.13644).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from typing import Any

import jax


Index = tuple[int, ...]
"""The sorted directions of a derivative. The k-th sum has the key `(-1 - k,)`."""


def sum_key(k: int) -> Index:
    return (-1 - k,)


@dataclass(frozen=True)
class Plan:
    """The streams of one evaluation.

    **Attributes:**

    - `indices`: the derivatives that have a stream, lower orders first.
    - `sums`: for each sum, the indices of its summands.
    - `sizes`: for each direction, `None` or the number of directions that it stands for. Streams
        along the latter are stacked along a leading axis.
    - `asked`: the indices of the derivatives that are results; `()` is the value.
    """

    indices: tuple[Index, ...]
    sums: tuple[tuple[Index, ...], ...] = ()
    sizes: tuple[int | None, ...] = ()
    asked: tuple[Index, ...] = ()

    @cached_property
    def keys(self) -> tuple[Index, ...]:
        return (*self.indices, *map(sum_key, range(len(self.sums))))

    @cached_property
    def everything(self) -> frozenset[Index]:
        """Returns the keys of all streams, and `()` for the value."""
        return frozenset((*self.keys, ()))

    def needs(self, keys: Iterable[Index]) -> frozenset[Index]:
        """Returns the operand streams, and `()`, from which a nonlinear function makes `keys`."""
        out = {(), *keys}
        for key in keys:
            terms = self.sums[-1 - key[0]] if key and key[0] < 0 else (key,)
            out.update(below for index in terms for below in _below(index))
        return frozenset(out)

    def shape(self, key: Index, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the shape of a stream, given the shape of its value."""
        size = self.size(key)
        return shape if size is None else (size, *shape)

    def each(self, function: Callable, keys: Sequence[Index]) -> Callable:
        """Turns a function of arrays into one of streams with these keys, stacked or not."""
        axes = tuple(None if self.size(key) is None else 0 for key in keys)
        return jax.vmap(function, axes) if 0 in axes else function

    def size(self, key: Index) -> int | None:
        """Returns the number of directions in a stacked stream; `None` for another stream."""
        sizes = {self.sizes[i] for i in key if i >= 0}
        sizes.discard(None)
        return sizes.pop() if sizes else None


def make_plan(
    indices: Iterable[Index], sums: Iterable[Iterable[Index]], sizes: tuple[int | None, ...]
) -> Plan:
    """Returns a plan of all streams that the derivatives at `indices` and the sums need."""
    asked = tuple(dict.fromkeys(indices))
    sums = tuple(tuple(terms) for terms in sums)
    wanted = {below for index in asked for below in (index, *_below(index))}
    wanted |= {below for terms in sums for index in terms for below in _below(index)}
    ordered = sorted((i for i in wanted if i), key=lambda i: (len(i), i))
    for index in (*ordered, *(i for terms in sums for i in terms)):
        stacked = {i for i in index if sizes[i] is not None}
        # A stream has one axis for stacked directions, so it cannot mix them with others.
        assert not stacked or len(set(index)) == 1, index
    return Plan(tuple(ordered), sums, sizes, asked)


def _below(index: Index) -> set[Index]:
    return {below for n in range(len(index)) for below in combinations(index, n)}


@cache
def splits(index: Index) -> tuple[tuple[int, Index, Index], ...]:
    """Returns the terms of the rule of Leibniz, except the two outer ones: counts and pairs."""
    times = Counter(left for n in range(1, len(index)) for left in combinations(index, n))
    rest = lambda left: tuple(sorted((Counter(index) - Counter(left)).elements()))
    return tuple((n, left, rest(left)) for left, n in times.items())


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yields all ways to divide the items into blocks."""
    if not items:
        yield []
        return
    first, *rest = items
    for blocks in _partitions(rest):
        yield [[first], *blocks]
        for i in range(len(blocks)):
            yield [*blocks[:i], [first, *blocks[i]], *blocks[i + 1 :]]


@cache
def chains(
    index: Index, in_turn: bool = False
) -> dict[int, tuple[tuple[int, tuple[Index, ...]], ...]]:
    """Returns the terms of the formula of Faà di Bruno, except the linear one, by the order of the
    outer derivative. Each term is a count, and the inner streams that are multiplied.

    If `in_turn`, they are in the order in which nested derivatives take them as directions. This
    matters for a rule of the user's that is not the derivative of any function."""
    found = Counter[tuple[Index, ...]]()
    for blocks in _partitions(list(range(len(index)))):
        if len(blocks) > 1:
            # A block becomes a direction with its first derivative.
            streams = [tuple(sorted(index[i] for i in block)) for block in sorted(blocks, key=min)]
            found[tuple(streams if in_turn else sorted(streams))] += 1
    out: dict[int, list] = {}
    for blocks, times in found.items():
        out.setdefault(len(blocks), []).append((times, blocks))
    return {order: tuple(terms) for order, terms in out.items()}
