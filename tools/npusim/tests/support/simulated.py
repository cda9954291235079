"""Runs scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from warm_scripts import start_scripts, statuses_of

SECONDS_TO_END = 500


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python source with these variables in place of the tests' own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RECSDK_SIM_NPU")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        capture_output=True,
        check=False,
        timeout=SECONDS_TO_END,
    )


def run_warm(folder: Path, text: str, **environment: str) -> None:
    """Runs Python source with these variables beside the tests' own; it has imported torch."""
    script, output = folder / "script.py", folder / "printed"
    script.write_text(textwrap.dedent(text))
    started = start_scripts([str(script)], output, [environment], modules=())
    assert statuses_of(started, SECONDS_TO_END) == [0], output.read_text()
