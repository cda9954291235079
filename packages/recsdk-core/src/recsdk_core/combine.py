"""Combining equal keys of a batch before it travels: each key once, with the sum of its gradients.

Shape letters: N keys, U distinct keys, B bags, C columns of a matrix, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from recsdk_core import _ext
from recsdk_core._ext import Bags

__all__ = ["CombineBlock", "combine_gradients", "distinct_keys"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""

CombineBlock: TypeAlias = tuple[Bags, Array, int, int, int, int]
"""(bags, grad, column, D, start, U): the gradient of bag b is `grad[b, column : column + D]`,
float32 (at least B, C), each row contiguous; the rows of the bags' keys are 0 to U - 1, and the sum
of those of row u goes to `packed[start + u * D : start + (u + 1) * D]`."""


def distinct_keys(keys: Array) -> tuple[Array, Array]:
    """The distinct keys (U,) in the order in which they first occur, and which each key is (N,).

    `keys`: int64 or uint64 (N,), or int32. Both results are int64, of the keys' framework. Raises
    TypeError and ValueError for anything else. Cost: linear; nobody can choose keys that collide.
    """
    return _ext.distinct_keys(keys)


def combine_gradients(blocks: Sequence[CombineBlock], packed: Array) -> None:
    """Writes the sums of the gradients of equal rows to their places in `packed`.

    `packed` is float32, one dimension; blocks may not overlap there. Gradients are added in the
    order of the keys, with the bags' weights and pooling; keys without a row by their outcome are
    left out, and a row that no key has gets 0.

    Everything is checked first: TypeError and ValueError change nothing. Spread over the thread
    pool block by block; the result does not depend on the number of threads.
    """
    _ext.combine_gradients(blocks, packed)
