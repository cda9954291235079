"""Text files as one Parquet file, written row group by row group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from recsdk_core.files import file_to_write
from recsdk_core.files.naming import naming_file
from recsdk_core.files.paths import is_url
from recsdk_core.files.whole_file import written_whole
from recsdk_pipeline.data.criteo import NUMBERS, criteo_source
from recsdk_pipeline.data.lines import BadLines
from recsdk_pipeline.data.movielens import movielens_paths, movielens_source
from recsdk_pipeline.data.rows import Bags, Rows
from recsdk_pipeline.data.text import TextSource
from recsdk_pipeline.data.text_files import opened, paths_of
from recsdk_pipeline.data_command.csv_files import CsvFiles

ADVICE = "pass --overwrite"
"""For a target that is there already."""

_WINDOW_BYTES = 64 << 20

Pieces = Iterator[tuple[pa.Table, int]]
"""Tables in order, each with the bytes of text read after it."""


@dataclass
class Conversion:
    """One run of `recsdk data convert`."""

    total_bytes: int
    """Of text, unpacked."""
    pieces: Callable[[], Pieces]
    sources: Sequence[str]
    """The files of text."""
    bad: BadLines = field(default_factory=BadLines)
    num_rows: int = 0
    """Written so far."""

    def write(
        self, target: Any, rows_a_group: int, overwrite: bool, progress: Callable[[int], None]
    ) -> None:
        """Write all rows, or nothing; memory holds a row group and a block of text."""
        path = file_to_write(target)
        if any(_is_file(path, source) for source in self.sources):
            raise ValueError(f"target {str(target)!r} is one of the source's files; choose another")
        with written_whole(path, overwrite=overwrite, advice=ADVICE) as part:
            self._write(part, partial(naming_file, str(path), "writing"), rows_a_group, progress)

    def _write(
        self,
        path: Path,
        writing: Callable[[], AbstractContextManager[None]],
        rows_a_group: int,
        progress: Callable[[int], None],
    ) -> None:
        """Write the rows to `path`. What is wrong with that says so by `writing`."""
        held: list[pa.Table] = []
        with ExitStack() as stack:
            writer = None
            for table, done in self.pieces():
                with writing():
                    writer = writer or stack.enter_context(_writer(path, table.schema, writing))
                    held.append(table)
                    if sum(map(len, held)) >= rows_a_group:
                        whole = pa.concat_tables(held)
                        end = len(whole) - len(whole) % rows_a_group
                        writer.write_table(whole.slice(0, end), row_group_size=rows_a_group)
                        held = [whole.slice(end)]
                self.num_rows += len(table)
                progress(done)
            if writer is None:
                raise ValueError("the source has no rows; pass files that have some")
            if sum(map(len, held)):
                with writing():
                    writer.write_table(pa.concat_tables(held), row_group_size=rows_a_group)


@contextmanager
def _writer(
    path: Path, schema: pa.Schema, writing: Callable[[], AbstractContextManager[None]]
) -> Iterator[pq.ParquetWriter]:
    file = path.open("wb")  # pyarrow takes no name that is not UTF-8
    try:
        writer = pq.ParquetWriter(file, schema)
        try:
            yield writer
        except BaseException:
            with suppress(OSError):
                writer.close()
            raise
        with writing():
            writer.close()
    finally:
        with writing():  # what is still to be written may find a full disk
            file.close()


def conversion(
    kind: str,
    sources: Sequence[str],
    *,
    delimiter: str,
    types: Mapping[str, pa.DataType],
    max_bad_lines: int,
) -> Conversion:
    """What `recsdk data convert` is asked to do, of one source at least."""
    bad = BadLines(limit=max_bad_lines)
    dense: tuple[str, ...] = NUMBERS
    lists: tuple[str, ...] = ()
    if kind == "csv":
        paths = paths_of(sources, {})
        total = sum(_bytes_of(path) for path in paths)
        files = CsvFiles(paths=paths, delimiter=delimiter, types=types)
        return Conversion(total, files.pieces, paths)
    if kind == "criteo":
        paths = paths_of(sources, {})
        rows = criteo_source(sources, _WINDOW_BYTES, None)
    else:
        paths = movielens_paths(sources[0])
        rows = movielens_source(sources[0], _WINDOW_BYTES, None, bad)
        dense, lists = ("age_share",), ("genres",)
    total = sum(block.stop - block.start for block in rows.files.blocks)
    return Conversion(total, partial(_of_rows, rows, dense, lists, bad), paths, bad)


def _bytes_of(path: str) -> int:
    with opened(path, None, {}) as file:
        return int(file.size())


def _is_file(path: Path, source: str) -> bool:
    # Of a chain, the last link is the file: "zip://clicks.csv::clicks.zip".
    place = source.rpartition("::")[2] if is_url(source) else source
    fs, inner = fsspec.core.url_to_fs(place) if is_url(place) else (None, place)
    is_here = fs is None or isinstance(fs, LocalFileSystem)
    return is_here and path.exists() and path.samefile(inner)


def _of_rows(
    source: TextSource, dense: Sequence[str], lists: Sequence[str], bad: BadLines
) -> Pieces:
    done = 0
    for block, found in zip(source.files.blocks, source.parsed(threads=True), strict=True):
        parsed, errors = found
        for error in errors:
            bad.add(error)
        done += block.stop - block.start
        for part in parsed.parts:
            yield _table(part, dense, lists), done


def _table(rows: Rows, dense: Sequence[str], lists: Sequence[str]) -> pa.Table:
    columns: dict[str, Any] = {"label": rows.labels[:, 0]}
    columns |= {name: rows.dense[:, index] for index, name in enumerate(dense)}
    columns |= {
        name: _lists(bags, len(rows)) if name in lists else _singles(bags, len(rows))
        for name, bags in rows.bags.items()
    }
    return pa.table(columns)


def _lists(bags: Bags, num_rows: int) -> Any:
    offsets = np.concatenate([[0], np.cumsum(bags.lengths(num_rows))])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(bags.plain().values))


def _singles(bags: Bags, num_rows: int) -> Any:
    """One id a row, or null."""
    if bags.at is not None:
        bags = bags.plain()
    return pa.array(bags.values, mask=~bags.lengths(num_rows))
