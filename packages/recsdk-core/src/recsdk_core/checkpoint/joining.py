"""Tables of which ranges of columns are tables of a checkpoint, read as whole ones.

Shape letters: N keys of a table, n keys of a block, D columns of a range.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core.checkpoint.columns import WholeTable, all_tables
from recsdk_core.checkpoint.manifest import METADATA, Field
from recsdk_core.checkpoint.merging import Rows, merged_rows
from recsdk_core.checkpoint.reading import Checkpoint, Progress
from recsdk_core.checkpoint.stores import naming, write_all
from recsdk_core.errors import CheckpointError
from recsdk_core.outcome import Outcome
from recsdk_core.table import Table

__all__ = [
    "Block",
    "fields_side_by_side",
    "joined_rows",
    "missing",
    "side_by_side",
    "table_named",
    "whole_fields",
    "whole_rows",
]

Block: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys (n,), and weights (n, D)."""

_CHUNK_BYTES = 2**24
_OF_KEYS = {field.name for field in METADATA}
"""Fields that say something of a key, so all ranges have the same."""


def table_named(checkpoint: Checkpoint, name: str) -> WholeTable:
    """The table of that name in the model; CheckpointError if there is none."""
    found = all_tables(checkpoint.manifest.tables)
    for table in found:
        if table.name == name:
            return table
    raise CheckpointError(
        f"{checkpoint.location}: has no table {name!r}; it has {[table.name for table in found]}"
    )


def whole_fields(table: WholeTable) -> tuple[Field, ...]:
    """The fields of its rows: of its ranges side by side, but once what is said of a key."""
    return _whole_fields([part.fields for part in table.parts])


def whole_rows(
    chain: Sequence[Checkpoint],
    table: WholeTable,
    folder: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Rows]:
    """Its rows after a chain, as `merged_rows`; of ranges as `joined_rows`.

    `folder` is for scratch files; None: the system's for such.
    """
    ranges = [(part.fields, merged_rows(chain, part.name, None, progress)) for part in table.parts]
    if len(ranges) == 1:
        return iter(ranges[0][1])
    return joined_rows(table.name, ranges, folder or tempfile.gettempdir())


def joined_rows(
    name: str, ranges: Sequence[tuple[Sequence[Field], Iterable[Rows]]], folder: str
) -> Iterator[Rows]:
    """The whole rows of a table's keys, in the order of the first range.

    `ranges` are the fields and the rows of each, in whatever order of keys. Memory: some 70 bytes a
    key and 64 MiB; disk: the rows and 4 bytes more for each range, in files without a name in the
    folder. They are written and read in pieces of many rows. Raises CheckpointError for a key that
    some ranges have and others not, and for one that a range has twice.
    """
    fields = _whole_fields([of_range for of_range, _ in ranges])
    chunk = max(_CHUNK_BYTES // sum(map(_num_bytes, fields)), 1)
    place = f"a scratch file in {folder}"
    with ExitStack() as files:
        with naming(place, "making it"):
            parts = [
                _Range(files.enter_context(tempfile.TemporaryFile(dir=folder)).fileno(), own, chunk)
                for own in _own_fields([of_range for of_range, _ in ranges])
            ]
        numbers = _Numbers(name)
        for part, (_, blocks) in zip(parts, ranges, strict=True):
            for rows in blocks:
                at = numbers.of(rows.keys)
                with naming(place, "writing"):
                    part.add(at, rows)
            with naming(place, "writing"):
                part.write()
            numbers.end_range()
        keys_N = numbers.keys()
        for begin in range(0, len(keys_N), chunk):
            keys = keys_N[begin : begin + chunk]
            whole = {f.name: np.empty((len(keys), f.width), _dtype(f)) for f in fields}
            with naming(place, "reading"):
                _read_into(whole, parts, begin // chunk)
            yield Rows(keys, whole)


def _read_into(whole: Mapping[str, NDArray[Any]], parts: Sequence[_Range], chunk: int) -> None:
    ends = dict.fromkeys(whole, 0)
    for part in parts:
        records = part.read(chunk, len(next(iter(whole.values()))))
        for field in part.fields:
            begin, ends[field.name] = ends[field.name], ends[field.name] + field.width
            whole[field.name][records[_AT], begin : ends[field.name]] = records[field.name]


def fields_side_by_side(ranges: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The fields of one row, (width,) each, of those of all ranges."""
    return {
        name: first if name in _OF_KEYS else np.concatenate([of_range[name] for of_range in ranges])
        for name, first in ranges[0].items()
    }


def side_by_side(name: str, ranges: Sequence[Block]) -> Block:
    """The whole rows of ranges that lie in memory, in ascending order of keys.

    Raises CheckpointError for a key that some of them have and others not, or that one has twice.
    """
    orders = [np.argsort(keys) for keys, _ in ranges]
    sorted_keys = [keys[order] for (keys, _), order in zip(ranges, orders, strict=True)]
    for keys in sorted_keys:
        if (is_again := keys[1:] == keys[:-1]).any():
            raise CheckpointError(_twice(name, int(keys[1:][is_again][0])))
    for keys in sorted_keys[1:]:
        if not np.array_equal(keys, sorted_keys[0]):
            raise CheckpointError(missing(name, int(np.setxor1d(keys, sorted_keys[0])[0])))
    whole = np.empty((len(orders[0]), sum(weights.shape[1] for _, weights in ranges)), np.float32)
    begin = 0
    for (_, weights), order in zip(ranges, orders, strict=True):
        end = begin + weights.shape[1]
        whole[:, begin:end] = weights[order]
        begin = end
    return sorted_keys[0], whole


def missing(name: str, key: int) -> str:
    """What is said of a key that only some ranges of a table have."""
    return f"table {name!r}: only some ranges of its columns have a row of key {key}"


def _twice(name: str, key: int) -> str:
    return f"table {name!r}: key {key} is there twice; what it comes from is damaged"


def _own_fields(ranges: Sequence[Sequence[Field]]) -> list[Sequence[Field]]:
    """The fields that each range brings."""
    others = [[field for field in fields if field.name not in _OF_KEYS] for fields in ranges[1:]]
    return [ranges[0], *others]


def _whole_fields(ranges: Sequence[Sequence[Field]]) -> tuple[Field, ...]:
    widths: dict[str, int] = {}
    for fields in _own_fields(ranges):
        for field in fields:
            widths[field.name] = widths.get(field.name, 0) + field.width
    return tuple(replace(field, width=widths[field.name]) for field in ranges[0])


def _dtype(field: Field) -> np.dtype[Any]:
    """As numpy has it; bfloat16 as uint16."""
    return np.dtype("uint16" if field.dtype == "bfloat16" else field.dtype)


def _num_bytes(field: Field) -> int:
    return field.width * _dtype(field).itemsize


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
            raise CheckpointError(_twice(self._name, int(keys_n[~is_new][0])))
        return np.asarray(numbers, np.int64)

    def end_range(self) -> None:
        """Raises if the range lacks a key of the first; the next one begins."""
        if self._is_here_N is not None:
            self._refuse_missing(self.keys()[~self._is_here_N])
        self._is_here_N = np.zeros(len(self._table), bool)

    def _refuse_missing(self, keys: NDArray[np.int64]) -> None:
        if len(keys):
            raise CheckpointError(missing(self._name, int(keys[0])))

    def keys(self) -> NDArray[np.int64]:
        """All keys (N,) in the order of their numbers."""
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(batch.keys for batch in self._table.export(state=False))])


_AT = "#"
"""Of a record: its row's place in the chunk. No field has such a name."""


class _Range:
    """Some columns of all rows, in a file: chunk after chunk, each in the order in which they came.

    So rows that come in another order are written in stretches, and none by itself.
    """

    def __init__(self, descriptor: int, fields: Sequence[Field], chunk: int) -> None:
        """`chunk`: rows in each, but the last."""
        self.fields = fields
        self._file, self._chunk = descriptor, chunk
        self._record = np.dtype(
            [(_AT, np.uint32), *((f.name, _dtype(f), (f.width,)) for f in fields)]
        )
        self._waiting: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
        self._num_waiting = 0
        self._num_written: dict[int, int] = {}

    def add(self, numbers_n: NDArray[np.int64], rows: Rows) -> None:
        """Takes rows, each of another number."""
        records = np.empty(len(numbers_n), self._record)
        chunks, records[_AT] = np.divmod(numbers_n, self._chunk)
        for field in self.fields:
            records[field.name] = rows.fields[field.name]
        self._waiting.append((chunks, records))
        self._num_waiting += records.nbytes
        if self._num_waiting >= _CHUNK_BYTES:
            self.write()

    def write(self) -> None:
        """Writes what was taken."""
        if not self._num_waiting:
            return
        chunks, records = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        order = np.argsort(chunks, kind="stable")
        chunks, records = chunks[order], records[order]
        ends = np.flatnonzero(np.diff(chunks)) + 1
        for begin, end in pairwise([0, *ends.tolist(), len(chunks)]):
            chunk = int(chunks[begin])
            written = self._num_written.get(chunk, 0)
            self._num_written[chunk] = written + end - begin
            place = (chunk * self._chunk + written) * self._record.itemsize
            os.lseek(self._file, place, os.SEEK_SET)
            write_all(self._file, records[begin:end].view(np.uint8).data)

    def read(self, chunk: int, count: int) -> NDArray[Any]:
        """The records of a chunk."""
        size = count * self._record.itemsize
        raw = os.pread(self._file, size, chunk * self._chunk * self._record.itemsize)
        if len(raw) < size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return np.frombuffer(raw, self._record)
