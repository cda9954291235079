"""Pooling straight into the results of a batch, where every bag is whole on its own rank.

So it is on a rank that is alone, and with tables that every rank has: each vector then has its
place in the matrix of results, and neither the forward nor the backward copies what it could read
or write there.

Shape letters: B samples, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from recsdk_core import Bags, Lease, combine_gradients, distinct_keys
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding._batch.arrivals import Arrivals, Starts
from recsdk_sharding._batch.features import Features
from recsdk_sharding._batch.outcomes import highest
from recsdk_sharding.placement.layout import Route

__all__ = ["BagsOfAllRanks", "CombinedKeys", "Places", "WholeBags"]


_NO_RANK = -1


@dataclass(frozen=True)
class Places:
    """Where the vectors of one group's features go, if it is a module's only one."""

    columns: list[int]
    """First column of each of the group's features."""
    num_columns: int
    """C."""
    is_mean: list[bool]
    """Whether each feature's bags are averaged."""

    def pooling_of(self, feature: int) -> str:
        """How a feature's bags are reduced."""
        return "mean" if self.is_mean[feature] else "sum"


class WholeBags:
    """The bags of a rank that is alone."""

    def __init__(self, places: Places, features: Features) -> None:
        """`features` have one batch size."""
        self.shape = features.batch_size, places.num_columns
        """Of the results, (B, C)."""
        self._places = places
        self._features = features
        self._keys = list(accumulate(features.counts(), initial=0))

    def keys_of(self, features: Sequence[int]) -> torch.Tensor:
        """The keys of a table, int64 (N,)."""
        parts = [self._features.keys_N[self._span(number)] for number in features]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def counts_of(self, features: Sequence[int]) -> list[int]:
        """Keys of each feature."""
        return [self._keys[number + 1] - self._keys[number] for number in features]

    def of_shard(
        self,
        features: Sequence[int],
        rows: torch.Tensor,
        outcomes: torch.Tensor,
        first_column: int,
        *,
        is_trained: bool = True,
    ) -> list[FeatureBags]:
        """The bags of a table's features, at its columns from `first_column` on, mapped."""
        counts = self.counts_of(features)
        parts = zip(
            features, rows.split_with_sizes(counts), outcomes.split_with_sizes(counts), strict=True
        )
        return [
            FeatureBags(
                rows=own_rows,
                outcomes=own_outcomes,
                offsets=self._offsets(number),
                weights=self._weights(number),
                pooling=self._places.pooling_of(number),
                column=self._places.columns[number] + first_column,
                is_trained=is_trained,
            )
            for number, own_rows, own_outcomes in parts
        ]

    def outcomes_of(
        self, shards: Sequence[tuple[Route, Sequence[int], torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What became of each feature's keys, uint8 (N,); `shards` as `Arrivals.outcomes_of`.

        Copies: backward reads its own.
        """
        found: dict[int, torch.Tensor] = {}
        for _, features, outcomes in shards:
            pieces = outcomes.clone().split_with_sizes(self.counts_of(features))
            for number, piece in zip(features, pieces, strict=True):
                found[number] = highest(found.get(number), piece)
        return [found[number] for number in range(len(found))]

    def _span(self, number: int) -> slice:
        return slice(self._keys[number], self._keys[number + 1])

    def _offsets(self, number: int) -> torch.Tensor | None:
        """None if every bag has one key."""
        size = self._features.batch_size
        lengths = self._features.lengths_G.narrow(0, number * size, size)
        if self._keys[number + 1] - self._keys[number] == size and bool(lengths.eq(1).all()):
            return None
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    def _weights(self, number: int) -> torch.Tensor | None:
        weights_N = self._features.weights_N
        return None if weights_N is None else weights_N.detach()[self._span(number)]


class CombinedKeys:
    """Each feature's keys once, in the order in which they first occur."""

    def __init__(self, features: Features) -> None:
        parts = [
            distinct_keys(part) for part in features.keys_N.split_with_sizes(features.counts())
        ]
        self.which = [which_N for _, which_N in parts]
        """For each feature which of its keys each is, int64 (N,)."""
        self.features = replace(
            features,
            keys_N=torch.cat([keys_U for keys_U, _ in parts]),
            num_bags=[len(keys_U) for keys_U, _ in parts],
            weights_N=None,
        )
        """As a sequence: every key is a bag."""


class BagsOfAllRanks:
    """This rank's bags, of tables that every rank has, and what all ranks give to train them.

    That is a vector for each key that a rank sent, or for each of its bags if it did not combine
    keys: one gradient of one dimension from each rank.
    """

    def __init__(
        self,
        own: WholeBags,
        combined: CombinedKeys,
        arrived: Arrivals,
        starts: Starts,
        rank: int,
    ) -> None:
        """`starts` lays out vectors of all ranks, rank by rank."""
        self.shape = own.shape
        """Of the results, (B, C)."""
        self.num_values = starts.num_values
        """Numbers in each rank's gradient."""
        self._begins = list(accumulate(starts.num_values, initial=0))
        self._own = own
        self._combined = combined
        self._arrived = arrived
        self._starts = iter(starts.of_shards)
        self._rank = rank
        self._made: list[tuple[FeatureBags, torch.Tensor, int, int, int]] = []

    def of_shard(
        self,
        route: Route,
        features: Sequence[int],
        mapped: tuple[torch.Tensor, torch.Tensor, Lease],
        width: int,
    ) -> list[FeatureBags]:
        """The bags of a table of this width, mapped; call it for all shards, in order."""
        trained = self._arrived.bags_of(route, features, mapped, next(self._starts), _NO_RANK)
        own_rows, own_outcomes, own_starts = [], [], []
        for number, bags in enumerate(trained):
            position, bags.gradient = divmod(number, len(self.num_values))
            bags.column -= self._begins[bags.gradient]
            if bags.gradient == self._rank:
                which_N = self._combined.which[features[position]]
                own_rows.append(bags.rows[which_N])
                own_outcomes.append(bags.outcomes[which_N])
                own_starts.append((bags.column, len(bags.rows)))
        read = self._own.of_shard(
            features, torch.cat(own_rows), torch.cat(own_outcomes), 0, is_trained=False
        )
        for bags, feature, (start, count) in zip(read, features, own_starts, strict=True):
            self._made.append((bags, self._combined.which[feature], width, start, count))
        return trained + read

    def combine(self, grad_BC: torch.Tensor) -> torch.Tensor:
        """This rank's gradient, from that of its results: the sum of each of its keys."""
        packed = torch.empty(self.num_values[self._rank])
        blocks = [
            (
                Bags(which_N, bags.outcomes, bags.offsets, bags.weights, bags.pooling),
                grad_BC,
                bags.column,
                width,
                start,
                count,
            )
            for bags, which_N, width, start, count in self._made
        ]
        combine_gradients(blocks, packed)
        return packed
