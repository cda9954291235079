"""Putting vectors together on a device, in a number of operators that no number of tables changes.

The features of one width D have one matrix of cells: equal parts of their vectors, which are whole
unless columns are cut. What a rank sends of them is one stretch of cells; a number for each says
where it belongs. So a rank's cells are added by one operator, and as they all have other places,
without atomic operations; ranks are added one after the other, as on the host.

Shape letters: D width of a feature's vectors, G bags of a feature, P cells that are received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import join_rows
from recsdk_sharding._batch.assembly import Assembly, HostAssembly, Plan, ResultRoom
from recsdk_sharding.device.parcel import Item, Parcel, get_optional
from recsdk_sharding.placement.layout import SentWidth

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

    sent: SentWidth
    """What ranks send of them."""
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
        return sum(self.num_bags) * (self.sent.dim // self.sent.cell)


class DeviceAssembly:
    """The results of one group for this rank's samples, on a device."""

    def __init__(
        self, device: torch.device, plan: Plan, divisors: Sequence[torch.Tensor] | None
    ) -> None:
        """Plans; runs in the background."""
        self.num_values = plan.num_values
        """Numbers that each rank sends, W."""
        self._device = device
        self._has_padding = plan.has_padding
        self._parcel = Parcel()
        self._widths = [_plan_width(self._parcel, plan, own, divisors) for own in plan.by_width]
        self._num_features = len(plan.num_bags)
        self._parcel.seal()

    def open(self) -> None:
        """Starts the copies, on the current stream."""
        self._parcel.send(self._device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self._parcel.record_stream(stream)

    def put(self, received: torch.Tensor, room: ResultRoom, group: int) -> Sequence[torch.Tensor]:
        """The features' results, views of one matrix for each width unless they are apart."""
        found: dict[int, torch.Tensor] = {}
        for width in self._widths:
            cells = received.new_zeros(width.num_cells, width.sent.cell)
            for (start, count), places in zip(width.spans, self._places(width), strict=True):
                if count:
                    numbers = received.narrow(0, start, count * width.sent.cell)
                    cells.index_add_(0, places, numbers.view(-1, width.sent.cell))
            vectors = self._divided(width, cells.view(-1, width.sent.dim))
            split: Any = torch.split_with_sizes_copy if room.is_apart else torch.split_with_sizes
            found.update(zip(width.sent.features, split(vectors, width.num_bags), strict=True))
        return [found[feature] for feature in range(self._num_features)]

    def take(self, grads: Sequence[torch.Tensor], divisor: float = 1.0) -> torch.Tensor:
        """The gradients of everything that was received, from those of the features' results."""
        cells = []
        for width in self._widths:
            vectors = torch.cat([grads[feature] for feature in width.sent.features])
            cells.append(self._divided(width, vectors).view(-1, width.sent.cell))
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
                parts.append(torch.zeros(padding, dtype=torch.float32, device=self._device))
        nothing = torch.zeros(0, dtype=torch.float32, device=self._device)
        return torch.cat(parts) if parts else nothing

    def _places(self, width: _Width) -> Sequence[torch.Tensor]:
        """Of each rank, where its cells belong."""
        counts = [count for _, count in width.spans]
        return self._parcel.get(width.places_P).split_with_sizes(counts)

    def _divided(self, width: _Width, vectors: torch.Tensor) -> torch.Tensor:
        divisors = get_optional(self._parcel, width.divisors)
        return vectors if divisors is None else vectors / divisors[:, None]


# ---- planning -----------------------------------------------------------------------------------


def _plan_width(
    parcel: Parcel, plan: Plan, own: SentWidth, divisors: Sequence[torch.Tensor] | None
) -> _Width:
    if plan.in_batch:
        return _plan_as_cut(parcel, plan, own, divisors)
    num_bags_F = np.array(plan.num_bags, np.int64)
    num_bags = num_bags_F[own.features]
    firsts = np.zeros(len(num_bags_F), np.int64)
    firsts[own.features] = num_bags.cumsum() - num_bags
    rows, counts_S, begins_S = _cells_of(plan, own)
    parts = begins_S, counts_S, firsts[own.sent.features_S] * (own.dim // own.cell)
    cells_W = np.diff(np.concatenate([[0], counts_S.cumsum()])[own.ends_W1])
    starts_W = np.concatenate([plan.starts_S[own.places_S], [0]])[own.ends_W1[:-1]]
    is_large = int(num_bags.sum()) * (own.dim // own.cell) >= 2**31
    none_S = np.zeros(len(begins_S), np.int64)
    return _Width(
        sent=own,
        num_bags=num_bags.tolist(),
        spans=list(zip(starts_W.tolist(), cells_W.tolist(), strict=True)),
        places_P=parcel.put_made(
            int(cells_W.sum()),
            np.dtype(np.int64 if is_large else np.int32),
            lambda out: join_rows(rows, None, (*parts, none_S, none_S), out),
        ),
        divisors=_put_divisors(parcel, own, divisors),
    )


def _plan_as_cut(
    parcel: Parcel, plan: Plan, own: SentWidth, divisors: Sequence[torch.Tensor] | None
) -> _Width:
    """The only width, of which each cell's place is the number of its bag in the batch."""
    num_cells = [count // own.dim for count in plan.num_used]
    return _Width(
        sent=own,
        num_bags=plan.num_bags,
        spans=list(zip(accumulate(plan.num_values, initial=0), num_cells, strict=False)),
        places_P=parcel.put_filled(plan.filled),
        divisors=_put_divisors(parcel, own, divisors),
    )


def _put_divisors(
    parcel: Parcel, own: SentWidth, divisors: Sequence[torch.Tensor] | None
) -> Item | None:
    if divisors is None:
        return None
    return parcel.put(torch.cat([divisors[feature] for feature in own.features]).numpy())


def _cells_of(
    plan: Plan, own: SentWidth
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Which cells of their features stretches of one width have, how many, and where they begin.

    Cells are counted within a feature, bag by bag.
    """
    counts, sent, cell = plan.num_filled, own.sent, own.cell
    begins = counts.cumsum() - counts
    if own.dim == cell:
        return plan.filled, counts[sent.cuts_S], begins[sent.cuts_S]
    parts = plan.filled.to(torch.int64).split_with_sizes(counts.tolist())
    stretches = zip(
        sent.cuts_S.tolist(),
        (sent.first_columns_S // cell).tolist(),
        (sent.last_columns_S // cell).tolist(),
        strict=True,
    )
    cells = [
        (parts[cut][:, None] * (own.dim // cell) + torch.arange(first, last)).view(-1)
        for cut, first, last in stretches
    ]
    counts_S = np.array(list(map(len, cells)), np.int64)
    return torch.cat(cells), counts_S, counts_S.cumsum() - counts_S
