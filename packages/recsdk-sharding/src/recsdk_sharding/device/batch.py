"""A mapped batch as it goes to the device: the rows of all tables' keys, bag after bag.

The host only puts arrays one behind the other; what follows from them is found on the device. A key
takes four bytes on the way, eight in a store of 2^31 rows and more; a bag takes as many, unless
each of a batch has one key.

Shape letters: N keys, K keys that read initial rows, U distinct ones, P pieces of a set, B bags, M
weights that come late, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Outcome, distinct_keys, join_rows
from recsdk_sharding.device.parcel import Item, Parcel, put_optional

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["BagItems", "Block", "InitialItems", "TableSet", "plan_batch"]

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
    """The rows, float32 (U * D,)."""


@dataclass(frozen=True)
class BagItems:
    """A `BagIndex` in a parcel."""

    rows_N: Item
    offsets: Item | None
    weights_N: Item | None
    initial: InitialItems | None
    """None: all keys read the store."""


@dataclass(frozen=True)
class ReadBags:
    """Bags of a set that lie side by side."""

    first: int
    count: int
    first_key: int
    bags: BagItems


@dataclass(frozen=True)
class TableSet:
    """Tables of one store that are pooled as one, and trained by one update if they are alike."""

    tables: list[DeviceTable]
    shards: list[Any]
    """Their `MappedShard`s."""
    spare_row: int
    """The last one of its tables, which takes what must not be written. Of the store."""
    bags: BagItems
    num_bags: int
    read: ReadBags | None
    """The bags that are read; None: all are."""
    blocks: list[Block]
    divisors_B: Item | None
    """What sums are divided by, float32 (B,); None: by nothing."""
    places_N: Item | None
    """Where each key's weight is among those that come late, int64 (N,); None: none do."""
    begins: Sequence[tuple[DeviceTable, int]]
    """Tables whose new rows begin with shared ones, and the last call that made a row of the batch.
    """

    @property
    def dim(self) -> int:
        """Row width D."""
        return self.tables[0].dim


def plan_batch(bags: Any, request: Any, *, training: bool) -> tuple[Parcel, list[TableSet]]:
    """A sealed parcel, and what of it each set of tables needs.

    `bags`, `request`: `GroupBags` and `PoolRequest` of `recsdk_sharding._rows.home`.
    """
    parcel = Parcel()
    sets = _sets_of(bags.shards, training)
    plans = [_plan_set(parcel, bags, members, request) for members in sets]
    parcel.seal()
    return parcel, plans


def _sets_of(shards: Sequence[Any], training: bool) -> list[list[int]]:
    """Which shards are a set: those of one store. In training of equal settings too, and a table
    that accumulates is alone."""
    tables: list[DeviceTable] = [shard.held.table for shard in shards]
    settings = [table.settings if training else () for table in tables]
    homes = [
        table if training and shard.accumulation is not None else table.store
        for table, shard in zip(tables, shards, strict=True)
    ]
    if tables and _are_alike(homes) and _are_alike(settings):
        return [list(range(len(tables)))]
    sets: dict[Any, list[tuple[Any, list[int]]]] = {}
    for number, (home, own) in enumerate(zip(homes, settings, strict=True)):
        of_store = sets.setdefault(home, [])
        for common, members in of_store:  # comparing costs less than hashing, and most are equal
            if common == own:
                members.append(number)
                break
        else:
            of_store.append((own, [number]))
    return [members for of_store in sets.values() for _, members in of_store]


def _are_alike(values: Sequence[Any]) -> bool:
    """As nearly always; finding out which are takes much longer."""
    return values.count(values[0]) == len(values)


def _plan_set(parcel: Parcel, bags: Any, members: Sequence[int], request: Any) -> TableSet:
    """`members`: which of the group's shards the set has."""
    shards = [bags.shards[number] for number in members]
    tables = [shard.held.table for shard in shards]
    own = _SetBags.of_shards(bags, members, tables)
    store = tables[0].store
    spare_row = max([each.spare_row_of_store for each in tables])
    number = _type_of(len(store.weight_RD))
    items = own.put(parcel, number)
    read = None
    if request.pooled is not None:
        part, first, first_key = own.within(request.pooled)
        of_part = part.put(parcel, number)
        read = ReadBags(first, int(part.num_bags_P.sum()), first_key, of_part)
    return TableSet(
        tables=tables,
        shards=shards,
        spare_row=spare_row,
        bags=items,
        num_bags=int(own.num_bags_P.sum()),
        read=read,
        blocks=own.blocks(tables[0].dim, is_matrix=request.shape is not None),
        divisors_B=put_optional(parcel, own.divisors()),
        places_N=put_optional(parcel, own.places_in(request.weight_starts_P)),
        begins=_begins_of(bags, members),
    )


def _begins_of(bags: Any, members: Sequence[int]) -> list[tuple[DeviceTable, int]]:
    shards = bags.shards
    with_shared = [number for number in members if shards[number].held.table.begins_with_shared]
    if not with_shared:
        return []
    ends_P = np.append(0, bags.num_keys_P.cumsum())
    ends = ends_P[np.append(0, np.cumsum(bags.num_pieces))].tolist()
    rows_N, outcomes_N = bags.rows_N.numpy(), bags.outcomes_N.numpy()
    found = []
    for number in with_shared:
        table = shards[number].held.table
        own = slice(ends[number], ends[number + 1])
        has_row = outcomes_N[own] <= Outcome.INSERTED
        found.append((table, table.last_call_of(rows_N[own][has_row])))
    return found


def _type_of(num_rows: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if num_rows < 2**31 else np.int64)


@dataclass(frozen=True)
class _SetBags:
    """The pieces of a set, in the order of their vectors."""

    group: Any
    """The `GroupBags` that have them."""
    pieces_P: NDArray[np.int64]
    """Which of the group's they are."""
    tables: Sequence[DeviceTable]
    """The set's tables."""
    tables_P: NDArray[np.int64]
    """Which of them each one's is."""
    lengths_B: NDArray[np.int64] | None
    """None: each bag has one key."""
    num_bags_P: NDArray[np.int64]
    weights_N: NDArray[np.float32] | None

    @staticmethod
    def of_shards(group: Any, members: Sequence[int], tables: Sequence[DeviceTable]) -> _SetBags:
        """Those of some shards, whose tables these are."""
        table_of = np.full(len(group.shards), -1)
        table_of[members] = np.arange(len(tables))
        tables_P = np.repeat(table_of, group.num_pieces)
        own_P = np.flatnonzero(tables_P >= 0)
        pieces_P = own_P[np.argsort(group.starts_P[own_P], kind="stable")]
        return _SetBags.of_pieces(group, pieces_P, tables, tables_P[pieces_P])

    @staticmethod
    def of_pieces(
        group: Any,
        pieces_P: NDArray[np.int64],
        tables: Sequence[DeviceTable],
        tables_P: NDArray[np.int64],
    ) -> _SetBags:
        """Some pieces of a group."""
        pieces = pieces_P.tolist()
        weights = [] if group.weights is None else [group.weights[piece] for piece in pieces]
        given = [of_piece for of_piece in weights if of_piece is not None]
        lengths_B, num_bags_P = _lengths_of(group, pieces_P)
        weights_N = torch.cat(given).detach().numpy() if given else None
        return _SetBags(group, pieces_P, tables, tables_P, lengths_B, num_bags_P, weights_N)

    @property
    def num_keys_P(self) -> NDArray[np.int64]:
        """Keys of each."""
        counts_P: NDArray[np.int64] = self.group.num_keys_P[self.pieces_P]
        return counts_P

    @property
    def starts_P(self) -> NDArray[np.int64]:
        """Where the vectors of each begin."""
        starts_P: NDArray[np.int64] = self.group.starts_P[self.pieces_P]
        return starts_P

    def _rows_of_tables(self) -> Iterator[NDArray[np.int64]]:
        """As `join_rows` takes them: each one's first row, default row, number of shared rows."""
        of_tables = np.array([each.placing for each in self.tables], np.int64).reshape(-1, 3)
        yield from np.ascontiguousarray(of_tables[self.tables_P].T)

    def put(self, parcel: Parcel, number: np.dtype[Any]) -> BagItems:
        """Puts them into a parcel."""
        group = self.group
        begins = group.num_keys_P.cumsum() - group.num_keys_P
        parts = begins[self.pieces_P], self.num_keys_P, *self._rows_of_tables()
        rows_N = parcel.put_made(
            int(self.num_keys_P.sum()),
            number,
            lambda out: join_rows(group.rows_N, group.outcomes_N, parts, out),
        )
        offsets = None
        if self.lengths_B is not None:
            lengths_B = self.lengths_B
            offsets = parcel.put_made(
                len(lengths_B) + 1, number, lambda out: _write_offsets(lengths_B, out)
            )
        weights_N = put_optional(parcel, self.weights_N)
        return BagItems(rows_N, offsets, weights_N, self._put_initial(parcel))

    def _put_initial(self, parcel: Parcel) -> InitialItems | None:
        """Puts the initial rows that keys without a row read."""
        places, which, rows, num_rows = [], [], [], 0
        for number, table in enumerate(self.tables):
            if not table.reads_initial_rows:
                continue
            places_K, keys_K = self._without_row(np.flatnonzero(self.tables_P == number))
            keys_U, which_K = distinct_keys(keys_K)
            places.append(places_K)
            which.append(which_K + num_rows)
            rows.append(table.initial_rows(keys_U).reshape(-1))
            num_rows += len(keys_U)
        if num_rows == 0:
            return None
        return InitialItems(*(parcel.put(np.concatenate(each)) for each in (places, which, rows)))

    def _without_row(
        self, pieces: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of the keys of some pieces have no row, (K,), and those keys, (K,)."""
        group, counts_P = self.group, self.num_keys_P
        rows_N, outcomes_N = group.rows_N.numpy(), group.outcomes_N.numpy()
        begins = group.num_keys_P.cumsum() - group.num_keys_P
        shifts_P = begins[self.pieces_P] - (counts_P.cumsum() - counts_P)
        places, keys = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for piece in pieces.tolist():
            begin = int(begins[self.pieces_P[piece]])
            own = slice(begin, begin + int(counts_P[piece]))
            found = begin + np.flatnonzero(outcomes_N[own] > Outcome.INSERTED)
            places.append(found - shifts_P[piece])
            keys.append(rows_N[found])  # what `map` gives in place of a row number
        return np.concatenate(places), np.concatenate(keys)

    def within(self, pooled: range) -> tuple[_SetBags, int, int]:
        """The pieces that begin in a range, which lie side by side; the first bag and key."""
        starts_P = self.starts_P
        wanted = np.flatnonzero((starts_P >= pooled.start) & (starts_P < pooled.stop))
        first = int(wanted[0]) if len(wanted) else 0
        of_part = self.pieces_P[wanted], self.tables, self.tables_P[wanted]
        part = _SetBags.of_pieces(self.group, *of_part)
        before = self.num_bags_P[:first].sum(), self.num_keys_P[:first].sum()
        return part, int(before[0]), int(before[1])

    def blocks(self, dim: int, *, is_matrix: bool) -> list[Block]:
        """Where the vectors go; pieces whose vectors lie side by side are one block."""
        num_bags_P, starts_P = self.num_bags_P, self.starts_P
        firsts_P = num_bags_P.cumsum() - num_bags_P
        begins_P = np.ones(len(starts_P), np.bool_)
        if not is_matrix:
            begins_P[1:] = starts_P[:-1] + num_bags_P[:-1] * dim != starts_P[1:]
        at = np.flatnonzero(begins_P)
        counts = np.add.reduceat(num_bags_P, at) if len(at) else at
        return list(zip(firsts_P[at].tolist(), counts.tolist(), starts_P[at].tolist(), strict=True))

    def divisors(self) -> NDArray[np.float32] | None:
        """What sums are divided by to be means: the count, or the sum of weights.

        Infinite where that is 0, so that both the mean and its gradient are 0.
        """
        if self.group.is_mean_P is None or (self.lengths_B is None and self.weights_N is None):
            return None
        is_mean_P = self.group.is_mean_P[self.pieces_P]
        if not is_mean_P.any():
            return None
        divisors_B = self._totals()
        divisors_B[divisors_B == 0] = np.inf
        divisors_B[~np.repeat(is_mean_P, self.num_bags_P)] = 1.0
        return divisors_B

    def _totals(self) -> NDArray[np.float32]:
        """The keys of each bag, or the sum of their weights."""
        totals_B: NDArray[np.float32]
        if self.lengths_B is None:
            assert self.weights_N is not None
            totals_B = self.weights_N.copy()
            return totals_B
        totals_B = self.lengths_B.astype(np.float32)
        if self.weights_N is not None:
            bag_N = np.repeat(np.arange(len(self.lengths_B)), self.lengths_B)
            totals_B[:] = np.bincount(bag_N, self.weights_N, len(self.lengths_B))
        return totals_B

    def places_in(self, starts_P: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Where each key's weight is, if those of the group's pieces start there."""
        if starts_P is None:
            return None
        counts_P = self.num_keys_P
        shifts_P = starts_P[self.pieces_P] - (counts_P.cumsum() - counts_P)
        return np.arange(int(counts_P.sum())) + np.repeat(shifts_P, counts_P)


def _lengths_of(
    group: Any, pieces_P: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """The lengths of all bags (None: each has one key), and how many bags each piece has."""
    num_keys_P: NDArray[np.int64] = group.num_keys_P[pieces_P]
    offsets = [None] if group.offsets is None else [group.offsets[p] for p in pieces_P.tolist()]
    if all([of_piece is None for of_piece in offsets]):  # noqa: C419, a list is faster
        return None, num_keys_P
    lengths = [
        torch.ones(count, dtype=torch.int64) if of_piece is None else of_piece.diff()
        for of_piece, count in zip(offsets, num_keys_P.tolist(), strict=True)
    ]
    num_bags_P = np.array(list(map(len, lengths)), np.int64)
    lengths_B = torch.cat(lengths).numpy()
    return None if (lengths_B == 1).all() else lengths_B, num_bags_P


def _write_offsets(lengths_B: NDArray[np.int64], out: NDArray[Any]) -> None:
    out[0] = 0
    np.cumsum(lengths_B, out=out[1:])
