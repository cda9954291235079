"""A mapped batch as it goes to the device: the rows of all tables' keys, bag after bag.

The host only puts arrays one behind the other; what follows from them is found on the device. A key
takes four bytes on the way, eight in a store of 2^31 rows and more; a bag takes as many, unless
each of a batch has one key.

Shape letters: N keys, B bags, M weights that come late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Outcome
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding.device.parcel import Item, Parcel, put_optional

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["BagItems", "Block", "TableSet", "has_row", "plan_batch"]


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
    bags = _SetBags.of_members(members)
    store = shards[0].held.table.store
    spare_row = max(shard.held.table.spare_row_of_store for shard in shards)
    items = bags.put(parcel, spare_row, _type_of(len(store.weight_RD)))
    pooled: range | None = request.pooled
    read = None
    if pooled is not None:
        first, last = bags.bags_within(pooled)
        part, first_key = bags.part(first, last)
        of_part = part.put(parcel, spare_row, _type_of(len(store.weight_RD)))
        read = ReadBags(first, last - first, first_key, of_part)
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


def _type_of(num_rows: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if num_rows < 2**31 else np.int64


@dataclass(frozen=True)
class _SetBags:
    """The bags of a set's features, in the order of their vectors."""

    features: list[FeatureBags]
    rows_N: NDArray[np.int64]
    """Of the store; of keys without a row any."""
    has_row_N: NDArray[np.bool_]
    lengths_B: NDArray[np.int64] | None
    """None: each bag has one key."""
    num_bags: list[int]
    """Of each feature."""
    weights_N: NDArray[np.float32] | None
    places_N: NDArray[np.int64] | None

    @staticmethod
    def of_members(members: Sequence[tuple[Any, Sequence[int] | None]]) -> _SetBags:
        entries = [
            (feature, shard.held.table.first_row, None if starts is None else starts[number])
            for shard, starts in members
            for number, feature in enumerate(shard.features)
        ]
        entries.sort(key=lambda entry: entry[0].column)
        features = [feature for feature, _, _ in entries]
        counts = [len(feature.rows) for feature in features]
        firsts = np.array([first for _, first, _ in entries], np.int64)
        rows_N = torch.cat([feature.rows for feature in features]).numpy()
        outcomes_N = torch.cat([feature.outcomes for feature in features]).numpy()
        weights = [feature.weights for feature in features if feature.weights is not None]
        lengths_B, num_bags = _lengths_of(features)
        return _SetBags(
            features=features,
            rows_N=rows_N + np.repeat(firsts, counts) if firsts.any() else rows_N,
            has_row_N=has_row(outcomes_N),
            lengths_B=lengths_B,
            num_bags=num_bags,
            weights_N=torch.cat(weights).detach().numpy() if weights else None,
            places_N=_places(counts, [starts for _, _, starts in entries]),
        )

    def put(self, parcel: Parcel, spare_row: int, type_: Any) -> BagItems:
        """Puts them into a parcel."""
        rows_N = np.where(self.has_row_N, self.rows_N, spare_row).astype(type_)
        offsets = None
        if self.lengths_B is not None:
            offsets = np.zeros(len(self.lengths_B) + 1, type_)
            np.cumsum(self.lengths_B, out=offsets[1:])
        return BagItems(
            parcel.put(rows_N),
            None if offsets is None else parcel.put(offsets),
            put_optional(parcel, self.weights_N),
        )

    def bags_within(self, pooled: range) -> tuple[int, int]:
        """The bags of features that begin in a range, which lie side by side: first and last."""
        ends = list(accumulate(self.num_bags, initial=0))
        wanted = [number for number, f in enumerate(self.features) if f.column in pooled]
        return (ends[wanted[0]], ends[wanted[-1] + 1]) if wanted else (0, 0)

    def part(self, first: int, last: int) -> tuple[_SetBags, int]:
        """Some of the bags, with what goes over for them, and their first key."""
        before, after = first, last
        if self.lengths_B is not None:
            before = int(self.lengths_B[:first].sum())
            after = before + int(self.lengths_B[first:last].sum())
        keys = slice(before, after)
        found = _SetBags(
            features=[],
            rows_N=self.rows_N[keys],
            has_row_N=self.has_row_N[keys],
            lengths_B=None if self.lengths_B is None else self.lengths_B[first:last],
            num_bags=[],
            weights_N=None if self.weights_N is None else self.weights_N[keys],
            places_N=None,
        )
        return found, before

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


def has_row(outcomes_N: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which keys have a row."""
    is_row: NDArray[np.bool_] = (outcomes_N == Outcome.FOUND) | (outcomes_N == Outcome.INSERTED)
    return is_row
