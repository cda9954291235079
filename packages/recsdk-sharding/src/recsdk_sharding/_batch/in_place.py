"""Pooling straight into the results of a batch, where every bag is whole on its own rank.

So it is on a rank that is alone, and with tables that every rank has: each vector then has its
columns in the matrix of results, and neither the forward nor the backward copies what it could read
or write there.

Shape letters: B samples, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from recsdk_core import Bags, CombineBlock
from recsdk_core.nn.function import FeatureBags, SharedTraining
from recsdk_sharding._batch.arrivals import Arrivals, Starts
from recsdk_sharding._batch.context import ResultColumns, RoutedShard
from recsdk_sharding._batch.features import Features, MappedKeys
from recsdk_sharding._batch.outcomes import highest

__all__ = ["WholeBags", "bags_of_all_ranks"]


class WholeBags:
    """The bags of this rank's samples, each with its columns of the results."""

    def __init__(self, results: ResultColumns, features: Features) -> None:
        """`features` have one batch size."""
        self.features = features
        self.shape = features.batch_size, results.num_columns
        """Of the results, (B, C)."""
        self.results = results
        """Which columns they have."""
        self._keys = list(accumulate(features.counts, initial=0))
        self._offsets = _offsets_of(features)

    def keys_of(self, shards: Sequence[RoutedShard]) -> Sequence[torch.Tensor]:
        """The keys of each shard, int64 (N,)."""
        return [self._keys_of(shard) for shard in shards]

    def _keys_of(self, shard: RoutedShard) -> torch.Tensor:
        pieces = [self.features.keys_N[self._span(number)] for number in shard.features]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def bags_of(
        self, shard: RoutedShard, rows: torch.Tensor, outcomes: torch.Tensor
    ) -> list[FeatureBags]:
        """The bags of a shard's features, mapped."""
        counts = self._counts_of(shard)
        pieces = zip(
            shard.features,
            rows.split_with_sizes(counts),
            outcomes.split_with_sizes(counts),
            strict=True,
        )
        return [
            FeatureBags(
                rows=own_rows,
                outcomes=own_outcomes,
                offsets=self._offsets[number],
                weights=self._weights(number),
                pooling="mean" if self.results.is_mean[number] else "sum",
                column=self.results.columns[number] + shard.columns[0],
            )
            for number, own_rows, own_outcomes in pieces
        ]

    def outcomes_of(
        self, shards: Sequence[RoutedShard], outcomes: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What became of each feature's keys, uint8 (N,); arguments as of `Arrivals.outcomes_of`.

        Copies: backward reads its own.
        """
        found: dict[int, torch.Tensor] = {}
        for shard, of_shard in zip(shards, outcomes, strict=True):
            pieces = of_shard.clone().split_with_sizes(self._counts_of(shard))
            for number, piece in zip(shard.features, pieces, strict=True):
                found[number] = highest(found.get(number), piece)
        return [found[number] for number in range(len(found))]

    def _counts_of(self, shard: RoutedShard) -> list[int]:
        return [self._keys[number + 1] - self._keys[number] for number in shard.features]

    def _span(self, number: int) -> slice:
        return slice(self._keys[number], self._keys[number + 1])

    def _weights(self, number: int) -> torch.Tensor | None:
        weights_N = self.features.weights_N
        return None if weights_N is None else weights_N.detach()[self._span(number)]


def _offsets_of(features: Features) -> list[torch.Tensor | None]:
    """The offsets of each feature's bags, int64 (B + 1,); None where each has one key."""
    count = len(features.num_bags)
    if features.has_one_key_each or not count:
        return [None] * count
    lengths_FB = features.lengths_G.view(count, -1)
    offsets = torch.zeros(count, features.batch_size + 1, dtype=torch.int64)
    torch.cumsum(lengths_FB, 1, out=offsets[:, 1:])
    has_one_key_each = lengths_FB.eq(1).all(1).tolist()
    return [
        None if is_single else own
        for is_single, own in zip(has_one_key_each, offsets.unbind(), strict=True)
    ]


def bags_of_all_ranks(
    whole: WholeBags,
    which: Sequence[torch.Tensor],
    arrived: Arrivals,
    starts: Starts,
    shards: Sequence[tuple[RoutedShard, MappedKeys]],
    rank: int,
) -> tuple[list[list[FeatureBags]], SharedTraining]:
    """The bags of this rank, by shard, which are pooled; and those of all ranks, which train.

    A rank that combined keys trains with a bag for each distinct key, else with its bags. `which`:
    for each feature, which of the keys that this rank sent each of its keys is, int64 (N,).
    `starts`: where the vector of each bag begins, rank by rank.
    """
    begins = list(accumulate(starts.num_values, initial=0))
    pooled: list[list[FeatureBags]] = []
    trained: list[list[FeatureBags]] = []
    sums: list[CombineBlock] = []
    for (shard, mapped), of_shard in zip(shards, starts.of_shards, strict=True):
        trained.append(arrived.mapped_bags_of(shard, mapped, of_shard))
        for number, bags in enumerate(trained[-1]):
            bags.column -= begins[number % len(starts.num_values)]
        sent = trained[-1][rank :: len(starts.num_values)]
        which_of = [which[number] for number in shard.features]
        pairs = list(zip(sent, which_of, strict=True))
        rows = torch.cat([bags.rows[which_N] for bags, which_N in pairs])
        outcomes = torch.cat([bags.outcomes[which_N] for bags, which_N in pairs])
        pooled.append(whole.bags_of(shard, rows, outcomes))
        sums += map(partial(_sums, shard.width), pooled[-1], sent, which_of)
    return pooled, SharedTraining(
        sums=sums,
        sizes=starts.num_values,
        process=rank,
        swap=whole.results.swap,
        bags=trained,
    )


def _sums(width: int, own: FeatureBags, sent: FeatureBags, which_N: torch.Tensor) -> CombineBlock:
    """The sums of the gradients of a feature's keys, from those of its bags."""
    return CombineBlock(
        bags=Bags(which_N, own.outcomes, own.offsets, own.weights, own.pooling),
        column=own.column,
        width=width,
        start=sent.column,
        num_sums=len(sent.rows),
    )
