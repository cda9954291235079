from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import check_tree

# In pieces, or the check would find them here.
PREFETCH = "__builtin_" + "prefetch(at);"
TORCH_INDEX = "https://download." + "pytorch.org/whl"

REFUSED = [
    ("a.py", "open('/" + "root/x')", "absolute path of one machine: /" + "root"),
    ("a.md", "see /" + "home/ann/notes", "absolute path of one machine: /" + "home/ann"),
    ("a.txt", "--index https://" + "pypi" + ".org/simple", "host of a package registry: pypi"),
    ("a.toml", "files." + "pythonhosted" + ".org", "host of a package registry: files.pyth"),
    ("docs/a.md", TORCH_INDEX, "the torch index may stand only in README.md"),
    ("cpp/src/index/index.cc", PREFETCH, "call prefetch_line of util/prefetch.h"),
    ("cpp/include/recsdk/table.h", "  " + PREFETCH, "call prefetch_line of util/prefetch.h"),
    ("cpp/src/table/table.cc", PREFETCH, "call prefetch_line of util/prefetch.h"),
    ("packages/recsdk-core/src/bind/array.cc", PREFETCH, "call prefetch_line"),
    ("tests/test_a.py", "from test_b import C", "a test imports another: from test_b"),
    ("tests/nn/test_a.py", "import test_b", "a test imports another: import test_b"),
    ("a.cc", "// na\u00efve", "not ASCII: '\u00ef'"),
    ("Makefile", "all: ", "white space at the end of the line"),
]
ALLOWED = [
    ("a.py", "'${HOME}/" + "work/x'  # and build/" + "root/y"),
    ("a.md", "what " + "pypi" + " has"),
    ("README.md", TORCH_INDEX),
    ("tools/torch_wheel.py", TORCH_INDEX),
    ("cpp/src/util/prefetch.h", PREFETCH),
    ("cpp/src/kernels/kernels_pool.inc", PREFETCH),
    ("cpp/bench/index_bench.cc", PREFETCH),
    ("cpp/src/index/index.cc", "util::prefetch_line(at);"),
    ("tests/test_a.py", "from torchrec.distributed import test_utils"),
    ("tools/test_cpp_consumer.py", "import cpp_tests"),
    ("a.png", "na\u00efve "),
    ("LICENSE", "\u00a9 "),
]


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository in place of this one, with the links that it must have."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    for name, target in check_tree.SYMLINKS.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(target)
    return tmp_path


def write(tree: Path, name: str, content: bytes) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_bytes(content)


@pytest.mark.parametrize(("name", "line", "finding"), REFUSED)
def test_a_line_is_refused_by_its_place(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, line: str, finding: str
) -> None:
    write(tree, name, f"first\n{line}\n".encode())
    assert check_tree.main() == 1
    [found] = capsys.readouterr().out.splitlines()
    assert found.startswith(f"{name}:2: {finding}")


@pytest.mark.parametrize(("name", "line"), ALLOWED)
def test_a_line_is_let_pass(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    write(tree, name, f"{line}\n".encode())
    assert check_tree.main() == 0
    assert capsys.readouterr().out == ""


def test_files_as_a_whole(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tree, "large.png", bytes(check_tree.MAX_BYTES + 1))
    write(tree, "just_fits.png", bytes(check_tree.MAX_BYTES))
    write(tree, "odd.py", b"\xff")
    write(tree, "ignored.py", b"\xff")
    write(tree, ".gitignore", b"ignored.py\n")
    assert check_tree.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        f"large.png: {check_tree.MAX_BYTES + 1} bytes; at most {check_tree.MAX_BYTES} are kept in "
        "the repository",
        "odd.py: not text",
    ]


def test_crowded_folders_are_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(check_tree.MAX_FILES):
        write(tree, f"rooms/{number}.md", b"")
        write(tree, f"rooms/of_tests/{number}.py", b"")
    assert check_tree.main() == 0
    write(tree, "rooms/of_tests/more/last.py", b"")
    write(tree, ".gitignore", b"*.ignored\n")
    write(tree, "rooms/one.ignored", b"")
    assert check_tree.main() == 0
    write(tree, "rooms/of_tests/last.py", b"")
    subprocess.run(["git", "-C", tree, "add", "."], check=True)
    assert check_tree.main() == 1
    assert capsys.readouterr().out == (
        f"rooms/of_tests: {check_tree.MAX_FILES + 1} files; a folder has at most "
        f"{check_tree.MAX_FILES} of its own: split it\n"
    )
    (tree / "rooms/of_tests/last.py").unlink()  # git still tracks it
    assert check_tree.main() == 0


@pytest.mark.parametrize("target", [None, "elsewhere"])
def test_links_that_builds_need(
    tree: Path, capsys: pytest.CaptureFixture[str], target: str | None
) -> None:
    [(name, wanted)] = check_tree.SYMLINKS.items()
    (tree / name).unlink()
    if target is not None:
        (tree / name).symlink_to(target)
    assert check_tree.main() == 1
    assert capsys.readouterr().out == f"{name}: must be a symbolic link to {wanted}\n"
