"""Windows read into memory, some at once: the same rows in the same batches on any threads."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from threading import Lock
from typing import Protocol

from recsdk_pipeline._internal.shared_calls import SharedCalls
from recsdk_pipeline.data.dealing import Group, Piece, Plan, Window
from recsdk_pipeline.data.lines import BadLine
from recsdk_pipeline.data.packed import Packed, Placing
from recsdk_pipeline.data.rows import Rows

Loaded = tuple[Rows, list[BadLine]]
"""Good rows, and the errors of the bad ones between them."""

Read = Callable[[Piece], Iterable[Loaded]]
"""Reads the rows of a piece, in order; one thread at a time calls it."""


class MakesReaders(Protocol):
    """What a source is here."""

    def reader(self, *, threads: bool) -> Read:
        """A reader, which may use more threads than its caller's."""
        ...

    def is_small(self, piece: Piece) -> bool:
        """Whether a reader uses its caller's thread only for a piece."""
        ...


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Who reads."""

    num: int | None
    """Threads that read a window each; None: all of Arrow's read one together."""
    is_worker: bool
    """Whether a DataLoader's worker reads; with no `num` it does so itself, when asked."""

    def may_help(self, job: _Job) -> bool:
        """Whether the decoder may use threads of its own for a window."""
        if self.num is None:
            return not self.is_worker
        # Windows of one row group are decoded one after the other, so ours would only wait.
        return self.num > 1 and (job.goes_on or job.is_followed)


@dataclass(frozen=True)
class LoadedWindow:
    """The rows start..stop of what a window yields, in stretches that end where a batch does."""

    stretches: Sequence[Rows | Packed]
    start: int
    stop: int
    bad: list[BadLine]


def loaded_windows(
    source: MakesReaders,
    plan: Plan,
    windows: Sequence[Window],
    batch_size: int,
    threads: Threads,
) -> Iterator[LoadedWindow]:
    """The rows of each window, in order; unless a worker reads alone, it begins with this call."""
    load = _Loader(source, plan, batch_size, threads)
    jobs = _jobs(windows, plan.groups)
    if threads.num is None and threads.is_worker:
        return map(load, jobs)
    num = threads.num or _threads_of_arrow()
    # Of two windows one is read and one put in place, both with as much help as there is.
    pool = ThreadPoolExecutor(threads.num or num + 1, thread_name_prefix="recsdk-data")
    load.helpers = [pool] * (num - 1)
    # One that is done early begins another while the first is awaited.
    most = 1 if threads.num in (None, 1) else num + 1
    ahead = deque(_begun(pool, load, job) for job in islice(jobs, most))
    return _ahead(load, jobs, pool, ahead)


def _threads_of_arrow() -> int:
    from pyarrow import cpu_count  # what reads files has it

    num: int = cpu_count()
    return num


def _put_down(load: _Loader, job: _Job) -> list[LoadedWindow]:
    """A window to be taken out: the thread that loaded it may hold what it returns a little longer
    than who uses the window up."""
    return [load(job)]


def _begun(pool: Executor, load: _Loader, job: _Job) -> Future[list[LoadedWindow]]:
    """If it is cancelled, the window that comes after it ends too: else it would wait for ever."""

    def tell(loading: Future[list[LoadedWindow]]) -> None:
        if loading.cancelled():
            job.after.cancel()

    loading = pool.submit(_put_down, load, job)
    loading.add_done_callback(tell)
    return loading


def _ahead(
    load: _Loader,
    jobs: Iterator[_Job],
    pool: Executor,
    ahead: deque[Future[list[LoadedWindow]]],
) -> Iterator[LoadedWindow]:
    """What the jobs load. Those in `ahead` are under way, and as many always are."""
    is_exiting = sys.is_finalizing  # held, for modules are emptied then
    try:
        while ahead:
            first = ahead.popleft()
            # Who asks has used its window up, so that there is room to read another meanwhile.
            ahead.extend(_begun(pool, load, job) for job in islice(jobs, 1))
            yield first.result().pop()
    finally:
        # Without waiting: an iterator left behind may be collected inside threading's locks.
        if not is_exiting():
            for loading in reversed(ahead):
                loading.cancel()
            pool.shutdown(wait=False)


@dataclass(frozen=True)
class _Place:
    """Where reading stands when the rows of a window are in memory."""

    begun: int
    """Rows of a batch that the windows so far have begun."""
    reader: Read | None
    """For a window that goes on where this one ended."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A window, between the one before it and the one after it."""

    window: Window
    goes_on: bool
    """Whether it is best read by the reader of the window before it."""
    is_followed: bool
    """Whether the next one goes on so."""
    before: Future[_Place]
    after: Future[_Place]


def _jobs(windows: Sequence[Window], groups: Sequence[Group]) -> Iterator[_Job]:
    goes_on = [False, *(_goes_on(*pair, groups) for pair in pairwise(windows)), False]
    before: Future[_Place] = Future()
    before.set_result(_Place(0, None))
    for window, (this, following) in zip(windows, pairwise(goes_on), strict=False):
        after: Future[_Place] = Future()
        yield _Job(window=window, goes_on=this, is_followed=following, before=before, after=after)
        before = after


def _goes_on(before: Window, after: Window, groups: Sequence[Group]) -> bool:
    """Whether a window begins in the row group or the packed file in which another one ends."""
    last, first = before.pieces[-1].group, after.pieces[0].group
    run = groups[first].run
    return first == last or (run is not None and groups[last].run == run)


class _Loader:
    """Reads windows. Each of its threads begins with the first window that none has begun."""

    def __init__(self, source: MakesReaders, plan: Plan, batch_size: int, threads: Threads) -> None:
        self._source, self._plan, self._batch_size = source, plan, batch_size
        self._threads = threads
        self.helpers: Sequence[Executor] = ()
        """What has a thread to help with a window, for each that may."""
        self._placing = Lock() if threads.num is None else nullcontext()
        """Held for memory's sake: one window is put in place while another is read."""
        self._spare: dict[bool, list[Read]] = {False: [], True: []}
        """Readers that no thread uses, with the files that they have open."""

    def __call__(self, job: _Job) -> LoadedWindow:
        try:
            if self._threads.num is None:
                job.before.result()  # what has all threads goes first
            parts, bad, reader = self._read(job)
            size = sum(map(len, parts))
            start = min(job.window.skip, size)
            begun = job.before.result().begun
        except BaseException as error:
            job.after.set_exception(error)
            raise
        job.after.set_result(_Place((begun + size - start) % self._batch_size, reader))
        if start == size:
            return LoadedWindow((), start, size, bad)
        order = self._plan.shuffled(job.window, size) if self._plan.shuffle else None
        ends = [start, *range(start + self._batch_size - begun, size, self._batch_size), size]
        with self._placing:
            placing = Placing(parts, order, ends)
            self._make(placing.calls())
            parts.clear()
        return LoadedWindow(placing.found(), start, size, bad)

    def _make(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make the calls, together with threads that have nothing else to do."""
        shared = SharedCalls(calls)
        for _, helper in zip(calls[1:], self.helpers, strict=False):
            helper.submit(shared.help)
        shared.finish()

    def _read(self, job: _Job) -> tuple[list[Rows], list[BadLine], Read | None]:
        """Its rows, what was wrong with others, and the reader for the next window."""
        helped = self._threads.may_help(job)
        if helped and self._is_of_small_pieces(job):
            return *self._read_together(job.window.pieces), None
        reader = job.before.result().reader if job.goes_on else None
        reader = reader or self._spare_reader(helped)
        parts: list[Rows] = []
        bad: list[BadLine] = []
        for piece in job.window.pieces:
            for rows, errors in reader(piece):
                parts.append(rows)
                bad += errors
        if job.is_followed:
            return parts, bad, reader
        self._spare[helped].append(reader)
        return parts, bad, None

    def _is_of_small_pieces(self, job: _Job) -> bool:
        goes_over = job.goes_on or job.is_followed
        return not goes_over and all(map(self._source.is_small, job.window.pieces))

    def _read_together(self, pieces: Sequence[Piece]) -> tuple[list[Rows], list[BadLine]]:
        """What is in the pieces, each of which is read by any thread that has time."""
        found: list[list[Loaded]] = [[] for _ in pieces]
        self._make([partial(self._read_one, *each) for each in zip(pieces, found, strict=True)])
        loaded = list(chain.from_iterable(found))
        return [rows for rows, _ in loaded], [error for _, errors in loaded for error in errors]

    def _read_one(self, piece: Piece, found: list[Loaded]) -> None:
        reader = self._spare_reader(False)
        found += reader(piece)
        self._spare[False].append(reader)

    def _spare_reader(self, helped: bool) -> Read:
        try:
            return self._spare[helped].pop()
        except IndexError:  # asked first, another thread could come between
            return self._source.reader(threads=helped)
