"""Putting together the vectors that ranks send for this rank's samples, and taking gradients apart.

Every shard sends, for each feature of its table, the vectors of the bags that have keys there: one
stretch of numbers. Stretches of other columns lie side by side, those of other rows are added in
the order of ranks, so that the result is the same every time.

Shape letters: B samples, C columns, D width of a feature's vectors, G bags of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from recsdk_core import pack_vectors, unpack_vectors
from recsdk_core.vectors import Block, Part
from recsdk_sharding._batch.routing import Requests
from recsdk_sharding.placement.layout import GroupLayout

__all__ = ["Assembly", "HostAssembly", "Plan", "Results", "Stretch", "padded"]


class Stretch(NamedTuple):
    """The vectors that one shard sends for one feature, one after the other."""

    feature: int
    """Position of the feature."""
    columns: tuple[int, int]
    """Which columns of the feature's vectors."""
    bags: torch.Tensor | None
    """Which bags, int64, in ascending order; None: all."""
    num_values: int
    """Numbers in the stretch."""
    start: int
    """The first number among those of all ranks."""


@dataclass(frozen=True)
class Plan:
    """What all ranks send to one."""

    stretches: list[list[Stretch]]
    """Of each rank, in the order in which they lie there."""
    num_values: list[int]
    """Numbers that each rank sends, with those that fill up: W."""
    num_bags: list[int]
    """Of each feature."""
    widths: list[int]
    """D of each feature."""

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
        stretches: list[list[Stretch]] = []
        num_values: list[int] = []
        begin = end = 0
        for sender in range(layout.world_size):
            stretches.append([])
            is_left_out = layout.is_replicated and sender != rank
            for number in [] if is_left_out else layout.sending_order(sender):
                table, placed = layout.shards_of(sender)[number]
                found = requests.bags[placed.ranks, placed.shard.index]
                columns = placed.shard.columns
                for feature in table.features:
                    bags = found[feature]
                    count = num_bags[feature] if bags is None else bags.shape[0]
                    size = count * (columns[1] - columns[0])
                    stretches[-1].append(Stretch(feature, columns, bags, size, end))
                    end += size
            num_values.append(padded(end - begin, multiple))
            begin = end = begin + num_values[-1]
        widths = [table.dim for table in layout.tables for _ in table.features]
        return Plan(stretches, num_values, list(num_bags), widths)

    @property
    def has_padding(self) -> bool:
        """Whether there are numbers that fill up."""
        return any(
            sum(stretch.num_values for stretch in of_rank) < count
            for of_rank, count in zip(self.stretches, self.num_values, strict=True)
        )


class Results(Protocol):
    """The results of all groups of a module."""

    def empty(self) -> list[torch.Tensor]:
        """What is to be filled, on the host."""

    @property
    def takes_views(self) -> bool:
        """Whether `joined` copies what it is given."""

    def joined(self, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """What is made, on a device, of the vectors (G, D) of each group's features."""

    def parts_of(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The vectors of each group's features, as views of results or of their gradients."""


class Assembly(Protocol):
    """The results of one group for this rank's samples."""

    @property
    def num_values(self) -> list[int]:
        """Numbers that each rank sends, W."""

    @property
    def fills_results(self) -> bool:
        """Whether results are filled in their place."""

    def put(self, received: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Fills the features' results (G, D) with what was received from all ranks."""

    def made_of(self, received: torch.Tensor, *, apart: bool) -> list[torch.Tensor]:
        """The features' results, made of what was received, if they are not filled.

        `apart`: each in memory of its own.
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

    fills_results = True

    def __init__(self, plan: Plan, divisors: Sequence[torch.Tensor] | None) -> None:
        """`divisors`: what each feature's vectors are divided by, float32 (G,); None: nothing."""
        self._divisors = divisors
        self.num_values = plan.num_values
        """Numbers that each rank sends, W."""
        self._stretches = [stretch for of_rank in plan.stretches for stretch in of_rank]
        self._has_padding = plan.has_padding

    def put(self, received: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Fills the features' results with what was received from all ranks."""
        unpack_vectors(received, self._blocks(results))
        if self._divisors is not None:
            for result, divisor_G in zip(results, self._divisors, strict=True):
                result /= divisor_G[:, None]

    def made_of(self, received: torch.Tensor, *, apart: bool) -> list[torch.Tensor]:
        """Not used: results are filled."""
        raise NotImplementedError

    def take(self, grads: Sequence[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
        """The gradients of everything that was received, from those of the features' results."""
        if self._divisors is not None:
            pairs = zip(grads, self._divisors, strict=True)
            grads = [grad / divisor_G[:, None] for grad, divisor_G in pairs]
        make = torch.zeros if self._has_padding else torch.empty
        flat = make(sum(self.num_values), dtype=grads[0].dtype)
        pack_vectors(self._blocks(grads), flat, divisor)
        return flat

    def _blocks(self, tensors: Sequence[torch.Tensor]) -> list[Block]:
        """The columns of features' results or gradients, with the stretches that they have."""
        parts: dict[tuple[int, tuple[int, int]], list[Part]] = {}
        for stretch in self._stretches:
            columns = stretch.feature, stretch.columns
            parts.setdefault(columns, []).append((stretch.start, stretch.bags))
        return [
            (tensors[feature], first, last - first, found)
            for (feature, (first, last)), found in parts.items()
        ]

    def open(self) -> None:
        """Does nothing: all of it is on the host."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: all of it is on the host."""


def padded(count: int, multiple: int) -> int:
    """The least multiple that is not below a count."""
    return -(-count // multiple) * multiple
