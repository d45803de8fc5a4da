"""Chooses the cheapest arrays from which others can be computed.

The arrays that the backward pass reads are known. Each is kept, or computed again from others that
are. The cheapest choice is a minimum cut of the graph of these dependencies, with the bytes of each
array as the capacity of its node (as in the partitioner of PyTorch's AOTAutograd).
"""

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np


_INFINITE, _LARGEST = 2**30, 2**28
"""The capacity of an edge that must not be cut, and the largest sum of all others."""


def chosen(
    wanted: Collection[int],
    operands: Mapping[int, Collection[int]],
    free: Collection[int],
    size: Callable[[int], int],
) -> list[int]:
    """Returns the variables to keep, so that all `wanted` ones can be computed from them.

    **Arguments:**

    - `operands`: for each variable that can be computed again, the variables that this takes.
    - `free`: variables that are there anyway.
    - `size`: the bytes that a variable takes if it is kept.
    """
    found = dict.fromkeys(x for x in wanted if x not in free)
    pending = list(found)
    while pending:
        for x in operands.get(pending.pop(), ()):
            if x not in free and x not in found:
                found[x] = None
                pending.append(x)
    nodes = list(found)
    if all(x not in operands for x in wanted if x in found):
        return [x for x in nodes if x in wanted]
    return _cut(nodes, {x for x in wanted if x in found}, operands, size)


def _cut(
    nodes: list[int],
    wanted: Collection[int],
    operands: Mapping[int, Collection[int]],
    size: Callable[[int], int],
) -> list[int]:
    """Returns the cut of smallest size that is nearest to the wanted variables. Each variable is an
    edge between two nodes of the graph."""
    # Their import takes as long as an eighth of all others of this library.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    place = {x: i for i, x in enumerate(nodes)}
    source, sink = 2 * len(nodes), 2 * len(nodes) + 1
    sizes = [max(size(x), 1) for x in nodes]
    unit = math.ceil(sum(sizes) / _LARGEST)
    edges: dict[tuple[int, int], int] = {}
    for i, x in enumerate(nodes):
        edges[2 * i, 2 * i + 1] = math.ceil(sizes[i] / unit)
        if x not in operands:
            edges[source, 2 * i] = _INFINITE
        for y in operands.get(x, ()):
            if y in place:
                edges[2 * place[y] + 1, 2 * i] = _INFINITE
        if x in wanted:
            edges[2 * i + 1, sink] = _INFINITE
    tails, heads = np.array(list(edges)).T
    graph = csr_array(
        (np.array(list(edges.values()), np.int32), (tails, heads)), shape=(sink + 1, sink + 1)
    )
    rest = graph - maximum_flow(graph, source, sink).flow
    rest.eliminate_zeros()
    # What can still reach the sink needs nothing that is cut.
    reaching = set(breadth_first_order(rest.T.tocsr(), sink, return_predecessors=False).tolist())
    return [x for i, x in enumerate(nodes) if 2 * i not in reaching and 2 * i + 1 in reaching]
