"""Parquet files opened for reading by columns; the footers of local ones are kept for the next.

Of a file of some thousand rows, reading its footer costs a sixth of reading all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

_MOST_BYTES = 16 << 20
"""Of footers, as they are stored."""
_BYTES_AT_ONCE = 1 << 18
"""Read of a column of a local file, in place of all that a row group has."""
_FAR_BYTES_AT_ONCE = 1 << 22
_MOST_FAR_BYTES = 256 << 20
"""Of a row group, as they are stored, that are requested together."""
_BYTES_OF_REPEATED = 8
"""A value, dictionary included, of text that is worth reading by its dictionary, at most."""
_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)

Stamp = tuple[int, ...]
"""What differs if a file is another one, or was changed."""


class _Footers:
    """By stamp, in the order of their last use."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked process, where nobody would release a lock that was held."""
        self._lock = threading.Lock()
        self._of_stamp: dict[Stamp, Any] = {}
        self._bytes = 0

    def of(self, stamp: Stamp) -> Any:
        """A footer, or None."""
        with self._lock:
            found = self._of_stamp.pop(stamp, None)
            if found is not None:
                self._of_stamp[stamp] = found
            return found

    def keep(self, stamp: Stamp, footer: Any) -> None:
        """Keep one, in place of those that were not used for longest."""
        with self._lock:
            if stamp in self._of_stamp:
                return
            self._of_stamp[stamp] = footer
            self._bytes += footer.serialized_size
            while self._bytes > _MOST_BYTES:
                oldest = next(iter(self._of_stamp))
                self._bytes -= self._of_stamp.pop(oldest).serialized_size


_FOOTERS = _Footers()
os.register_at_fork(after_in_child=_FOOTERS.forget)


def stamp_of(path: str) -> Stamp:
    """The stamp of a local file; taken before its footer is read, so that it is no younger.

    Raises FileNotFoundError.
    """
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def keep_footer(stamp: Stamp, footer: Any) -> None:
    """Keep the footer of the file that had this stamp. Thread-safe."""
    _FOOTERS.keep(stamp, footer)


def is_local(fs: Any) -> bool:
    """Whether these are the files of this machine, by their paths."""
    return isinstance(fs, pafs.LocalFileSystem)


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds strings or bytes of any length."""
    return any(fits(kind) for fits in _TEXTS)


def open_file(path: str, fs: Any, columns: Sequence[str], texts: Sequence[str]) -> Any:
    """A file that these columns are read of.

    Of those in `texts` (strings or bytes) the ones that repeat few values come as dictionaries.
    """
    if is_local(fs):
        return _open_local(path, fs, texts)
    # Of local files the system reads ahead; requests to others are better few and large.
    file = pq.ParquetFile(path, filesystem=fs, pre_buffer=True)
    footer = file.metadata
    repeated, is_small = _repeated(footer, texts), _most_stored(footer, columns) <= _MOST_FAR_BYTES
    if is_small and not repeated:
        return file
    return pq.ParquetFile(
        path,
        filesystem=fs,
        metadata=footer,
        read_dictionary=repeated,
        pre_buffer=is_small,
        buffer_size=0 if is_small else _FAR_BYTES_AT_ONCE,
    )


def _open_local(path: str, fs: Any, texts: Sequence[str]) -> Any:
    stamp = stamp_of(path)
    footer = _FOOTERS.of(stamp) or pq.read_metadata(path, filesystem=fs)
    file = pq.ParquetFile(
        path,
        filesystem=fs,
        metadata=footer,
        read_dictionary=_repeated(footer, texts),
        pre_buffer=False,
        buffer_size=_BYTES_AT_ONCE,
    )
    if stamp_of(path) == stamp:
        keep_footer(stamp, footer)
        return file
    file.close()  # it was replaced meanwhile: the footer may be that of another file
    return pq.ParquetFile(path, filesystem=fs, pre_buffer=False, buffer_size=_BYTES_AT_ONCE)


def _repeated(footer: Any, texts: Sequence[str]) -> list[str]:
    """Which of these columns repeat few values in each row group.

    Their dictionaries are hashed in place of all values. Of others Arrow would first have to find
    out which values are equal, at ten times the cost.
    """
    if not texts:
        return []
    schema = footer.schema.to_arrow_schema()
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    return [
        name
        for name in texts
        for leaf in leaves_of(schema, [name])
        if all(_repeats(group.column(leaf)) for group in groups)
    ]


def _repeats(stored: Any) -> bool:
    # A writer gives a dictionary up as too long. It does not say so, but then values are stored
    # one by one, each with its length.
    is_short = stored.total_uncompressed_size <= _BYTES_OF_REPEATED * stored.num_values
    return bool(stored.physical_type == "BYTE_ARRAY" and stored.has_dictionary_page and is_short)


def _most_stored(footer: Any, columns: Sequence[str]) -> int:
    """Bytes of these columns in the largest row group."""
    leaves = leaves_of(footer.schema.to_arrow_schema(), columns)
    groups = map(footer.row_group, range(footer.num_row_groups))
    sizes = (sum(group.column(leaf).total_compressed_size for leaf in leaves) for group in groups)
    return max(sizes, default=0)


def leaves_of(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    """Which of Parquet's columns, the leaves of a schema's, hold these."""
    # By place: a leaf's path does not tell the column "a.b" from the "b" of a struct "a".
    owners = [field.name for field in schema for _ in range(_num_leaves(field.type))]
    return [leaf for leaf, owner in enumerate(owners) if owner in columns]


def _num_leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if not pa.types.is_nested(kind):
        return 1
    return sum(_num_leaves(kind.field(index).type) for index in range(kind.num_fields))
