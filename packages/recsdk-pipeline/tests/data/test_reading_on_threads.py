"""Threads that read windows at once give the batches and states of one, in its order."""

from __future__ import annotations

import gzip
import itertools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_support import parquet
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from recsdk_pipeline.data import (
    BadLine,
    BadLines,
    CriteoData,
    FileData,
    IdColumn,
    MovieLensData,
    ParquetData,
    packed,
)
from recsdk_pipeline.data.dealing import Piece
from recsdk_pipeline.data.packed import Placing
from recsdk_pipeline.data.parquet_files import Reader

WINDOW = 3200
"""Bytes: a hundred rows of these files."""


def columns_of(num_rows: int) -> dict[str, Any]:
    """A seventh of the rows is malformed."""
    ids = range(num_rows)
    return {
        "id": pa.array(ids, pa.int64()),
        "bag": pa.array([[i] * (i % 3) for i in ids], pa.list_(pa.int64())),
        "age": pa.array([i / 8 for i in ids], pa.float32()),
        "label": pa.array([None if i % 7 == 5 else 1.0 for i in ids], pa.float32()),
    }


def data_of(source: str, **options: Any) -> ParquetData:
    given = {"ids": ["id"], "labels": "label", "batch_size": 5, "bad": BadLines(limit=10**6)}
    return ParquetData(source, **{**given, **options})


def good_files(folder: Path, row_groups: list[int]) -> str:
    columns = columns_of(sum(row_groups))
    columns["label"] = pa.array([1.0] * sum(row_groups), pa.float32())
    return parquet.write(folder, columns, [row_groups])


def plain(batch: Any) -> list[Any]:
    sparse = batch.sparse
    tensors = (batch.dense, batch.labels, sparse.values(), sparse.lengths())
    return [sparse.keys(), *(each.tolist() for each in tensors)]


def read(data: FileData, most: int | None = None) -> list[Any]:
    """Each batch, and the state after it."""
    return [(plain(batch), data.state_dict()) for batch in itertools.islice(data, most)]


@settings(max_examples=2 * settings().max_examples)
@given(
    row_groups=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    window_bytes=st.sampled_from([1, 200, 600, 10**6]),
    batch_size=st.integers(1, 17),
    shuffle=st.booleans(),
    where=st.sampled_from([None, 3, 20]),
    has_bags=st.booleans(),
    num_threads=st.integers(1, 4),
    is_worker=st.booleans(),
    stop=st.integers(0, 9),
)
def test_batches_and_states_are_those_of_one_reader(
    row_groups: list[int],
    window_bytes: int,
    batch_size: int,
    shuffle: bool,
    where: int | None,
    has_bags: bool,
    num_threads: int,
    is_worker: bool,
    stop: int,
) -> None:
    options = {
        "ids": ["id", "bag"] if has_bags else ["id"],
        "dense": ["age"],
        "window_bytes": window_bytes,
        "batch_size": batch_size,
        "shuffle": shuffle,
        "where": None if where is None else ds.field("id") >= where,
    }
    with tempfile.TemporaryDirectory() as folder:
        source = parquet.write(Path(folder), columns_of(sum(row_groups)), [row_groups])
        begun = data_of(source, **options)
        before, state = read(begun, stop), begun.state_dict()
        rest = read(begun_at(data_of(source, **options), state))
        threads = data_of(source, **options, num_threads=num_threads)
        if not is_worker:
            assert read(threads, stop) == before
            assert read(begun_at(threads, state)) == rest
            return
        with parquet.as_worker(0, 1):
            assert read(threads, stop) == before
            assert read(begun_at(threads, state)) == rest


def begun_at(data: FileData, state: dict[str, Any]) -> FileData:
    data.load_state_dict(state)
    return data


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_text_too(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    lines = [
        "\t".join([str(n % 2), str(n), *[""] * 12, f"{n:x}", *["0a1b2c3d"] * 25])
        for n in range(400)
    ]
    lines[123] = "no click"
    for number in range(3):
        (tmp_path / str(number)).write_bytes(pack("\n".join(lines).encode()))
    files = [tmp_path / str(number) for number in range(3)]

    def data(**more: Any) -> FileData:
        bad = BadLines(limit=9)
        return CriteoData(files, batch_size=7, window_bytes=20_000, bad=bad, **more)

    found = read(data())
    assert len(found) == 1197 // 7
    assert read(data(num_threads=3)) == found


def test_ratings_too(tmp_path: Path) -> None:
    flags = "|".join(["0"] * 18 + ["1"])
    (tmp_path / "u.user").write_text("1|30|M|writer|12345\n")
    (tmp_path / "u.item").write_text(f"1|Film|01-Jan-1995||x|{flags}\n")
    (tmp_path / "u.data").write_text("".join(f"1\t1\t{n % 5 + 1}\t{n}\n" for n in range(500)))
    found = read(MovieLensData(tmp_path, batch_size=7, window_bytes=900))
    assert read(MovieLensData(tmp_path, batch_size=7, window_bytes=900, num_threads=2)) == found


def watched(
    monkeypatch: pytest.MonkeyPatch, data: FileData, watch: Callable[[Piece], None]
) -> None:
    """Has `watch` called with each piece before it is read."""
    source = type(data._source)
    reader = source.reader

    def watching(self: Any, *, threads: bool) -> Callable[[Piece], Any]:
        read = reader(self, threads=threads)

        def call(piece: Piece) -> Any:
            watch(piece)
            return read(piece)

        return call

    monkeypatch.setattr(source, "reader", watching)


@pytest.mark.parametrize("num", [2, 4])
def test_so_many_windows_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    data = data_of(good_files(tmp_path, [100] * 8), window_bytes=WINDOW, num_threads=num)
    meeting = threading.Barrier(num, timeout=60)
    watched(monkeypatch, data, lambda _: meeting.wait() and None)
    assert sum(len(batch) for batch in data) == 800


def test_a_thread_that_is_done_early_begins_another_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"window_bytes": WINDOW, "shuffle": False, "num_threads": 2}
    data = data_of(good_files(tmp_path, [100] * 5), **options)
    third_is_begun = threading.Event()
    make = Placing.calls

    def slowly(self: Placing) -> Any:
        is_first = self._parts[0].bags["id"].values[0] == 0
        assert not is_first or third_is_begun.wait(60)
        return make(self)

    monkeypatch.setattr(Placing, "calls", slowly)
    watched(monkeypatch, data, lambda piece: piece.group == 2 and third_is_begun.set())
    assert sum(len(batch) for batch in data) == 500


def test_threads_without_a_window_help_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2, timeout=60)
    fill = Placing._fill
    monkeypatch.setattr(packed, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(Placing, "_fill", lambda *given: (fill(*given), meeting.wait())[0])
    data = data_of(
        good_files(tmp_path, [100]), ids=["id", IdColumn(name="id_too", column="id")], num_threads=2
    )
    assert sum(len(batch) for batch in data) == 100  # of four columns, two at a time


def test_windows_of_one_row_group_decode_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    begin = Reader._begin
    monkeypatch.setattr(Reader, "_begin", lambda self, piece: begun.append(begin(self, piece)))
    data = data_of(good_files(tmp_path, [700, 650]), window_bytes=WINDOW, num_threads=3)
    assert sum(len(batch) for batch in data) == 1350
    assert len(begun) == 2


def test_the_first_error_in_order_is_raised_and_ends_the_iterator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"window_bytes": WINDOW, "shuffle": False, "num_threads": 3}
    data = data_of(good_files(tmp_path, [100] * 6), **options)
    last_failed = threading.Event()

    def fail(piece: Piece) -> None:
        if piece.group == 3:
            last_failed.set()
            raise OSError("the third")
        if piece.group == 2:
            assert last_failed.wait(60)
            raise OSError("the second")

    watched(monkeypatch, data, fail)
    batches: Any = iter(data)
    assert [len(next(batches)) for _ in range(40)] == [5] * 40
    with pytest.raises(OSError, match="the second"):
        next(batches)
    assert next(batches, None) is None
    monkeypatch.undo()
    assert sum(len(batch) for batch in begun_at(data, data.state_dict())) == 400


def test_a_malformed_row_is_raised_where_it_stands(tmp_path: Path) -> None:
    source = parquet.write(tmp_path, columns_of(60), [[10] * 6])
    data = data_of(source, bad=BadLines(limit=4), shuffle=False, window_bytes=1, num_threads=3)
    with pytest.raises(BadLine) as raised:
        list(data)
    assert raised.value.line == 33


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_in_workers_too(tmp_path: Path, kind: type[DataLoader[Any]]) -> None:
    source = good_files(tmp_path, [100] * 8)

    def batches(num_threads: int | None) -> list[Any]:
        data = data_of(source, window_bytes=WINDOW, num_threads=num_threads)
        return [plain(each) for each in kind(data, batch_size=None, num_workers=2)]

    assert batches(2) == batches(None)


def test_an_iterator_that_is_left_stops_its_threads(tmp_path: Path) -> None:
    data = data_of(good_files(tmp_path, [100] * 8), window_bytes=WINDOW, num_threads=3)
    others = set(threading.enumerate())  # of iterators that errors of other tests still hold
    batches: Any = iter(data)
    next(batches)
    del batches
    ours = set(threading.enumerate()) - others
    for each in ours:
        each.join(60)
    assert not any(each.is_alive() for each in ours)


def test_numbers_of_one_batch_are_not_those_of_another(tmp_path: Path) -> None:
    data = data_of(good_files(tmp_path, [100] * 8), window_bytes=WINDOW, num_threads=4)
    held = list(data)
    ids = torch.cat([batch.sparse["id"].values() for batch in held])
    assert sorted(ids.tolist()) == list(range(800))


@pytest.mark.parametrize(
    ("num_threads", "kind", "message"),
    [
        (0, ValueError, "num_threads must be at least 1, got 0"),
        (2.5, TypeError, "num_threads must be an int, got 2.5"),
        (True, TypeError, "num_threads must be an int, got True"),
        ("2", TypeError, "num_threads must be an int, got '2'"),
    ],
)
def test_what_is_no_number_of_threads_is_refused(
    tmp_path: Path, num_threads: Any, kind: type[Exception], message: str
) -> None:
    (tmp_path / "clicks").write_text("")
    with pytest.raises(kind, match=message):
        CriteoData(str(tmp_path / "clicks"), batch_size=np.int64(2), num_threads=num_threads)
