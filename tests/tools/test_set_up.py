from __future__ import annotations

import threading
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


def test_what_was_built_among_the_sources_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    home = tmp_path / "packages" / "p" / "src" / "p"
    for name in ("a.py", "build/mypy/b.json", "__pycache__/a.pyc", ".pytest_cache/c"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    assert list(set_up.sources_of("p")) == [home / "a.py"]


def test_passwords_of_an_index_are_not_shown() -> None:
    command = ["pip", "--index-url", "https://user:pass@host.example/simple", "torch"]
    assert set_up.shown(command) == "pip --index-url https://host.example/simple torch"
    assert set_up.without_password("https://host.example/a@b") == "https://host.example/a@b"


def test_stamps_hold_no_password(stamps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_INDEX", "https://user:pass@host.example/simple")
    monkeypatch.setattr(set_up, "announce_torch", lambda source: None)
    monkeypatch.setattr(set_up, "install", lambda *args, **options: None)
    set_up.install_torch()
    assert "https://host.example/simple" in stamps.read_text()
    assert "pass" not in stamps.read_text()


def test_the_engine_is_built_beside_what_is_installed(
    stamps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, installed = threading.Event(), threading.Event()

    def build() -> None:
        begun.set()
        assert installed.wait(60)

    monkeypatch.setattr(set_up, "build_engine", build)
    monkeypatch.setattr(set_up, "install_requirements", lambda name: None)
    with set_up.engine_meanwhile():
        assert begun.wait(60)
        installed.set()
    set_up.write_stamp(
        "package-recsdk-core", set_up.digest_of_files(set_up.sources_of("recsdk-core"))
    )
    monkeypatch.setattr(set_up, "build_engine", lambda: pytest.fail("it was built already"))
    with set_up.engine_meanwhile():
        pass


def test_an_engine_that_cannot_be_built_is_an_error(
    stamps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise set_up.SetUpError("no compiler")

    monkeypatch.setattr(set_up, "build_engine", fail)
    monkeypatch.setattr(set_up, "install_requirements", lambda name: None)
    with pytest.raises(set_up.SetUpError, match="no compiler"), set_up.engine_meanwhile():
        pass


def test_what_tests_import_is_compiled_once(stamps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    monkeypatch.setattr(set_up, "run", lambda command: runs.append(command[-1]))
    for _ in range(2):
        with set_up.imports_meanwhile():
            pass
    (code,) = runs
    assert code.endswith(f"import {', '.join(set_up.IMPORTED_BY_TESTS)}")
    assert code.index("TORCH_DEVICE_BACKEND_AUTOLOAD") < code.index("torch.")
    assert list(set_up.read_stamps()) == ["imports"]


def test_commands_write_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in set_up.environment()
