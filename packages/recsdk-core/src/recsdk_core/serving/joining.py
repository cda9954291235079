"""Rows of a table of which ranges of columns are tables of a checkpoint, put together.

Shape letters: N keys of a table, n keys of a block, D columns of a range.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core.checkpoint.stores import naming, write_all
from recsdk_core.errors import CheckpointError
from recsdk_core.outcome import Outcome
from recsdk_core.table import Table

__all__ = ["Block", "joined_rows", "side_by_side"]

Block: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys (n,), and weights (n, D)."""

_CHUNK_BYTES = 2**24


def joined_rows(
    name: str, ranges: Sequence[tuple[int, Iterable[Block]]], folder: str
) -> Iterator[Block]:
    """The whole rows of a table's keys, in the order of the first range.

    `ranges` are the width and the blocks of each, in whatever order of keys. Memory: some 70 bytes
    a key; disk: the rows as float32, in files without a name in the folder. Raises CheckpointError
    for a key that some ranges have and others not, and for one that a range has twice.
    """
    place = f"a scratch file in {folder}"
    with ExitStack() as files:
        with naming(place, "making it"):
            parts = [
                _Range(files.enter_context(tempfile.TemporaryFile(dir=folder)).fileno(), width)
                for width, _ in ranges
            ]
        numbers = _Numbers(name)
        with naming(place, "writing"):
            for part, (_, blocks) in zip(parts, ranges, strict=True):
                for keys, weights in blocks:
                    part.write(numbers.of(keys), weights)
                numbers.end_range()
        rows = max(_CHUNK_BYTES // (4 * sum(width for width, _ in ranges)), 1)
        keys_N = numbers.keys()
        for begin in range(0, len(keys_N), rows):
            chunk = keys_N[begin : begin + rows]
            with naming(place, "reading"):
                columns = [part.read(begin, len(chunk)) for part in parts]
            yield chunk, np.concatenate(columns, axis=1)


def side_by_side(name: str, ranges: Sequence[Block]) -> Block:
    """The whole rows of ranges that lie in memory, in ascending order of keys.

    Raises CheckpointError for a key that some of them have and others not.
    """
    orders = [np.argsort(keys) for keys, _ in ranges]
    sorted_keys = [keys[order] for (keys, _), order in zip(ranges, orders, strict=True)]
    for keys in sorted_keys[1:]:
        if not np.array_equal(keys, sorted_keys[0]):
            raise CheckpointError(_missing(name, int(np.setxor1d(keys, sorted_keys[0])[0])))
    whole = np.empty((len(orders[0]), sum(weights.shape[1] for _, weights in ranges)), np.float32)
    begin = 0
    for (_, weights), order in zip(ranges, orders, strict=True):
        end = begin + weights.shape[1]
        whole[:, begin:end] = weights[order]
        begin = end
    return sorted_keys[0], whole


def _missing(name: str, key: int) -> str:
    return f"table {name!r}: only some ranges of its columns have a row of key {key}"


class _Numbers:
    """Which row of the scratch files a key has, and whether every range has it once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._table = Table(dim=1, name="keys")
        self._is_here_N: NDArray[np.bool_] | None = None
        """Of the range that is read; None: it is the first, which gives numbers."""

    def of(self, keys_n: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,); a key of the first range gets the next number."""
        is_first = self._is_here_N is None
        numbers, outcomes = self._table.map(np.ascontiguousarray(keys_n), insert=is_first)
        if self._is_here_N is None:
            is_new = outcomes == Outcome.INSERTED
        else:
            self._refuse_missing(keys_n[outcomes != Outcome.FOUND])
            is_new = np.zeros(len(numbers), bool)
            is_new[np.unique(numbers, return_index=True)[1]] = True
            is_new &= ~self._is_here_N[numbers]
            self._is_here_N[numbers] = True
        if not is_new.all():
            raise CheckpointError(
                f"table {self._name!r}: key {int(keys_n[~is_new][0])} has two rows; what they come "
                "from is damaged"
            )
        return np.asarray(numbers, np.int64)

    def end_range(self) -> None:
        """Raises if the range lacks a key of the first; the next one begins."""
        if self._is_here_N is not None:
            self._refuse_missing(self.keys()[~self._is_here_N])
        self._is_here_N = np.zeros(len(self._table), bool)

    def _refuse_missing(self, keys: NDArray[np.int64]) -> None:
        if len(keys):
            raise CheckpointError(_missing(self._name, int(keys[0])))

    def keys(self) -> NDArray[np.int64]:
        """All keys (N,) in the order of their numbers."""
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(batch.keys for batch in self._table.export(state=False))])


class _Range:
    """Some columns of all rows, in a file, by the number of the row."""

    def __init__(self, descriptor: int, width: int) -> None:
        self._file, self._width = descriptor, width

    def write(self, numbers_n: NDArray[np.int64], weights_nD: NDArray[Any]) -> None:
        order = np.argsort(numbers_n, kind="stable")
        numbers, rows = numbers_n[order], np.ascontiguousarray(weights_nD[order], np.float32)
        ends = np.flatnonzero(np.diff(numbers) != 1) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(numbers)]):
            if begin < end:
                os.lseek(self._file, int(numbers[begin]) * self._row_bytes, os.SEEK_SET)
                write_all(self._file, rows[begin:end].data.cast("B"))

    def read(self, first: int, count: int) -> NDArray[np.float32]:
        size = count * self._row_bytes
        raw = os.pread(self._file, size, first * self._row_bytes)
        if len(raw) < size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return np.frombuffer(raw, np.float32).reshape(count, self._width)

    @property
    def _row_bytes(self) -> int:
        return 4 * self._width
