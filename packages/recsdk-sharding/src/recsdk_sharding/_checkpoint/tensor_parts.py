"""The parts of one tensor that ranks have, in whatever form torch or torchrec keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

__all__ = ["Layout", "Piece", "TensorParts", "join"]

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part begins in each dimension, and its size."""

Piece: TypeAlias = tuple[int, int, NDArray[np.float32]]
"""First row, first column, and the numbers (n, d)."""


@dataclass(frozen=True)
class Layout:
    """What a rank, or all together, have of a tensor."""

    size: tuple[int, ...]
    """Of the whole tensor."""
    places: frozenset[Place]
    """Of the parts that are there; a copy of a part counts once."""

    @property
    def num_found(self) -> int:
        """How many of the numbers are there."""
        return sum(math.prod(size) for _, size in self.places)

    @property
    def is_whole(self) -> bool:
        """Whether all numbers are there."""
        return self.num_found == math.prod(self.size)


@dataclass(frozen=True)
class TensorParts:
    """The parts of a tensor that this rank has, which may be none."""

    size: tuple[int, ...]
    """Of the whole tensor."""
    parts: list[tuple[tuple[int, ...], torch.Tensor]]
    """Where each begins in each dimension."""

    @staticmethod
    def of(name: str, value: Any) -> TensorParts:
        """The parts of a tensor, ShardedTensor or DTensor; TypeError, with the name, for others.

        No rank waits for another here, and none needs to have a part.
        """
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            got = getattr(value, "dtype", type(value).__name__)
            raise TypeError(
                f"{name} must be a tensor of floats, as it is or as a ShardedTensor or DTensor, "
                f"got {got}"
            )
        parts = [(tuple(place), part) for place, part in _parts(name, value) if part.numel() > 0]
        for _, part in parts:
            if part.is_meta or part.layout != torch.strided:
                raise TypeError(f"{name} must be dense, got {part.layout} on {part.device}")
        return TensorParts(tuple(value.size()), parts)

    @property
    def layout(self) -> Layout:
        """What other ranks are told."""
        places = ((place, tuple(part.size())) for place, part in self.parts)
        return Layout(self.size, frozenset(places))

    def rows(self, first: int, last: int) -> list[Piece]:
        """This rank's parts of a range of rows, counted from its first; (N,) is one column."""
        found = []
        for (row, *columns), part in self.parts:
            begin, end = max(first - row, 0), min(last - row, len(part))
            if begin < end:
                numbers = part.detach()[begin:end].float().cpu().numpy()
                column = columns[0] if columns else 0
                found.append((row + begin - first, column, numbers.reshape(end - begin, -1)))
        return found


def join(size: tuple[int, int], pieces: Iterable[Piece]) -> NDArray[np.float32]:
    """A matrix of pieces that cover it."""
    found = np.empty(size, np.float32)
    for row, column, piece in pieces:
        found[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
    return found


@torch.no_grad()  # or the local part of a DTensor would be a view, which empty shards refuse
def _parts(name: str, value: torch.Tensor) -> Iterable[tuple[Sequence[int], torch.Tensor]]:
    if isinstance(value, ShardedTensor):
        return [(each.metadata.shard_offsets, each.tensor) for each in value.local_shards()]
    if not isinstance(value, DTensor):
        return [((0,) * value.dim(), value)]
    local = value.to_local()
    if isinstance(local, LocalShardsWrapper):
        # Without shards it has the offsets of one.
        return zip(local.local_offsets(), local.local_shards(), strict=False)
    if any(placement.is_partial() for placement in value.placements):
        raise TypeError(f"{name} is a DTensor of partial sums; redistribute it first")
    [chunk] = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [(chunk.offsets, local)]
