"""Pooling straight into the results of a batch, where every bag is whole on its own rank.

So it is on a rank that is alone, and with tables that every rank has: each vector then has its
columns in the matrix of results, and neither the forward nor the backward copies what it could read
or write there.

Shape letters: B samples, C columns, N keys, S features of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Bags, CombineBlock, Outcome
from recsdk_core.nn.function import FeatureBags, SharedTraining
from recsdk_sharding._batch.context import ResultColumns
from recsdk_sharding._batch.features import Features, KeyPieces
from recsdk_sharding._batch.key_data import latest_of
from recsdk_sharding._batch.outcomes import highest
from recsdk_sharding._rows.home import GroupBags, MappedBags, ShardGroup
from recsdk_sharding.placement.layout import ShardFeatures

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
        self._offsets = _offsets_of(features)

    def num_keys_of(self, placed: ShardFeatures) -> NDArray[np.int64]:
        """Keys of each feature of the shards, (S,)."""
        return np.array(self.features.counts, np.int64)[placed.features_S]

    def pieces_of(
        self, placed: ShardFeatures, group: ShardGroup, num_pieces_T: NDArray[np.int64]
    ) -> tuple[KeyPieces, GroupBags]:
        """The keys of the shards' features, where they are in the batch, and their bags.

        What does not depend on the keys but on how many they are is that of the batch before if it
        had as many.
        """
        counts = self.features.counts
        if self._offsets is not None or self.features.weights_N is not None:
            bags, begins_S = self._bags_of(placed, group, num_pieces_T), self._begins_of(placed)
        else:
            same = self.results, placed, num_pieces_T
            kept = group.kept.get(WholeBags)
            if kept is None or kept[0] != counts or not all(map(is_, kept[1], same)):
                found = self._bags_of(placed, group, num_pieces_T)
                kept = group.kept[WholeBags] = counts, same, found, self._begins_of(placed)
            _, _, bags, begins_S = kept
        return KeyPieces(self.features.keys_N, bags.num_keys_P, begins_S), bags

    def _begins_of(self, placed: ShardFeatures) -> NDArray[np.int64]:
        """Where the keys of each feature of the shards begin, (S,)."""
        ends = np.cumsum([0, *self.features.counts])
        begins_S: NDArray[np.int64] = ends[placed.features_S]
        return begins_S

    @property
    def latest_F(self) -> NDArray[np.int64] | None:
        """The latest time of each feature's keys; None: they have none."""
        return latest_of(self.features)

    @property
    def data_names(self) -> set[str]:
        """What comes with the keys, by name of `KeyData`."""
        return set(self.features.data)

    def num_without(self, name: str, placed: ShardFeatures) -> NDArray[np.int64]:
        """Keys of each feature of the shards, (S,), with which this does not come."""
        num_keys_S = self.num_keys_of(placed)
        return np.zeros_like(num_keys_S) if name in self.features.data else num_keys_S

    def data_of(self, placed: ShardFeatures, name: str, fills_S: Sequence[int]) -> torch.Tensor:
        """One thing that comes with the keys of the shards, (N,); as of `Arrivals.data_of`."""
        return self._of_shards(self.features.data[name], placed)

    def _of_shards(self, of_keys_N: torch.Tensor, placed: ShardFeatures) -> torch.Tensor:
        """What each key of the shards has, of what each of the batch has."""
        parts = of_keys_N.split_with_sizes(self.features.counts)
        return torch.cat([of_keys_N[:0], *(parts[i] for i in placed.features_S.tolist())])

    def _bags_of(
        self, placed: ShardFeatures, group: ShardGroup, num_pieces_T: NDArray[np.int64]
    ) -> GroupBags:
        numbers = placed.features_S
        weights_N, weights = self.features.weights_N, None
        if weights_N is not None:
            of_features = weights_N.detach().split_with_sizes(self.features.counts)
            weights = [of_features[number] for number in numbers.tolist()]
        offsets = self._offsets
        return GroupBags(
            group=group,
            num_pieces_T=num_pieces_T,
            num_keys_P=self.num_keys_of(placed),
            starts_P=self.results.columns_F[numbers] + placed.first_columns_S,
            offsets=None if offsets is None else [offsets[number] for number in numbers.tolist()],
            weights=weights,
            is_mean_P=self.results.is_mean_F[numbers],
        )

    def outcomes_of(self, placed: ShardFeatures, outcomes_N: torch.Tensor) -> list[torch.Tensor]:
        """What became of each feature's keys, uint8 (N,); arguments as of `Arrivals.outcomes_of`.

        Copies: backward reads its own.
        """
        found: dict[int, torch.Tensor] = {}
        pieces = outcomes_N.clone().split_with_sizes(self.num_keys_of(placed).tolist())
        for number, piece in zip(placed.features_S.tolist(), pieces, strict=True):
            found[number] = highest(found.get(number), piece)
        return [found[number] for number in range(len(found))]


def _offsets_of(features: Features) -> list[torch.Tensor | None] | None:
    """The offsets of each feature's bags, int64 (B + 1,); None where each has one key."""
    if features.has_one_key_each:
        return None
    pairs = zip(features.has_one_key_each_F, features.offsets(), strict=True)
    return [None if is_single else own for is_single, own in pairs]


def bags_of_all_ranks(
    whole: WholeBags,
    which: Sequence[torch.Tensor],
    arrived: MappedBags,
    num_values: Sequence[int],
    placed: ShardFeatures,
    rank: int,
) -> tuple[MappedBags, SharedTraining]:
    """The bags of this rank, which are pooled; and those of all ranks, which train.

    A rank that combined keys trains with a bag for each distinct key, else with its bags. `which`:
    for each feature, which of the keys that this rank sent each of its keys is, int64 (N,).
    `num_values`: numbers in the gradient of each rank; the bags that arrived start among those of
    all ranks.
    """
    world_size, numbers = len(num_values), placed.features_S.tolist()
    begins = np.cumsum([0, *num_values[:-1]])
    trained = replace(arrived, starts_P=arrived.starts_P - np.tile(begins, len(numbers))).features
    sent = [bags for of_shard in trained for bags in of_shard][rank::world_size]
    pairs = [(bags, which[number]) for bags, number in zip(sent, numbers, strict=True)]
    rows = [bags.rows[which_N] for bags, which_N in pairs]
    outcomes = [bags.outcomes[which_N] for bags, which_N in pairs]
    _, bags = whole.pieces_of(placed, arrived.group, arrived.num_pieces_T // world_size)
    pooled = bags.mapped(
        torch.cat([arrived.rows_N[:0], *rows]),
        torch.cat([arrived.outcomes_N[:0], *outcomes]),
        arrived.leases,
    )
    own = [bags for of_shard in pooled.features for bags in of_shard]
    return pooled, SharedTraining(
        sums=[
            _sums(width, bags, *pair)
            for width, bags, pair in zip(placed.widths_S.tolist(), own, pairs, strict=True)
        ],
        sizes=num_values,
        process=rank,
        swap=whole.results.swap,
        bags=trained,
    )


def _sums(width: int, own: FeatureBags, sent: FeatureBags, which_N: torch.Tensor) -> CombineBlock:
    """The sums of the gradients of a feature's keys, from those of its bags.

    Those of keys without a row too, which train the rows that they share.
    """
    all_N = torch.full_like(own.outcomes, Outcome.FOUND)
    return CombineBlock(
        bags=Bags(which_N, all_N, own.offsets, own.weights, own.pooling),
        column=own.column,
        width=width,
        start=sent.column,
        num_sums=len(sent.rows),
    )
