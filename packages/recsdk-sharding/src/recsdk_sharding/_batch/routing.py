"""Cutting a batch by the ranks that its keys go to.

For each rank a batch becomes int64 words: for each route that the rank is on, how many bags each
feature has, the bags' lengths, and the keys. In a sequence every key is a bag, and lengths are left
out. Weights travel beside, in the order of the keys.

Shape letters: N keys, F features of a route, G bags of a route's features, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_sharding._batch.features import Features
from recsdk_sharding.placement.layout import GroupLayout, Route
from recsdk_sharding.placement.ranks import RankMap

__all__ = ["Ints", "Requests"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """A batch as it is sent."""

    words: torch.Tensor
    """int64, those for rank 0 first."""
    num_words: list[int]
    """Words for each rank."""
    positions: torch.Tensor | None
    """int64, which of the batch's keys each one sent is; None if nobody needs it."""
    num_keys: list[int]
    """Keys for each rank."""
    bags: dict[tuple[tuple[int, ...], int], tuple[Route, list[Ints | None]]]
    """By ranks of a route and number of the row shard: the bags of each of its features that
    have keys there; None: all bags."""

    @staticmethod
    def of_features(
        features: Features, layout: GroupLayout, *, is_sequence: bool, notes_positions: bool = False
    ) -> Requests:
        """Cuts the bags; within a rank the order of the input is kept."""
        words: list[list[Ints]] = [[] for _ in range(layout.world_size)]
        positions: list[list[Ints]] = [[] for _ in range(layout.world_size)]
        num_keys = [0] * layout.world_size
        bags: dict[tuple[tuple[int, ...], int], tuple[Route, list[Ints | None]]] = {}
        for route in layout.routes:
            batch = _RouteBatch.of_features(features, route, is_sequence, notes_positions)
            pieces = batch.cut(RankMap(len(route.ranks), layout.rule))
            for index, (rank, piece) in enumerate(zip(route.ranks, pieces, strict=True)):
                words[rank] += piece.words
                positions[rank] += [] if piece.positions is None else [piece.positions]
                num_keys[rank] += piece.num_keys
                bags[route.ranks, index] = route, piece.bags
        return Requests(
            words=_joined(words),
            num_words=[sum(map(len, of_rank)) for of_rank in words],
            positions=_joined(positions) if notes_positions else None,
            num_keys=num_keys,
            bags=bags,
        )

    def bags_on(self, ranks: tuple[int, ...], index: int) -> dict[int, Ints | None]:
        """The bags that have keys on a row shard, by position of the feature."""
        route, bags = self.bags[ranks, index]
        return dict(zip(route.features, bags, strict=True))


def _joined(parts: Sequence[Sequence[Ints]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([part for of_rank in parts for part in of_rank]))


@dataclass(frozen=True)
class _Piece:
    """What goes to one row shard."""

    words: list[Ints]
    positions: Ints | None
    num_keys: int
    bags: list[Ints | None]


@dataclass(frozen=True)
class _RouteBatch:
    """The features of one route."""

    keys_N: Ints
    positions_N: Ints | None
    """Which of the batch's keys each is; None if nobody needs it."""
    lengths_G: Ints | None
    """None: every key is a bag."""
    num_bags_F: Ints

    @staticmethod
    def of_features(
        features: Features, route: Route, is_sequence: bool, notes_positions: bool
    ) -> _RouteBatch:
        every = route.features == tuple(range(len(features.num_bags)))
        counts = features.num_bags if is_sequence else features.counts()
        keys = _spans(counts, None if every else route.features)
        bags = _spans(features.num_bags, None if every else route.features)
        positions = torch.arange(len(features.keys_N)) if notes_positions else None
        return _RouteBatch(
            keys_N=_taken(features.keys_N, keys),
            positions_N=None if positions is None else _taken(positions, keys),
            lengths_G=None if is_sequence else _taken(features.lengths_G, bags),
            num_bags_F=np.array([features.num_bags[i] for i in route.features], np.int64),
        )

    def cut(self, ranks: RankMap) -> list[_Piece]:
        """What goes to each row shard."""
        if ranks.world_size == 1:
            return [self._piece(self.lengths_G, None)]
        owners_N = ranks.owners(self.keys_N)
        order_N = np.argsort(owners_N.astype(np.uint16), kind="stable")
        counts = np.bincount(owners_N, minlength=ranks.world_size)
        orders = np.split(order_N, np.cumsum(counts)[:-1])
        if self.lengths_G is None:
            return [self._piece(None, order) for order in orders]
        lengths_WG = _lengths_per_shard(owners_N, self.lengths_G, ranks.world_size)
        return [self._piece(*part) for part in zip(lengths_WG, orders, strict=True)]

    def _piece(self, lengths_G: Ints | None, order: Ints | None) -> _Piece:
        """The keys at some positions (None: all), with the lengths of their bags."""
        keys = self.keys_N if order is None else self.keys_N[order]
        positions_N = self.positions_N
        if positions_N is not None and order is not None:
            positions_N = positions_N[order]
        ends_F = np.cumsum(self.num_bags_F)
        if lengths_G is None:
            kept = np.arange(len(keys)) if order is None else order
            num_bags_F = np.diff(np.searchsorted(kept, ends_F), prepend=0)
            words = [num_bags_F, keys]
        else:
            kept = np.flatnonzero(lengths_G)
            words = [self.num_bags_F, lengths_G, keys]
        bags = _split_bags(kept, self.num_bags_F, ends_F)
        return _Piece(words, positions_N, len(keys), bags)


def _split_bags(kept: Ints, num_bags_F: Ints, ends_F: Ints) -> list[Ints | None]:
    """Positions among all bags, in ascending order, as positions among those of each feature."""
    cuts = np.searchsorted(kept, ends_F).tolist()
    starts = [0, *cuts[:-1]]
    firsts = (ends_F - num_bags_F).tolist()
    counts = num_bags_F.tolist()
    return [
        None if end - start == count else kept[start:end] - first
        for start, end, first, count in zip(starts, cuts, firsts, counts, strict=True)
    ]


def _spans(counts: Sequence[int], wanted: Sequence[int] | None) -> list[slice] | None:
    """Where the features lie; None: all of them, in order."""
    if wanted is None:
        return None
    ends = list(accumulate(counts, initial=0))
    return [slice(ends[i], ends[i + 1]) for i in wanted]


def _taken(tensor: torch.Tensor, spans: list[slice] | None) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().numpy()
    return array if spans is None else np.concatenate([array[span] for span in spans])


def _lengths_per_shard(owners_N: Ints, lengths_G: Ints, num_shards: int) -> Ints:
    """How many keys of each bag go to each row shard, int64 (shards, G)."""
    num_bags = len(lengths_G)
    bag_N = np.repeat(np.arange(num_bags), lengths_G)
    flat = np.bincount(owners_N * num_bags + bag_N, minlength=num_shards * num_bags)
    return flat.reshape(num_shards, num_bags)
