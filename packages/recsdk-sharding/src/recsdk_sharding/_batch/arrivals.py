"""What all ranks sent of one batch to this rank, as bags of the shards that it has.

Shape letters: N keys, G bags of a route's features, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from recsdk_core import read_bags
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding._batch.assembly import padded
from recsdk_sharding._batch.context import RoutedShard
from recsdk_sharding._batch.features import MappedKeys
from recsdk_sharding._batch.outcomes import highest
from recsdk_sharding.placement.layout import Route

__all__ = ["Arrivals", "ArrivedBags", "Starts"]


@dataclass(frozen=True)
class Starts:
    """Where vectors lie among the numbers that this rank sends."""

    of_shards: list[list[int]]
    """Of each shard: of each feature and rank, in that order."""
    num_values: list[int]
    """Numbers for each rank."""


class ArrivedBags(NamedTuple):
    """What one rank sent of one feature."""

    keys: torch.Tensor
    """int64 (N,)."""
    num_keys: int
    """N."""
    num_bags: int
    """Bags that have keys."""
    offsets: torch.Tensor | None
    """int64, of the bags that have keys; None: every key is a bag."""
    weights: torch.Tensor | None = None
    """float32 (N,)."""


_OfRank: TypeAlias = dict[tuple[tuple[int, ...], int], ArrivedBags]
"""By the ranks of the route and the position of the feature."""


class Arrivals:
    """The bags of all ranks; within a feature those of rank 0 come first."""

    def __init__(
        self,
        words: Sequence[torch.Tensor],
        routes: Sequence[Route],
        every_key_is_a_bag: Sequence[bool],
    ) -> None:
        """`words`: what each rank sent, of the routes that this rank is on."""
        self._arrived = [
            _read(of_rank, routes, is_sequence=is_sequence)
            for of_rank, is_sequence in zip(words, every_key_is_a_bag, strict=True)
        ]

    @property
    def num_keys(self) -> list[int]:
        """Keys that each rank sent."""
        return [sum(bags.num_keys for bags in found.values()) for found in self._arrived]

    def add_weights(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Adds the weights of the keys that each rank sent; None: that rank's have none."""
        pairs = zip(self._arrived, weights, strict=True)
        self._arrived = [
            found if of_rank is None else _weighted(found, of_rank) for found, of_rank in pairs
        ]

    def weight_starts_of(self, shard: RoutedShard) -> list[int]:
        """Where the weights of each feature's keys of each rank lie, among those of all keys."""
        starts: list[dict[tuple[tuple[int, ...], int], int]] = []
        start = 0
        for found in self._arrived:
            starts.append({})
            for feature, bags in found.items():
                starts[-1][feature] = start
                start += bags.num_keys
        ranks = shard.route.ranks
        return [of_rank[ranks, f] for f in shard.features for of_rank in starts]

    def keys_of(self, shards: Sequence[RoutedShard]) -> Sequence[torch.Tensor]:
        """The keys of each shard, int64 (N,): feature by feature, rank by rank."""
        of_shards = [self._bags_of(shard) for shard in shards]
        pieces = [bags.keys for of_shard in of_shards for bags in of_shard]
        if not pieces:
            return [torch.zeros(0, dtype=torch.int64)] * len(shards)
        counts = [sum(bags.num_keys for bags in of_shard) for of_shard in of_shards]
        return torch.cat(pieces).split_with_sizes(counts)

    def _bags_of(self, shard: RoutedShard) -> list[ArrivedBags]:
        return [found[shard.route.ranks, f] for f in shard.features for found in self._arrived]

    def outcomes_of(
        self, shards: Sequence[RoutedShard], outcomes: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What became of the keys that each rank sent, uint8 (N,), in the order of its keys.

        `outcomes`: of each shard those of what `keys_of` gives; shards of some columns may have
        the same keys.
        """
        by_rank: list[dict[tuple[tuple[int, ...], int], torch.Tensor]] = [{} for _ in self._arrived]
        for shard, of_shard in zip(shards, outcomes, strict=True):
            counts = [bags.num_keys for bags in self._bags_of(shard)]
            for number, of_bags in enumerate(of_shard.split_with_sizes(counts)):
                index, rank = divmod(number, len(self._arrived))
                feature = shard.route.ranks, shard.features[index]
                by_rank[rank][feature] = highest(by_rank[rank].get(feature), of_bags)
        nothing = torch.zeros(0, dtype=torch.uint8)
        return [
            torch.cat([nothing, *(of_rank[feature] for feature in found)])
            for of_rank, found in zip(by_rank, self._arrived, strict=True)
        ]

    def starts_of(
        self, shards: Sequence[RoutedShard], order: Sequence[int], multiple: int
    ) -> Starts:
        """Lays out the vectors: rank by rank, then shard by shard in an order, then by feature."""
        of_shards: list[list[list[int]]] = [[[] for _ in shard.features] for shard in shards]
        num_values: list[int] = []
        start = 0
        for found in self._arrived:
            begin = start
            for number in order:
                shard = shards[number]
                ranks, width = shard.route.ranks, shard.width
                for starts, feature in zip(of_shards[number], shard.features, strict=True):
                    starts.append(start)
                    start += found[ranks, feature].num_bags * width
            start = begin + padded(start - begin, multiple)
            num_values.append(start - begin)
        joined = [[start for of_feature in each for start in of_feature] for each in of_shards]
        return Starts(joined, num_values)

    def mapped_bags_of(
        self,
        shard: RoutedShard,
        mapped: MappedKeys,
        starts: Sequence[int],
    ) -> list[FeatureBags]:
        """The bags of a shard, mapped: feature by feature, rank by rank."""
        arrived = self._bags_of(shard)
        counts = [bags.num_keys for bags in arrived]
        rows, outcomes, _ = mapped
        pieces = zip(
            arrived,
            rows.split_with_sizes(counts),
            outcomes.split_with_sizes(counts),
            starts,
            strict=True,
        )
        return [
            FeatureBags(
                rows=own_rows,
                outcomes=own_outcomes,
                offsets=bags.offsets,
                weights=bags.weights,
                column=start,
            )
            for bags, own_rows, own_outcomes, start in pieces
        ]


def _read(words: torch.Tensor, routes: Sequence[Route], *, is_sequence: bool) -> _OfRank:
    """What one rank sent; `routes` are those that this rank is on."""
    found: _OfRank = {}
    for route in routes:
        own = read_bags(words, len(route.features), every_key_is_a_bag=is_sequence)
        first_key = own.num_words - sum(own.num_keys)
        keys = words[first_key : own.num_words].split_with_sizes(own.num_keys)
        words = words[own.num_words :]
        offsets: Sequence[torch.Tensor | None] = [None] * len(keys)
        if own.offsets is not None:
            offsets = own.offsets.split_with_sizes([count + 1 for count in own.num_filled])
        pieces = zip(route.features, keys, own.num_keys, own.num_filled, offsets, strict=True)
        for position, of_bags, num_keys, num_filled, bag_ends in pieces:
            found[route.ranks, position] = ArrivedBags(of_bags, num_keys, num_filled, bag_ends)
    return found


def _weighted(found: _OfRank, weights: torch.Tensor) -> _OfRank:
    """What one rank sent, with the weights of its keys."""
    pieces = weights.split_with_sizes([bags.num_keys for bags in found.values()])
    pairs = zip(found.items(), pieces, strict=True)
    return {feature: bags._replace(weights=piece) for (feature, bags), piece in pairs}
