"""The bags of a set's pieces in one batch, and what of them goes to the device.

Shape letters: N keys, K keys that read initial rows, P pieces of the set, B bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Outcome, distinct_keys, join_offsets, join_rows
from recsdk_sharding.device.parcel import Item, Parcel, put_optional
from recsdk_sharding.device.sets import PieceOrder, SetLayout

__all__ = ["BagItems", "Block", "InitialItems", "SetBags"]

Block: TypeAlias = tuple[int, int, int]
"""Bags of a set that lie side by side, and whose vectors do: the first bag, how many they are, and
where the first vector begins in the results, a number, or a column of their matrix."""


@dataclass(frozen=True)
class InitialItems:
    """Initial rows in a parcel, which keys without a row read in place of the store's."""

    places_K: Item
    """Which of the keys they are, int64 (K,)."""
    which_K: Item
    """Which of the rows each reads, int64 (K,)."""
    values: Item
    """The rows, float32 (U * D,) of U distinct keys."""


@dataclass(frozen=True)
class BagItems:
    """A `BagIndex` in a parcel."""

    rows_N: Item
    offsets: Item | None
    weights_N: Item | None
    initial: InitialItems | None
    """None: all keys read the store."""


class SetBags:
    """The pieces of a set, in the order of their vectors."""

    def __init__(self, group: Any, layout: SetLayout, order: PieceOrder) -> None:
        """`group`: the `GroupBags` that have them."""
        self.pieces_P = pieces_P = order.pieces_P
        """Which of the group's they are."""
        self._group = group
        self._layout = layout
        self._order = order
        self._num_keys_P: NDArray[np.int64] = group.num_keys_P[pieces_P]
        self._starts_P: NDArray[np.int64] = group.starts_P[pieces_P]
        self._offsets_P, self._num_bags_P = _offsets_of(group, pieces_P, self._num_keys_P)
        self._weights_N = _weights_of(group, pieces_P)

    @property
    def num_bags(self) -> int:
        """B."""
        return int(self._num_bags_P.sum())

    @property
    def _begins_P(self) -> NDArray[np.int64]:
        """Where the keys of each piece begin among the group's."""
        num_keys = self._group.num_keys_P
        begins_P: NDArray[np.int64] = (num_keys.cumsum() - num_keys)[self._order.pieces_P]
        return begins_P

    @property
    def firsts_P(self) -> NDArray[np.int64]:
        """Where the keys of each piece begin among the set's."""
        firsts_P: NDArray[np.int64] = self._num_keys_P.cumsum() - self._num_keys_P
        return firsts_P

    def put(self, parcel: Parcel) -> BagItems:
        """Puts them into a parcel, with room for the rows of their keys."""
        layout = self._layout
        rows_N = parcel.put_room(int(self._num_keys_P.sum()), layout.number)
        offsets = None
        if self._offsets_P is not None:
            write = partial(join_offsets, self._offsets_P, self._num_keys_P)
            offsets = parcel.put_made(self.num_bags + 1, layout.number, write)
        return BagItems(rows_N, offsets, put_optional(parcel, self._weights_N), None)

    def write_rows(self, mapped: Any, out: NDArray[Any]) -> None:
        """Writes the rows of the keys, which are mapped now: in `MappedBags`."""
        placing_3P = self._layout.placing_of(self._order.tables_P)
        parts = self._begins_P, self._num_keys_P, *placing_3P
        join_rows(mapped.rows_N, mapped.outcomes_N, parts, out)

    def put_initial(self, parcel: Parcel, mapped: Any) -> InitialItems | None:
        """Puts the initial rows that keys without a row read, of mapped bags."""
        places, which, rows, num_rows = [], [], [], 0
        for number in self._layout.with_initial:
            pieces = np.flatnonzero(self._order.tables_P == number)
            places_K, keys_K = self._without_row(pieces, mapped)
            keys_U, which_K = distinct_keys(keys_K)
            places.append(places_K)
            which.append(which_K + num_rows)
            rows.append(self._layout.tables[number].initial_rows(keys_U).reshape(-1))
            num_rows += len(keys_U)
        if num_rows == 0:
            return None
        return InitialItems(*(parcel.put(np.concatenate(each)) for each in (places, which, rows)))

    def _without_row(
        self, pieces: NDArray[np.int64], mapped: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of the keys of some pieces have no row, (K,), and those keys, (K,)."""
        counts_P, begins_P = self._num_keys_P, self._begins_P
        rows_N, outcomes_N = mapped.rows_N.numpy(), mapped.outcomes_N.numpy()
        shifts_P = begins_P - self.firsts_P
        places, keys = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for piece in pieces.tolist():
            begin = int(begins_P[piece])
            own = slice(begin, begin + int(counts_P[piece]))
            found = begin + np.flatnonzero(outcomes_N[own] > Outcome.INSERTED)
            places.append(found - shifts_P[piece])
            keys.append(rows_N[found])  # what `map` gives in place of a row number
        return np.concatenate(places), np.concatenate(keys)

    def within(self, pooled: range) -> tuple[SetBags, int, int]:
        """The pieces that begin in a range, which lie side by side; the first bag and key."""
        starts_P = self._starts_P
        wanted = np.flatnonzero((starts_P >= pooled.start) & (starts_P < pooled.stop))
        first = int(wanted[0]) if len(wanted) else 0
        part = SetBags(self._group, self._layout, self._order.at(wanted))
        return part, int(self._num_bags_P[:first].sum()), int(self._num_keys_P[:first].sum())

    def blocks(self, *, is_matrix: bool) -> list[Block]:
        """Where the vectors go; pieces whose vectors lie side by side are one block."""
        num_bags_P, starts_P = self._num_bags_P, self._starts_P
        dim = self._layout.tables[0].dim
        if not is_matrix and len(starts_P):
            num_bags, first = int(num_bags_P.sum()), int(starts_P[0])
            end = int(starts_P[-1]) + int(num_bags_P[-1]) * dim
            if end - first == num_bags * dim:  # no two lie in the same place, and they ascend
                return [(0, num_bags, first)]
        firsts_P = num_bags_P.cumsum() - num_bags_P
        if not is_matrix:
            begins_P = np.ones(len(starts_P), np.bool_)
            begins_P[1:] = starts_P[:-1] + num_bags_P[:-1] * dim != starts_P[1:]
            at = np.flatnonzero(begins_P)
            num_bags_P = np.add.reduceat(num_bags_P, at) if len(at) else at
            firsts_P, starts_P = firsts_P[at], starts_P[at]
        return list(zip(firsts_P.tolist(), num_bags_P.tolist(), starts_P.tolist(), strict=True))

    def divisors(self) -> NDArray[np.float32] | None:
        """What sums are divided by to be means: the count, or the sum of weights.

        Infinite where that is 0, so that both the mean and its gradient are 0.
        """
        if self._group.is_mean_P is None or (self._offsets_P is None and self._weights_N is None):
            return None
        is_mean_P = self._group.is_mean_P[self._order.pieces_P]
        if not is_mean_P.any():
            return None
        divisors_B = self._totals()
        divisors_B[divisors_B == 0] = np.inf
        divisors_B[~np.repeat(is_mean_P, self._num_bags_P)] = 1.0
        return divisors_B

    def _totals(self) -> NDArray[np.float32]:
        """The keys of each bag, or the sum of their weights."""
        totals_B: NDArray[np.float32]
        if self._offsets_P is None:
            assert self._weights_N is not None
            totals_B = self._weights_N.copy()
            return totals_B
        offsets = np.empty(self.num_bags + 1, np.int64)
        join_offsets(self._offsets_P, self._num_keys_P, offsets)
        lengths_B = np.diff(offsets)
        totals_B = lengths_B.astype(np.float32)
        if self._weights_N is not None:
            bag_N = np.repeat(np.arange(len(lengths_B)), lengths_B)
            totals_B[:] = np.bincount(bag_N, self._weights_N, len(lengths_B))
        return totals_B

    def places_in(self, starts_P: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Where each key's weight is, if those of the group's pieces start there."""
        if starts_P is None:
            return None
        counts_P = self._num_keys_P
        shifts_P = starts_P[self._order.pieces_P] - (counts_P.cumsum() - counts_P)
        return np.arange(int(counts_P.sum())) + np.repeat(shifts_P, counts_P)


def _offsets_of(
    group: Any, pieces_P: NDArray[np.int64], num_keys_P: NDArray[np.int64]
) -> tuple[list[torch.Tensor | None] | None, NDArray[np.int64]]:
    """Where bags begin in each piece (None: each has one key), and how many bags each has."""
    if group.offsets is None:
        return None, num_keys_P
    offsets: list[torch.Tensor | None] = [group.offsets[p] for p in pieces_P.tolist()]
    pairs = zip(offsets, num_keys_P.tolist(), strict=True)
    num_bags_P = np.array([n if own is None else len(own) - 1 for own, n in pairs], np.int64)
    if (num_bags_P == num_keys_P).all():
        given = [own for own in offsets if own is not None]
        if all(bool((own.diff() == 1).all()) for own in given):
            return None, num_keys_P
    return offsets, num_bags_P


def _weights_of(group: Any, pieces_P: NDArray[np.int64]) -> NDArray[np.float32] | None:
    weights: Sequence[Any] = group.weights or ()
    given = [weights[piece] for piece in pieces_P.tolist()] if weights else []
    given = [of_piece for of_piece in given if of_piece is not None]
    found: NDArray[np.float32] | None = torch.cat(given).detach().numpy() if given else None
    return found
