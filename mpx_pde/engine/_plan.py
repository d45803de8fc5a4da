"""Which derivatives travel together, and how products and functions mix them.

A *stream* is a derivative of a value with respect to the point. It is named by its *index*, the
sorted tuple of its directions: `(0, 0, 1)` is u_xxy. With each index go all that lie below it
(u_x, u_y, u_xx, u_xy): what the rules of Leibniz and of Faà di Bruno ask for.

A *sum* is a stream of its own: a linear combination of derivatives that is wanted as a whole, such
as a Laplacian. Linear operations take it as they take any stream, so its summands need none of
theirs (*collapsed Taylor mode*: Dangel et al., arXiv 2505.13644).
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

    - `indices`: every derivative that has a stream, lower orders first.
    - `sums`: for each sum the indices of its summands.
    - `sizes`: for each direction `None`, or how many directions stand for it: the streams of
        indices with such a direction are stacked along a leading axis, one for each.
    - `asked`: the indices whose derivatives are wanted for themselves; `()` is the value.
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
        """The keys of all streams, and `()` for the value."""
        return frozenset((*self.keys, ()))

    def needs(self, keys: Iterable[Index]) -> frozenset[Index]:
        """Returns the operand streams that a nonlinear function needs, the value too."""
        out = {(), *keys}
        for key in keys:
            terms = self.sums[-1 - key[0]] if key and key[0] < 0 else (key,)
            out.update(below for index in terms for below in _below(index))
        return frozenset(out)

    def shape(self, key: Index, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape of a stream of a value of this shape."""
        size = self.size(key)
        return shape if size is None else (size, *shape)

    def each(self, function: Callable, keys: Sequence[Index]) -> Callable:
        """A function of arrays as one of streams with these keys, any of which may be stacked."""
        axes = tuple(None if self.size(key) is None else 0 for key in keys)
        return jax.vmap(function, axes) if 0 in axes else function

    def size(self, key: Index) -> int | None:
        """The length of the leading axis of a stream; `None` if it has none."""
        sizes = {self.sizes[i] for i in key if i >= 0}
        sizes.discard(None)
        return sizes.pop() if sizes else None


def make_plan(
    indices: Iterable[Index], sums: Iterable[Iterable[Index]], sizes: tuple[int | None, ...]
) -> Plan:
    """All streams that the wanted derivatives and sums need."""
    asked = tuple(dict.fromkeys(indices))
    sums = tuple(tuple(terms) for terms in sums)
    wanted = {below for index in asked for below in (index, *_below(index))}
    wanted |= {below for terms in sums for index in terms for below in _below(index)}
    ordered = sorted((i for i in wanted if i), key=lambda i: (len(i), i))
    for index in (*ordered, *(i for terms in sums for i in terms)):
        stacked = {i for i in index if sizes[i] is not None}
        # Streams along two stacked directions would need two axes.
        assert not stacked or set(index) == stacked, index
    return Plan(tuple(ordered), sums, sizes, asked)


def _below(index: Index) -> set[Index]:
    return {below for n in range(len(index)) for below in combinations(index, n)}


@cache
def splits(index: Index) -> tuple[tuple[int, Index, Index], ...]:
    """The rule of Leibniz without its two outer terms: how often which pair is multiplied."""
    times = Counter(left for n in range(1, len(index)) for left in combinations(index, n))
    rest = lambda left: tuple(sorted((Counter(index) - Counter(left)).elements()))
    return tuple((n, left, rest(left)) for left, n in times.items())


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put the items into blocks."""
    if not items:
        yield []
        return
    first, *rest = items
    for blocks in _partitions(rest):
        yield [[first], *blocks]
        for i in range(len(blocks)):
            yield [*blocks[:i], [first, *blocks[i]], *blocks[i + 1 :]]


@cache
def chains(index: Index) -> dict[int, tuple[tuple[int, tuple[Index, ...]], ...]]:
    """The formula of Faà di Bruno but for its linear term: by the order of the derivative of the
    outer function, how often which product of inner streams enters."""
    found = Counter(
        tuple(sorted(tuple(sorted(block)) for block in blocks))
        for blocks in _partitions(list(index))
        if len(blocks) > 1
    )
    out: dict[int, list] = {}
    for blocks, times in found.items():
        out.setdefault(len(blocks), []).append((times, blocks))
    return {order: tuple(terms) for order, terms in out.items()}
