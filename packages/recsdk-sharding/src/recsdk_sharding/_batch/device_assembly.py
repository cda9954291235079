"""Putting vectors together on a device, in a number of operators that no number of tables changes.

The features of one width D have one matrix of cells: equal parts of their vectors, which are whole
unless columns are cut. What a rank sends of them is one stretch of cells; a number for each says
where it belongs. So a rank's cells are added by one operator, and as they all have other places,
without atomic operations; ranks are added one after the other, as on the host.

Shape letters: D width of a feature's vectors, G bags of a feature, P cells that are received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import join_rows
from recsdk_sharding._batch.assembly import Assembly, HostAssembly, Plan, Stretch
from recsdk_sharding.device.parcel import Item, Parcel, get_optional

__all__ = ["DeviceAssembly", "assembly_on"]


def assembly_on(
    device: torch.device, plan: Plan, divisors: Sequence[torch.Tensor] | None
) -> Assembly:
    """How results are put together on a device.

    `divisors`: what each feature's vectors are divided by, float32 (G,); None: by nothing.
    """
    if device.type == "cpu":
        return HostAssembly(plan, divisors)
    return DeviceAssembly(device, plan, divisors)


@dataclass(frozen=True)
class _Width:
    """The features of one width."""

    dim: int
    """D."""
    cell: int
    """Numbers of a cell; they divide D."""
    features: list[int]
    """Their positions."""
    num_bags: list[int]
    """Of each."""
    spans: list[tuple[int, int]]
    """Of each rank: where its cells begin among the numbers received, and how many they are."""
    places_P: Item
    """Where each cell that is received belongs, rank by rank."""
    divisors: Item | None
    """What vectors are divided by, float32 (sum of G,); None: by nothing."""

    @property
    def num_cells(self) -> int:
        """Of the results."""
        return sum(self.num_bags) * (self.dim // self.cell)


class DeviceAssembly:
    """The results of one group for this rank's samples, on a device."""

    fills_results = False

    def __init__(
        self, device: torch.device, plan: Plan, divisors: Sequence[torch.Tensor] | None
    ) -> None:
        """Plans; runs in the background."""
        self.num_values = plan.num_values
        """Numbers that each rank sends, W."""
        self._device = device
        self._has_padding = plan.has_padding
        self._parcel = Parcel()
        self._widths = [
            _plan_width(self._parcel, plan, dim, divisors) for dim in sorted(set(plan.widths))
        ]
        self._num_features = len(plan.widths)
        self._parcel.seal()

    def open(self) -> None:
        """Starts the copies, on the current stream."""
        self._parcel.send(self._device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self._parcel.record_stream(stream)

    def put(self, received: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Not used: results are made."""
        raise NotImplementedError

    def made_of(self, received: torch.Tensor, *, apart: bool) -> list[torch.Tensor]:
        """The features' results, views of one matrix for each width unless they are `apart`."""
        found: dict[int, torch.Tensor] = {}
        for width in self._widths:
            cells = received.new_zeros(width.num_cells, width.cell)
            for (start, count), places in zip(width.spans, self._places(width), strict=True):
                if count:
                    numbers = received.narrow(0, start, count * width.cell)
                    cells.index_add_(0, places, numbers.view(-1, width.cell))
            vectors = self._divided(width, cells.view(-1, width.dim))
            split: Any = torch.split_with_sizes_copy if apart else torch.split_with_sizes
            found.update(zip(width.features, split(vectors, width.num_bags), strict=True))
        return [found[feature] for feature in range(self._num_features)]

    def take(self, grads: Sequence[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
        """The gradients of everything that was received, from those of the features' results."""
        cells = []
        for width in self._widths:
            vectors = torch.cat([grads[feature] for feature in width.features])
            cells.append(self._divided(width, vectors).view(-1, width.cell))
        flat = self._taken(cells)
        return flat if divisor == 1.0 else flat.div_(divisor)

    def _taken(self, cells: Sequence[torch.Tensor]) -> torch.Tensor:
        """Everything that was received, from the cells of each width."""
        if len(cells) == 1 and not self._has_padding:
            places_P = self._parcel.get(self._widths[0].places_P)
            return cells[0].index_select(0, places_P).view(-1)
        parts: list[torch.Tensor] = []
        places = [self._places(width) for width in self._widths]
        for rank, num_values in enumerate(self.num_values):
            own = [
                of_width.index_select(0, of_ranks[rank]).view(-1)
                for of_width, of_ranks in zip(cells, places, strict=True)
            ]
            padding = num_values - sum(map(len, own))
            parts += own
            if padding:
                parts.append(torch.zeros(padding, device=self._device))
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def _places(self, width: _Width) -> Sequence[torch.Tensor]:
        """Of each rank, where its cells belong."""
        counts = [count for _, count in width.spans]
        return self._parcel.get(width.places_P).split_with_sizes(counts)

    def _divided(self, width: _Width, vectors: torch.Tensor) -> torch.Tensor:
        divisors = get_optional(self._parcel, width.divisors)
        return vectors if divisors is None else vectors / divisors[:, None]


# ---- planning -----------------------------------------------------------------------------------


def _plan_width(
    parcel: Parcel, plan: Plan, dim: int, divisors: Sequence[torch.Tensor] | None
) -> _Width:
    features = [feature for feature, width in enumerate(plan.widths) if width == dim]
    own = [
        [stretch for stretch in of_rank if plan.widths[stretch.feature] == dim]
        for of_rank in plan.stretches
    ]
    cell = dim
    for of_rank in own:
        for stretch in of_rank:
            cell = math.gcd(cell, *stretch.columns)
    num_bags = [plan.num_bags[feature] for feature in features]
    first_bags = dict(zip(features, np.cumsum([0, *num_bags]).tolist(), strict=False))
    parts = [
        _cells_of(stretch, first_bags[stretch.feature], plan.num_bags, dim, cell)
        for of_rank in own
        for stretch in of_rank
    ]
    spans = [
        (of_rank[0].start if of_rank else 0, sum(each.num_values for each in of_rank) // cell)
        for of_rank in own
    ]
    is_large = sum(num_bags) * (dim // cell) >= 2**31
    divided = None
    if divisors is not None:
        divided = parcel.put(torch.cat([divisors[feature] for feature in features]).numpy())
    return _Width(
        dim=dim,
        cell=cell,
        features=features,
        num_bags=num_bags,
        spans=spans,
        places_P=parcel.put_made(
            sum(count for _, count in spans),
            np.dtype(np.int64 if is_large else np.int32),
            partial(_write_places, parts),
        ),
        divisors=divided,
    )


def _cells_of(
    stretch: Stretch, first_bag: int, num_bags: Sequence[int], dim: int, cell: int
) -> tuple[Any, None, int]:
    """The cells of a stretch, as `join_rows` takes them: numbers, and what to add to them."""
    bags = stretch.bags
    if bags is None:
        bags = torch.arange(num_bags[stretch.feature])
    first, last = stretch.columns
    of_bag = dim // cell
    if of_bag > 1:
        inside = torch.arange(first // cell, last // cell)
        bags = (bags[:, None] * of_bag + inside).view(-1)
    return bags, None, first_bag * of_bag


def _write_places(parts: Sequence[tuple[Any, None, int]], out: NDArray[Any]) -> None:
    join_rows(parts, 0, out)
