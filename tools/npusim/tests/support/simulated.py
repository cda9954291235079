"""Runs scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python source with these variables in place of the tests' own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RECSDK_SIM_NPU")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        capture_output=True,
        check=False,
        timeout=500,
    )
