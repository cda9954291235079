"""Training data in Parquet files, in pieces over ranks and workers, resumable to the batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recsdk_pipeline._internal.checks import int_of, int_within, list_of, options_of
from recsdk_pipeline.data.dealing import Group, Layout, Piece
from recsdk_pipeline.data.lines import BadLine, BadLines
from recsdk_pipeline.data.parquet_columns import IdColumn
from recsdk_pipeline.data.parquet_columns import Mapping as Columns
from recsdk_pipeline.data.stream import FileData, Options
from recsdk_pipeline.data.window_reading import Loaded, Read


class ParquetData(FileData):
    """Batches of Parquet files, a part of the row groups for each rank and DataLoader worker.

    `source` is a file, folder or pattern, local or by fsspec URL, or a list of them; `options` go
    to fsspec. `ids` are features, `dense` and `labels` columns of numbers. A batch has `batch_size`
    rows of this rank, the last one the rest, or nothing with `drop_last`.

    Each row is read once an epoch, by one rank and worker: row groups are dealt so that the rows
    of two ranks, or of two workers of one, differ by at most the largest row group (before
    `where`). With `shuffle`, the row groups come in an order drawn from `seed` and the epoch, and
    the rows in a window are shuffled. `where`, a `pyarrow.dataset` expression, skips row groups by
    their statistics and then rows; only columns in use are decoded.

    `num_threads` threads each read a window, which one thread of Arrow's decodes: the batches are
    the same, in the same order, for any number of them. Windows of one row group are decoded one
    after the other, each by all threads of Arrow's. By default one window is read ahead, and
    another while somebody waits for that one, decoded by all of them and shuffled by as many; a
    DataLoader worker reads none ahead, on one thread. Row groups of fewer than 16,384 rows are
    decoded by one thread each, several at once. Without `where`, strings that repeat few
    values are hashed once each, by the file's dictionaries.

    Memory: a batch, and at most three windows of `window_bytes` (default 64 MiB): one in use, one
    read and one shuffled; in a worker two, and with `num_threads` two and two for each thread. Each
    worker keeps the shared memory of the batches that were under way at once, up to 256 MiB. Each
    thread also has what Arrow decodes at a time of a row group, of any size: up to 131,072 rows of
    it, and of each column a dictionary and 256 KiB as they are stored. Of files that are not local
    it requests the columns of a row group together, where they are 256 MiB or less, else 4 MiB of
    each. It has the eight files open that it used last. A process keeps up to 128 MiB that was
    freed, for the next windows, and the footers of local files, up to 16 MiB as they are stored.
    Where each row has one id of each feature, batches share one tensor of lengths; do not write to
    it.

    Malformed rows (a number that is missing or not finite; a null in a bag; weights or timestamps
    of another length than the ids) go to `bad`; by default the first is raised as `BadLine`, whose
    `line` is the row's number in its file, from 0. Each worker counts its own.
    `missing_dense` is what a null in a dense column reads as (default: it is malformed).

    `rank` and `world_size` are those of torch.distributed at this call, or 0 of 1. Not
    thread-safe. Raises ImportError without pyarrow and fsspec, FileNotFoundError, ValueError or
    TypeError for what cannot be read so.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        ids: Sequence[str | IdColumn],
        labels: str | Sequence[str],
        batch_size: int,
        dense: Sequence[str] = (),
        missing_dense: float | None = None,
        where: Any | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window_bytes: int = 64 << 20,
        bad: BadLines | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_threads: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        checked = Options(
            batch_size=batch_size,
            window_bytes=window_bytes,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            bad=bad,
            rank=rank,
            world_size=world_size,
            num_threads=num_threads,
        )
        columns = Columns.of(ids, dense, labels, missing_dense)
        if isinstance(source, os.PathLike):
            source = os.fspath(source)
        found = options_of(options)
        files = _find(source, columns, where, found)
        super().__init__(_ParquetSource(files, columns, where, found), checked)

    @property
    def num_rows(self) -> int:
        """Rows of all ranks' row groups that `where` does not rule out by their statistics."""
        return sum(self.row_groups)

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Rows of each row group of all ranks, in the order of the files, as `num_rows` counts."""
        return tuple(group.rows for group in self._source.groups)

    def part(self, row_groups: Sequence[int]) -> ParquetData:
        """Return data of some of the row groups, numbered as in `row_groups`, from epoch 0.

        For a part that is held out, say. Files, columns and options are the same, and so is `bad`.
        Opens no file. Raises IndexError for a number that is not there, ValueError for one that is
        there twice.
        """
        given = list_of("row_groups", row_groups)
        numbers = [int_of("each of row_groups", number) for number in given]
        for number in numbers:
            if not 0 <= number < len(self.row_groups):
                last = len(self.row_groups) - 1
                wanted = "empty, since there are none" if last < 0 else f"0 to {last}"
                raise IndexError(f"row_groups must be {wanted}, got {number}")
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"row_groups must not repeat, got {numbers}")
        source = self._source
        assert isinstance(source, _ParquetSource)
        data = ParquetData.__new__(ParquetData)
        FileData.__init__(data, source.part(numbers), replace(self._options, bad=self.bad))
        return data

    def rows_of_ranks(self, epoch: int) -> tuple[int, ...]:
        """Return how many rows each rank is dealt in `epoch`, bad ones and filtered ones too.

        Every rank returns the same. Costs a pass over the numbers of the row groups.
        """
        streams = self._plan(int_within("epoch", epoch, 0)).streams((), Layout(self._world_size, 1))
        return tuple(sum(window.rows for window in stream) for stream in streams)


@dataclass(frozen=True)
class _ParquetSource:
    files: Any
    columns: Columns
    where: Any
    options: dict[str, Any]
    chosen: tuple[int, ...] | None = None
    """Which row groups of the files; None: all."""

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.columns.ids)

    @property
    def num_dense(self) -> int:
        return len(self.columns.dense)

    @property
    def groups(self) -> tuple[Group, ...]:
        groups: tuple[Group, ...] = self.files.groups
        return groups

    def name(self) -> str:
        sizes = [(group.rows, group.bytes) for group in self.groups]
        chosen = [] if self.chosen is None else [self.chosen]
        return json.dumps([sizes, repr(self.columns), str(self.where), *chosen])

    def part(self, numbers: Sequence[int]) -> _ParquetSource:
        """Some of the row groups."""
        before = range(len(self.groups)) if self.chosen is None else self.chosen
        chosen = tuple(before[number] for number in numbers)
        return replace(self, files=self.files.part(numbers), chosen=chosen)

    def is_small(self, piece: Piece) -> bool:
        from recsdk_pipeline.data.parquet_files import is_small

        return is_small(self.groups[piece.group].rows)

    def reader(self, *, threads: bool) -> Read:
        from recsdk_pipeline.data.parquet_files import Reader
        from recsdk_pipeline.data.parquet_rows import good_rows

        reader = Reader(
            self.files, self.columns.columns(), self.where, self.options, threads=threads
        )

        def read(piece: Piece) -> Iterator[Loaded]:
            path = self.files.places[piece.group].path
            for start, batch in reader.read(piece):
                bad: list[BadLine] = []
                yield good_rows(batch, self.columns, path, start, bad), bad

        return read


def _find(source: Any, columns: Columns, where: Any, options: dict[str, Any]) -> Any:
    try:
        from recsdk_pipeline._internal.parquet_types import check_types
        from recsdk_pipeline.data.parquet_files import find_files
        from recsdk_pipeline.data.parquet_filter import check_answer, check_filter
    except ImportError as error:
        raise ImportError(
            'ParquetData needs pyarrow and fsspec; run pip install "recsdk-pipeline[data]"'
        ) from error
    check_filter(where)
    files = find_files(source, columns.columns(), where, options)
    check_answer(files.schema, where)
    check_types(files.schema, columns)
    return files
