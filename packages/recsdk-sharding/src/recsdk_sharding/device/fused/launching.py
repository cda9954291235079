"""How kernels are launched, and what part of a matrix each of their programs has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["MOST_BAGS", "Tile", "launch", "tile_of", "vector_begins"]

MOST_BAGS = 2**30
"""That kernels number with 32 bits, the places of a last program too."""

_NUMBERS_PER_PROGRAM = 1024
_WIDEST = 4096
"""The widest row that one program holds; each thread has 32 numbers of each matrix then."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a matrix, powers of two."""

    rows: int
    columns: int


def tile_of(dim: int) -> Tile | None:
    """Whole rows of this width for one program; None: it is too wide."""
    if dim > _WIDEST:
        return None
    columns = triton.next_power_of_2(dim)
    return Tile(max(1, min(64, _NUMBERS_PER_PROGRAM // columns)), columns)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Runs a kernel on the device of its first argument, and that device's current stream."""
    if 0 in grid:
        return
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants)


@triton.jit
def vector_begins(bag, starts_F, num_samples, stride, HAS_STARTS: tl.constexpr):
    """Where the vectors of bags begin in a `BagMatrix`, int64; `stride`: from row to row."""
    if HAS_STARTS:  # no more than MOST_BAGS: dividing 64 bits would take long
        bag = bag.to(tl.int32)
        feature = bag // num_samples
        sample = (bag - feature * num_samples).to(tl.int64)
        return sample * stride + tl.load(starts_F + feature).to(tl.int64)
    return bag.to(tl.int64) * stride
