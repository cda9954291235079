"""Combines equal keys of a batch before it travels: each key once, with the sum of its gradients.

Shape letters: N keys, U distinct keys, B bags, C columns of a matrix, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from recsdk_core import _ext
from recsdk_core._ext import Bags

__all__ = ["CombineBlock", "combine_gradients", "distinct_keys"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""


@dataclass(frozen=True, kw_only=True)
class CombineBlock:
    """The bags of one feature, the gradients of whose keys are added up."""

    bags: Bags
    """Bags whose row numbers say which of U distinct keys each key is."""
    column: int
    """First column of the bags' gradients."""
    width: int
    """D."""
    start: int
    """Where the U sums begin, one after the other."""
    num_sums: int
    """U."""


def distinct_keys(keys: Array) -> tuple[Array, Array]:
    """The distinct keys (U,) in order of first occurrence, and the index of each key's (N,).

    `keys` are int64, uint64 or int32 (N,). Both results are int64, in the keys' framework. Raises
    TypeError or ValueError for anything else. Cost: linear; nobody can choose keys that collide.
    """
    return _ext.distinct_keys(keys)


def combine_gradients(blocks: Sequence[CombineBlock], grad: Array, packed: Array) -> None:
    """Adds up the gradients of equal rows, and writes the sums to `packed`.

    The gradient of bag b of a block is `grad[b, column : column + D]`, float32 (at least B, C),
    each row contiguous. The sum of row u goes to `packed[start + u * D : start + (u + 1) * D]`,
    float32 in one dimension; blocks may not overlap there. Gradients are added in the order of the
    keys, with the bags' weights and pooling. Keys whose outcome says that they have no row are left
    out; a row without keys gets 0.

    Everything is checked first: TypeError and ValueError change nothing. Spread over the thread
    pool block by block; the result does not depend on the number of threads.
    """
    if not isinstance(blocks, Sequence):
        raise TypeError(f"blocks must be a sequence, got {type(blocks).__name__}")
    given = list(blocks)
    for block in given:
        if not isinstance(block, CombineBlock):
            raise TypeError(f"blocks must be of CombineBlock, got {type(block).__name__}")
    items = [(b.bags, grad, b.column, b.width, b.start, b.num_sums) for b in given]
    _ext.combine_gradients(items, packed)
