"""Runs a script in the network namespace that the variable NETWORK_NAMESPACE names."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    path = Path("/var/run/netns", os.environ["NETWORK_NAMESPACE"])
    with path.open("rb") as file:
        # Of this thread, and of all that it starts.
        if libc.setns(file.fileno(), _NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {path}")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
