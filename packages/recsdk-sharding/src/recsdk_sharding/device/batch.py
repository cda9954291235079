"""A mapped batch as it goes to the device: the rows of all tables' keys, bag after bag.

The host only puts arrays one behind the other; what follows from them is found on the device. A key
takes four bytes on the way, eight in a store of 2^31 rows and more; a bag takes as many, unless
each of a batch has one key.

Shape letters: N keys, B bags, M weights that come late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import join_rows
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding.device.parcel import Item, Parcel, put_optional

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["BagItems", "Block", "TableSet", "plan_batch"]


@dataclass(frozen=True)
class Block:
    """Bags of a set that lie side by side, and whose vectors do."""

    first: int
    """The first bag."""
    count: int
    start: int
    """Where the first vector begins in the results: a number, or a column of their matrix."""


@dataclass(frozen=True)
class BagItems:
    """A `BagIndex` in a parcel."""

    rows_N: Item
    offsets: Item | None
    weights_N: Item | None


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
    """Their `ShardBags`."""
    spare_row: int
    """What keys without a row read: zeros. Of the store."""
    bags: BagItems
    num_bags: int
    read: ReadBags | None
    """The bags that are read; None: all are."""
    blocks: list[Block]
    divisors_B: Item | None
    """What sums are divided by, float32 (B,); None: by nothing."""
    places_N: Item | None
    """Where each key's weight is among those that come late, int64 (N,); None: none do."""

    @property
    def dim(self) -> int:
        """Row width D."""
        return self.tables[0].dim


def plan_batch(
    mapped: Sequence[Any], request: Any, *, training: bool
) -> tuple[Parcel, list[TableSet]]:
    """A sealed parcel, and what of it each set of tables needs.

    `mapped`, `request`: `ShardBags` and `PoolRequest` of `recsdk_sharding._rows.home`.
    """
    parcel = Parcel()
    late = request.weight_starts or [None] * len(mapped)
    sets: dict[Any, list[tuple[Any, Sequence[int] | None]]] = {}
    for shard, starts in zip(mapped, late, strict=True):
        sets.setdefault(_set_of(shard, training), []).append((shard, starts))
    plans = [_plan_set(parcel, members, request) for members in sets.values()]
    parcel.seal()
    return parcel, plans


def _set_of(shard: Any, training: bool) -> Any:
    """What the tables of a set have in common; a table that accumulates is alone."""
    table: DeviceTable = shard.held.table
    if not training:
        return id(table.store)
    if shard.accumulation is not None:
        return id(table)
    return id(table.store), table.settings


def _plan_set(
    parcel: Parcel, members: Sequence[tuple[Any, Sequence[int] | None]], request: Any
) -> TableSet:
    shards = [shard for shard, _ in members]
    bags = _SetBags.of_entries(_entries_of(members))
    store = shards[0].held.table.store
    spare_row = max(shard.held.table.spare_row_of_store for shard in shards)
    number = _type_of(len(store.weight_RD))
    items = bags.put(parcel, spare_row, number)
    read = None
    if request.pooled is not None:
        part, first, first_key = bags.within(request.pooled)
        of_part = part.put(parcel, spare_row, number)
        read = ReadBags(first, sum(part.num_bags), first_key, of_part)
    dim = shards[0].held.table.dim
    return TableSet(
        tables=[shard.held.table for shard in shards],
        shards=shards,
        spare_row=spare_row,
        bags=items,
        num_bags=sum(bags.num_bags),
        read=read,
        blocks=bags.blocks(dim, is_matrix=request.shape is not None),
        divisors_B=put_optional(parcel, bags.divisors()),
        places_N=put_optional(parcel, bags.places_N),
    )


def _type_of(num_rows: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if num_rows < 2**31 else np.int64)


_Entry: TypeAlias = tuple[FeatureBags, int, int | None]
"""A feature, the first row of its table in the store, and where its late weights begin."""


def _entries_of(members: Sequence[tuple[Any, Sequence[int] | None]]) -> list[_Entry]:
    """The features of a set, in the order of their vectors."""
    entries: list[_Entry] = []
    for shard, starts in members:
        first_row = shard.held.table.first_row
        for number, feature in enumerate(shard.features):
            entries.append((feature, first_row, None if starts is None else starts[number]))
    return sorted(entries, key=lambda entry: entry[0].column)


@dataclass(frozen=True)
class _SetBags:
    """The bags of a set's features, in the order of their vectors."""

    entries: list[_Entry]
    counts: list[int]
    """Keys of each feature."""
    lengths_B: NDArray[np.int64] | None
    """None: each bag has one key."""
    num_bags: list[int]
    """Of each feature."""
    weights_N: NDArray[np.float32] | None
    places_N: NDArray[np.int64] | None

    @staticmethod
    def of_entries(entries: list[_Entry]) -> _SetBags:
        features = [feature for feature, _, _ in entries]
        counts = [len(feature.rows) for feature in features]
        weights = [feature.weights for feature in features if feature.weights is not None]
        lengths_B, num_bags = _lengths_of(features)
        return _SetBags(
            entries=entries,
            counts=counts,
            lengths_B=lengths_B,
            num_bags=num_bags,
            weights_N=torch.cat(weights).detach().numpy() if weights else None,
            places_N=_places(counts, [starts for _, _, starts in entries]),
        )

    @property
    def features(self) -> list[FeatureBags]:
        """The features alone."""
        return [feature for feature, _, _ in self.entries]

    def put(self, parcel: Parcel, spare_row: int, number: np.dtype[Any]) -> BagItems:
        """Puts them into a parcel."""
        parts = [(feature.rows, feature.outcomes, first) for feature, first, _ in self.entries]
        rows_N = parcel.put_made(
            sum(self.counts), number, lambda out: join_rows(parts, spare_row, out)
        )
        offsets = None
        if self.lengths_B is not None:
            lengths_B = self.lengths_B
            offsets = parcel.put_made(
                len(lengths_B) + 1, number, lambda out: _write_offsets(lengths_B, out)
            )
        return BagItems(rows_N, offsets, put_optional(parcel, self.weights_N))

    def within(self, pooled: range) -> tuple[_SetBags, int, int]:
        """The features that begin in a range, which lie side by side; the first bag and key."""
        wanted = [n for n, (feature, _, _) in enumerate(self.entries) if feature.column in pooled]
        first = wanted[0] if wanted else 0
        # Late weights are found by the first key: these need no places.
        entries = [self.entries[number][:2] for number in wanted]
        part = _SetBags.of_entries([(feature, row, None) for feature, row in entries])
        return part, sum(self.num_bags[:first]), sum(self.counts[:first])

    def blocks(self, dim: int, *, is_matrix: bool) -> list[Block]:
        """Where the vectors go; features whose vectors lie side by side are one block."""
        blocks: list[Block] = []
        first = 0
        for feature, count in zip(self.features, self.num_bags, strict=True):
            block = Block(first, count, feature.column)
            first += count
            last = blocks[-1] if blocks else None
            if last is not None and not is_matrix and last.start + last.count * dim == block.start:
                blocks[-1] = Block(last.first, last.count + count, last.start)
            else:
                blocks.append(block)
        return blocks

    def divisors(self) -> NDArray[np.float32] | None:
        """What sums are divided by to be means: the count, or the sum of weights.

        Infinite where that is 0, so that both the mean and its gradient are 0.
        """
        is_mean = np.array([feature.pooling == "mean" for feature in self.features])
        if not is_mean.any():
            return None
        if self.lengths_B is None and self.weights_N is None:
            return None
        divisors_B = self._totals()
        divisors_B[divisors_B == 0] = np.inf
        divisors_B[~np.repeat(is_mean, self.num_bags)] = 1.0
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


def _lengths_of(features: Sequence[FeatureBags]) -> tuple[NDArray[np.int64] | None, list[int]]:
    """The lengths of all bags (None: each has one key), and how many bags each feature has."""
    if all(feature.offsets is None for feature in features):
        return None, [len(feature.rows) for feature in features]
    lengths = [
        torch.ones(len(feature.rows), dtype=torch.int64)
        if feature.offsets is None
        else feature.offsets.diff()
        for feature in features
    ]
    lengths_B = torch.cat(lengths).numpy()
    return None if (lengths_B == 1).all() else lengths_B, list(map(len, lengths))


def _places(counts: Sequence[int], starts: Sequence[int | None]) -> NDArray[np.int64] | None:
    if not starts or starts[0] is None:
        return None
    ends = np.cumsum(counts)
    shifts = np.array(starts, np.int64) - (ends - counts)
    return np.arange(int(ends[-1])) + np.repeat(shifts, counts)


def _write_offsets(lengths_B: NDArray[np.int64], out: NDArray[Any]) -> None:
    out[0] = 0
    np.cumsum(lengths_B, out=out[1:])
