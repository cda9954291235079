"""Packs rows of matrices one after the other, as they travel between processes, and unpacks them.

Shape letters: n rows of a part, D width of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from recsdk_core import _ext

__all__ = ["Array", "Block", "Part", "pack_vectors", "unpack_vectors"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""

Part: TypeAlias = tuple[int, Array | None]
"""(start, rows): n vectors one after the other, the first at `packed[start]`.

`rows` says which rows of the block they are: int64 (n,), or None for all of them in order.
"""

Block: TypeAlias = tuple[Array, int, int, Sequence[Part]]
"""(matrix, column, width, parts): the columns [column, column + width) of a float32 matrix, each of
whose rows is contiguous and has memory of its own, and where vectors of its rows lie."""


def unpack_vectors(packed: Array, blocks: Sequence[Block]) -> None:
    """Writes to each row of each block the sum of its vectors.

    `packed` is float32, one dimension. Vectors are added in the order of the parts; a row that no
    part has becomes 0. Blocks may not overlap.

    Everything is checked first: TypeError and ValueError change nothing. Cost: one pass over the
    vectors, spread over the thread pool; the result does not depend on the number of threads.
    """
    _ext.unpack_vectors(packed, blocks)


def pack_vectors(blocks: Sequence[Block], packed: Array, divisor: float = 1.0) -> None:
    """Writes the vectors of each part, divided by `divisor`, to their places in `packed`.

    Places that no part fills stay as they are. Parts may not overlap. Otherwise as
    `unpack_vectors`.
    """
    _ext.pack_vectors(blocks, packed, divisor)
