"""Arrays in Arrow's memory, which keeps for the next what is freed.

numpy gives large arrays back to the system, and the next one is then paid for page by page: three
times what it takes to fill it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """A new array of any values."""
    import pyarrow as pa

    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(pa.allocate_buffer(size), dtype).reshape(shape)


def taken(items: Any, rows: Any) -> Any:
    """`items[rows]`; the numbers in `rows` must be right, and not below 0."""
    out = empty((len(rows), *items.shape[1:]), items.dtype)
    if len(rows):
        np.take(items, rows, axis=0, out=out, mode="clip")  # others copy once more
    return out


def concatenated(arrays: Sequence[Any]) -> Any:
    """At least one array, of one type, one after the other."""
    rows = sum(map(len, arrays))
    return np.concatenate(arrays, out=empty((rows, *arrays[0].shape[1:]), arrays[0].dtype))
