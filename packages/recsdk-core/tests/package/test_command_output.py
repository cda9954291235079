"""What the command does when its output cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from recsdk_core import Table
from recsdk_core.checkpoint import open_checkpoint

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-c", "from recsdk_core.cli import main; main()"]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]])
def test_a_full_disk_is_a_message(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_closed_output_is_no_failure(tmp_path: Path) -> None:
    """As of a service, or after >&- in a shell."""
    table = Table(dim=2, name="user")
    table.upsert(np.arange(3), np.ones((3, 2), np.float32))
    table.save(tmp_path / "saved")
    np.savez(tmp_path / "trace.npz", ids=np.arange(9))
    for arguments in (
        ["simulate", "trace.npz", "--rows", "5", "--rules", "lru", "--json", "-"],
        ["freeze", "saved", "frozen", "--json"],
        ["ckpt", "verify", "frozen", "--json"],
    ):
        closed = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments]
        done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), arguments


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_report_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", ids=np.arange(9))
    asked = ["simulate", "trace.npz", "--rows", "5", "--rules", "lru", "--json"]

    def run(target: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *asked, target]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert run("report.json").returncode == 0
    written = (tmp_path / "report.json").read_bytes()
    (tmp_path / "report.json").chmod(0o600)
    assert run("report.json").returncode == 0
    assert (tmp_path / "report.json").read_bytes() == written
    assert (tmp_path / "report.json").stat().st_mode & 0o777 == 0o600
    limited = ["sh", "-c", 'ulimit -f 0; trap "" XFSZ; exec "$@"', "sh"]
    command = [*limited, *COMMAND, *asked, "report.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "report.json" in done.stderr
    assert (tmp_path / "report.json").read_bytes() == written
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.json", "trace.npz"]
    done = run("/dev/full")
    assert done.stderr == "Error: /dev/full: writing failed: No space left on device\n"
    (tmp_path / "link").symlink_to("report.json")
    (tmp_path / "report.json").write_text("before")
    assert run("link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "report.json").read_bytes() == written


INTERRUPTED = """
import time, click
from recsdk_core import cli

@cli.main.command()
def wait():
    click.echo("waiting")
    time.sleep(60)

cli.main()
"""


def test_ctrl_c_ends_a_command_by_its_signal_without_a_traceback() -> None:
    """A shell shows status 130 then, and ends the loop that the command is in."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", INTERRUPTED, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "waiting\n"
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=60)
    assert (running.returncode, told) == (-signal.SIGINT, "\nAborted!\n")


INTERRUPTED_AT_START = """
import signal, sys

def is_loading(frame):
    while frame is not None:
        if getattr(frame.f_locals.get("self"), "name", None) == "recsdk_core._ext":
            return True
        frame = frame.f_back
    return False

def interrupt(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.endswith("enum.py") and is_loading(frame):
        sys.setprofile(None)
        print("loading", flush=True)
        signal.raise_signal(signal.SIGINT)

sys.setprofile(interrupt)
try:
    import recsdk_core
finally:
    print("recsdk_core._ext" in sys.modules)
"""


def test_ctrl_c_waits_until_the_compiled_part_is_loaded() -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT_START]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "loading\nTrue\n"), done.stderr
    assert done.stderr.endswith("\nKeyboardInterrupt\n")


def unread_pipe() -> IO[str]:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["compact", "diff"])
@pytest.mark.parametrize("is_read", [True, False])
def test_output_that_cannot_be_written_says_nothing_of_checkpoints(
    tmp_path: Path, command: str, is_read: bool
) -> None:
    """It goes to a full disk, or to a pipe that nobody reads, as after head."""
    for number in range(2):
        table = Table(dim=2, name="user")
        table.upsert(np.arange(3), np.full((3, 2), number, np.float32))
        table.save(tmp_path / str(number))
    places = ["0", "made"] if command == "compact" else ["0", "1"]
    with FULL.open("w") if is_read else unread_pipe() as output:
        arguments = [*COMMAND, "ckpt", command, *places]
        done = subprocess.run(
            arguments, stdout=output, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    told = "Error: the output cannot be written: No space left on device\n"
    assert done.stderr == (told if is_read else "")
    assert done.returncode == (1 if command == "compact" else 2)  # 1 of diff is an answer
    if command == "compact":
        open_checkpoint(tmp_path / "made").verify()
