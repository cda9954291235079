"""Two that write to one place, with locks and without: what is there is of one of them, whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Stepped, stepping

from recsdk_core import Table
from recsdk_core.checkpoint import chain_of, reshard
from recsdk_core.checkpoint.merging import merged_rows
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.checkpoint.tabular import FORMATS, export_table, read_arrays
from recsdk_core.files import whole_file
from recsdk_core.serving import freeze, open_tables

NAMES = ("a", "b")
KEYS = np.arange(8)
IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
Turns = list[tuple[int, int]]
"""Whose turn it is, and for how many operations."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of two tables in three files each, whose numbers all are that of the source."""
    return [make_source(tmp_path_factory.mktemp("source"), number) for number in range(4)]


def make_source(folder: Path, number: int) -> Path:
    tables = [Table(dim=2, name=name) for name in NAMES]
    for table in tables:
        table.upsert(KEYS, np.full((len(KEYS), 2), number, np.float32))
    shards = [Shard(table=table) for table in tables]
    save_tables(lambda: (shards, SaveOptions()), OneRank(), folder / "one")
    reshard(folder / "one", folder / "three", world_size=3)
    return folder / "three"


def make(work: str, source: Path, target: Path) -> object:
    if work == "freeze":
        return freeze(source, target, overwrite=True, num_shards=2)
    if work == "reshard":
        return reshard(source, target, world_size=2, overwrite=True)
    return export_table(chain_of(source), "a", target, work)


def found_at(work: str, target: Path) -> int | None:
    """The number of what is there, in every row; None if nothing is. Half of one would raise."""
    if not target.exists():
        return None
    if work in FORMATS:
        arrays = read_arrays(target)
        assert sorted(arrays["key"]) == KEYS.tolist()
        values = arrays["weight"]
    elif work == "freeze":
        opened = open_tables(target)
        values = np.concatenate([opened[name].lookup(KEYS) for name in NAMES])
    else:
        chain = chain_of(target)
        every = [rows for name in NAMES for rows in merged_rows(chain, name)]
        values = np.concatenate([rows.fields["weight"] for rows in every])
        assert len(values) == 2 * len(KEYS)
    assert (values == values[0, 0]).all()
    return int(values[0, 0])


@contextmanager
def place_for(work: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder / f"made.{work}"
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("work", ["freeze", "safetensors"])
def test_what_another_has_written_meanwhile_is_not_removed(sources: list[Path], work: str) -> None:
    """Without locks, wherever the first stops."""
    number, is_over = 0, False
    while not is_over:
        with place_for(work) as target, stepping(has_locks=False):
            first, second = (Stepped(partial(make, work, sources[i], target)) for i in range(2))
            for _ in range(number):
                if not first.is_done:
                    first.step()
            is_over = first.is_done
            while not second.is_done:
                second.step()
            while not first.is_done:
                first.step()
                if first.has_changed:
                    assert found_at(work, target) in (0, 1)
            won = [i for i, writer in enumerate((first, second)) if writer.error is None]
            assert found_at(work, target) in won
            assert work == "freeze" or len(won) == 1
        number += 1 if IS_FULL else 2


def refused(number: int) -> Any:
    """A call of the system that always fails."""

    def call(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("lacks", ["links", "leave to list", "leave to read"])
def test_an_export_needs_no_more_than_to_make_files(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    with place_for("parquet") as target:
        if lacks == "links":
            monkeypatch.setattr(os, "link", refused(errno.EPERM))
        elif lacks == "leave to list":
            monkeypatch.setattr(os, "listdir", refused(errno.EACCES))
        else:
            sync = whole_file._sync
            monkeypatch.setattr(
                whole_file,
                "_sync",
                lambda path: (refused(errno.EACCES) if path.is_dir() else sync)(path),
            )
        assert make("parquet", sources[0], target) == len(KEYS)
        monkeypatch.undo()
        assert found_at("parquet", target) == 0
        assert os.listdir(target.parent) == [target.name]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="has no /dev/shm to write to")
def test_a_file_in_shared_memory_is_a_file() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "one")
        path.write_text("old")
        with pytest.raises(FileExistsError, match="exists already; choose another path"):
            whole_file.refuse_taken(path, overwrite=False, advice="remove it")
        with whole_file.written_whole(path, overwrite=True) as partial_path:
            partial_path.write_text("new")
        assert path.read_text() == "new"


def test_an_export_says_so_if_its_place_was_taken_for_an_instant(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with place_for("parquet") as target:
        monkeypatch.setattr(os, "link", refused(errno.EEXIST))
        with pytest.raises(FileExistsError, match="exists already"):
            make("parquet", sources[0], target)
        assert not os.listdir(target.parent)


def test_an_export_knows_its_file_where_a_link_is_asked_for_twice(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a network that lost the first answer."""
    link = os.link
    with place_for("parquet") as target:
        monkeypatch.setattr(os, "link", lambda *names: (link(*names), link(*names)))
        assert make("parquet", sources[1], target) == len(KEYS)
        assert found_at("parquet", target) == 1


def test_an_export_that_is_interrupted_as_it_has_its_lock_blocks_no_later_one(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the exception is held."""
    take = whole_file.lock_place

    def interrupted(*given: Any) -> None:
        taken.append(take(*given))
        raise KeyboardInterrupt

    taken: list[Any] = []
    with place_for("parquet") as target:
        monkeypatch.setattr(whole_file, "lock_place", interrupted)
        with pytest.raises(KeyboardInterrupt) as held:
            make("parquet", sources[0], target)
        monkeypatch.undo()
        assert not os.listdir(target.parent)
        assert make("parquet", sources[1], target) == len(KEYS)
        assert found_at("parquet", target) == 1
        assert held.value is not None
        assert taken[0] is not None


@pytest.mark.parametrize("work", ["freeze", "reshard", *FORMATS])
@settings(max_examples=100 if IS_FULL else 8)
@given(
    has_locks=st.booleans(),
    has_old=st.booleans(),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80)), max_size=16),
    killed=st.none() | st.integers(0, 2),
)
def test_what_is_there_is_of_one_of_them_whole(
    sources: list[Path],
    work: str,
    has_locks: bool,
    has_old: bool,
    turns: Turns,
    killed: int | None,
) -> None:
    """Each writes another source. Turns come to an end with one of them killed, then all go on."""
    old = 3 if has_old and work not in FORMATS else None
    with place_for(work) as target, stepping(has_locks=has_locks):
        if old is not None:
            make(work, sources[old], target)
        writers = [Stepped(partial(make, work, sources[i], target)) for i in range(3)]

        def step(number: int) -> None:
            if not writers[number].is_done:
                writers[number].step()
                if writers[number].has_changed:
                    assert found_at(work, target) in {old, 0, 1, 2}

        for number, count in turns:
            for _ in range(count):
                step(number)
        if killed is not None and not writers[killed].is_done:
            writers[killed].kill()
        for number, writer in enumerate(writers):
            while not writer.is_done:
                step(number)
        won = [number for number, writer in enumerate(writers) if writer.error is None]
        dead = [number for number, writer in enumerate(writers) if writer.error == "killed"]
        found = found_at(work, target)
        assert found in {*won, *dead} or (dead and found == old)
        for writer in writers:
            if writer.error not in (None, "killed"):
                told = ("another save to this path", "another write to this file", "exists already")
                assert any(text in writer.error for text in told)
        if work in FORMATS:
            assert len(won) <= 1
            target.unlink(missing_ok=True)
        make(work, sources[3], target)
        assert found_at(work, target) == 3
        left = {entry.name for entry in target.parent.iterdir()} - {target.name}
        assert not left if has_locks else len(left) <= len(dead)
