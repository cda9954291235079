"""Where the rows and columns of the tables of one sharding group are.

A table is cut into column ranges, and each range by rows: every shard is on one rank. torchrec's
sharding classes decide which; this is what they decided, in the words of the exchange.

Shape letters: A features that come to a rank, D row width, F features, K blocks of columns, S
features of shards, P pieces: what each of W ranks sends of each of those, feature by feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core import VectorStretches
from recsdk_sharding.placement.ranks import NUM_VIRTUAL_SHARDS, RankMap, RankRule

__all__ = [
    "Arriving",
    "GroupLayout",
    "PlacedShard",
    "Route",
    "SentWidth",
    "Shard",
    "ShardFeatures",
    "TableLayout",
]


@dataclass(frozen=True)
class Shard:
    """The rows and columns of a table that one rank holds."""

    ranks: RankMap
    """Which shard of its column range a key belongs to; `world_size` is the number of those."""
    index: int
    """Which of those shards this is."""
    columns: tuple[int, int]
    """First column, and the one after the last."""

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns[1] - self.columns[0]

    def owned_groups(self, num_groups: int | None) -> tuple[int, int] | None:
        """Which groups of keys it has, the first and the one after the last; None: all."""
        if num_groups is None or self.ranks.world_size == 1:
            return None
        return self.ranks.owned_groups(self.index, num_groups)

    @staticmethod
    def whole(dim: int) -> Shard:
        """All of a table."""
        return Shard(RankMap(1), 0, (0, dim))


@dataclass(frozen=True)
class PlacedShard:
    """A shard of a table and the rank that holds it."""

    rank: int
    shard: Shard
    ranks: tuple[int, ...]
    """The ranks of all row shards of its column range, which its keys may go to."""


@dataclass(frozen=True)
class TableLayout:
    """One table of the group."""

    name: str
    dim: int
    """D."""
    features: tuple[int, ...]
    """Positions of its features in the group's."""
    shards: tuple[PlacedShard, ...]
    """By first column, then by row shard."""


@dataclass(frozen=True)
class Route:
    """Ranks that features' keys go to: each key to one of them."""

    ranks: tuple[int, ...]
    """The rank of each row shard."""
    features: tuple[int, ...]
    """Positions of the features."""
    num_virtual_shards: int = NUM_VIRTUAL_SHARDS
    """Of which each row shard has whole ones."""


@dataclass(frozen=True)
class FeatureBlocks:
    """Columns of features, K in all, and the stretches of vectors that each has: arrays int64."""

    features_K: NDArray[np.int64]
    first_columns_K: NDArray[np.int64]
    widths_K: NDArray[np.int64]
    num_stretches_K: NDArray[np.int64]
    order_S: NDArray[np.int64]
    """The stretches, block by block."""


@dataclass(frozen=True)
class ShardFeatures:
    """The features of shards, S in all: arrays int64 (S,)."""

    ranks_S: NDArray[np.int64]
    """The rank that holds the shard, ascending."""
    features_S: NDArray[np.int64]
    """Positions of the features."""
    first_columns_S: NDArray[np.int64]
    last_columns_S: NDArray[np.int64]
    """Those after the last."""
    cuts_S: NDArray[np.int64]
    """Which of the features of all routes and their row shards it is, in that order."""
    arrivals_S: NDArray[np.int64]
    """Which of the features of the routes that the rank is on it is, in that order."""

    @cached_property
    def widths_S(self) -> NDArray[np.int64]:
        """Numbers of columns."""
        return self.last_columns_S - self.first_columns_S

    @cached_property
    def stretches(self) -> VectorStretches:
        """Their vectors, as they lie if they travel in this order."""
        given = self.cuts_S, self.widths_S, self.ranks_S
        return VectorStretches(*map(np.ascontiguousarray, given))

    @cached_property
    def blocks(self) -> FeatureBlocks:
        """Those of the same columns of a feature, which are added up, in the order of ranks."""
        keys_3S = np.stack([self.features_S, self.first_columns_S, self.widths_S])
        keys_3K, inverse = np.unique(keys_3S, axis=1, return_inverse=True)
        features_K, first_columns_K, widths_K = map(np.ascontiguousarray, keys_3K)
        block_S = inverse.reshape(-1)
        num_stretches_K = np.bincount(block_S, minlength=len(features_K))
        order_S = np.argsort(block_S, kind="stable")
        return FeatureBlocks(features_K, first_columns_K, widths_K, num_stretches_K, order_S)

    def at(self, places: NDArray[Any]) -> ShardFeatures:
        """Some of them."""
        return ShardFeatures(*(getattr(self, each.name)[places] for each in fields(self)))


@dataclass(frozen=True)
class Arriving:
    """What all ranks send to one, as pieces of the features of its shards: arrays int64."""

    num_features: list[int]
    """Of each route that the rank is on, A in all."""
    pieces_P: NDArray[np.int64]
    """Which of what arrives each piece is, (W, A) counted rank by rank."""
    stretches: VectorStretches
    """The vectors of the pieces as they travel back, whose numbers are counted alike."""
    places_P: NDArray[np.int64]
    """Which of the stretches has each piece's."""

    @staticmethod
    def of_shards(
        features: ShardFeatures,
        order_S: NDArray[np.int64],
        num_features: list[int],
        world_size: int,
    ) -> Arriving:
        """`features`: of the rank's shards; `order_S`: in which their vectors travel."""
        ranks_W1 = np.arange(world_size)[:, None]
        arrivals_WS = features.arrivals_S + sum(num_features) * ranks_W1
        places_S = np.argsort(order_S)
        return Arriving(
            num_features,
            arrivals_WS.T.ravel(),
            VectorStretches(
                arrivals_WS[:, order_S].ravel(),
                np.tile(features.widths_S[order_S], world_size),
                np.repeat(np.arange(world_size), len(order_S)),
            ),
            (places_S + len(order_S) * ranks_W1).T.ravel(),
        )


@dataclass(frozen=True)
class SentWidth:
    """What ranks send of the features of one width: S stretches, as equal cells of columns."""

    dim: int
    """D."""
    features: list[int]
    """Positions of the features."""
    places_S: NDArray[np.int64]
    """Which of all that is sent the stretches are."""
    sent: ShardFeatures
    """Those."""
    cell: int
    """Numbers of a cell; they divide D."""
    ends_W1: NDArray[np.int64]
    """How many stretches the ranks before each one send, and all."""

    @staticmethod
    def of_sent(sent: ShardFeatures, dims_F: NDArray[np.int64], world_size: int) -> list[SentWidth]:
        """Those of all that is sent; `dims_F`: the width of each feature."""
        found = []
        for dim in sorted(set(dims_F.tolist())):
            places_S = np.flatnonzero(dims_F[sent.features_S] == dim)
            own = sent.at(places_S)
            cell = int(np.gcd.reduce([dim, *own.first_columns_S, *own.last_columns_S]))
            ends_W1 = np.searchsorted(own.ranks_S, np.arange(world_size + 1))
            features = np.flatnonzero(dims_F == dim).tolist()
            found.append(SentWidth(dim, features, places_S, own, cell, ends_W1))
        return found


@dataclass(frozen=True)
class GroupLayout:
    """The tables of one sharding group."""

    tables: tuple[TableLayout, ...]
    feature_names: tuple[str, ...]
    """F names, in the order of the tables; a feature of two tables is there twice."""
    world_size: int
    is_replicated: bool
    """Whether every rank has all rows of every table, trained alike."""
    rule: RankRule

    @staticmethod
    def of_columns(
        tables: Sequence[tuple[str, int, Sequence[str], int | None]],
        placed: Mapping[str, Sequence[tuple[int, tuple[int, int]]]],
        world_size: int,
        rule: RankRule,
        is_replicated: bool,
    ) -> GroupLayout:
        """The layout of tables (name, dim, feature names, groups), placed as (rank, columns).

        Ranks with the same columns of a table share their rows, in ascending order of ranks. Where
        keys fall into groups, each has whole groups.
        """
        layouts: list[TableLayout] = []
        names: list[str] = []
        for name, dim, feature_names, num_groups in tables:
            first = len(names)
            names.extend(feature_names)
            layouts.append(
                TableLayout(
                    name=name,
                    dim=dim,
                    features=tuple(range(first, len(names))),
                    shards=tuple(_shards(placed[name], rule, is_replicated, num_groups)),
                )
            )
        return GroupLayout(tuple(layouts), tuple(names), world_size, is_replicated, rule)

    def shards_of(self, rank: int) -> list[tuple[TableLayout, PlacedShard]]:
        """What a rank holds, in the order of the tables and columns."""
        return self._shards_by_rank[rank]

    @cached_property
    def _shards_by_rank(self) -> list[list[tuple[TableLayout, PlacedShard]]]:
        found: list[list[tuple[TableLayout, PlacedShard]]] = [[] for _ in range(self.world_size)]
        for table in self.tables:
            for placed in table.shards:
                found[placed.rank].append((table, placed))
        return found

    @cached_property
    def shard_features(self) -> ShardFeatures:
        """The features of all shards: rank by rank, and in the order of `shards_of`."""
        cuts: dict[tuple[tuple[int, ...], int, int], int] = {}
        for route in self.routes:
            for index in range(len(route.ranks)):
                for feature in route.features:
                    cuts[route.ranks, index, feature] = len(cuts)
        found: list[tuple[int, ...]] = []
        for rank, held in enumerate(self._shards_by_rank):
            arriving = [
                (route.ranks, feature)
                for route in self.routes_to(rank)
                for feature in route.features
            ]
            places = {each: place for place, each in enumerate(arriving)}
            for table, placed in held:
                for feature in table.features:
                    cut = cuts[placed.ranks, placed.shard.index, feature]
                    arrival = places[placed.ranks, feature]
                    found.append((rank, feature, *placed.shard.columns, cut, arrival))
        return ShardFeatures(*np.array(found, np.int64).reshape(-1, 6).T)

    def features_on(self, rank: int) -> ShardFeatures:
        """The features of the shards that a rank holds, in the order of `shards_of`."""
        return self.shard_features.at(np.flatnonzero(self.shard_features.ranks_S == rank))

    def sending_order(self, features: ShardFeatures) -> NDArray[np.int64]:
        """The order in which vectors travel: rank by rank, and by width of table."""
        return np.lexsort([self.dims_F[features.features_S], features.ranks_S])

    def arriving_at(self, rank: int) -> Arriving:
        """What all ranks send to one."""
        own = self.features_on(rank)
        num_features = [len(route.features) for route in self.routes_to(rank)]
        return Arriving.of_shards(own, self.sending_order(own), num_features, self.world_size)

    @cached_property
    def sends_as_cut(self) -> bool:
        """Whether whole vectors of one width travel in the order in which bags are cut."""
        if self.is_replicated or len(self.routes) != 1 or len(self._widths_by_rank[0]) != 1:
            return False
        (width,) = self._widths_by_rank[0]
        in_order = np.array_equal(self.sent.cuts_S, np.arange(len(self.sent.cuts_S)))
        return in_order and width.cell == width.dim and self.takes_all(self.routes[0])

    def takes_all(self, route: Route) -> bool:
        """Whether a route has all features, in their order."""
        return route.features == self._all_features

    @cached_property
    def _all_features(self) -> tuple[int, ...]:
        return tuple(range(len(self.feature_names)))

    @cached_property
    def dims_F(self) -> NDArray[np.int64]:
        """D of each feature."""
        return np.array([table.dim for table in self.tables for _ in table.features], np.int64)

    @cached_property
    def sent(self) -> ShardFeatures:
        """What all ranks send, in the order in which it travels."""
        return self.shard_features.at(self.sending_order(self.shard_features))

    def sent_to(self, rank: int) -> ShardFeatures:
        """What ranks send to one; nobody sends what all have."""
        return self._own_by_rank[rank] if self.is_replicated else self.sent

    @cached_property
    def _own_by_rank(self) -> list[ShardFeatures]:
        ranks = range(self.world_size)
        return [self.sent.at(np.flatnonzero(self.sent.ranks_S == rank)) for rank in ranks]

    def widths_sent_to(self, rank: int) -> list[SentWidth]:
        """The same, by width."""
        return self._widths_by_rank[rank if self.is_replicated else 0]

    @cached_property
    def _widths_by_rank(self) -> list[list[SentWidth]]:
        of_ranks = self._own_by_rank if self.is_replicated else [self.sent]
        return [SentWidth.of_sent(own, self.dims_F, self.world_size) for own in of_ranks]

    def routes_to(self, rank: int) -> list[Route]:
        """The routes that a rank is on."""
        return [route for route in self.routes if rank in route.ranks]

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Where keys go; a rank gets a table's keys once, however many shards it holds."""
        found: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for table in self.tables:
            ways = [(each.ranks, each.shard.ranks.num_virtual_shards) for each in table.shards]
            for way in dict.fromkeys(ways):
                found.setdefault(way, []).extend(table.features)
        return tuple(Route(ranks, tuple(of), shards) for (ranks, shards), of in found.items())


def _shards(
    placed: Sequence[tuple[int, tuple[int, int]]],
    rule: RankRule,
    is_replicated: bool,
    num_groups: int | None,
) -> list[PlacedShard]:
    ranks_by_columns: dict[tuple[int, int], list[int]] = {}
    for rank, columns in sorted(placed, key=lambda entry: (entry[1], entry[0])):
        ranks_by_columns.setdefault(columns, []).append(rank)
    shards: list[PlacedShard] = []
    for columns, ranks in ranks_by_columns.items():
        spread = RankMap.of_groups(1 if is_replicated else len(ranks), rule, num_groups)
        for index, rank in enumerate(ranks):
            own = Shard(spread, 0 if is_replicated else index, columns)
            route = (rank,) if is_replicated else tuple(ranks)
            shards.append(PlacedShard(rank, own, route))
    return shards
