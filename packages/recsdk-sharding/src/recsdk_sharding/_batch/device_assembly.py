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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import join_rows
from recsdk_sharding._batch.assembly import Assembly, HostAssembly, Plan, ResultRoom
from recsdk_sharding.device.parcel import Item, Parcel, get_optional
from recsdk_sharding.placement.layout import ShardFeatures

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

    def put(self, received: torch.Tensor, room: ResultRoom, group: int) -> Sequence[torch.Tensor]:
        """The features' results, views of one matrix for each width unless they are apart."""
        found: dict[int, torch.Tensor] = {}
        for width in self._widths:
            cells = received.new_zeros(width.num_cells, width.cell)
            for (start, count), places in zip(width.spans, self._places(width), strict=True):
                if count:
                    numbers = received.narrow(0, start, count * width.cell)
                    cells.index_add_(0, places, numbers.view(-1, width.cell))
            vectors = self._divided(width, cells.view(-1, width.dim))
            split: Any = torch.split_with_sizes_copy if room.is_apart else torch.split_with_sizes
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
    is_of_width_F = np.array(plan.widths) == dim
    features = np.flatnonzero(is_of_width_F).tolist()
    num_bags_F = np.where(is_of_width_F, plan.num_bags, 0)
    own_S = np.flatnonzero(is_of_width_F[plan.sent.features_S])
    sent = plan.sent.at(own_S)
    cell = int(np.gcd.reduce([dim, *sent.first_columns_S, *sent.last_columns_S]))
    rows, counts_S, begins_S = _cells_of(plan, sent, cell)
    first_cells_F = (num_bags_F.cumsum() - num_bags_F) * (dim // cell)
    parts = begins_S, counts_S, first_cells_F[sent.features_S]
    ranks = np.arange(len(plan.num_values) + 1)
    at = np.searchsorted(sent.ranks_S, ranks)
    cells_W = np.diff(np.concatenate([[0], counts_S.cumsum()])[at])
    starts = np.concatenate([plan.starts_S[own_S], [0]])[at[:-1]]
    is_large = int(num_bags_F.sum()) * (dim // cell) >= 2**31
    none_P = np.zeros(len(parts[0]), np.int64)
    divided = None
    if divisors is not None:
        divided = parcel.put(torch.cat([divisors[feature] for feature in features]).numpy())
    return _Width(
        dim=dim,
        cell=cell,
        features=features,
        num_bags=[plan.num_bags[feature] for feature in features],
        spans=list(zip(starts.tolist(), cells_W.tolist(), strict=True)),
        places_P=parcel.put_made(
            int(cells_W.sum()),
            np.dtype(np.int64 if is_large else np.int32),
            lambda out: join_rows(rows, None, (*parts, none_P, none_P), out),
        ),
        divisors=divided,
    )


def _cells_of(
    plan: Plan, sent: ShardFeatures, cell: int
) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Which cells of their features stretches of one width have, how many, and where they begin.

    Cells are counted within a feature, bag by bag.
    """
    counts = plan.num_filled
    begins = counts.cumsum() - counts
    dims_S = np.array(plan.widths, np.int64)[sent.features_S]
    if (dims_S == cell).all():
        return plan.filled, counts[sent.cuts_S], begins[sent.cuts_S]
    parts = plan.filled.split_with_sizes(counts.tolist())
    stretches = zip(
        sent.cuts_S.tolist(),
        (dims_S // cell).tolist(),
        (sent.first_columns_S // cell).tolist(),
        (sent.last_columns_S // cell).tolist(),
        strict=True,
    )
    cells = [
        (parts[cut][:, None] * of_bag + torch.arange(first, last)).view(-1)
        for cut, of_bag, first, last in stretches
    ]
    counts_S = np.array(list(map(len, cells)), np.int64)
    return torch.cat(cells), counts_S, counts_S.cumsum() - counts_S
