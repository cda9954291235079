"""What all readers of files share: shares of ranks and workers, windows, batches, states."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from recsdk_pipeline._internal.checks import (
    check_switch,
    int_within,
)
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.dealing import Group, Layer, Layout, Piece, Plan, Position, Window
from recsdk_pipeline.data.lines import BadLines, check_bad
from recsdk_pipeline.data.packed import Packed, joined_stretches
from recsdk_pipeline.data.rows import Rows
from recsdk_pipeline.data.stream_state import KIND, layer_of, layers_of, merged
from recsdk_pipeline.data.window_reading import LoadedWindow, Read, Threads, loaded_windows


class Source(Protocol):
    """Files, and how rows are made of them. It goes to other processes by pickle."""

    @property
    def features(self) -> tuple[str, ...]:
        """Of batches, in order."""
        ...

    @property
    def num_dense(self) -> int:
        """Dense columns."""
        ...

    @property
    def groups(self) -> tuple[Group, ...]:
        """The parts that are dealt; the same in every process."""
        ...

    def name(self) -> str:
        """What the rows follow from, as text."""
        ...

    def reader(self, *, threads: bool) -> Read:
        """A reader, which may use more threads than its caller's."""
        ...

    def is_small(self, piece: Piece) -> bool:
        """Whether a reader uses its caller's thread only for a piece."""
        ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that all readers have, checked."""

    batch_size: int
    window_bytes: int
    seed: int
    shuffle: bool
    drop_last: bool
    bad: BadLines | None
    rank: int | None
    world_size: int | None
    num_threads: int | None

    def __post_init__(self) -> None:
        numbers = {
            name: int_within(name, getattr(self, name), 1)
            for name in ("batch_size", "window_bytes", "num_threads")
            if getattr(self, name) is not None or name != "num_threads"
        }
        numbers["seed"] = int_within("seed", self.seed, 0)
        for name, answer in (("shuffle", self.shuffle), ("drop_last", self.drop_last)):
            check_switch(name, answer)
        check_bad(self.bad)
        if self.rank is not None or self.world_size is not None:
            numbers["rank"], numbers["world_size"] = _rank_of(self.rank, self.world_size)
        for name, number in numbers.items():
            object.__setattr__(self, name, number)


_Part: TypeAlias = tuple[Rows | Packed, tuple[Position, int]]
"""The rows of a batch, or some of them, with the position and bad rows after them."""


class _Batches(Iterator[ClickBatch]):
    """Holds no rows, as a generator would; and, unlike `map`, takes the weak references by which a
    pipeline knows whether its caller still has it."""

    def __init__(self, data: FileData, parts: Iterator[_Part]) -> None:
        self._data, self._parts = data, parts
        self._part: _Part | None = None
        """What is to be a batch, while it is made."""

    def __next__(self) -> ClickBatch:
        if self._part is None:
            self._part = next(self._parts)
        rows, after = self._part
        batch = rows.batch()
        # Without a call in between, so that a Ctrl-C loses no rows, nor gives any twice.
        self._data._position, self._data._bad_before = after
        self._part = None
        return batch


class FileData(IterableDataset[ClickBatch]):
    """Batches of files, a part of them for each rank and DataLoader worker.

    What `ParquetData`, `CriteoData` and `MovieLensData` share; they make it.
    """

    def __init__(self, source: Source, options: Options) -> None:
        self._source = source
        self.features, self.num_dense = source.features, source.num_dense
        self._rank, self._world_size = _rank_of(options.rank, options.world_size)
        self.batch_size, self._drop_last = options.batch_size, options.drop_last
        self.bad = options.bad if options.bad is not None else BadLines()
        self._options = options
        settings = (options.window_bytes, options.seed, options.shuffle)
        text = f"{source.name()} {settings}"
        self._name = hashlib.blake2b(
            text.encode(errors="surrogatepass"), digest_size=16
        ).hexdigest()
        self._epoch = 0
        self._layers: tuple[Layer, ...] = ()
        self._position: Position = (0, 0)
        self._bad_before = 0
        self._is_pending = False

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterators read epoch `epoch` (0 at first) from its start.

        Workers that live longer than an epoch (`persistent_workers`) do not see it.
        """
        self._epoch = int_within("epoch", epoch, 0)
        self._layers, self._position = (), (0, 0)
        self._is_pending = False

    def __iter__(self) -> Iterator[ClickBatch]:
        """Read the epoch from its start, or once from where `load_state_dict` says.

        Reading begins with this call, in a DataLoader's worker with the first batch.
        """
        return _Batches(self, self._parts())

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
        if not isinstance(state, dict) or state.get("kind") != KIND:
            raise ValueError(f"this is no state of {type(self).__name__}: {state!r:.100}")
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
                    f"states of all by {type(self).__name__}.merge and load the result on every "
                    "rank"
                )
        self._epoch, self._layers = int(state["epoch"]), layers_of(state["layers"])
        window, offset = state["position"]
        self._position = (int(window), int(offset))
        self._bad_before = self.bad.count = int(state["bad"])
        self._is_pending = True

    @staticmethod
    def merge(states: Iterable[Any]) -> dict[str, Any]:
        """One state for any number of ranks and workers, from those of all ranks and workers.

        Each of `states` is a `state_dict` of this class, of a StatefulDataLoader that reads one,
        or of a pipeline with either as `data`. Load the result into each rank's data before the
        loader is made. Rows that were read are not read again, and none is left out. Raises
        ValueError if a state is missing, there twice, or of another run or epoch.
        """
        return merged(states)

    def _plan(self, epoch: int) -> Plan:
        return Plan(
            groups=self._source.groups,
            window_bytes=self._options.window_bytes,
            seed=self._options.seed,
            epoch=epoch,
            shuffle=self._options.shuffle,
        )

    def _here(self) -> tuple[Layout, int]:
        """The layout, and the number of this process's stream."""
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        number = 0 if worker is None else worker.id
        return Layout(self._world_size, workers), self._rank * workers + number

    def _parts(self) -> Iterator[_Part]:
        if not self._is_pending:
            self._layers, self._position, self._bad_before = (), (0, 0), self.bad.count
        self._is_pending = False
        plan = self._plan(self._epoch)
        layout, stream = self._here()
        first, offset = self._position
        streams = plan.streams(self._layers, layout)
        self._warn_if_left_out(streams, layout, stream)
        windows = streams[stream][first:]
        if windows:
            windows[0] = replace(windows[0], skip=max(windows[0].skip, offset))
        stretches = self._stretches(self._windows(plan, windows), first)
        return self._cut(stretches, self.batch_size)

    def _warn_if_left_out(
        self, streams: Sequence[Sequence[Window]], layout: Layout, stream: int
    ) -> None:
        """Warns in the first stream of a rank that gets nothing of an epoch in which others read.

        Pipelines end with the first rank that has no batch, so such an epoch trains nothing.
        """
        first = self._rank * layout.num_workers
        of_rank = streams[first : first + layout.num_workers]
        if not self._layers and stream == first and any(streams) and not any(of_rank):
            warnings.warn(
                f"rank {self._rank} of {self._world_size} has nothing to read, as there are "
                f"{len(self._source.groups)} row groups of Parquet, or blocks of 4 MiB of text, to "
                "deal to all ranks; pipelines end with the first rank that has no batch. Write "
                "files of more row groups, by recsdk data convert --rows-a-group say",
                stacklevel=4,  # the caller of `iter`
            )

    def _cut(self, stretches: Iterator[_Part], batch_size: int) -> Iterator[_Part]:
        parts: list[Rows | Packed] = []
        for rows, after in stretches:
            parts.append(rows)
            del rows  # which may be of a window that is used up
            if sum(map(len, parts)) == batch_size:
                whole, parts = [joined_stretches(parts)], []
                yield whole.pop(), after
        if parts and not self._drop_last:
            yield joined_stretches(parts), after

    def _stretches(self, windows: Iterator[LoadedWindow], first: int) -> Iterator[_Part]:
        """Rows of one window and batch each, with the position and bad rows after them."""
        index = first
        for window in windows:  # by enumerate it would be held until the next is there
            yield from self._stretches_of(window, index)
            del window
            index += 1

    def _stretches_of(self, window: LoadedWindow, index: int) -> Iterator[_Part]:
        before = self.bad.count
        for error in window.bad:
            self.bad.add(error)
        stop = window.start
        for rows in window.stretches:
            stop += len(rows)
            ends = stop == window.stop
            position = (index + 1, 0) if ends else (index, stop)
            yield rows, (position, self.bad.count if ends else before)

    def _windows(self, plan: Plan, windows: Sequence[Window]) -> Iterator[LoadedWindow]:
        """The rows of each window; in the main process some are read ahead, the first from now."""
        threads = Threads(num=self._options.num_threads, is_worker=get_worker_info() is not None)
        return loaded_windows(self._source, plan, windows, self.batch_size, threads)


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"pass both rank and world_size, or neither, got {rank} and {world_size}")
    if rank is None or world_size is None:
        is_one_of_many = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_one_of_many else (0, 1)
    size = int_within("world_size", world_size, 1)
    return int_within("rank", rank, 0, size), size
