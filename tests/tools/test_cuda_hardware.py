"""The command that runs the tests of devices on a CUDA device, and what it takes there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cuda_hardware
import wheelhouse
from sampling import sampled

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("what", sampled(["test", "bench"], 1))
def test_without_a_device_it_says_what_is_needed(what: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "cuda_hardware.py"), what]
    command += ["--wheels", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "torch sees no CUDA device" in done.stdout
    assert "CUDA build of torch" in done.stdout


TESTS = cuda_hardware.PACKAGES / "recsdk-sharding" / "tests"
CHOSEN = [Path(name) for name in cuda_hardware.tests_of("recsdk-sharding")]


def test_every_suite_is_there_once() -> None:
    for package, suites in cuda_hardware.SUITES.items():
        for suite in suites:
            pattern, *names = suite.split("::")
            found = list((cuda_hardware.PACKAGES / package / "tests").glob(pattern))
            assert found
            assert all(f"def {name}(" in found[0].read_text() for name in names)
        chosen = cuda_hardware.tests_of(package)
        assert len(set(chosen)) == len(chosen)


def test_tests_of_packages_run_apart_in_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    calls: list[tuple[str, tuple[str, ...]]] = []

    def run(*args: str, cwd: Path, **variables: str) -> int:
        calls.append((cwd.name, args))
        assert variables == {"RECSDK_TEST_CUDA_HARDWARE": "1"}
        [junit] = [arg.partition("=")[2] for arg in args if arg.startswith("--junit-xml=")]
        Path(junit).write_text('<testsuite tests="5" failures="1" errors="0" skipped="1"/>')
        now[0] += 100
        return int(len(calls) == 1)

    monkeypatch.setattr(cuda_hardware.time, "monotonic", lambda: now[0])
    found: Any = SimpleNamespace(run=run)
    assert cuda_hardware.run_tests_on(found, tmp_path, 3) == 1
    assert [package for package, _ in calls] == list(cuda_hardware.SUITES)
    seconds = [arg for _, args in calls for arg in args if arg.startswith("--session-timeout")]
    assert seconds == ["--session-timeout=180", "--session-timeout=80"]
    assert capsys.readouterr().out == "6 passed, 2 failed, 2 skipped\n"


def test_all_tests_that_have_a_device_run_on_it() -> None:
    of_devices = {
        path
        for path in (TESTS / "device").glob("test_*.py")
        if re.search(r"\b(npus|npu_pool|DEVICE)\b", path.read_text())
        and "pytestmark = on_npus_alone" not in path.read_text()
    }
    assert len(of_devices) > 9
    assert of_devices <= set(CHOSEN)


def test_tests_that_run_on_a_device_do_not_say_that_it_is_an_npu() -> None:
    said = re.compile(r"""npus\.run\([^\n]*["']npu["']""")
    assert [path.name for path in CHOSEN if said.search(path.read_text())] == []


def test_wheels_are_unpacked_beside_the_torch_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(call: list[str], check: bool) -> Any:
        calls.append(call)
        return subprocess.CompletedProcess(call, 0)

    monkeypatch.setattr(cuda_hardware.subprocess, "run", run)
    monkeypatch.setattr(cuda_hardware, "SITE", tmp_path / "site")
    assert "PYTHONPATH" not in cuda_hardware.interpreter(tmp_path).environment
    wheel = tmp_path / "torchrec-1.6.1-py3-none-any.whl"
    wheel.touch()
    found = cuda_hardware.interpreter(tmp_path)
    assert found.python == sys.executable
    assert found.environment["PYTHONPATH"].split(":")[0] == str(cuda_hardware.SITE)
    [call] = calls
    assert {"--no-index", "--no-deps", str(wheel)} < {*call}
    of_before = cuda_hardware.SITE / "of_before.py"
    of_before.touch()
    assert cuda_hardware.interpreter(tmp_path) == found
    assert len(calls) == 1
    assert of_before.exists()
    wheel.write_text("another")
    assert cuda_hardware.interpreter(tmp_path) == found
    assert len(calls) == 2
    assert not of_before.exists()


def test_wheels_for_another_python_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_hardware, "SITE", tmp_path / "site")
    (tmp_path / "torchrec-1.6.1-cp27-cp27m-any.whl").touch()
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"cannot be installed for Python 3\.\d+"):
            cuda_hardware.interpreter(tmp_path)


def test_each_torch_that_is_supported_has_wheels() -> None:
    assert set(wheelhouse.FITTING) == {"2.11", "2.12", "2.13"}
    assert not any(name.startswith(("torch==", "numpy")) for name in wheelhouse.NEEDS)
