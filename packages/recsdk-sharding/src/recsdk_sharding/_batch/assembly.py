"""Putting together the vectors that ranks send for this rank's samples, and taking gradients apart.

Every shard sends, for each feature of its table, the vectors of the bags that have keys there: one
stretch of numbers. Stretches of other columns lie side by side, those of other rows are added in
the order of ranks, so that the result is the same every time.

Shape letters: B samples, C columns, D width of a feature's vectors, G bags of a feature, S
stretches, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import (
    VectorParts,
    in_huge_pages,
    lay_out_vectors,
    pack_vectors,
    unpack_vectors,
)
from recsdk_sharding._batch.routing import Requests
from recsdk_sharding.placement.layout import GroupLayout, SentWidth, ShardFeatures

__all__ = ["Assembly", "HostAssembly", "Plan", "ResultRoom", "Results"]


@dataclass(frozen=True)
class Plan:
    """What all ranks send to one: S stretches of vectors, each of one feature of a shard."""

    sent: ShardFeatures
    """Whose they are, in the order in which they lie there."""
    by_width: list[SentWidth]
    """The same."""
    filled: torch.Tensor
    """As in `Requests`: which bags have keys on each row shard of a feature."""
    in_batch: bool
    """Whether these are counted within the batch; they lie in the order that is sent then, too."""
    num_filled: NDArray[np.int64]
    """How many; `cuts_S` of what is sent says which of them a stretch has."""
    starts_S: NDArray[np.int64]
    """The first number of each stretch among those of all ranks."""
    num_used: list[int]
    """Numbers of the vectors that each rank sends: W."""
    num_values: list[int]
    """The same with those that fill up."""
    num_bags: list[int]
    """Of each feature."""

    @property
    def has_padding(self) -> bool:
        """Whether there are numbers that fill up."""
        return self.num_used != self.num_values

    @staticmethod
    def of_requests(
        layout: GroupLayout,
        requests: Requests,
        num_bags: Sequence[int],
        *,
        rank: int,
        multiple: int,
    ) -> Plan:
        """What the ranks send to `rank`, each filled up to a `multiple`."""
        sent = layout.sent_to(rank)
        starts_S, num_used, num_values = lay_out_vectors(
            requests.num_filled, sent.stretches, layout.world_size, multiple
        )
        return Plan(
            sent=sent,
            by_width=layout.widths_sent_to(rank),
            filled=requests.filled,
            in_batch=requests.in_batch,
            num_filled=requests.num_filled,
            starts_S=starts_S,
            num_used=num_used,
            num_values=num_values,
            num_bags=list(num_bags),
        )

    def parts(self, begins_W: NDArray[np.int64] | None) -> VectorParts:
        """The stretches as the core takes them, for matrices that are those of the features.

        `begins_W`: where the numbers of each rank begin; None: they lie one after the other.
        """
        blocks, counts = self.sent.blocks, self.num_filled
        begins = counts.cumsum() - counts
        cuts_S = self.sent.cuts_S[blocks.order_S]
        starts_S = self.starts_S
        if begins_W is not None:
            sizes_W = np.array(self.num_values, np.int64)
            shifts_W: NDArray[np.int64] = begins_W - sizes_W.cumsum() + sizes_W
            starts_S = starts_S + shifts_W[self.sent.ranks_S]
        return VectorParts(
            matrices=blocks.features_K,
            columns=blocks.first_columns_K,
            widths=blocks.widths_K,
            num_parts=blocks.num_stretches_K,
            starts=starts_S[blocks.order_S],
            begins=begins[cuts_S],
            counts=counts[cuts_S],
            rows=self.filled,
        )


class Results(Protocol):
    """The results of all groups of a module."""

    def empty(self) -> list[torch.Tensor]:
        """What is to be filled, on the host."""

    @property
    def takes_views(self) -> bool:
        """Whether `joined` copies what it is given."""

    def joined(self, parts: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """What is made, on a device, of the vectors (G, D) of each group's features."""

    def parts_of(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The vectors of each group's features, as views of results or of their gradients."""


class ResultRoom:
    """Where the results of one forward go: filled in their place, or made of parts."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._filled: list[torch.Tensor] | None = None
        self.is_apart = not results.takes_views
        """Whether vectors that are made need memory of their own."""

    def of_group(self, group: int) -> list[torch.Tensor]:
        """The vectors (G, D) of a group's features, to be filled in their place."""
        if self._filled is None:
            self._filled = self._results.empty()
        return self._results.parts_of(self._filled)[group]

    def taken(self, parts: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The results, once every group's vectors are filled or made."""
        return self._results.joined(parts) if self._filled is None else self._filled


class Assembly(Protocol):
    """The results of one group for this rank's samples."""

    @property
    def num_values(self) -> list[int]:
        """Numbers that each rank sends, W."""

    def put(self, received: torch.Tensor, room: ResultRoom, group: int) -> Sequence[torch.Tensor]:
        """The features' results (G, D) of what was received from all ranks.

        They are the room's for this `group`, filled, or made: then in memory of their own if the
        room wants them apart.
        """

    def take(self, grads: Sequence[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
        """The gradients of everything that was received, from those of the features' results.

        Divided by `divisor`. The columns of each of `grads` lie side by side.
        """

    def open(self) -> None:
        """Makes it usable for work on the current stream."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""


class HostAssembly:
    """Puts vectors together on the cpu, by the engine."""

    def __init__(self, plan: Plan, divisors: Sequence[torch.Tensor] | None) -> None:
        """`divisors`: what each feature's vectors are divided by, float32 (G,); None: nothing."""
        self._divisors = divisors
        self.num_values = plan.num_values
        """Numbers that each rank sends, W."""
        self._plan = plan

    def put(
        self,
        received: torch.Tensor,
        room: ResultRoom,
        group: int,
        begins_W: NDArray[np.int64] | None = None,
    ) -> Sequence[torch.Tensor]:
        """The room's results for this group, filled.

        `begins_W`: where the numbers of each rank begin in `received`; None: one after the other.
        """
        results = room.of_group(group)
        unpack_vectors(received, self._plan.parts(begins_W), results)
        if self._divisors is not None:
            for result, divisor_G in zip(results, self._divisors, strict=True):
                result /= divisor_G[:, None]
        return results

    def take(self, grads: Sequence[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
        """The gradients of everything that was received, from those of the features' results."""
        flat = in_huge_pages(grads[0].new_empty(sum(self.num_values)))
        if self._plan.has_padding:
            flat.zero_()
        self.take_into(flat, grads, divisor)
        return flat

    def take_into(
        self,
        room: torch.Tensor,
        grads: Sequence[torch.Tensor],
        divisor: float,
        begins_W: NDArray[np.int64] | None = None,
    ) -> None:
        """As `take`, into numbers that are there; `begins_W` as in `put`."""
        if self._divisors is not None:
            pairs = zip(grads, self._divisors, strict=True)
            grads = [grad / divisor_G[:, None] for grad, divisor_G in pairs]
        pack_vectors(grads, self._plan.parts(begins_W), room, divisor)

    def open(self) -> None:
        """Does nothing: all of it is on the host."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: all of it is on the host."""
