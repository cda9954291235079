"""What all ranks sent of one batch to this rank, as bags of the shards that it has.

Shape letters: N keys, A features of the routes that this rank is on, S features of its shards, P
pieces: what each of W ranks sent of each of those, feature by feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import read_bags
from recsdk_sharding._batch.assembly import lay_out
from recsdk_sharding._batch.features import KeyPieces
from recsdk_sharding._batch.key_data import ArrivedData
from recsdk_sharding._batch.outcomes import highest
from recsdk_sharding._configs.data_taken import DTYPES
from recsdk_sharding._rows.home import GroupBags, ShardGroup
from recsdk_sharding.placement.layout import Route, ShardFeatures

__all__ = ["Arrivals"]


@dataclass
class _OfRank:
    """What one rank sent: of each feature, A in all."""

    first_keys: list[int]
    """Where its keys begin among the words of all ranks."""
    num_keys: list[int]
    num_filled: list[int]
    """Bags that have keys."""
    offsets: list[torch.Tensor | None]
    """int64, of the bags that have keys; None: every key is a bag."""
    weights: Sequence[torch.Tensor | None]
    """float32, of the keys."""
    data: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    """What came with the keys, by name of `KeyData`."""


class Arrivals:
    """The bags of all ranks; within a feature those of rank 0 come first."""

    def __init__(
        self,
        words: torch.Tensor,
        num_words: Sequence[int],
        routes: Sequence[Route],
        every_key_is_a_bag: Sequence[bool],
    ) -> None:
        """`words`: what all ranks sent, so many each, of the routes that this rank is on."""
        self._words = words
        spans = pairwise(accumulate(num_words, initial=0))
        self._ranks = [
            _read(words, span, routes, is_sequence=is_sequence)
            for span, is_sequence in zip(spans, every_key_is_a_bag, strict=True)
        ]
        self._first_keys_WA = np.array([each.first_keys for each in self._ranks], np.int64)
        self._num_keys_WA = np.array([each.num_keys for each in self._ranks], np.int64)
        self._num_filled_WA = np.array([each.num_filled for each in self._ranks], np.int64)
        self.latest_F: NDArray[np.int64] | None = None
        """The latest time of the keys of each of the group's features; None: they have none."""

    @property
    def num_keys(self) -> list[int]:
        """Keys that each rank sent."""
        return self._num_keys_WA.sum(1).tolist()  # type: ignore[no-any-return]

    def add_weights(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Adds the weights of the keys that each rank sent; None: that rank's have none."""
        for of_rank, own, counts in zip(self._ranks, weights, self._num_keys_WA, strict=True):
            if own is not None:
                of_rank.weights = own.split_with_sizes(counts.tolist())

    def add_data(self, arrived: ArrivedData) -> None:
        """Adds what came with the keys of all ranks."""
        self.latest_F = arrived.latest_F
        pairs = zip(self._ranks, arrived.of_ranks, self._num_keys_WA.tolist(), strict=True)
        for of_rank, columns, counts in pairs:
            of_rank.data = {name: own.split_with_sizes(counts) for name, own in columns.items()}

    @property
    def data_names(self) -> set[str]:
        """What came with keys of some rank, by name of `KeyData`."""
        return {name for of_rank in self._ranks for name in of_rank.data}

    def data_of(self, placed: ShardFeatures, name: str, fills_S: Sequence[int]) -> torch.Tensor:
        """One thing that came with all pieces' keys, (N,).

        `fills_S`: what keys of each feature have, of ranks from which none came.
        """
        dtype = DTYPES[name]
        pieces = [torch.zeros(0, dtype=dtype)]
        for arrival, fill in zip(placed.arrivals_S.tolist(), fills_S, strict=True):
            for of_rank in self._ranks:
                own = of_rank.data.get(name)
                size = of_rank.num_keys[arrival]
                pieces.append(
                    torch.full((size,), fill, dtype=dtype) if own is None else own[arrival]
                )
        return torch.cat(pieces)

    def weight_starts_of(self, placed: ShardFeatures) -> NDArray[np.int64]:
        """Where the weights of each piece's keys lie, among those of all keys, (P,)."""
        ends_WA = self._num_keys_WA.cumsum().reshape(self._num_keys_WA.shape)
        return _pieces(ends_WA - self._num_keys_WA, placed)

    def num_keys_of(self, placed: ShardFeatures) -> NDArray[np.int64]:
        """Keys of each piece, (P,)."""
        return _pieces(self._num_keys_WA, placed)

    def keys_of(self, placed: ShardFeatures) -> KeyPieces:
        """The keys of all pieces, where they arrived."""
        return KeyPieces(
            self._words, self.num_keys_of(placed), _pieces(self._first_keys_WA, placed)
        )

    def outcomes_of(self, placed: ShardFeatures, outcomes_N: torch.Tensor) -> list[torch.Tensor]:
        """What became of the keys that each rank sent, uint8 (N,), in the order of its keys.

        `outcomes_N`: of what `keys_of` gives; shards of some columns may have the same keys.
        """
        found: list[dict[int, torch.Tensor]] = [{} for _ in self._ranks]
        pieces = iter(outcomes_N.split_with_sizes(self.num_keys_of(placed).tolist()))
        for arrival in placed.arrivals_S.tolist():
            for of_rank in found:
                of_rank[arrival] = highest(of_rank.get(arrival), next(pieces))
        nothing = torch.zeros(0, dtype=torch.uint8)
        return [
            torch.cat([nothing, *(of_rank[arrival] for arrival in sorted(of_rank))])
            for of_rank in found
        ]

    def starts_of(
        self, placed: ShardFeatures, order_S: NDArray[np.int64], multiple: int
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Where the vectors of each piece begin, (P,), and how many numbers each rank gets.

        They lie rank by rank, in an order of the shards' features, each rank's filled up to a
        `multiple`.
        """
        sizes_WS = self._num_filled_WA[:, placed.arrivals_S] * placed.widths_S
        world_size = len(sizes_WS)
        ranks = np.repeat(np.arange(world_size), sizes_WS.shape[1])
        starts, num_values, _ = lay_out(sizes_WS[:, order_S].ravel(), ranks, world_size, multiple)
        starts_WS = np.empty_like(sizes_WS)
        starts_WS[:, order_S] = starts.reshape(sizes_WS.shape)
        return starts_WS.T.ravel(), num_values

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
            num_keys_P=self.num_keys_of(placed),
            starts_P=starts_P,
            offsets=_of_pieces([each.offsets for each in self._ranks], placed),
            weights=_of_pieces([each.weights for each in self._ranks], placed),
        )


def _read(
    words: torch.Tensor, span: tuple[int, int], routes: Sequence[Route], *, is_sequence: bool
) -> _OfRank:
    """What one rank sent, which lies there; `routes` are those that this rank is on."""
    begin, end = span
    found = _OfRank([], [], [], [], [])
    for route in routes:
        own = read_bags(words[begin:end], len(route.features), every_key_is_a_bag=is_sequence)
        begin += own.num_words
        firsts = accumulate(own.num_keys, initial=begin - sum(own.num_keys))
        found.first_keys += islice(firsts, len(own.num_keys))
        found.num_keys += own.num_keys
        found.num_filled += own.num_filled
        if own.offsets is None:
            found.offsets += [None] * len(own.num_filled)
        else:
            found.offsets += own.offsets.split_with_sizes([count + 1 for count in own.num_filled])
    found.weights = [None] * len(found.num_keys)
    return found


def _pieces(numbers_WA: NDArray[np.int64], placed: ShardFeatures) -> NDArray[np.int64]:
    """Of each piece, (P,)."""
    pieces_P: NDArray[np.int64] = numbers_WA[:, placed.arrivals_S].T.ravel()
    return pieces_P


def _of_pieces(
    of_ranks: Sequence[Sequence[torch.Tensor | None]], placed: ShardFeatures
) -> list[torch.Tensor | None] | None:
    """What each piece has, of what each rank has of each feature; None: none has any."""
    if all(of_piece is None for own in of_ranks for of_piece in own):
        return None
    return [own[a] for a in placed.arrivals_S.tolist() for own in of_ranks]
