"""Training data in Parquet files, in pieces over ranks and workers, resumable to the batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.dealing import Layer, Layout, Plan, Position, Window
from recsdk_pipeline.data.lines import BadLine, BadLines
from recsdk_pipeline.data.parquet_columns import IdColumn
from recsdk_pipeline.data.parquet_columns import Mapping as Columns
from recsdk_pipeline.data.parquet_state import KIND, layer_of, layers_of, merged

if TYPE_CHECKING:
    from recsdk_pipeline.data.parquet_files import Reader
    from recsdk_pipeline.data.parquet_rows import Rows

_Loaded = tuple["Rows", list[BadLine]]


class ParquetData(IterableDataset[ClickBatch]):
    """Batches of Parquet files, a part of the row groups for each rank and DataLoader worker.

    `source` is a file, folder or pattern, local or by fsspec URL, or a list of them; `options` go
    to fsspec. `ids` are features, `dense` and `labels` columns of numbers. A batch has `batch_size`
    rows of this rank, the last one the rest, or nothing with `drop_last`.

    Each row is read once an epoch, by one rank and worker: row groups are dealt so that the rows
    of two ranks, or of two workers of one, differ by at most the largest row group (before
    `where`). With `shuffle`, the row groups come in an order drawn from `seed` and the epoch, and
    the rows in a window are shuffled. `where`, a `pyarrow.dataset` expression, skips row groups by
    their statistics and then rows; only columns in use are decoded.

    Memory: at most three windows of `window_bytes` (default 64 MiB; one in use, and one read and
    shuffled; in a worker two), a batch, and what Arrow decodes at a time of one row group. A
    DataLoader worker decodes on one thread.

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
        source: str | Sequence[str],
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
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _check(batch_size=batch_size, window_bytes=window_bytes)
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must not be negative")
        self._columns = Columns.of(ids, dense, labels, missing_dense)
        self.features = tuple(each.name for each in self._columns.ids)
        self.num_dense = len(self._columns.dense)
        self._rank, self._world_size = _rank_of(rank, world_size)
        self.batch_size, self._drop_last = batch_size, drop_last
        self._where, self._options = where, dict(options or {})
        self.bad = bad if bad is not None else BadLines()
        self._files = self._find(source)
        self._setting = (window_bytes, seed, shuffle)
        self._name = self._fingerprint()
        self._epoch = 0
        self._layers: tuple[Layer, ...] = ()
        self._position: Position = (0, 0)
        self._bad_before = 0
        self._is_pending = False

    @property
    def num_rows(self) -> int:
        """Rows of all ranks' row groups that `where` does not rule out by their statistics."""
        return sum(group.rows for group in self._files.groups)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterators read epoch `epoch` (0 at first) from its start.

        Workers that live longer than an epoch (`persistent_workers`) do not see it.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; it must not be negative")
        self._epoch, self._layers, self._position = epoch, (), (0, 0)
        self._is_pending = False

    def __iter__(self) -> Iterator[ClickBatch]:
        """Read the epoch from its start, or once from where `load_state_dict` says."""
        if not self._is_pending:
            self._layers, self._position, self._bad_before = (), (0, 0), self.bad.count
        self._is_pending = False
        return self._batches()

    def state_dict(self) -> dict[str, Any]:
        """How far this rank and worker has read, to the batch: numbers, strings and lists."""
        layout, stream = self._here()
        return {
            "kind": KIND,
            "data": self._name,
            "epoch": self._epoch,
            "layers": [layer_of(layer) for layer in self._layers],
            "layout": [layout.world_size, layout.num_workers],
            "stream": stream,
            "position": list(self._position),
            "bad": self._bad_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iterator go on after the last batch before `state_dict`.

        `state` is of the same data, rank, number of ranks and worker, or made by `merge`. Raises
        ValueError for any other; the batch size may be another.
        """
        if state.get("kind") != KIND:
            raise ValueError(f"this is no state of ParquetData: {sorted(state)}")
        if state["data"] != self._name:
            raise ValueError(
                "the state is of other files, columns, filter, window_bytes, seed or shuffle; "
                "pass those that it was saved with"
            )
        layout, stream = self._here()
        if state["stream"] is not None:
            asked = [*state["layout"], state["stream"]]
            found = [layout.world_size, layout.num_workers, stream]
            if asked != found:
                raise ValueError(
                    f"the state is of (ranks, workers, stream) {asked}, this is {found}; merge the "
                    "states of all by ParquetData.merge and load the result on every rank"
                )
        self._epoch, self._layers = int(state["epoch"]), layers_of(state["layers"])
        window, offset = state["position"]
        self._position = (int(window), int(offset))
        self._bad_before = self.bad.count = int(state["bad"])
        self._is_pending = True

    @staticmethod
    def merge(states: Iterable[Any]) -> dict[str, Any]:
        """One state for any number of ranks and workers, from those of all ranks and workers.

        Each of `states` is a `state_dict` of ParquetData, of a StatefulDataLoader that reads one,
        or of a pipeline with either as `data`. Load the result into each rank's ParquetData before
        the loader is made. Rows that were read are not read again, and none is left out. Raises
        ValueError if a state is missing, there twice, or of another run or epoch.
        """
        return merged(states)

    def _find(self, source: str | Sequence[str]) -> Any:
        try:
            from recsdk_pipeline.data.parquet_files import find_files
            from recsdk_pipeline.data.parquet_rows import check_types
        except ImportError as error:
            raise ImportError(
                'ParquetData needs pyarrow and fsspec; run pip install "recsdk-pipeline[data]"'
            ) from error
        files = find_files(source, self._columns.columns(), self._where, self._options)
        check_types(files.schema, self._columns)
        return files

    def _fingerprint(self) -> str:
        sizes = [(group.rows, group.bytes) for group in self._files.groups]
        text = json.dumps([sizes, self._setting, repr(self._columns), str(self._where)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _here(self) -> tuple[Layout, int]:
        """The layout, and the number of this process's stream."""
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        number = 0 if worker is None else worker.id
        return Layout(self._world_size, workers), self._rank * workers + number

    def _batches(self) -> Iterator[ClickBatch]:
        from recsdk_pipeline.data.parquet_rows import joined

        parts: list[Rows] = []
        for rows, after in self._stretches():
            parts.append(rows)
            if sum(map(len, parts)) == self.batch_size:
                whole, parts = joined(parts), []
                self._position, self._bad_before = after
                yield whole.batch()
        if parts and not self._drop_last:
            self._position, self._bad_before = after
            yield joined(parts).batch()

    def _stretches(self) -> Iterator[tuple[Rows, tuple[Position, int]]]:
        """Rows of one window and batch each, with the position and bad rows after them."""
        window_bytes, seed, shuffle = self._setting
        plan = Plan(
            groups=self._files.groups,
            window_bytes=window_bytes,
            seed=seed,
            epoch=self._epoch,
            shuffle=shuffle,
        )
        layout, stream = self._here()
        windows = plan.streams(self._layers, layout)[stream]
        first, offset = self._position
        room = self.batch_size
        loaded = self._windows(plan, windows[first:])
        for index, (rows, found) in enumerate(loaded, start=first):
            before = self.bad.count
            for error in found:
                self.bad.add(error)
            start = max(windows[index].skip, offset if index == first else 0)
            while start < len(rows):
                stop = min(len(rows), start + room)
                ends = stop == len(rows)
                position = (index + 1, 0) if ends else (index, stop)
                yield rows.part(start, stop), (position, self.bad.count if ends else before)
                room = self.batch_size if stop - start == room else room - (stop - start)
                start = stop

    def _windows(self, plan: Plan, windows: Sequence[Window]) -> Iterator[_Loaded]:
        """The rows of each window; in the main process the next is read meanwhile."""
        from recsdk_pipeline.data.parquet_files import Reader

        is_worker = get_worker_info() is not None
        reader = Reader(
            self._files,
            self._columns.columns(),
            self._where,
            self._options,
            threads=not is_worker,
        )
        if is_worker:
            yield from (self._load(reader, plan, window) for window in windows)
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="recsdk-parquet")
        try:
            ahead = [pool.submit(self._load, reader, plan, window) for window in windows[:1]]
            for window in [*windows[1:], None]:
                loaded = ahead.pop().result() if ahead else None
                if window is not None:
                    ahead.append(pool.submit(self._load, reader, plan, window))
                if loaded is not None:
                    yield loaded
        finally:
            # Without waiting: an iterator left behind may be collected inside threading's locks.
            pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, reader: Reader, plan: Plan, window: Window) -> _Loaded:
        from recsdk_pipeline.data.parquet_rows import joined

        parts: list[Rows] = []
        bad: list[BadLine] = []
        for piece in window.pieces:
            path = self._files.places[piece.group].path
            for start, batch in reader.read(piece):
                parts.append(_good_rows(batch, self._columns, path, start, bad))
        rows = joined(parts)
        return (rows.take(plan.permutation(window, len(rows))) if plan.shuffle else rows), bad


def _good_rows(batch: Any, columns: Columns, path: str, start: int, bad: list[BadLine]) -> Rows:
    """The rows that pass the filter and have no problem; the others' errors go to `bad`."""
    import numpy as np

    from recsdk_pipeline.data.parquet_files import KEEP
    from recsdk_pipeline.data.parquet_rows import problems_of, rows_of

    numbers: Any = range(start, start + len(batch))
    if KEEP in batch.schema.names:
        keep = batch.column(KEEP).fill_null(False)
        numbers = start + np.flatnonzero(keep.to_numpy(zero_copy_only=False))
        batch = batch.filter(keep)
    problems = sorted(problems_of(batch, columns))
    if problems:
        import pyarrow as pa

        is_good = np.ones(len(batch), bool)
        is_good[[row for row, _, _ in problems]] = False
        bad += [
            BadLine(path, int(numbers[row]), column, problem, noun="row")
            for row, column, problem in problems
        ]
        batch = batch.filter(pa.array(is_good))
    return rows_of(batch, columns)


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("pass both rank and world_size, or neither")
    if rank is None or world_size is None:
        is_one_of_many = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_one_of_many else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks, counted from 0")
    return rank, world_size
