"""Cutting a batch by the ranks that its keys go to.

For each rank a batch becomes int64 words: for each route that the rank is on, how many bags each
feature has, the bags' lengths, and the keys. Where every key is a bag, as in a sequence, lengths
are left out. Weights travel beside, in the order of the keys.

Shape letters: N keys, F features of a route, G bags of a route's features, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import CutBags, cut_bags
from recsdk_sharding._batch.features import Features
from recsdk_sharding.device.parcel import pinned_room
from recsdk_sharding.placement.layout import GroupLayout, Route

__all__ = ["Requests"]


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
    filled: torch.Tensor
    """int32, which bags have keys: route by route, row shard by row shard, feature by feature."""
    in_batch: bool
    """Whether these are counted within the batch, else within their feature."""
    num_filled: NDArray[np.int64]
    """How many these are, each time."""

    @staticmethod
    def of_features(
        features: Features,
        layout: GroupLayout,
        *,
        is_sequence: bool,
        notes_positions: bool = False,
        is_pinned: bool = False,
    ) -> Requests:
        """Cuts the bags; within a rank the order of the input is kept.

        `is_pinned`: whether `filled` goes to a device: if it goes as it is, it is written for it.
        """
        in_batch = is_pinned and layout.sends_as_cut and sum(features.num_bags) < 2**31
        cuts = [
            _RouteCut.of_features(
                features,
                route,
                layout,
                is_sequence=is_sequence,
                notes_positions=notes_positions,
                in_batch=in_batch,
            )
            for route in layout.routes
        ]
        return Requests(
            words=_joined([(cut.route, cut.bags.words, cut.bags.num_words) for cut in cuts]),
            num_words=_by_rank([(cut.route, cut.bags.num_words) for cut in cuts], layout),
            positions=_joined([(cut.route, cut.positions, cut.bags.num_keys) for cut in cuts])
            if notes_positions
            else None,
            num_keys=_by_rank([(cut.route, cut.bags.num_keys) for cut in cuts], layout),
            filled=cuts[0].bags.filled
            if len(cuts) == 1
            else torch.cat([torch.zeros(0, dtype=torch.int32), *(cut.bags.filled for cut in cuts)]),
            in_batch=in_batch,
            num_filled=cuts[0].bags.num_filled
            if len(cuts) == 1
            else np.concatenate([np.zeros(0, np.int64), *(cut.bags.num_filled for cut in cuts)]),
        )


@dataclass(frozen=True)
class _RouteCut:
    """The features of one route, cut by its row shards."""

    route: Route
    bags: CutBags
    positions: torch.Tensor | None
    """Which of the batch's keys each one sent is, int64 (N,); None if nobody needs it."""

    @staticmethod
    def of_features(
        features: Features,
        route: Route,
        layout: GroupLayout,
        *,
        is_sequence: bool,
        notes_positions: bool,
        in_batch: bool,
    ) -> _RouteCut:
        every = layout.takes_all(route)
        counts = features.num_bags if is_sequence else features.counts
        keys = None if every else _spans(counts, route.features)
        bags = None if every else _spans(features.num_bags, route.features)
        num_bags = features.num_bags
        if not every:
            num_bags = [num_bags[i] for i in route.features]
        room = None
        if in_batch:
            most = min(len(features.keys_N), sum(num_bags) * len(route.ranks))
            room = pinned_room(most)
        cut = cut_bags(
            _taken(features.keys_N, keys),
            None if is_sequence else _taken(features.lengths_G, bags),
            num_bags,
            len(route.ranks),
            rule=layout.rule,
            wants_places=notes_positions,
            num_virtual_shards=route.num_virtual_shards,
            counts_in_batch=in_batch,
            filled=room,
        )
        positions = cut.places
        if positions is not None and keys is not None:
            positions = _taken(torch.arange(len(features.keys_N)), keys)[positions]
        return _RouteCut(route, cut, positions)


def _joined(parts: Sequence[tuple[Route, torch.Tensor | None, list[int]]]) -> torch.Tensor:
    """What goes to the ranks of routes, rank by rank."""
    pieces: dict[int, list[torch.Tensor]] = {}
    for route, tensor, sizes in parts:
        assert tensor is not None
        if len(parts) == 1:  # the ranks of a route are in ascending order
            return tensor
        for rank, piece in zip(route.ranks, tensor.split_with_sizes(sizes), strict=True):
            pieces.setdefault(rank, []).append(piece)
    found = [piece for rank in sorted(pieces) for piece in pieces[rank]]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _by_rank(counts: Sequence[tuple[Route, list[int]]], layout: GroupLayout) -> list[int]:
    totals = [0] * layout.world_size
    for route, numbers in counts:
        for rank, number in zip(route.ranks, numbers, strict=True):
            totals[rank] += number
    return totals


def _spans(counts: Sequence[int], wanted: Sequence[int]) -> list[slice]:
    """Where the features lie."""
    ends = list(accumulate(counts, initial=0))
    return [slice(ends[i], ends[i + 1]) for i in wanted]


def _taken(tensor: torch.Tensor, spans: list[slice] | None) -> torch.Tensor:
    """Some parts of a tensor, one after the other; None: all of it."""
    if spans is None:
        return tensor.contiguous()
    return torch.cat([tensor[span] for span in spans])
