"""Putting together the vectors that ranks send for this rank's samples, and taking gradients apart.

Every shard sends, for each feature of its table, the vectors of the bags that have keys there: one
stretch of numbers. Stretches of other columns lie side by side, those of other rows are added in
the order of ranks, so that the result is the same every time.

Shape letters: B samples, C columns, D width of a feature's vectors, G bags of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from recsdk_core import pack_vectors, unpack_vectors
from recsdk_core.vectors import Block, Part
from recsdk_sharding._batch.routing import Requests
from recsdk_sharding.placement.layout import GroupLayout

__all__ = ["Assembly", "Plan", "Stretch", "padded"]


@dataclass(frozen=True)
class Stretch:
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
    is_first: bool
    """Whether no stretch before it has the same feature and columns."""

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """The stretch's vectors, a view (bags, columns) of what was received."""
        first, last = self.columns
        return flat.narrow(0, self.start, self.num_values).view(-1, last - first)

    def of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """The stretch's columns of its feature's result."""
        first, last = self.columns
        return results[self.feature][:, first:last]


@dataclass(frozen=True)
class Plan:
    """What all ranks send to one."""

    stretches: list[Stretch]
    """In the order in which they lie there."""
    num_values: list[int]
    """Numbers that each rank sends, with those that fill up: W."""
    has_padding: bool
    """Whether there are numbers that fill up."""

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
        stretches: list[Stretch] = []
        num_values: list[int] = []
        begin = end = 0
        has_padding = False
        for sender in range(layout.world_size):
            is_left_out = layout.is_replicated and sender != rank
            for table, placed in [] if is_left_out else layout.shards_of(sender):
                found = requests.bags[placed.ranks, placed.shard.index]
                columns, is_first = placed.shard.columns, placed.shard.index == 0
                for feature in table.features:
                    bags = found[feature]
                    count = num_bags[feature] if bags is None else len(bags)
                    size = count * (columns[1] - columns[0])
                    stretches.append(Stretch(feature, columns, bags, size, end, is_first))
                    end += size
            num_values.append(padded(end - begin, multiple))
            has_padding |= begin + num_values[-1] > end
            begin = end = begin + num_values[-1]
        return Plan(stretches, num_values, has_padding)


class Assembly:
    """The results of one group for this rank's samples.

    A result for each feature: (G, D), views of what `put` and `take` are given.
    """

    def __init__(self, plan: Plan, divisors: Sequence[torch.Tensor] | None) -> None:
        """`divisors`: what each feature's vectors are divided by, float32 (G,); None: nothing."""
        self._divisors = divisors
        self._bags: torch.Tensor | None = None  # of all stretches, on a device
        self.num_values = plan.num_values
        """Numbers that each rank sends, W."""
        self._stretches = plan.stretches
        self._has_padding = plan.has_padding

    def put(self, received: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Fills the features' results with what was received from all ranks."""
        if received.device.type == "cpu":
            unpack_vectors(received, self._blocks(results))
        else:
            self._put_on_device(received, results)
        if self._divisors is not None:
            for result, divisor_G in zip(results, self._divisors, strict=True):
                result /= divisor_G[:, None]

    def _put_on_device(self, received: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        for stretch in self._stretches:
            target, vectors = stretch.of(results), stretch.read(received)
            if stretch.bags is None:
                if stretch.is_first:
                    target.copy_(vectors)
                else:
                    target += vectors
            elif stretch.is_first:
                target.zero_().index_copy_(0, stretch.bags, vectors)
            else:
                target.index_add_(0, stretch.bags, vectors)

    def take(self, grads: Sequence[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
        """The gradients of everything that was received, from those of the features' results.

        Divided by `divisor`. The columns of each of `grads` lie side by side.
        """
        if self._divisors is not None:
            pairs = zip(grads, self._divisors, strict=True)
            grads = [grad / divisor_G[:, None] for grad, divisor_G in pairs]
        make = torch.zeros if self._has_padding else torch.empty
        flat = make(sum(self.num_values), dtype=grads[0].dtype, device=grads[0].device)
        if flat.device.type == "cpu":
            pack_vectors(self._blocks(grads), flat, divisor)
            return flat
        for stretch in self._stretches:
            grad = stretch.of(grads)
            if stretch.bags is not None:
                grad = grad.index_select(0, stretch.bags)
            stretch.read(flat).copy_(grad)
        return flat if divisor == 1.0 else flat.div_(divisor)

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

    def to(self, device: torch.device) -> Assembly:
        """The same with its tensors on a device; starts copies on the current stream."""
        if device.type == "cpu":
            return self
        made = copy(self)
        if self._divisors is not None:
            joined = torch.cat(list(self._divisors)).to(device, non_blocking=True)
            made._divisors = joined.split_with_sizes([len(part) for part in self._divisors])
        bags = [each.bags for each in self._stretches if each.bags is not None]
        if bags:
            made._bags = torch.cat(bags).to(device, non_blocking=True)
            found = iter(made._bags.split_with_sizes(list(map(len, bags))))
            made._stretches = [
                each if each.bags is None else replace(each, bags=next(found))
                for each in self._stretches
            ]
        return made

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        for tensor in (self._bags, *(self._divisors or ())):
            if tensor is not None and tensor.device.type != "cpu":
                tensor.record_stream(stream)


def padded(count: int, multiple: int) -> int:
    """The least multiple that is not below a count."""
    return -(-count // multiple) * multiple
