"""Arrays in memory that is kept for the next when it is freed.

The system takes large arrays back, and pays for the next one page by page: three times what it
takes to fill it. Arrow's pool gives them back too, some time later.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from recsdk_core import Shuffle

_MOST_KEPT = 128 << 20
"""Bytes."""
_SMALLEST_KEPT = 1 << 16
_STEPS_A_DOUBLING = 8


class _Free:
    """Memory that nothing uses, by its size."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked process, where nobody would release a lock that was held."""
        self._lock = threading.Lock()
        self._of_size: dict[int, list[Any]] = {}
        self._bytes = 0

    def take(self, size: int) -> Any:
        """Memory of `size` bytes, or None."""
        with self._lock:
            found = self._of_size.pop(size, None)
            if found is None:
                return None
            memory = found.pop()
            if found:
                self._of_size[size] = found  # last, as used last
            self._bytes -= size
            return memory

    def put(self, memory: Any) -> None:
        """Keep it for `take`, in place of such as was not used for longest."""
        # Called by the collector of garbage, in the midst of anything: it must not wait.
        if len(memory) > _MOST_KEPT or not self._lock.acquire(blocking=False):
            return
        try:
            found = self._of_size.pop(len(memory), [])
            while self._bytes + len(memory) > _MOST_KEPT and self._of_size:
                self._drop(next(iter(self._of_size)))
            if self._bytes + len(memory) <= _MOST_KEPT:
                found.append(memory)
                self._bytes += len(memory)
            if found:
                self._of_size[len(memory)] = found
        finally:
            self._lock.release()

    def _drop(self, size: int) -> None:
        memories = self._of_size[size]
        memories.pop()
        self._bytes -= size
        if not memories:
            del self._of_size[size]


_FREE = _Free()
os.register_at_fork(after_in_child=_FREE.forget)


class _Lent:
    """What numpy takes for the owner of an array, and lets go with the last view of it."""

    def __init__(self, memory: Any, size: int) -> None:
        self._memory, self._free = memory, _FREE
        place = memory.__array_interface__["data"]
        self.__array_interface__ = {"data": place, "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._free.put(self._memory)


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """A new array of any values. Thread-safe."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _SMALLEST_KEPT:
        return np.empty(shape, dtype)
    room = _rounded(size)
    memory = _FREE.take(room)
    lent = _Lent(np.empty(room, np.uint8) if memory is None else memory, size)
    return np.asarray(lent).view(dtype).reshape(shape)


def _rounded(size: int) -> int:
    """Few different sizes, at most an eighth more."""
    step = 1 << max(0, size.bit_length() - _STEPS_A_DOUBLING.bit_length())
    return -(-size // step) * step


def taken(items: Any, rows: Any) -> Any:
    """`items[rows]`; the numbers in `rows` must be right, and not below 0."""
    out = empty((len(rows), *items.shape[1:]), items.dtype)
    take_into(out, items, rows)
    return out


def take_into(out: Any, items: Any, rows: Any) -> None:
    """`items[rows]` into `out`; the numbers in `rows` must be right, and not below 0."""
    if len(rows):
        items.take(rows, axis=0, out=out, mode="clip")  # other buffers are copied


def contiguous(array: Any) -> Any:
    """The same in one piece of memory, which it mostly is."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def shuffled(arrays: Sequence[Any], order: Shuffle) -> Any:
    """At least one array, of one type, one after the other, in this order."""
    out = empty((len(order), *arrays[0].shape[1:]), arrays[0].dtype)
    kind = np.uint8 if out.dtype == np.bool_ else out.dtype
    order.write([([contiguous(each).view(kind) for each in arrays], [out.view(kind)])])
    return out


def concatenated(arrays: Sequence[Any]) -> Any:
    """At least one array, of one type, one after the other."""
    rows = sum(map(len, arrays))
    return np.concatenate(arrays, out=empty((rows, *arrays[0].shape[1:]), arrays[0].dtype))
