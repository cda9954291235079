"""What all ranks sent of one batch to this rank, as bags of the shards that it has.

Shape letters: N keys, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recsdk_core import Lease
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding._batch.assembly import padded
from recsdk_sharding._batch.outcomes import highest
from recsdk_sharding._batch.routing import Arrived, FeatureBagsOfRank, read_weights, read_words
from recsdk_sharding.placement.layout import Route

__all__ = ["Arrivals", "Starts"]


@dataclass(frozen=True)
class Starts:
    """Where vectors lie among the numbers that this rank sends."""

    of_shards: list[list[int]]
    """Of each shard: of each feature and rank, in that order."""
    num_values: list[int]
    """Numbers for each rank."""


class Arrivals:
    """The bags of all ranks; within a feature those of rank 0 come first."""

    def __init__(
        self,
        words: Sequence[torch.Tensor],
        routes: Sequence[Route],
        every_key_is_a_bag: Sequence[bool],
    ) -> None:
        """`words`: what each rank sent, of the routes that this rank is on."""
        self._arrived: list[Arrived] = [
            read_words(of_rank, routes, is_sequence=is_sequence)
            for of_rank, is_sequence in zip(words, every_key_is_a_bag, strict=True)
        ]

    @property
    def num_keys(self) -> list[int]:
        """Keys that each rank sent."""
        return [sum(len(bags.keys) for bags in found.values()) for found in self._arrived]

    def add_weights(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Adds the weights of the keys that each rank sent; None: that rank's have none."""
        pairs = zip(self._arrived, weights, strict=True)
        self._arrived = [
            found if of_rank is None else read_weights(found, of_rank) for found, of_rank in pairs
        ]

    def weight_starts_of(self, route: Route, features: Sequence[int]) -> list[int]:
        """Where the weights of each feature's keys of each rank lie, among those of all keys."""
        starts: list[dict[tuple[tuple[int, ...], int], int]] = []
        start = 0
        for found in self._arrived:
            starts.append({})
            for place, bags in found.items():
                starts[-1][place] = start
                start += len(bags.keys)
        return [of_rank[route.ranks, f] for f in features for of_rank in starts]

    def keys_of(self, route: Route, features: Sequence[int]) -> torch.Tensor:
        """The keys of a table, int64 (N,): feature by feature, rank by rank."""
        return torch.cat([bags.keys for bags in self.blocks_of(route, features)])

    def blocks_of(self, route: Route, features: Sequence[int]) -> list[FeatureBagsOfRank]:
        """The bags of a table: feature by feature, rank by rank."""
        return [found[route.ranks, f] for f in features for found in self._arrived]

    def outcomes_of(
        self, shards: Sequence[tuple[Route, Sequence[int], torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What became of the keys that each rank sent, uint8 (N,), in the order of its keys.

        `shards`: of each the outcomes of what `keys_of` gives; shards of some columns may have
        the same keys.
        """
        by_rank: list[dict[tuple[tuple[int, ...], int], torch.Tensor]] = [{} for _ in self._arrived]
        for route, features, outcomes in shards:
            counts = [len(block.keys) for block in self.blocks_of(route, features)]
            for number, piece in enumerate(outcomes.split_with_sizes(counts)):
                index, rank = divmod(number, len(self._arrived))
                place = route.ranks, features[index]
                by_rank[rank][place] = highest(by_rank[rank].get(place), piece)
        nothing = torch.zeros(0, dtype=torch.uint8)
        return [
            torch.cat([nothing, *(of_rank[place] for place in found)])
            for of_rank, found in zip(by_rank, self._arrived, strict=True)
        ]

    def starts_of(
        self,
        places: Sequence[tuple[Route, Sequence[int]]],
        widths: Sequence[int],
        multiple: int,
    ) -> Starts:
        """Lays out the vectors: rank by rank, then shard by shard, feature by feature."""
        by_rank: list[list[list[int]]] = []
        num_values: list[int] = []
        start = 0
        for found in self._arrived:
            begin = start
            by_rank.append([])
            for (route, features), width in zip(places, widths, strict=True):
                of_shard = []
                for feature in features:
                    of_shard.append(start)
                    start += found[route.ranks, feature].num_bags * width
                by_rank[-1].append(of_shard)
            start = begin + padded(start - begin, multiple)
            num_values.append(start - begin)
        of_shards = [
            [of_rank[shard][index] for index in range(len(features)) for of_rank in by_rank]
            for shard, (_, features) in enumerate(places)
        ]
        return Starts(of_shards, num_values)

    def bags_of(
        self,
        route: Route,
        features: Sequence[int],
        mapped: tuple[torch.Tensor, torch.Tensor, Lease],
        starts: Sequence[int],
        reads_only: int | None,
    ) -> list[FeatureBags]:
        """The bags of a shard, mapped; `reads_only`: the one rank whose vectors are wanted."""
        blocks = self.blocks_of(route, features)
        counts = [len(block.keys) for block in blocks]
        rows, outcomes, _ = mapped
        world_size = len(self._arrived)
        parts = zip(
            blocks,
            rows.split_with_sizes(counts),
            outcomes.split_with_sizes(counts),
            starts,
            strict=True,
        )
        return [
            FeatureBags(
                rows=own_rows,
                outcomes=own_outcomes,
                offsets=block.offsets,
                weights=block.weights,
                column=start,
                is_read=reads_only is None or number % world_size == reads_only,
            )
            for number, (block, own_rows, own_outcomes, start) in enumerate(parts)
        ]
