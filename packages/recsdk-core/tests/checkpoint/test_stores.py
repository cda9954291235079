"""Stores: a checkpoint is complete or absent, whatever fails, and the one before it stays."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import threading
import uuid
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from checkpoint_support import _writer, content_of, save, table_entry, unchanged
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import chain_of, open_checkpoint
from recsdk_core.checkpoint.fsspec_store import FsspecStore
from recsdk_core.checkpoint.local_store import LocalStore
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import position_of
from recsdk_core.checkpoint.saving import SaveOptions, ShardFile, save_shards
from recsdk_core.checkpoint.stores import Store, open_store
from recsdk_core.files.place_lock import Held, lock_left_over, lock_place
from recsdk_core.serving import ServingTable


@pytest.fixture(params=["local", "memory", "simplecache", "filecache"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of each kind of store, as a path or URL."""
    name = f"run_{uuid.uuid4().hex}"
    if request.param == "local":
        yield str(tmp_path / name)
        return
    url = f"memory://{name}"
    yield url if request.param == "memory" else f"{request.param}::{url}"
    forget_memory()


def forget_memory() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_saving_and_overwriting(place: str) -> None:
    path = f"{place}/first"
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(path)
    save(path, b"one", step=3, user_state={"blob": b"xyz"})
    found = open_checkpoint(path)
    assert (found.manifest.step, found.user_state()) == (3, {"blob": b"xyz"})
    with pytest.raises(CheckpointError, match="already; choose another path or pass overwrite"):
        save(path, b"two")
    assert content_of(path) == b"one"
    save(path, b"three", overwrite=True)
    assert content_of(path) == b"three"
    assert open_checkpoint(path).user_state() is None


def test_overwriting_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    for place in (str(tmp_path / "x"), "memory://old/x"):
        for content in (b"one", b"two", b"three"):
            save(place, content, overwrite=True)
        files = fsspec.core.url_to_fs(place)[0].find(fsspec.core.url_to_fs(place)[1])
        assert len(files) == 2


def test_chains_are_found_beside(place: str) -> None:
    base = save(f"{place}/a")
    first = save(f"{place}/b", is_delta=True, after=base)
    second = save(f"{place}/c", is_delta=True, after=first)
    save(f"{place}/other")
    assert second.sequence == 2
    assert [one.hash for one in chain_of(f"{place}/c")] == [base.hash, first.hash, second.hash]
    paths = [f"{place}/{name}" for name in "abc"]
    assert [one.hash for one in chain_of(paths)] == [base.hash, first.hash, second.hash]


@pytest.mark.parametrize(
    "pattern",
    [
        "memory://{}",
        "simplecache::memory://{}",
        "dir://{}::memory://base",
        "dir://above/{}::memory://base",
        "simplecache::dir://above/{}::memory://base",
        "memory://above/{}/",
        "simplecache::{tmp_path}/{}",
    ],
)
def test_chains_are_found_beside_whatever_the_url(pattern: str, tmp_path: Path) -> None:
    pattern = pattern.replace("{tmp_path}", str(tmp_path))
    try:
        base = save(pattern.format("a"))
        first = save(pattern.format("b"), is_delta=True, after=base)
        found = chain_of(pattern.format("b"))
        assert [one.hash for one in found] == [base.hash, first.hash]
        save(pattern.format("c"), is_delta=True, after=position_of(found))
        for one in chain_of(pattern.format("c")):  # by the URLs that were found
            assert open_checkpoint(one.location).hash == one.hash
            assert one.location.rstrip("/") in [pattern.format(name).rstrip("/") for name in "abc"]
    finally:
        forget_memory()


def test_a_delta_looks_for_what_it_follows(place: str) -> None:
    base = save(f"{place}/a")
    first = save(f"{place}/b", is_delta=True, after=base)
    save(f"{place}/elsewhere/c", is_delta=True, after=first)
    files, path = fsspec.core.url_to_fs(place)
    files = getattr(files, "fs", files)  # of a cache: what it caches
    files.mv(f"{path}/b", f"{path}/x", recursive=True)
    save(f"{place}/d", is_delta=True, after=first)
    assert [one.store.location[-2:] for one in chain_of(f"{place}/d")] == ["/a", "/x", "/d"]
    with pytest.raises(
        CheckpointError, match="elsewhere/e: the delta builds on .*/b, which is gone"
    ):
        save(f"{place}/elsewhere/e", is_delta=True, after=first)
    save(f"{place}/a", overwrite=True)
    with pytest.raises(
        CheckpointError, match="/e: the delta builds on .*/a, .* is not the checkpoint"
    ):
        save(f"{place}/e", is_delta=True, after=first)


def test_a_parent_whose_name_starts_with_a_dot_is_found(place: str) -> None:
    base = save(f"{place}/.hidden")
    first = save(f"{place}/.x.partial-y", is_delta=True, after=base)
    save(f"{place}/c", is_delta=True, after=first)
    names = [one.location.rpartition("/")[2] for one in chain_of(f"{place}/c")]
    assert names == [".hidden", ".x.partial-y", "c"]


def test_links_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    base = save(tmp_path / "a")
    first = save(tmp_path / "b", is_delta=True, after=base)
    second = save(tmp_path / "c", is_delta=True, after=first)
    save(tmp_path / "d", is_delta=True, after=second)
    branch = save(tmp_path / "branch", is_delta=True, after=base)
    foreign = save(tmp_path / "x")
    save(tmp_path / "y", is_delta=True, after=foreign)
    assert branch.sequence == 1
    for names, at, reason in [
        ("bcd", "b", "begins with a snapshot"),
        ("abd", "d", "parent .* is missing"),
        ("acbd", "c", "out of order"),
        ("ba", "a", "out of order: .*after .*/b, delta 1"),
        ("abbc", "b", "repeated"),
        ("aba", "a", "repeated"),
        ("ay", "y", "foreign"),
        ("abx", "x", "foreign"),
    ]:
        with pytest.raises(CheckpointError, match=f"/{at}: .*{reason}"):
            chain_of([tmp_path / name for name in names])
    with pytest.raises(CheckpointError, match="branch: out of order"):
        chain_of([tmp_path / "a", tmp_path / "b", tmp_path / "branch"])
    (tmp_path / "b").rename(tmp_path.parent / f"{tmp_path.name}_moved")
    with pytest.raises(CheckpointError, match="c: .* its parent is missing"):
        chain_of(tmp_path / "d")
    with pytest.raises(ValueError, match="no path"):
        chain_of([])


def test_a_delta_does_not_replace_what_it_builds_on(tmp_path: Path) -> None:
    base = save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="would replace a checkpoint that it builds on"):
        save(tmp_path / "x" / ".." / "a", is_delta=True, after=base, overwrite=True)
    first = save(tmp_path / "b", is_delta=True, after=base)
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    with unchanged(tmp_path):
        for name in ("a", "b"):  # whatever the way there is called
            with pytest.raises(CheckpointError, match="would replace a checkpoint that it builds"):
                save(tmp_path / "link" / name, is_delta=True, after=first, overwrite=True)
    (tmp_path / "a").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="would replace a checkpoint that it builds on"):
        save(tmp_path / "moved", is_delta=True, after=first, overwrite=True)
    save(tmp_path / "other")
    save(tmp_path / "other", is_delta=True, after=first, overwrite=True)


def test_one_place_has_many_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    save(str(tmp_path / "a"))
    places = [
        [f"{tmp_path}/a", f"{tmp_path}/link/a", f"file://{tmp_path}/a",
         f"simplecache::file://{tmp_path}/a", f"simplecache::file://{tmp_path}/link/a"],
        [f"dir::file://{tmp_path}/a", f"{tmp_path}/a/{tmp_path}/a"],  # as fsspec joins them
        # There is none yet.
        [f"{tmp_path}/b", f"{tmp_path}/x/../b", f"simplecache::file://{tmp_path}/b"],
        ["memory://names/a", "memory:///names/a/", "simplecache::memory://names/a"],
        ["memory://names/b"],
    ]  # fmt: skip
    for place, other in product(places, places):
        for one, two in product(place, other):
            assert open_store(one).is_place_of(open_store(two)) == (place is other)


def test_steps_are_any_integers_and_checked_first(tmp_path: Path) -> None:
    save(tmp_path / "a", step=np.int32(7))
    assert open_checkpoint(tmp_path / "a").manifest.step == 7
    for step, kind in [(1.0, TypeError), ("1", TypeError), (-1, ValueError), (2**63, ValueError)]:
        with unchanged(tmp_path), pytest.raises(kind):
            save(tmp_path / "b", step=step)


def test_modes_of_files_and_folders(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(tmp_path / "deep" / "er" / "one", user_state=b"x")
        save(tmp_path / "deep" / "er" / "one", user_state=b"x", overwrite=True)
    finally:
        os.umask(before)
    found = sorted((tmp_path / "deep").rglob("*"))
    assert len(found) > 6
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    for bad, kind in [("", ValueError), ("x" * 1025, ValueError), (b"x", TypeError),
                      ("a\0b", ValueError), ("/", ValueError), ("a\udcff", ValueError),
                      ("memory://a\ud800/b", ValueError)]:  # fmt: skip
        with pytest.raises(kind, match="path"):
            save(bad)
    with pytest.raises(CheckpointError, match="too long"):
        save(tmp_path / ("x" * 300))
    name = "n" * 250
    save(tmp_path / name)
    assert content_of(tmp_path / name) == b"rows"


def test_a_path_from_a_folder_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for opens in (open_store, ServingTable):
        with pytest.raises(CheckpointError, match="^one: finding the current folder failed"):
            opens("one")
    save(str(tmp_path / "one"))


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no store of fsspec"):
        save("nothing://x/y")


def test_symbolic_links_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="symbolic link"), unchanged(tmp_path):
                save(tmp_path / name, overwrite=overwrite)
        with pytest.raises(CheckpointError, match="symbolic link"):
            open_checkpoint(tmp_path / name)
    store = LocalStore(tmp_path / "real")
    folder = next(path for path in (tmp_path / "real").iterdir() if path.is_dir())
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        content_of(tmp_path / "real")
    manifest = tmp_path / "real" / "manifest.json"
    manifest.rename(tmp_path / "manifest")
    manifest.symlink_to(tmp_path / "manifest")
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.read_manifest()


def test_what_is_no_checkpoint_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("ten years")
    (tmp_path / "file").write_text("precious")
    for name in ("folder", "file"):
        with pytest.raises(CheckpointError, match="no checkpoint"), unchanged(tmp_path):
            save(tmp_path / name, overwrite=True)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            open_checkpoint(tmp_path / name)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    assert content_of(tmp_path / "empty") == b"rows"


def test_a_memory_folder_that_is_no_checkpoint_is_not_replaced() -> None:
    MemoryFileSystem().pipe_file("/other/thesis.tex", b"ten years")
    MemoryFileSystem().pipe_file("/own/own", b"named as its folder")
    for name in ("other", "own"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            save(f"memory://{name}", overwrite=True)
    MemoryFileSystem.store.clear()


def test_what_killed_saves_left_is_removed_by_the_next(tmp_path: Path) -> None:
    token = "f" * 32
    (tmp_path / f".one.partial-{token}" / token).mkdir(parents=True)
    (tmp_path / f".two.partial-{token}" / token).mkdir(parents=True)
    save(tmp_path / "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".two.partial-{token}", "one"]
    (tmp_path / "one" / token).mkdir()
    (tmp_path / "one" / f".manifest-{token}").write_text("{")
    save(tmp_path / "one", b"new", overwrite=True)
    assert len(list((tmp_path / "one").iterdir())) == 2


def test_what_killed_saves_of_this_host_left_beside_is_removed(tmp_path: Path) -> None:
    token, here = "f" * 32, socket.gethostname()
    holders = {"killed": here, "elsewhere": f"not-{here}", "running": here}
    for name, host in holders.items():
        (tmp_path / f".{name}.partial-{token}" / token).mkdir(parents=True)
        (tmp_path / f".{name}.recsdk-lock").write_text(f"process 1 on {host}\n")
    (tmp_path / ".alone.recsdk-lock").write_text(f"process 1 on {here}\n")
    (tmp_path / ".unnamed.recsdk-lock").touch()
    held = lock_place(tmp_path / ".running.recsdk-lock")
    assert held is not None
    save(tmp_path / "one")
    stay = {f".{name}.{end}" for name in ("elsewhere", "running")
            for end in ("recsdk-lock", f"partial-{token}")}  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {"one", ".unnamed.recsdk-lock", *stay}
    held.release()
    save(tmp_path / "killed")


def test_a_save_waits_for_one_that_looks_whether_its_lock_is_left(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(f"process 1 on {socket.gethostname()}\n")
    looking = lock_left_over(path)
    assert looking is not None
    threading.Timer(0.02, looking.release).start()
    held = lock_place(path)
    assert held is not None
    assert held.is_valid
    assert lock_left_over(path) is None
    held.release()


@pytest.mark.parametrize("was_there", [False, True])
def test_of_two_saves_one_inside_the_other_one_wins(place: str, was_there: bool) -> None:
    path = f"{place}/one"
    if was_there:
        save(path, b"old")
    inner: list[str] = []

    def write_and_save(target: Any, *_: Any) -> Any:
        done = _writer(b"outer")(target, b"", "none", None)
        inner.append(outcome_of(lambda: save(path, b"inner", overwrite=True)))
        return done

    shard = ShardFile(entry=table_entry(), write=write_and_save)
    for user_state in (None, b"written after the other save"):
        told = SaveOptions(overwrite=True, user_state=user_state)
        outer = outcome_of(
            lambda told=told: save_shards(open_store(path), OneRank(), [shard], told)
        )
        if "://" in place:
            assert "another save to this path has begun or committed meanwhile" in outer
            assert inner.pop() == ""
            assert content_of(path) == b"inner"
        else:
            assert f"under way, by process {os.getpid()} on " in inner.pop()
            assert outer == ""
            assert content_of(path) == b"outer"


def test_a_save_whose_files_were_removed_replaces_nothing(place: str) -> None:
    path = f"{place}/one"
    save(path, b"old")

    def write_and_lose(target: Any, *_: Any) -> Any:
        done = _writer(b"lost")(target, b"", "none", None)
        files, folder = fsspec.core.url_to_fs(path)
        getattr(files, "fs", files).rm(folder, recursive=True)
        return done

    shard = ShardFile(entry=table_entry(), write=write_and_lose)
    with pytest.raises(CheckpointError, match="one: (its files were removed|another)"):
        save_shards(open_store(path), OneRank(), [shard], SaveOptions(overwrite=True))
    save(path, b"next")
    assert content_of(path) == b"next"


@pytest.mark.parametrize("was_there", [False, True])
def test_where_there_are_no_locks_saves_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    path, other = tmp_path / "one", "f" * 32

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    if was_there:
        save(path, b"old")
        (path / other).mkdir()  # of a save that may live
    (tmp_path / f".one.partial-{other}").mkdir()
    save(path, b"new", overwrite=True)
    assert content_of(path) == b"new"
    names = {p.name for p in tmp_path.rglob("*") if p.is_dir() and other in p.name}
    assert names == {f".one.partial-{other}", *([other] if was_there else [])}
    assert len(list(path.iterdir())) == 2 + was_there

    def write_and_lose(target: Any, *_: Any) -> Any:
        done = _writer(b"lost")(target, b"", "none", None)
        save(path, b"other", overwrite=True)
        return done

    shard = ShardFile(entry=table_entry(), write=write_and_lose)
    with pytest.raises(CheckpointError, match="another save to this path has begun or committed"):
        save_shards(open_store(path), OneRank(), [shard], SaveOptions(overwrite=True))
    assert content_of(path) == b"other"


def test_a_manifest_whose_inode_changes_is_no_other_save(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path, b"old")

    def write_and_change(target: Any, *_: Any) -> Any:
        (tmp_path / "copy").write_bytes((path / "manifest.json").read_bytes())
        (tmp_path / "copy").rename(path / "manifest.json")
        return _writer(b"new")(target, b"", "none", None)

    shard = ShardFile(entry=table_entry(), write=write_and_change)
    save_shards(open_store(path), OneRank(), [shard], SaveOptions(overwrite=True))
    assert content_of(path) == b"new"


def test_a_lock_that_another_user_left_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, open_file = tmp_path / ".one.recsdk-lock", os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if Path(path) == left and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="recsdk-lock: locking failed: Permission denied"):
        save(tmp_path / "one", b"new")  # nor may one be made
    left.touch()
    save(tmp_path / "one", b"new")
    assert content_of(tmp_path / "one") == b"new"
    left.touch()
    held = lock_place(left)
    with pytest.raises(CheckpointError, match="another save to this path is under way"):
        save(tmp_path / "one", b"newer", overwrite=True)
    assert held is not None
    held.release()


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_interruption_while_a_save_takes_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """The next save to that place goes well, though the exception is held."""
    take = LocalStore._take

    def interrupted(store: LocalStore, path: Path) -> None:
        if is_taken:
            take(store, path)
        else:
            monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            take(store, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt) as held:
        save(tmp_path / "one")
    monkeypatch.undo()
    save(tmp_path / "one")
    assert content_of(tmp_path / "one")
    assert held.value is not None
    assert not list(tmp_path.glob(".*"))


def test_a_lock_that_was_let_go_closes_no_other_file(tmp_path: Path) -> None:
    lock = lock_place(tmp_path / "lock")
    assert lock is not None
    lock.release()
    with (tmp_path / "file").open("w") as file:  # has its descriptor now
        assert file.fileno() == lock.descriptor
        lock.release()
        lock.close()
        file.write("text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_child_of_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = lock_place(tmp_path / "lock")
    assert lock is not None
    with pytest.raises(Held, match=f", by process {os.getpid()} on "):
        lock_place(tmp_path / "lock")
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(lock.descriptor)
        except OSError:
            os.write(tell, b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(tell)
    assert os.read(told, 6) == b"closed"
    os.close(told)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "one")
    rows, manifest = next((tmp_path / "one").rglob("*.rows")), tmp_path / "one" / "manifest.json"
    for file in (rows, manifest):
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match=f"{file.name}: is no plain file"):
            content_of(tmp_path / "one")


def test_a_file_that_does_not_close_well_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    save("memory://closing/one")
    monkeypatch.setattr(MemoryFile, "close", fail_to_close)
    assert content_of("memory://closing/one") == b"rows"


def fail_to_close(file: Any) -> None:
    raise AttributeError("no setter")


class TwoStores:
    """Two ranks that do not see the same file system, on rank 0's turn."""

    rank, world_size = 0, 2

    def __init__(self, other: Store) -> None:
        self._other = other
        self._tokens: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, tuple) and isinstance(value[1], str) and len(value[1]) == 32:
            self._tokens.append(value[1])
        elif self._tokens and value == (None, None):
            try:
                self._other.join(self._tokens[0])
            except CheckpointError as error:
                return [value, (str(error), None)]
        return [value, value]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_ranks_must_see_one_store(tmp_path: Path, kind: str) -> None:
    start = str(tmp_path) if kind == "local" else "memory://two"
    shard = ShardFile(entry=table_entry(), write=_writer(b"x"))
    ranks = TwoStores(open_store(f"{start}/other/one"))
    with pytest.raises(CheckpointError, match="rank 1 failed.* does not see"):
        save_shards(open_store(f"{start}/one"), ranks, [shard], SaveOptions())
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(f"{start}/one")


GONE = "the network is gone"


class FailingFiles(MemoryFileSystem):
    """Fails its nth call, once; with `does_it` only the answer is lost."""

    cachable = False
    calls_left: int | None = None
    calls = 0
    does_it = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        counted = ("exists", "ls", "isfile", "makedirs", "pipe_file", "cat_file", "open", "size",
                   "rm", "rm_file", "invalidate_cache")  # fmt: skip
        if name not in counted:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            FailingFiles.calls += 1
            if FailingFiles.calls_left is not None:
                FailingFiles.calls_left -= 1
                if FailingFiles.calls_left == -1:
                    if FailingFiles.does_it:
                        found(*args, **kwargs)
                    raise ConnectionError(GONE)
            return found(*args, **kwargs)

        return call


def failing_store() -> FsspecStore:
    return FsspecStore(
        FailingFiles(skip_instance_cache=True), "/failing/one", "memory://failing/one"
    )


def save_failing(content: bytes, overwrite: bool) -> None:
    shard = ShardFile(entry=table_entry(), write=_writer(content))
    options = SaveOptions(overwrite=overwrite, user_state=b"x")
    save_shards(failing_store(), OneRank(), [shard], options)


@pytest.mark.parametrize("does_it", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_each_call_of_an_fsspec_store_may_fail(overwrite: bool, does_it: bool) -> None:
    FailingFiles.calls = 0
    FailingFiles.does_it = does_it
    FailingFiles.calls_left = None
    save_failing(b"old", overwrite=True)
    num_calls = FailingFiles.calls
    assert num_calls > 8
    outcomes = set()
    for number in range(num_calls + 4):
        MemoryFileSystem.store.clear()
        if overwrite:
            save_failing(b"old", overwrite=True)
        FailingFiles.calls_left = number
        outcome = outcome_of(lambda: save_failing(b"new", overwrite=overwrite))
        FailingFiles.calls_left = None
        outcomes.add(outcome)
        before = b"old" if overwrite else None
        allowed = {b"new"} if not outcome else {before, b"new" if does_it else before}
        assert found_at("memory://failing/one") in allowed
        save_failing(b"next", overwrite=True)
        assert found_at("memory://failing/one") == b"next"
    assert {text and GONE in text for text in outcomes} == {"", True}
    MemoryFileSystem.store.clear()


def outcome_of(call: Any) -> str:
    """What CheckpointError said; "" if there was none."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def found_at(url: str) -> bytes | None:
    store = open_store(url)
    assert isinstance(store, FsspecStore)
    return None if store._state() == "absent" else content_of(url)
