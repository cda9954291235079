"""What the command does when its output cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]])
def test_a_full_disk_is_a_message(arguments: list[str]) -> None:
    command = [sys.executable, "-c", "from recsdk_core.cli import main; main()", *arguments]
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1
