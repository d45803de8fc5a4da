"""Strategies to share derivative scales: one for each direction, order or term.

Each strategy knows its scalers, and the rows that count derivatives, with the scale in each. It
finds the row of a term, a Laplacian or a sum, and the scale of the streams on the way to it.
"""

import abc
import functools as ft
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._util._calls import called
from ._checks import split_names, term_list


Weights = tuple[tuple[int, int], ...]
"""Pairs of a scaler and the number of times that it enters."""

_LOW = -8
"""Below this exponent, a stream of values around 1 nears float16's subnormal numbers and loses
digits. Values down to 2^-5 keep theirs at this exponent."""


@dataclass(frozen=True)
class HistogramRow:
    """A row of the histogram, for the derivatives that are scaled alike."""

    name: str
    weights: Weights
    smallest: bool = False
    """If true, all directions take the smallest of all scales, as a Laplacian does."""

    @property
    def order(self) -> int:
        return max(w for _, w in self.weights) if self.smallest else sum(w for _, w in self.weights)


def _weights(dirs: Iterable[int]) -> Weights:
    return tuple(sorted(Counter(dirs).items()))


def _dirs_of(term: str, order: int, coords: tuple[str, ...] | None) -> tuple[Any, ...]:
    """Returns the directions of a term with a histogram of its own: the positions of coordinates,
    or letters if the names of the coordinates are not known.
    """
    suffix = term.rpartition("_")[2]
    dirs = tuple(suffix) if coords is None else split_names(suffix, coords)
    if dirs is None or not 1 <= len(dirs) <= order:
        names = "of one letter, or in `coords`" if coords is None else ", ".join(coords)
        raise ValueError(
            f"`{called()}` cannot give the term {term!r} a histogram of its own: it must end in an "
            f"underscore and 1 to {order} of the coordinates {names}."
        )
    return dirs


class AbstractStrategy(abc.ABC):
    """The part of a `DerivativeScaling` that decides which derivatives share a scaler. It is static
    data that can be compared and hashed.

    **Attributes:**

    - `kind`: the name of the strategy.
    - `names`: the names of the scalers.
    - `order`: the highest order that has scales; `None` if it does not matter.
    - `rows`: the groups of derivatives that are counted together.
    - `coords`: the coordinates that have scales; `None` if scales are not by coordinate.
    """

    kind: Any
    names: tuple[str, ...]
    order: int | None
    rows: tuple[HistogramRow, ...]
    coords: ClassVar[Any] = None

    def __str__(self) -> str:
        order = "" if self.order is None else f" up to order {self.order}"
        return f"per_{self.kind}{order}, {len(self.rows)} rows"

    @property
    def row_names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    def shifts(self, exponents: Any, rows: Sequence[int] | None = None) -> Any:
        """Returns the exponents of two by which the derivatives in `rows`, by default all, are
        scaled."""
        chosen = self.rows if rows is None else [self.rows[i] for i in rows]
        column = lambda of: np.array([of(row) for row in chosen], np.int32)
        # Avoids sums over an axis, which are separate kernels on a GPU.
        each = [exponents[i] for i in range(len(self.names))]
        powers = [column(lambda row, i=i: dict(row.weights).get(i, 0)) for i in range(len(each))]
        total = sum(power * x for power, x in zip(powers, each, strict=True))
        smallest = column(lambda row: row.smallest)
        if not smallest.any():
            return total
        return jnp.where(
            smallest, column(lambda row: row.order) * ft.reduce(jnp.minimum, each), total
        )

    @property
    def options(self) -> dict[str, Any]:
        """Returns the kind, the names of the scalers and of the rows, and the order, for
        `scaling_options`.
        """
        names = {"names": list(self.names), "rows": list(self.row_names)}
        return {"kind": self.kind, **names, "order": self.order}

    def row_of(self, term: str, named: Sequence[str]) -> int:
        """Returns the row of a term, which is the derivative in the `named` coordinates."""
        order, output = len(named), term.rpartition("_")[0]
        # The letters may be in any order.
        alike = (f"{output}_{''.join(names)}" for names in permutations(named))
        term = next((name for name in (term, *alike) if name in self.row_names), term)
        if self.order is not None and order > self.order and term not in self.names:
            raise ValueError(
                f"`{called()}`: the term {term!r} is of order {order}, but the scaling was built "
                f"for orders up to {self.order}. Give `DerivativeScaling.per_{self.kind}` the "
                f"order {order}."
            )
        if term not in self.row_names:
            if self.order is None:
                raise ValueError(
                    f"`{called()}`: the scaling has no scaler for the term {term!r}; it knows "
                    f"{', '.join(self.names)}. Name it in `DerivativeScaling.per_term`."
                )
            return self._shared_row(named)
        row = self.row_names.index(term)
        expected = self._expected(term, named)
        if expected is not None and self.rows[row].weights != expected:
            raise ValueError(
                f"`{called()}`: the term {term!r} is the derivative in {', '.join(named)}, which "
                f"is not what `DerivativeScaling.per_{self.kind}` took it for. Give it the same "
                f"coordinates{', as `coords`' if self.kind == 'order' else ''}."
            )
        return row

    def _shared_row(self, named: Sequence[str]) -> int:
        """Returns the row that counts a derivative for any output: the first with its weights,
        which precedes those of terms.
        """
        expected = self._expected("", named)
        return [row.weights == expected for row in self.rows].index(True)

    @abc.abstractmethod
    def _expected(self, term: str, named: Sequence[str]) -> Weights | None:
        """Returns the powers of the scalers that a row named like a term must have, or `None` if
        the name is enough.
        """

    def sum_rows(self, summands: Sequence[Sequence[str]], laplacian: bool) -> tuple[int, ...]:
        """Returns the rows that count a sum of the derivatives in these coordinates: those of its
        highest order. A Laplacian over all coordinates that have scales has a row of its own.
        """
        whole = self.coords is None or len(summands) == len(self.coords)
        if laplacian and whole and "laplacian" in self.row_names:
            return (self.row_names.index("laplacian"),)
        order = max(map(len, summands))
        if self.order is None or order > self.order:
            what = "a Laplacian" if laplacian else f"an operator of order {order}"
            raise ValueError(
                f"`{called()}`: the scaling has no scaler for {what}; it knows "
                f"{', '.join(self.names)}. Build it for order {order} with "
                "`DerivativeScaling.per_direction` or `per_order`. `per_term` takes a Laplacian by "
                "the name 'laplacian'."
            )
        highest = [named for named in summands if len(named) == order]
        return tuple(dict.fromkeys(map(self._shared_row, highest)))

    def seeds_of(self, row: int) -> int | None:
        """Returns `row` if its derivatives have seeds of their own, and `None` if they share the
        common ones.
        """
        return None

    @abc.abstractmethod
    def exponent(self, exponents: Any, along: Sequence[Sequence[str]], order: int) -> Any:
        """Returns the exponent of the scale that a stream with shared seeds carries.

        **Arguments:**

        - `exponents`: the exponents of the scalers.
        - `along`: the coordinates of each differentiation: one, several if they are stacked, or
            none for a drawn direction.
        - `order`: the order of the lowest counted derivative that it leads to, itself included.
        """

    def stored(self, exponent: Any, margin: int) -> Any:
        """Returns the exponent at which a stream is stored. `exponent` is that of its derivative,
        and the update rule keeps `margin` powers of two free below overflow.
        """
        return exponent

    def steps(self, margin: int, rows: Iterable[HistogramRow]) -> int:
        """Returns the smallest rise of a scaler that raises one of its `rows` by `margin`."""
        return math.ceil(margin / max(row.order for row in rows))

    def order_of(self, scaler: int) -> int:
        """Returns the order of the derivatives that a scaler scales as a whole. It replaces as many
        factors of a coordinate's scale.
        """
        return 1

    def check_coords(self, coords: Iterable[str]) -> None:
        """Raises a `ValueError` for coordinates that have no scale."""
        unknown = [c for c in coords if self.coords is not None and c not in self.coords]
        if unknown:
            raise ValueError(
                f"`{called()}`: the scaling was built for the coordinates {', '.join(self.names)} "
                f"and has no scale for {', '.join(map(repr, unknown))}. Name all coordinates in "
                "`DerivativeScaling.per_direction`."
            )


@dataclass(frozen=True)
class PerDirection(AbstractStrategy):
    """One scale `s` for each coordinate. A derivative of order k in it carries `s**k`."""

    names: tuple[str, ...]
    order: int
    rows: tuple[HistogramRow, ...]
    kind: ClassVar[str] = "direction"

    @classmethod
    def of(cls, names: tuple[str, ...], order: int, terms: Sequence[str]) -> "PerDirection":
        rows = [
            HistogramRow("_" + "".join(names[i] for i in dirs), _weights(dirs))
            for k in range(1, order + 1)
            for dirs in combinations_with_replacement(range(len(names)), k)
        ]
        if order >= 2:
            every = tuple((i, 2) for i in range(len(names)))
            rows.append(HistogramRow("laplacian", every, smallest=True))
        for term in term_list(terms, empty=True):
            rows.append(HistogramRow(term, _weights(_dirs_of(term, order, names))))
        return cls(names, order, tuple(rows))

    def _expected(self, term: str, named: Sequence[str]) -> Weights:
        return _weights(self.names.index(name) for name in named)

    def exponent(self, exponents: Any, along: Sequence[Sequence[str]], order: int) -> Any:
        if not along[0]:
            return len(along) * jnp.min(exponents)
        places = [np.array([self.names.index(c) for c in coords]) for coords in along]
        at: list[Any] = [exponents[i if len(i) > 1 else int(i[0])] for i in places]
        return sum(at[1:], at[0])

    def stored(self, exponent: Any, margin: int) -> Any:
        return jnp.maximum(exponent, jnp.minimum(exponent + margin, _LOW))

    @property
    def coords(self) -> tuple[str, ...]:
        return self.names


@dataclass(frozen=True)
class PerOrder(AbstractStrategy):
    """One scaler for each order and one for each special term, as in section 3.1 of Xue et al. If
    `order` is `None`, there is one scaler for each term, and no terms share seeds.

    A term with a row of its own and no scaler shares the scaler of its order.
    """

    names: tuple[str, ...]
    order: int | None
    rows: tuple[HistogramRow, ...]

    @classmethod
    def of(
        cls,
        order: int,
        special: Sequence[str],
        terms: Sequence[str],
        coords: tuple[str, ...] | None,
    ) -> "PerOrder":
        names = (*(f"order {k}" for k in range(1, order + 1)), *special)
        rows = [HistogramRow(name, ((i, 1),)) for i, name in enumerate(names)]
        if order >= 2 and "laplacian" not in special:
            rows.append(HistogramRow("laplacian", ((1, 1),)))
        for term in term_list(terms, empty=True):
            if term not in special:  # special terms have rows already
                dirs = _dirs_of(term, order, coords)
                rows.append(HistogramRow(term, ((len(dirs) - 1, 1),)))
        return cls(names, order or None, tuple(rows))

    @property
    def kind(self) -> str:
        return "term" if self.order is None else "order"

    def _expected(self, term: str, named: Sequence[str]) -> Weights | None:
        return None if term in self.names else ((len(named) - 1, 1),)

    def order_of(self, scaler: int) -> int:
        if scaler < (self.order or 0):
            return scaler + 1
        name = self.names[scaler]
        # The highest order that is possible; the name alone does not tell it.
        return 2 if name == "laplacian" else len(name.rpartition("_")[2])

    def seeds_of(self, row: int) -> int | None:
        ((scaler, _),) = self.rows[row].weights
        return None if scaler < (self.order or 0) else row

    def exponent(self, exponents: Any, along: Sequence[Sequence[str]], order: int) -> Any:
        # A stream that is not counted follows the derivative that it leads to.
        return jnp.floor_divide(exponents[order - 1] * len(along), order)
