"""What every function of this package that takes a path says of paths that are none, or odd."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fsspec.core import _un_chain
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import CheckpointError, Table
from recsdk_core.checkpoint import chain_of, compact, diff, open_checkpoint, reshard
from recsdk_core.checkpoint.tabular import export_table, import_table, read_arrays
from recsdk_core.cli import main
from recsdk_core.files import file_to_read, local_path
from recsdk_core.files.paths import is_url
from recsdk_core.files.urls import require_protocols
from recsdk_core.serving import ServingTable, freeze

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
KEYS = np.array([1, -2])
ROWS = np.ones((2, 2), np.float32)
SURROGATE = os.fsdecode(b"\xff")
ODD_NAMES = ["plain", "with space", "h\u00e4", SURROGATE]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a checkpoint, a folder, files that are empty and that are text."""
    monkeypatch.chdir(tmp_path)
    table().save("good")
    for suffix in ("npz", "npy", "parquet", "safetensors"):
        Path(f"folder.{suffix}").mkdir()
        Path(f"empty.{suffix}").touch()
        Path(f"text.{suffix}").write_text("hello world, this is no such file\n" * 9)
    np.savez("rows.npz", key=KEYS, weight=ROWS)
    return tmp_path


def table() -> Table:
    made = Table(dim=2, name="user")
    made.upsert(KEYS, ROWS)
    return made


CHECKPOINTS: dict[str, Callable[[Any], Any]] = {
    "Table.load": lambda path: table().load(path),
    "Table.load a list": lambda path: table().load([path]),
    "open_checkpoint": open_checkpoint,
    "chain_of": chain_of,
    "compact": lambda path: compact(path, "made"),
    "diff": lambda path: diff(path, "good"),
    "diff with": lambda path: diff(["good"], path),
    "reshard": lambda path: reshard(path, "made", world_size=2),
    "Table.save": lambda path: table().save(path),
    "Table.save_async": lambda path: table().save_async(path).wait(),
    "compact to": lambda path: compact("good", path),
    "reshard to": lambda path: reshard("good", path, world_size=2),
    "import_table": lambda path: import_table(path, "user", KEYS, ROWS),
}
FILES: dict[str, Callable[[Any], Any]] = {
    "file_to_read": file_to_read,
    "read_arrays": read_arrays,
    "export_table": lambda path: export_table(chain_of("good"), "user", path, "parquet"),
}
NO_PATHS: list[tuple[Any, type[Exception], str]] = [
    (5, TypeError, "path must be a string.* got int"),
    (None, TypeError, "path must be a string.* got NoneType"),
    ("", ValueError, "path (is empty; give|must have 1 to)"),
    ("a\0b", ValueError, "path must not have a zero character, got 'a"),
]


def some(names: Sequence[str], cases: Sequence[Any]) -> list[tuple[str, Any]]:
    """Half of all pairs, with each name and case in several; all in the full profile."""
    places = product(range(len(names)), range(len(cases)))
    return [(names[i], cases[j]) for i, j in places if IS_FULL or (i + j) % 2 == 0]


@pytest.mark.parametrize(("name", "case"), some([*CHECKPOINTS, *FILES], NO_PATHS))
def test_what_is_no_path(folder: Path, name: str, case: tuple[Any, type[Exception], str]) -> None:
    path, kind, text = case
    before = sorted(os.listdir(folder))
    with pytest.raises(kind, match=text):
        {**CHECKPOINTS, **FILES}[name](path)
    assert sorted(os.listdir(folder)) == before


NO_CHECKPOINTS: list[tuple[Any, type[Exception], str]] = [
    (b"good", TypeError, "got bytes; give os.fsdecode of it"),
    ("nope://bucket/run", CheckpointError, "^nope://bucket/run: .*Protocol not known"),
    ("rows.npz", CheckpointError, r"^rows.npz: .*no checkpoint"),
    ("rows.npz/under", CheckpointError, "rows.npz/.*under.*: "),
]


@pytest.mark.parametrize(("name", "case"), some(list(CHECKPOINTS), NO_CHECKPOINTS))
def test_what_is_no_checkpoint(
    folder: Path, name: str, case: tuple[Any, type[Exception], str]
) -> None:
    path, kind, text = case
    with pytest.raises(kind, match=text):
        CHECKPOINTS[name](path)


@given(
    links=st.lists(
        st.sampled_from(
            [
                "memory://a",
                "file:///a/b",
                "zip://a*",
                "simplecache",
                "zip",
                "/a",
                "a.zip",
                "a",
                "b://a",
                "nope://a",
                "nope",
                "Zip://a",
                "memory://",
                "://",
                "nope-2://a",
                "nope-2",
            ]
        ),
        min_size=1,
        max_size=4,
    )
)
@example(links=["simplecache", "nope://a"])
def test_protocols_are_refused_where_fsspec_refuses_them(links: list[str]) -> None:
    url = "::".join(links)
    found = refused = None
    try:
        require_protocols(url)
    except ValueError as error:
        found = str(error)
    try:
        _un_chain(url, {})
    except ValueError as error:
        refused = str(error)
    if is_url(url):
        assert (found is None) == (refused is None)
        assert found is None or found.startswith(f"{url}: the protocol ")
    else:
        assert found is None


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("as_given", [str, Path, os.fsencode])
def test_paths_of_files_in_any_form(
    folder: Path, name: str, as_given: Callable[[str], Any]
) -> None:
    path = as_given(f"{name}.npz")
    os.rename("rows.npz", path)
    assert read_arrays(path)["key"].tolist() == KEYS.tolist()
    target = as_given(f"{name}.parquet")
    assert export_table(chain_of("good"), "user", target, "parquet") == len(KEYS)
    assert sorted(read_arrays(target)["key"].tolist()) == sorted(KEYS.tolist())


@pytest.mark.parametrize("suffix", ["npz", "npy", "parquet", "safetensors"])
@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("missing", FileNotFoundError, "there is no such file"),
        ("folder", IsADirectoryError, "is a folder; give the path of a file in it"),
        ("empty", ValueError, "is empty"),
        ("text", ValueError, "cannot be read as"),
        ("http://host/x", ValueError, "is a URL; give a local path instead"),
    ],
)
def test_files_that_cannot_be_read(
    folder: Path, suffix: str, name: str, kind: type[Exception], text: str
) -> None:
    path = f"{name}.{suffix}"
    if path == "folder.parquet":  # may be one, of many files
        kind, text = ValueError, "cannot be read as parquet: it has no columns"
    with pytest.raises(kind, match=f"^{path}: {text}") as raised:
        read_arrays(path)
    assert "pickle" not in str(raised.value)
    files = ["rows.npz", "--keys-file", path], [path]
    for arguments in files if suffix != "npy" else files[:1]:
        result = run("import", *arguments, "made", "--name", "user")
        assert result.exit_code == (2 if "://" in path else 1), result.output
        assert f"{path}: " in result.stderr
        assert not Path("made").exists()


def test_what_the_system_refuses_while_it_is_read_names_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(np, "load", load)
    with pytest.raises(OSError, match="^rows.npz: reading failed: Input/output error$") as raised:
        read_arrays("rows.npz")
    assert raised.value.errno == errno.EIO


def test_a_folder_of_parquet_files(folder: Path) -> None:
    export_table(chain_of("good"), "user", "folder.parquet/part", "parquet")
    assert sorted(read_arrays("folder.parquet")["key"].tolist()) == sorted(KEYS.tolist())


def test_a_file_that_this_user_must_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as a user who may read all."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"^rows.npz: must not be read; give another path"):
        file_to_read("rows.npz")


def test_files_that_cannot_be_written(folder: Path) -> None:
    cases = {
        "rows.npz/x.parquet": "rows.npz/x.parquet: there is no folder rows.npz; make it first",
        "missing/x.parquet": "missing/x.parquet: there is no folder missing; make it first",
        "folder.parquet": "folder.parquet: is a folder; give the path of a file in it",
        f"{'a' * 300}.parquet": "File name too long",
        "a\0b.parquet": "path must not have a zero character",
    }
    for path, text in cases.items():
        result = run("export", "good", path)
        status = 2 if "\0" in path else 1
        assert (result.exit_code, text in result.stderr) == (status, True), result.output
    longest = f"{'a' * 247}.parquet"
    assert run("export", "good", longest).exit_code == 0
    assert Path(longest).is_file()


def test_the_command_takes_no_traceback_for_an_answer(folder: Path) -> None:
    for path in ("", "a\0b", "missing", "rows.npz", "folder.npz", "nope://x/y", SURROGATE):
        for command in ("inspect", "verify", "top", "get", "diff", "compact", "reshard", "export"):
            rest = {"get": ["1"], "diff": ["good"], "top": ["--by", "key"]}.get(command, ["made"])
            if command == "export":
                rest = ["made.parquet"]
            if command == "reshard":
                rest += ["--world-size", "2"]
            result = run(command, path, *rest)
            assert result.exit_code in (1, 2), (command, path, result.output)
            assert isinstance(result.exception, SystemExit), (command, path, result.exception)
            assert "Error: " in result.stderr


def test_a_working_folder_whose_name_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SURROGATE).mkdir()
    monkeypatch.chdir(tmp_path / SURROGATE)
    trained = table()
    trained.save("one", user_state={"file": b"bytes"})
    trained.erase(KEYS[:1])
    trained.save_async("two", delta=True).wait()
    compact("two", "whole")
    freeze("one", "frozen")
    served = ServingTable("frozen")
    served.verify()
    served.follow(".", interval_seconds=0.001)
    while served.stats().sequence != 1:
        assert served.stats().problem is None
    served.stop_following()
    loaded = Table(dim=2, name="user")
    for path in ("two", "whole"):
        loaded.load(path)
        np.testing.assert_array_equal(loaded.lookup(KEYS), trained.lookup(KEYS))
    np.testing.assert_array_equal(served.lookup(KEYS), trained.lookup(KEYS))
    assert run("export", "whole", "rows.parquet").exit_code == 0
    assert run("verify", "whole").exit_code == 0
    file = next(Path("whole").rglob("*.rows"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"/\\udcff/whole/.*rank_00000\.rows"):
        loaded.load("whole")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["ckpt", *arguments])


def test_local_paths(folder: Path) -> None:
    assert local_path(b"a\xff") == Path(os.fsdecode(b"a\xff"))
    with pytest.raises(ValueError, match="has characters that no file's name can have"):
        local_path("\ud800")
