"""Parquet files behind fsspec URLs: their row groups, and the record batches of pieces of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from recsdk_core.files.paths import is_url
from recsdk_core.files.urls import require_protocols
from recsdk_pipeline._internal.checks import list_of
from recsdk_pipeline._internal.parquet_opening import (
    is_local,
    is_text,
    keep_footer,
    leaves_of,
    open_file,
    stamp_of,
)
from recsdk_pipeline._internal.urls import is_pattern, urls_of
from recsdk_pipeline.data.dealing import Group, Piece
from recsdk_pipeline.data.parquet_filter import Filter

_CHUNK_ROWS = 1 << 17
_ROWS_FOR_THREADS = 1 << 14
_MOST_OPENED_AT_ONCE = 16
_MOST_OPEN = 8
_FORMAT = ds.ParquetFileFormat()


@dataclass(frozen=True)
class Place:
    """Where a group lies."""

    path: str
    row_group: int
    first_row: int
    """Its first row's number in the file."""


@dataclass(frozen=True)
class Files:
    """What was found once; it is the same in every process, and can be pickled."""

    groups: tuple[Group, ...]
    places: tuple[Place, ...]
    schema: pa.Schema

    def part(self, numbers: Sequence[int]) -> Files:
        """Some of the groups."""
        groups, places = [self.groups[n] for n in numbers], [self.places[n] for n in numbers]
        return Files(tuple(groups), tuple(places), self.schema)


def find_files(
    source: str | Sequence[str], columns: Sequence[str], where: Any, options: Mapping[str, Any]
) -> Files:
    """The row groups of all files of `source` whose statistics do not rule out the filter."""
    paths = [path for url in _urls(source) for path in _expanded(url, options)]
    if not paths:
        raise FileNotFoundError(f"{source}: holds no Parquet file")
    with ThreadPoolExecutor(_MOST_OPENED_AT_ONCE) as pool:
        found = list(pool.map(lambda path: _one_file(path, columns, where, options), paths))
    schema = found[0][1]
    for path, (_, other) in zip(paths, found, strict=True):
        for name in set(columns) & set(schema.names):
            if (count := other.names.count(name)) > 1:
                raise ValueError(
                    f"{path}: has {count} columns {name!r}; write it with a name for each"
                )
            theirs = other.field(name).type if name in other.names else "absent"
            if theirs != schema.field(name).type:
                raise ValueError(
                    f"{path}: column {name!r} is {theirs}; in {paths[0]} it is "
                    f"{schema.field(name).type}; convert the files to one type"
                )
    groups = [group for listed, _ in found for group in listed]
    return Files(tuple(g for g, _ in groups), tuple(p for _, p in groups), schema)


def _urls(source: str | Sequence[str]) -> list[str]:
    """Paths, patterns and URLs as text; TypeError or ValueError for what is none."""
    given = [source] if isinstance(source, str) else list_of("source", source)
    for each in given:
        if not isinstance(each, str | os.PathLike):
            raise TypeError(f"source must be paths, patterns or URLs, got {each!r}")
        if not os.fspath(each):
            raise ValueError(
                "source must be paths, patterns or URLs, got ''; for this folder give '.'"
            )
        if "\0" in os.fspath(each):
            raise ValueError(f"source must be without zero characters, got {each!r}")
        if any("\ud800" <= character <= "\udfff" for character in os.fspath(each)):
            raise ValueError(
                f"source must have characters of UTF-8 only, got {each!r}; rename the file"
            )
    return [os.fspath(each) for each in given]


def _expanded(url: str, options: Mapping[str, Any]) -> list[str]:
    """The files that a URL of a file, a folder or a pattern names, in order."""
    require_protocols(url)
    fs, path = fsspec.core.url_to_fs(url, **options)
    if is_pattern(path) and not (isinstance(fs, LocalFileSystem) and fs.exists(path)):
        found = sorted(fs.glob(path))
    elif fs.isdir(path):
        if isinstance(fs, LocalFileSystem):
            _require_readable(path)
        found = sorted(each for each in fs.find(path) if _is_data(each[len(path) :]))
    else:
        found = [path]
    if not found:
        raise FileNotFoundError(f"{url}: holds no Parquet file; look at the path for mistakes")
    return urls_of(found, url, path)


def _require_readable(path: str) -> None:
    """Raise OSError for a folder below that cannot be listed: fsspec leaves it out."""

    def fail(error: OSError) -> None:
        raise error

    for _, folders, _ in os.walk(path, onerror=fail):
        folders[:] = filter(_is_data, folders)


def _is_data(path: str) -> bool:
    return not any(part.startswith(("_", ".")) for part in path.split("/"))


def _opened(url: str, options: Mapping[str, Any]) -> tuple[str, Any]:
    if not is_url(url):
        return url, pafs.LocalFileSystem()
    fs, path = fsspec.core.url_to_fs(url, **options)
    return path, pafs.PyFileSystem(pafs.FSSpecHandler(fs))


def _one_file(
    url: str, columns: Sequence[str], where: Any, options: Mapping[str, Any]
) -> tuple[list[tuple[Group, Place]], pa.Schema]:
    path, fs = _opened(url, options)
    try:
        stamp = stamp_of(path) if is_local(fs) else None
        fragment = _FORMAT.make_fragment(path, fs)
        schema, metadata = fragment.physical_schema, fragment.metadata
        kept = fragment if where is None else fragment.split_by_row_group(where)
        chosen = (
            set(range(metadata.num_row_groups))
            if where is None
            else {group.id for part in kept for group in part.row_groups}
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{url}: there is no such file; look at the path for mistakes"
        ) from error
    except pa.ArrowException as error:
        what = "cannot be read as Parquet" + (", or the filter" if where is not None else "")
        raise ValueError(
            f"{url}: {what}: {str(error).rstrip('.')}; recsdk data convert makes Parquet of text"
        ) from error
    if stamp is not None:
        keep_footer(stamp, metadata)
    found, first = [], 0
    leaves = leaves_of(schema, columns)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if index in chosen:
            size = Group(rows=group.num_rows, bytes=_bytes(group, leaves))
            found.append((size, Place(url, index, first)))
        first += group.num_rows
    return found, schema


def _bytes(group: Any, leaves: Sequence[int]) -> int:
    """Eight bytes a value, and eight a row for the offsets of bags."""
    return sum(8 * (group.column(leaf).num_values + group.num_rows) for leaf in leaves)


def is_small(num_rows: int) -> bool:
    """Whether a row group is decoded by one thread: to share it out would cost more than it."""
    return num_rows < _ROWS_FOR_THREADS


class Reader:
    """Reads pieces of groups; goes on in an open row group if the next piece follows."""

    def __init__(
        self,
        files: Files,
        columns: Sequence[str],
        where: Any,
        options: Mapping[str, Any],
        *,
        threads: bool,
    ) -> None:
        self._files = files
        self._options = options
        self._filter = None if where is None else Filter(files.schema, columns, where)
        self._columns = list(columns if self._filter is None else self._filter.columns)
        # What a filter looks at should have the files' type.
        self._texts = [
            name
            for name in columns
            if self._filter is None and is_text(files.schema.field(name).type)
        ]
        self._threads = threads
        self._open: dict[str, tuple[Any, Any]] = {}
        self._group = -1
        self._next = 0
        self._batches: Iterator[Any] = iter(())
        self._rest: Any = None

    def read(self, piece: Piece) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (number of the first row in its file, record batch)."""
        place = self._files.places[piece.group]
        try:
            if self._group != piece.group or self._next > piece.start:
                self._begin(piece)
            while self._next < piece.stop:
                start = self._next
                batch = self._take(piece.start, piece.stop)
                if batch is not None:
                    yield place.first_row + start, batch
            if self._next == self._files.groups[piece.group].rows:
                # What decodes the columns holds as much memory as they do.
                self._batches = iter(())
        except (pa.ArrowException, OSError) as error:
            raise OSError(
                f"{place.path}, row group {place.row_group}: cannot be read; was the file "
                f"changed or cut off? {error}"
            ) from error

    def _begin(self, piece: Piece) -> None:
        place, rows = self._files.places[piece.group], self._files.groups[piece.group].rows
        file, threads = self._file(place.path), self._threads and not is_small(rows)
        if piece.start == 0 and piece.stop == rows <= _CHUNK_ROWS:
            # At once: by record batches Arrow's threads take more of the processors.
            group = file.read_row_group(place.row_group, self._columns, use_threads=threads)
            batches = iter(group.to_batches())
        else:
            # A window whose rows lie in one record batch need not be joined.
            size = _CHUNK_ROWS if piece.start else max(1, min(piece.stop, _CHUNK_ROWS))
            batches = file.iter_batches(
                size, row_groups=[place.row_group], columns=self._columns, use_threads=threads
            )
        keep = self._filter
        if keep is not None:
            batches = (keep(batch, place.path) for batch in batches)
        self._batches = batches
        self._group, self._next, self._rest = piece.group, 0, None

    def _file(self, url: str) -> Any:
        """A file whose footer was read; that of the file used longest ago is let go."""
        found = self._open.pop(url, None)
        if found is None:
            path, fs = _opened(url, self._options)
            # The file system of an archive closes its files when it goes.
            found = open_file(path, fs, self._columns, self._texts), fs
        self._open[url] = found
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return found[0]

    def _take(self, start: int, stop: int) -> pa.RecordBatch | None:
        """The next rows of the open group that lie in start..stop; None if before it."""
        batch = next(self._batches, None) if self._rest is None else self._rest
        if batch is None:
            raise OSError(f"it ended after {self._next} rows")
        wanted = stop if self._next >= start else start
        taken = batch.slice(0, wanted - self._next)
        self._rest = batch.slice(len(taken)) if len(taken) < len(batch) else None
        is_wanted = self._next >= start
        self._next += len(taken)
        return taken if is_wanted else None
