"""What every function and option of this package that takes a path says of paths, odd or wrong."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from recsdk_core.cli import main
from recsdk_pipeline.data import HeldOutSplit, Share, read_criteo, read_movielens
from recsdk_pipeline.demo import command
from recsdk_pipeline.demo.report import Screen

SURROGATE = os.fsdecode(b"\xff")
CLICKS = ("\t".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26]) + "\n") * 12
RATINGS = {
    "u.data": "1\t1\t5\t891351328\n" * 12,
    "u.user": "1|24|M|technician|85711\n",
    "u.item": "1|Toy Story|01-Jan-1995||http://|" + "|".join(["0"] * 18 + ["1"]) + "\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with files of both formats."""
    monkeypatch.chdir(tmp_path)
    Path("clicks").write_text(CLICKS)
    Path("clicks.gz").write_bytes(gzip.compress(CLICKS.encode()))
    Path("empty").touch()
    os.mkfifo("pipe")
    Path("ratings").mkdir()
    for name, text in RATINGS.items():
        Path("ratings", name).write_text(text)
    Path("pipes").mkdir()
    Path("pipes", "u.data").write_text(RATINGS["u.data"])
    os.mkfifo("pipes/u.user")
    return tmp_path


def num_examples(data: HeldOutSplit) -> int:
    batches = data.train(epoch=0, batch_size=5, share=Share())
    return sum(map(len, batches)) + data.num_held_out


READERS: dict[str, Callable[[Any], HeldOutSplit]] = {
    "read_criteo": read_criteo,
    "read_movielens": read_movielens,
}
SOURCES = {"read_criteo": "clicks", "read_movielens": "ratings"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["plain", "with space", "h\u00e4", SURROGATE])
@pytest.mark.parametrize("as_given", [str, Path, os.fsencode])
def test_paths_in_any_form(
    folder: Path, reader: str, name: str, as_given: Callable[[str], Any]
) -> None:
    path = as_given(name)
    os.rename(SOURCES[reader], path)
    assert num_examples(READERS[reader](path)) == 12


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        (5, TypeError, "path must be a string, bytes or os.PathLike, got int"),
        (None, TypeError, "path must be a string, bytes or os.PathLike, got NoneType"),
        ("", ValueError, "path is empty"),
        ("a\0b", ValueError, "path must not have a zero character"),
        ("memory://nowhere/clicks", FileNotFoundError, "^memory://nowhere/clicks"),
    ],
)
def test_what_is_no_local_path(reader: str, path: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        READERS[reader](path)


@pytest.mark.parametrize(
    ("reader", "path", "kind", "text"),
    [
        ("read_criteo", "missing", FileNotFoundError, "^missing: there is no such file"),
        ("read_criteo", "ratings", IsADirectoryError, "^ratings: is a folder; give the path of"),
        ("read_criteo", "empty", ValueError, "^empty: is empty"),
        ("read_criteo", os.devnull, ValueError, f"^{os.devnull}: is a pipe or a device"),
        ("read_criteo", "pipe", ValueError, "^pipe: is a pipe or a device, which cannot be read"),
        ("read_movielens", "pipes", ValueError, "^pipes/u.user: is a pipe or a device"),
        ("read_movielens", "missing", FileNotFoundError, "^missing holds no u.data or ml-100k"),
        ("read_movielens", "clicks", NotADirectoryError, "^clicks: is a file; pass the folder"),
    ],
)
def test_what_is_no_data(
    folder: Path, reader: str, path: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        READERS[reader](path)


@pytest.mark.parametrize("name", RATINGS)
@pytest.mark.parametrize(("spoil", "text"), [("unlink", "no such"), ("write_text", "is empty")])
def test_a_file_of_the_folder_is_named(folder: Path, name: str, spoil: str, text: str) -> None:
    file = Path("ratings", name)
    getattr(file, spoil)(*[""] * (spoil == "write_text"))
    wanted = "^ratings holds no u.data" if (name, spoil) == ("u.data", "unlink") else None
    with pytest.raises((ValueError, OSError), match=wanted or f"^{file}: .*{text}"):
        read_movielens("ratings")


def test_files_that_gzip_packed(folder: Path) -> None:
    assert num_examples(read_criteo("clicks.gz")) == 12
    os.rename("clicks.gz", "clicks.tsv")  # what is in it counts
    assert num_examples(read_criteo("clicks.tsv")) == 12
    for name, text in RATINGS.items():
        Path("ratings", f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        Path("ratings", name).unlink()
        assert num_examples(read_movielens("ratings")) == 12


@pytest.mark.parametrize("damage", ["cut", "header", "middle", "end"])
def test_files_that_gzip_cannot_unpack(folder: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(CLICKS.encode()))
    places = {"header": 2, "middle": len(packed) // 2, "end": len(packed) - 6}
    if damage == "cut":
        del packed[-9:]
    else:
        packed[places[damage]] ^= 0xFF
    Path("damaged.gz").write_bytes(packed)
    with pytest.raises(OSError, match=r"^damaged.gz: is damaged or cut off, so gzip cannot"):
        read_criteo("damaged.gz")


@pytest.mark.parametrize("option", ["--criteo", "--movielens", "--output"])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "path is empty"),
        ("a\0b", "must not have a zero character"),
        ("s3://bucket/x", "s3://bucket/x: is a URL"),
        ("clicks/x", None),
    ],
)
def test_options_of_the_demo(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, path: str, text: str | None
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "_run_ranks", lambda settings: started.append(settings) or 0)
    result = CliRunner().invoke(main, ["demo", option, path])
    assert isinstance(result.exception, SystemExit | None)
    if option == "--output" and text is None:
        assert started  # the ranks make the folder, and say if they cannot
        return
    assert (result.exit_code, started) == (2, [])
    assert (text or "does not exist") in result.stderr
    assert not Path("s3:").exists()


def test_a_name_that_is_no_utf8_can_be_shown(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(num_steps=1, is_shown=True)
    monkeypatch.setattr(screen, "_console", Console(highlight=False))
    screen.show_path(Path(f"[red]{SURROGATE}"))
    assert capsysbinary.readouterr().out == b"written to [red]\\udcff\n"
