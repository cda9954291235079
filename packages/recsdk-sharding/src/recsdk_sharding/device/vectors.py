"""Where the vectors of bags lie in the results of a forward, and their gradients in a backward's.

Shape letters: S samples, F features, B bags of a set of tables, C columns, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from recsdk_sharding.device.batch import Block, TableSet
from recsdk_sharding.device.parcel import Parcel, get_optional

__all__ = ["BagMatrix", "gradients_of", "in_a_row", "matrix_of", "rows_of", "side_by_side"]


@dataclass(frozen=True)
class BagMatrix:
    """The vectors of a set's bags in a matrix, in which other sets may have columns, too.

    Bag b is that of sample b % S and of feature b // S: its vector is a part of the sample's row.
    """

    values_SC: torch.Tensor
    """float32; the numbers of a row lie side by side."""
    starts: Sequence[int]
    """The column at which the vectors of each feature begin."""
    starts_F: torch.Tensor | None
    """The same on the device, int32 or int64 (F,); None: one feature, from column 0 on."""
    dim: int
    """Row width D."""
    unit: int = 1
    """A divisor of all starts: 4 or 1. With 4, kernels read and write 16 bytes at once."""

    @property
    def num_bags(self) -> int:
        """How many bags B there are."""
        return len(self.values_SC) * len(self.starts)

    def joined(self) -> torch.Tensor:
        """The vectors one below the other, float32 (B, D)."""
        parts = [self.values_SC.narrow(1, start, self.dim) for start in self.starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take(self, vectors_BD: torch.Tensor) -> None:
        """Copies vectors to their places, feature by feature."""
        num_samples = len(self.values_SC)
        for feature, start in enumerate(self.starts):
            own = vectors_BD.narrow(0, feature * num_samples, num_samples)
            self.values_SC.narrow(1, start, self.dim).copy_(own)


def matrix_of(plan: TableSet, parcel: Parcel, values_SC: torch.Tensor) -> BagMatrix:
    """A set's vectors in the matrix of all results, or of their gradients."""
    starts = [start for _, _, start in plan.blocks]
    starts_F = get_optional(parcel, plan.starts_F)
    return BagMatrix(values_SC, starts, starts_F, plan.dim, plan.unit)


def side_by_side(
    sets: Sequence[TableSet],
    pooled: Sequence[torch.Tensor],
    shape: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """The features' vectors as a matrix of this shape, (S, C)."""
    parts = [
        (start, vectors.narrow(0, first, num_bags))
        for each, vectors in zip(sets, pooled, strict=True)
        for first, num_bags, start in each.blocks
    ]
    if not parts:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    parts.sort(key=itemgetter(0))
    return torch.cat([vectors for _, vectors in parts], dim=1)


def in_a_row(
    sets: Sequence[TableSet],
    pooled: Sequence[torch.Tensor],
    num_values: int,
    device: torch.device,
) -> torch.Tensor:
    """The features' vectors one after the other, (num_values,); zeros between them."""
    found: list[tuple[int, torch.Tensor]] = []
    for each, vectors in zip(sets, pooled, strict=True):
        first, count = 0, each.num_bags
        if each.read is not None:
            first, count = each.read.first, each.read.count
        for bag, num_bags, start in each.blocks:
            begin, end = max(bag, first), min(bag + num_bags, first + count)
            if begin < end:
                own = vectors.narrow(0, begin - first, end - begin)
                found.append((start + (begin - bag) * each.dim, own.flatten()))
    found.sort(key=lambda part: part[0])
    gaps, end = [], 0
    for start, values in found:
        gaps.append(start - end)
        end = start + len(values)
    gaps.append(num_values - end)
    if not found:
        return torch.zeros(num_values, dtype=torch.float32, device=device)
    if not any(gaps):
        return found[0][1] if len(found) == 1 else torch.cat([values for _, values in found])
    zeros = torch.zeros(max(gaps), dtype=torch.float32, device=device)
    parts = [zeros.narrow(0, 0, gaps[0])]
    for (_, values), gap in zip(found, gaps[1:], strict=True):
        parts += [values, zeros.narrow(0, 0, gap)]
    return torch.cat(parts)


def gradients_of(plan: TableSet, parcel: Parcel, grad: torch.Tensor) -> BagMatrix:
    """The gradients of a set's bags, from those of all results: a matrix, or all in a row."""
    if grad.dim() == 2:
        return matrix_of(plan, parcel, grad)
    parts = [_part_of(block, grad, plan.dim) for block in plan.blocks]
    return rows_of(parts[0] if len(parts) == 1 else torch.cat(parts))


def rows_of(vectors_BD: torch.Tensor) -> BagMatrix:
    """A matrix of nothing but the vectors of bags, one below the other."""
    return BagMatrix(vectors_BD, (0,), None, vectors_BD.shape[1], 4)


def _part_of(block: Block, grad: torch.Tensor, dim: int) -> torch.Tensor:
    _, num_bags, start = block
    return grad.narrow(0, start, num_bags * dim).view(-1, dim)
