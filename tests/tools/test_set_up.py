from __future__ import annotations

from pathlib import Path

import pytest

import set_up


@pytest.fixture
def stamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(set_up, "STAMPS", tmp_path / "stamps.json")
    return tmp_path / "stamps.json"


def test_a_step_is_done_once_for_the_same_input(stamps: Path) -> None:
    done: list[str] = []
    for wanted in ("a", "a", "b", "b"):
        set_up.step("thing", wanted, "doing it", lambda wanted=wanted: done.append(wanted))
    assert done == ["a", "b"]


def test_an_interrupted_step_is_done_again(stamps: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        set_up.step("thing", "a", "doing it", interrupt)
    done: list[str] = []
    set_up.step("thing", "a", "doing it", lambda: done.append("a"))
    assert done == ["a"]


def test_damaged_stamps_mean_doing_it_again(stamps: Path) -> None:
    stamps.write_text('{"thing": "a"')
    done: list[str] = []
    set_up.step("thing", "a", "doing it", lambda: done.append("a"))
    assert done == ["a"]
    assert set_up.read_stamps() == {"thing": "a"}


def test_python_sources_count_by_name_others_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    source, header = tmp_path / "a.py", tmp_path / "a.h"
    source.write_text("1")
    header.write_text("1")
    before = set_up.digest_of_files([source, header])
    source.write_text("2")
    assert set_up.digest_of_files([source, header]) == before
    header.write_text("2")
    assert set_up.digest_of_files([source, header]) != before
    assert set_up.digest_of_files([header]) != set_up.digest_of_files([source, header])


def test_the_digest_tells_where_parts_end() -> None:
    assert set_up.digest(["ab", "c"]) != set_up.digest(["a", "bc"])


def test_every_direct_requirement_is_pinned() -> None:
    for path in (set_up.ROOT / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            name = line.partition("#")[0].strip()
            if name and "==" not in name and not name.startswith("."):
                assert set_up.pinned(name).startswith(f"{name}==")


def test_the_shim_asks_for_the_pinned_fbgemm() -> None:
    shim = (set_up.ROOT / "packaging/fbgemm-gpu-shim/pyproject.toml").read_text()
    assert f'"{set_up.pinned("fbgemm-gpu-cpu")}"' in shim


def test_an_unpinned_name_is_an_error() -> None:
    with pytest.raises(set_up.SetUpError, match="pins no"):
        set_up.pinned("no-such-thing")


def test_errors_end_in_a_line_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise set_up.SetUpError("the disk is full")

    assert set_up.report_errors(fail) == 1
    assert capsys.readouterr().err == "set-up: the disk is full\n"
