"""Runs a command whose ranks torchrun starts, in a process that has imported torchrec already.

    under_torchrun.py demo [OPTION ...]       `recsdk demo`
    under_torchrun.py [OPTION ...] SCRIPT     torchrun

Ranks are forked from this one, so that they need not import it again; all else is torchrun's.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import recsdk_pipeline  # noqa: F401  the ranks have it from here
from recsdk_core.cli import main as recsdk
from warm_scripts import PR_SET_PDEATHSIG


def forked(config: LaunchConfig, entrypoint: str) -> Callable[..., Any]:
    """Stands for what starts `entrypoint`, a Python, with arguments."""
    assert entrypoint == sys.executable
    config.start_method = "fork"
    return elastic_launch(config, be_python)


def be_python(*command: str) -> None:
    """Does what `python -u [-m] WHAT [ARGUMENT ...]` does."""
    assert command[0] == "-u"
    # With a launcher that is aborted; by torch's SIGINT those would stay who wait for another.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGABRT)
    sys.argv = [argument for argument in command[1:] if argument != "-m"]
    if "-m" in command:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run.elastic_launch = forked
    if sys.argv[1] == "demo":
        recsdk(sys.argv[1:])
    run.main(sys.argv[1:])
