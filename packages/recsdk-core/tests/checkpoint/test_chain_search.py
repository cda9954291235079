"""A delta's predecessors are found beside it, whatever else lies there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import save
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import chain_of
from recsdk_core.checkpoint.fsspec_store import FsspecStore
from recsdk_core.checkpoint.reading import look_beside
from recsdk_core.checkpoint.stores import open_store
from recsdk_core.serving.manifest import FrozenManifest


def damage(folder: Path, kind: str) -> None:
    """Makes something of a kind that a search comes across."""
    manifest = folder / "manifest.json"
    if kind == "a file":
        folder.write_text("notes")
        return
    if kind in LINKS:
        folder.symlink_to(LINKS[kind])
        return
    folder.mkdir()
    if kind == "other files":
        (folder / "events.log").write_text("log")
    elif kind == "a folder as manifest":
        manifest.mkdir()
    elif kind == "a pipe":
        os.mkfifo(manifest)
    elif kind == "no JSON":
        manifest.write_bytes(b"\xff{[")
    elif kind == "deep JSON":
        manifest.write_text("[" * 100_000)
    elif kind == "a frozen one":
        frozen = FrozenManifest(token="0" * 32, source=None, tables=(), writer="test")
        manifest.write_bytes(frozen.to_bytes())
    elif kind == "a damaged frozen one":
        manifest.write_text('{"format":"recsdk-frozen"}')
    elif kind == "another format":
        manifest.write_text("{}\n")
    elif kind == "a loop of links":
        manifest.symlink_to(manifest)
    elif kind == "a link as manifest":
        (folder / "elsewhere").write_text("{}")
        manifest.symlink_to("elsewhere")


LINKS = {"a dangling link": "nowhere", "a link to a checkpoint": "e"}
NO_CHECKPOINT = [
    "a file",
    "a dangling link",
    "nothing",
    "other files",
    "a folder as manifest",
    "a pipe",
    "a frozen one",
    "a damaged frozen one",
]
UNREADABLE = [
    "a link to a checkpoint",
    "no JSON",
    "deep JSON",
    "another format",
    "a loop of links",
    "a link as manifest",
    "closed",
]


@contextmanager
def closed_folders() -> Iterator[None]:
    """Folders named so cannot be looked into meanwhile, whoever runs the test."""
    look = os.stat

    def look_or_fail(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if Path(str(path)).parent.name.endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "stat", look_or_fail)
        yield


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from("0bdf"), st.sampled_from([*NO_CHECKPOINT, *UNREADABLE])),
        max_size=6,
    )
)
def test_a_chain_is_found_among_anything(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    base = save(folder / "a")
    first = save(folder / "c", is_delta=True, after=base)
    second = save(folder / "e", is_delta=True, after=first)
    names = [f"{start} {n} {kind}" for n, (start, kind) in enumerate(kinds)]
    for name, (_, kind) in zip(names, kinds, strict=True):
        damage(folder / name, kind)
    with closed_folders():
        found = chain_of(folder / "e")
        assert tuple(one.hash for one in found) == second.hashes
        save(folder / "f", is_delta=True, after=second)
        (folder / "a").rename(folder / "moved")
        save(folder / "g", is_delta=True, after=second)
        check_those_named(folder, names)


def check_those_named(folder: Path, names: list[str]) -> None:
    """What cannot be read is named where the parent is not found, three at most."""
    (folder / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="e: delta 2 .* parent is missing") as raised:
        chain_of(folder / "e")
    text = str(raised.value)
    unread = [name for name in sorted(names) if name.split(" ", 2)[2] in UNREADABLE]
    assert all((f"{folder}/{name}" in text) == (name in unread[:3]) for name in names)
    assert ("what cannot be read was passed over" in text) == bool(unread)
    assert (f"and {len(unread) - 3} more" in text) == (len(unread) > 3)


def test_a_delta_whose_parent_is_gone_names_what_it_could_not_read(tmp_path: Path) -> None:
    base = save(tmp_path / "a")
    for kind in ("closed", "no JSON"):
        damage(tmp_path / kind, kind)
    (tmp_path / "a").rename(tmp_path.parent / f"{tmp_path.name}_gone")
    text = r"b: the delta builds on .*/a, .*passed over: "
    with closed_folders(), pytest.raises(CheckpointError, match=text) as raised:
        save(tmp_path / "b", is_delta=True, after=base)
    for reason in ("closed/manifest.json: looking at it failed: Permission", "no JSON/manifest"):
        assert reason in str(raised.value)


@pytest.mark.parametrize("place", ["no-such-store://run/a", "/long" * 300])
def test_a_link_at_a_place_that_cannot_be_opened_is_looked_for_beside(
    tmp_path: Path, place: str
) -> None:
    base = replace(save(tmp_path / "a"), locations=(place,))
    save(tmp_path / "b", is_delta=True, after=base)
    text = f"elsewhere/b: the delta builds on {place}, which .*cannot be read.*save in full"
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path / "elsewhere" / "b", is_delta=True, after=base)


def test_beside_a_folder_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    for place in (f"{tmp_path}/none/one", "memory://none/one"):
        beside = look_beside(open_store(place))
        assert (beside.checkpoints, beside.errors) == ({}, [])


class HalfClosedFiles(MemoryFileSystem):
    """Refuses to tell of, or to read, what lies in some folders."""

    cachable = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("exists", "open", "ls"):
            return found

        def call(path: str, *args: Any, **kwargs: Any) -> Any:
            if f"closed to {name}" in path:
                raise PermissionError(f"403: {path}")
            return found(path, *args, **kwargs)

        return call


@pytest.fixture
def url() -> Iterator[str]:
    yield "memory://half"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_what_a_store_refuses_to_show_is_passed_over(url: str) -> None:
    base = save(f"{url}/a")
    first = save(f"{url}/b", is_delta=True, after=base)
    second = save(f"{url}/c", is_delta=True, after=first)
    for what in ("exists", "open"):
        MemoryFileSystem().pipe_file(f"/half/0 closed to {what}/manifest.json", b"{}")
    files = HalfClosedFiles(skip_instance_cache=True)
    store = FsspecStore(files, "/half/c", f"{url}/c")
    beside = look_beside(store)
    assert {base.hash, first.hash} <= set(beside.checkpoints)
    assert second.hash not in beside.checkpoints
    assert len(beside.errors) == 2
    for what in ("exists", "open"):
        assert f"{url}/0 closed to {what}" in beside.unread
    folder = FsspecStore(files, "/half/x closed to ls/c", f"{url}/x closed to ls/c")
    assert "listing the folder above it failed: PermissionError: 403" in look_beside(folder).unread
