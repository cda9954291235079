"""Checkpoints that another save replaces while they are read: one of them is read, whole."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import CheckpointError, Table
from recsdk_core.checkpoint import Sharding, compact, open_checkpoint, reshard
from recsdk_core.checkpoint.fsspec_store import FsspecStore
from recsdk_core.checkpoint.local_store import LocalStore
from recsdk_core.checkpoint.model.loading import Loading, load_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import MOST_READS, CountedOnce
from recsdk_core.cli import main
from recsdk_core.serving import ServingTable, freeze

KEYS = np.arange(100)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place of each kind of store."""
    yield str(tmp_path / "one") if request.param == "local" else f"memory://{uuid.uuid4().hex}/one"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Saver:
    """Saves to one place tables whose rows and user state all are the number of the save."""

    def __init__(self, path: str) -> None:
        self._path, self.number, self._lock = path, -1, threading.Lock()
        self.save()

    def save(self) -> None:
        with self._lock:
            self._save()

    def _save(self) -> None:
        self.number += 1
        table = Table(dim=2, name="user")
        table.upsert(KEYS, np.full((100, 2), self.number, np.float32))
        state = {"number": self.number, "array": np.full(3, self.number)}
        table.save(self._path, overwrite=True, step=self.number, user_state=state)


@contextmanager
def replacing(times: int, replace: Callable[[], None], end: str) -> Iterator[None]:
    """Replaces what is there just before a file whose name ends so is opened, so many times."""
    left = times
    opens = [(kind, kind.open) for kind in (LocalStore, FsspecStore)]

    def patched(open_: Any) -> Any:
        def call(store: Any, path: str) -> Any:
            nonlocal left
            if left and path.endswith(end):
                left -= 1
                replace()
            return open_(store, path)

        return call

    for kind, open_ in opens:
        kind.open = patched(open_)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, open_ in opens:
            kind.open = open_  # type: ignore[method-assign]


def number_in(table: Any) -> int:
    """The save whose rows a table has, all of them."""
    rows = table.lookup(KEYS)
    assert (rows == rows[0, 0]).all()
    return int(rows[0, 0])


ROWS, USER = ".rows", ".bin"


@pytest.mark.parametrize("times", [1, MOST_READS - 1])
@pytest.mark.parametrize("end", [ROWS, USER])
def test_a_load_reads_what_is_there_then(place: str, times: int, end: str) -> None:
    saver, table = Saver(place), Table(dim=2, name="user")
    with replacing(times, saver.save, end):
        found = table.load(place)
    assert number_in(table) == saver.number == times
    assert found.manifest.step == found.user_state()["number"] == times
    assert table.position is not None
    assert table.position.hash == found.hash


def test_a_checkpoint_that_is_always_replaced_is_refused_by_name(place: str) -> None:
    saver, table = Saver(place), Table(dim=2, name="user")
    before = table.find_or_insert(KEYS)
    with (
        replacing(MOST_READS, saver.save, ROWS),
        pytest.raises(CheckpointError, match="replaced or removed while it was read .*; read it "
                      "again, and save to a path of its own"),
    ):  # fmt: skip
        table.load(place)
    assert (table.lookup(KEYS) == before).all()
    assert table.position is None
    table.load(place)
    assert number_in(table) == MOST_READS


def test_a_checkpoint_that_goes_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    saver = Saver(path)
    [rows] = tmp_path.glob("one/*/**/*.rows")
    opened = open_checkpoint(path)
    rows.unlink()
    with pytest.raises(CheckpointError, match=r"rows: opening failed: No such file"):
        opened.verify()
    saver.save()
    with pytest.raises(CheckpointError, match="replaced or removed while it was read"):
        opened.verify()
    opened = open_checkpoint(path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="replaced or removed while it was read"):
        opened.user_state()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Table(dim=2, name="user").load(path)


@pytest.mark.parametrize("times", [1, MOST_READS - 1, MOST_READS])
@pytest.mark.parametrize("end", [ROWS, USER])
def test_all_ranks_read_the_same(place: str, times: int, end: str) -> None:
    saver = Saver(place)
    tables = [Table(dim=2, name="user"), Table(dim=2, name="user")]
    errors: list[Exception] = []
    told = [0, 0]
    ranks = TwoRanks()

    def load(rank: int) -> None:
        shard = Shard(table=tables[rank], owner=Owner(rank, 2, Sharding()))
        try:
            load_tables(lambda: ([shard], Loading(may_lack=True)), ranks.of(rank), place)
        except CheckpointError as error:
            errors.append(error)
        told[rank] = len(tables[rank])

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(2)]
    with replacing(times, saver.save, end):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if times == MOST_READS and end == USER:  # rank 0 alone reads the user's
        assert len(errors) == 2
        assert told == [0, 0]
        assert any("rank 0 failed, so no rank went on" in str(error) for error in errors)
        return
    if errors:  # both may be replaced in one read, or each in its own
        assert len(errors) == 2
        assert told == [0, 0]
        assert times == MOST_READS
        return
    assert sum(told) == 100
    for table in tables:
        kept = table.lookup(KEYS, return_outcomes=True)
        assert (kept[0][kept[1] == 0] == saver.number).all()


class TwoRanks:
    """Two threads that exchange values."""

    def __init__(self) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2)

    def of(self, number: int) -> Any:
        ranks = self

        class Rank:
            rank, world_size = number, 2

            def gather(self, value: Any) -> list[Any]:
                ranks._values[number] = value
                ranks._barrier.wait(60)
                found = list(ranks._values)
                ranks._barrier.wait(60)
                return found

        return Rank()


@pytest.mark.parametrize("work", ["compact", "reshard", "freeze", "verify"])
def test_what_reads_all_reads_again(tmp_path: Path, work: str) -> None:
    path, target = str(tmp_path / "one"), str(tmp_path / "made")
    saver = Saver(path)
    with replacing(2, saver.save, ROWS):
        if work == "verify":
            ran = CliRunner().invoke(main, ["ckpt", "verify", path])
            assert (ran.exit_code, ran.output.count("are intact")) == (0, 1)
            return
        made = {"compact": compact, "freeze": freeze}.get(work)
        made(path, target) if made else reshard(path, target, world_size=2)
    if work == "freeze":
        assert number_in(ServingTable(target)) == 2
        return
    table = Table(dim=2, name="user")
    found = table.load(target)
    assert number_in(table) == found.user_state()["number"] == 2


@pytest.mark.parametrize("work", ["compact", "reshard", "freeze", "load"])
def test_bytes_that_are_read_again_are_counted_once(tmp_path: Path, work: str) -> None:
    path, target = str(tmp_path / "one"), str(tmp_path / "made")
    saver = Saver(str(tmp_path / "whole"))

    def replace() -> None:
        saver.save()
        reshard(tmp_path / "whole", path, world_size=3, overwrite=True)

    replace()
    told: list[int] = []
    with replacing(3, replace, "00002.rows"):
        if work == "load":
            shards = [Shard(table=Table(dim=2, name="user"))]
            load_tables(lambda: (shards, Loading(progress=told.append)), OneRank(), path)
        elif work == "reshard":
            reshard(path, target, world_size=1, progress=told.append)
        else:
            {"compact": compact, "freeze": freeze}[work](path, target, progress=told.append)
    [entry] = open_checkpoint(path).manifest.tables
    assert sum(told) == entry.num_bytes
    assert min(told) > 0


@given(st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=4))
@example([[3, 3], [4, 4]])
def test_bytes_are_counted_once_in_whatever_pieces_they_come_again(reads: list[list[int]]) -> None:
    told: list[int] = []
    once = CountedOnce(told.append)
    for sizes in reads:
        count = once.begin()
        assert count is not None
        for size in sizes:
            count(size)
    assert sum(told) == max(map(sum, reads), default=0)
    assert min(told, default=1) > 0


@pytest.mark.parametrize("work", ["compact", "reshard", "export"])
def test_a_command_begins_anew_as_often_as_a_call(tmp_path: Path, work: str) -> None:
    path, target = str(tmp_path / "one"), str(tmp_path / "made.parquet")
    saver = Saver(path)
    options = ["--world-size", "2"] if work == "reshard" else []
    with replacing(10**6, saver.save, ROWS):
        ran = CliRunner().invoke(main, ["ckpt", work, path, target, *options])
    assert (ran.exit_code, ran.output.count("replaced or removed while it was read")) == (1, 1)
    assert saver.number == MOST_READS
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one"]


def test_a_frozen_table_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = str(tmp_path / "one"), str(tmp_path / "frozen")
    saver = Saver(path)
    freeze(path, target)
    stat = Path.stat

    def replaced(self: Path, **how: Any) -> Any:
        if self.name.endswith(".frozen"):
            monkeypatch.setattr(Path, "stat", stat)
            saver.save()
            freeze(path, target, overwrite=True)
        return stat(self, **how)

    monkeypatch.setattr(Path, "stat", replaced)
    assert number_in(ServingTable(target)) == 1
