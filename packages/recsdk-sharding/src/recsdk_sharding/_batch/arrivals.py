"""What all ranks sent of one batch to this rank, as bags of the shards that it has.

Shape letters: N keys, A features of the routes that this rank is on, S features of its shards, P
pieces: what each of W ranks sent of each of those, feature by feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import lay_out_vectors, read_bags
from recsdk_sharding._batch.features import KeyPieces
from recsdk_sharding._batch.key_data import ArrivedData
from recsdk_sharding._batch.outcomes import highest
from recsdk_sharding._configs.data_taken import DTYPES
from recsdk_sharding._rows.home import GroupBags, ShardGroup
from recsdk_sharding.placement.layout import Arriving, ShardFeatures

__all__ = ["Arrivals"]


class Arrivals:
    """The bags of all ranks; within a feature those of rank 0 come first."""

    def __init__(
        self,
        words: torch.Tensor,
        num_words: Sequence[int],
        arriving: Arriving,
        every_key_is_a_bag: Sequence[bool],
    ) -> None:
        """`words`: what all ranks sent, so many each."""
        self._words = words
        self._arriving = arriving
        self._found = read_bags(
            words, num_words, arriving.num_features, every_key_is_a_bag=every_key_is_a_bag
        )
        self.num_keys_P = self._found.num_keys.take(arriving.pieces_P)
        """Keys of each piece."""
        self._weights: list[Sequence[torch.Tensor] | None] = [None] * len(num_words)
        self._data: list[dict[str, Sequence[torch.Tensor]]] = [{} for _ in num_words]
        self.latest_F: NDArray[np.int64] | None = None
        """The latest time of the keys of each of the group's features; None: they have none."""

    @property
    def _num_keys_WA(self) -> NDArray[np.int64]:
        shape = len(self._weights), sum(self._arriving.num_features)
        return self._found.num_keys.reshape(shape)

    @property
    def num_keys(self) -> list[int]:
        """Keys that each rank sent."""
        return self._num_keys_WA.sum(1).tolist()  # type: ignore[no-any-return]

    def add_weights(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Adds the weights of the keys that each rank sent; None: that rank's have none."""
        pairs = zip(weights, self._num_keys_WA.tolist(), strict=True)
        self._weights = [
            None if own is None else own.split_with_sizes(counts) for own, counts in pairs
        ]

    def add_data(self, arrived: ArrivedData) -> None:
        """Adds what came with the keys of all ranks."""
        self.latest_F = arrived.latest_F
        pairs = zip(arrived.of_ranks, self._num_keys_WA.tolist(), strict=True)
        self._data = [
            {name: own.split_with_sizes(counts) for name, own in columns.items()}
            for columns, counts in pairs
        ]

    @property
    def data_names(self) -> set[str]:
        """What came with keys of some rank, by name of `KeyData`."""
        return {name for of_rank in self._data for name in of_rank}

    def num_without(self, name: str, placed: ShardFeatures) -> NDArray[np.int64]:
        """Keys of each feature of the shards, (S,), with which this does not come."""
        num_keys_SW = self.num_keys_P.reshape(len(placed.arrivals_S), len(self._data))
        lacks_W = np.array([name not in of_rank for of_rank in self._data], bool)
        num_without_S: NDArray[np.int64] = num_keys_SW[:, lacks_W].sum(1)
        return num_without_S

    def data_of(self, placed: ShardFeatures, name: str, fills_S: Sequence[int]) -> torch.Tensor:
        """One thing that came with all pieces' keys, (N,).

        `fills_S`: what keys of each feature have, of ranks from which none came.
        """
        dtype, sizes = DTYPES[name], iter(self.num_keys_P.tolist())
        pieces = [torch.zeros(0, dtype=dtype)]
        for arrival, fill in zip(placed.arrivals_S.tolist(), fills_S, strict=True):
            for of_rank in self._data:
                own, size = of_rank.get(name), next(sizes)
                pieces.append(
                    torch.full((size,), fill, dtype=dtype) if own is None else own[arrival]
                )
        return torch.cat(pieces)

    @property
    def weight_starts_P(self) -> NDArray[np.int64]:
        """Where the weights of each piece's keys lie, among those of all keys."""
        num_keys = self._found.num_keys
        return (num_keys.cumsum() - num_keys).take(self._arriving.pieces_P)

    @property
    def keys(self) -> KeyPieces:
        """The keys of all pieces, where they arrived."""
        firsts_P = self._found.first_keys.take(self._arriving.pieces_P)
        return KeyPieces(self._words, self.num_keys_P, firsts_P)

    def outcomes_of(self, placed: ShardFeatures, outcomes_N: torch.Tensor) -> list[torch.Tensor]:
        """What became of the keys that each rank sent, uint8 (N,), in the order of its keys.

        `outcomes_N`: of what `keys` gives; shards of some columns may have the same keys.
        """
        found: list[dict[int, torch.Tensor]] = [{} for _ in self._weights]
        pieces = iter(outcomes_N.split_with_sizes(self.num_keys_P.tolist()))
        for arrival in placed.arrivals_S.tolist():
            for of_rank in found:
                of_rank[arrival] = highest(of_rank.get(arrival), next(pieces))
        nothing = torch.zeros(0, dtype=torch.uint8)
        return [
            torch.cat([nothing, *(of_rank[arrival] for arrival in sorted(of_rank))])
            for of_rank in found
        ]

    def starts_of(self, multiple: int) -> tuple[NDArray[np.int64], list[int]]:
        """Where the vectors of each piece begin, (P,), and how many numbers each rank gets.

        They lie rank by rank, each rank's filled up to a `multiple`.
        """
        arriving, num_filled = self._arriving, self._found.num_filled
        starts, _, num_values = lay_out_vectors(
            num_filled, arriving.stretches, len(self._weights), multiple
        )
        return starts.take(arriving.places_P), num_values

    def bags_of(
        self,
        placed: ShardFeatures,
        group: ShardGroup,
        num_pieces_T: NDArray[np.int64],
        starts_P: NDArray[np.int64],
    ) -> GroupBags:
        """The bags of the shards."""
        return GroupBags(
            group=group,
            num_pieces_T=num_pieces_T,
            num_keys_P=self.num_keys_P,
            starts_P=starts_P,
            offsets=_of_pieces(self._offsets(), placed),
            weights=_of_pieces(self._weights, placed),
        )

    def _offsets(self) -> list[Sequence[torch.Tensor | None] | None]:
        """Of each rank, int64 of the bags that have keys of each feature; None: each is a key."""
        of_routes, num_features = self._found.offsets, self._arriving.num_features
        if all(own is None for own in of_routes):
            return [None] * len(self._weights)
        counts = iter(self._found.num_filled.tolist())
        found: list[Sequence[torch.Tensor | None] | None] = []
        routes = iter(of_routes)
        for _ in self._weights:
            of_rank: list[torch.Tensor | None] = []
            for size in num_features:
                sizes = [count + 1 for count in islice(counts, size)]
                own = next(routes)
                of_rank += [None] * size if own is None else own.split_with_sizes(sizes)
            found.append(of_rank)
        return found


def _of_pieces(
    of_ranks: Sequence[Sequence[torch.Tensor | None] | None], placed: ShardFeatures
) -> list[torch.Tensor | None] | None:
    """What each piece has, of what each rank has of each feature; None: none has any."""
    if all(own is None for own in of_ranks):
        return None
    arrivals = placed.arrivals_S.tolist()
    return [None if own is None else own[a] for a in arrivals for own in of_ranks]
