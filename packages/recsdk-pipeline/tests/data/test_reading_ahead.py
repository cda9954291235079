"""One window is read while another is put in place, and three are held at most."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_support import parquet

from recsdk_pipeline.data import BadLines, ParquetData, packed, window_reading
from recsdk_pipeline.data.dealing import Group, Piece, Plan, Window
from recsdk_pipeline.data.packed import Packed, Placing
from recsdk_pipeline.data.rows import Bags, Rows, joined
from recsdk_pipeline.data.window_reading import LoadedWindow, Threads, loaded_windows


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_reading, "_threads_of_arrow", lambda: 3)


def read(source: str, **options: Any) -> tuple[list[Any], list[Any]]:
    """Batches with the states after them, and the numbers of the bad rows."""
    bad = BadLines(limit=10**6)
    data = ParquetData(source, ids=["id"], labels="label", batch_size=7, bad=bad, **options)
    batches = [(b.sparse.values().tolist(), b.labels.tolist(), data.state_dict()) for b in data]
    return batches, [bad.count, bad.first]


@settings(deadline=None)
@given(
    files=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    window_bytes=st.sampled_from([64, 500, 10**6]),
    shuffle=st.booleans(),
)
def test_batches_states_and_bad_rows_are_those_of_one_thread(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    window_bytes: int,
    shuffle: bool,
) -> None:
    num_rows = sum(map(sum, files))
    labels = [None if row % 5 == 3 else float(row) for row in range(num_rows)]
    columns = {"id": pa.array(range(num_rows)), "label": pa.array(labels, pa.float32())}
    source = parquet.write(tmp_path_factory.mktemp("files") / "a", columns, files)
    options = {"window_bytes": window_bytes, "shuffle": shuffle}
    assert read(source, **options) == read(source, **options, num_threads=1)


class Source:
    """Row groups of 32,768 rows, as `ParquetData` has them."""

    NUM_ROWS = 1 << 15

    def __init__(self) -> None:
        self.read: list[weakref.ref[Any]] = []
        self.begun: list[int] = []
        self.watch: Any = lambda piece: None
        self.are_small = False

    def is_small(self, piece: Piece) -> bool:
        return self.are_small

    def reader(self, *, threads: bool) -> Any:
        def read(piece: Piece) -> Iterator[Any]:
            self.begun.append(piece.group)
            self.watch(piece)
            ids = np.arange(piece.start, piece.stop) + piece.group * self.NUM_ROWS
            self.read.append(weakref.ref(ids))
            empty = np.zeros((len(ids), 0), np.float32)
            yield Rows(np.zeros((len(ids), 1), np.float32), empty, {"id": Bags(ids)}), []

        return read

    def windows(self, num: int) -> tuple[Plan, list[Window]]:
        groups = (Group(rows=self.NUM_ROWS, bytes=8 * self.NUM_ROWS),) * num
        plan = Plan(groups=groups, window_bytes=1, seed=0, epoch=0, shuffle=True)
        return plan, [Window((Piece(number, 0, self.NUM_ROWS),)) for number in range(num)]


ALL_THREADS = Threads(num=None, is_worker=False)


def test_who_waits_has_the_next_window_begun() -> None:
    source = Source()
    second_is_begun = threading.Event()
    found = loaded_windows(source, *source.windows(4), 100, ALL_THREADS)
    fill = Packed.empty

    def slowly(*given: Any) -> Any:
        assert second_is_begun.wait(60)
        return fill(*given)

    source.watch = lambda piece: piece.group == 1 and second_is_begun.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packed, "empty", slowly)
        next(found)
    assert len(source.begun) < 4


class ByHand(Executor):
    """Runs nothing by itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.submitted: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Any, /, *given: Any, **named: Any) -> Future[Any]:
        self.submitted.append((Future(), partial(call, *given, **named)))
        return self.submitted[-1][0]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future, _ in self.submitted if cancel_futures else ():
            future.cancel()


def test_a_window_under_way_ends_where_the_one_before_it_will_never_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a thread takes it while whoever left the iterator takes back what is queued."""
    pool = ByHand()
    monkeypatch.setattr(window_reading, "ThreadPoolExecutor", lambda *_, **__: pool)
    source = Source()
    found: Any = loaded_windows(source, *source.windows(6), 100, Threads(num=3, is_worker=False))
    (first, load), _, (third, load_third), *_ = pool.submitted
    first.set_result(load())
    next(found)
    assert third.set_running_or_notify_cancel()
    found.close()
    ended: list[BaseException] = []

    def run() -> None:
        try:
            load_third()
        except CancelledError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert len(ended) == 1
    assert all(each.cancelled() for each, _ in pool.submitted if each not in (first, third))


def test_small_pieces_of_a_window_are_read_together_and_follow_each_other() -> None:
    source = Source()
    source.are_small = True
    plan, windows = source.windows(4)
    whole = [Window(tuple(each.pieces[0] for each in windows))]
    two_read = threading.Barrier(2)
    source.watch = lambda piece: two_read.wait(60)
    plan = replace(plan, shuffle=False)
    (found,) = loaded_windows(source, plan, whole, 100, ALL_THREADS)
    ids = [stretch.ids[0] for stretch in found.stretches if isinstance(stretch, Packed)]
    assert np.array_equal(np.concatenate(ids), np.arange(4 * source.NUM_ROWS))

    def fail(piece: Piece) -> None:
        if piece.group == 2:
            raise OSError("cut off")

    source.watch = fail
    with pytest.raises(OSError, match="cut off"):
        next(loaded_windows(source, plan, whole, 100, ALL_THREADS))


@pytest.mark.parametrize("_", range(3))
def test_no_more_than_three_windows_are_held(_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    placed: list[weakref.ref[Any]] = []
    empty = Packed.empty
    held: list[int] = []

    def look(_: Any = None) -> None:
        alive = [each() for each in [*source.read, *placed]]
        held.append(sum(each.nbytes for each in alive if each is not None))

    def made(*given: Any) -> Packed:
        found = empty(*given)
        placed.append(weakref.ref(found.memory))
        look()
        return found

    monkeypatch.setattr(Packed, "empty", made)
    source.watch = look
    batch_size = source.NUM_ROWS // 8
    for window in loaded_windows(source, *source.windows(20), batch_size, ALL_THREADS):
        del window
    bytes_of_window = 12 * source.NUM_ROWS  # of which the labels are read beside the ids
    assert max(held) <= 3 * bytes_of_window
    assert len(source.begun) == 20


def test_a_window_that_is_used_up_is_let_go_though_who_read_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    set_result = Future.set_result

    def slowly(future: Future[Any], result: Any) -> None:
        set_result(future, result)
        if isinstance(result, LoadedWindow | list):
            assert may_go_on.wait(60)

    monkeypatch.setattr(Future, "set_result", slowly)
    source = Source()
    found = loaded_windows(source, *source.windows(2), 100, ALL_THREADS)
    memories = [weakref.ref(stretch.memory) for stretch in next(found).stretches]  # type: ignore[union-attr]
    next(found)
    held = [memory() is not None for memory in memories]
    may_go_on.set()
    assert held
    assert not any(held)


def test_rows_that_wait_for_the_next_window_do_not_hold_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wholes: list[weakref.ref[Any]] = []

    def owned(*given: Any) -> Rows:
        """As `joined`, with ids that are no view, so that one can see when they go."""
        whole = joined(*given)
        ids = np.array(whole.bags["id"].values)
        wholes.append(weakref.ref(ids))
        return replace(whole, bags={"id": replace(whole.bags["id"], values=ids)})

    monkeypatch.setattr(packed, "joined", owned)
    rows = Rows(
        np.zeros((10, 1), np.float32),
        np.zeros((10, 0), np.float32),
        {"id": Bags(np.arange(20), np.arange(0, 22, 2))},
    )
    placing = Placing([rows], None, [0, 4, 8, 10])
    for call in placing.calls():
        call()
    last = placing.found()[-1]
    assert isinstance(last, Rows)
    assert last.bags["id"].values.tolist() == [16, 17, 18, 19]
    del placing, call
    assert [whole() for whole in wholes] == [None]
