"""Process groups with backend "hccl"."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("support") / "collectives.py"


def test_collectives_on_two_ranks() -> None:
    options = ["--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
