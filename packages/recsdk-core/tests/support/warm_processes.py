"""Processes that run a script, forked from one that has imported the package and torch, if there.

That takes four seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

SECONDS_TO_END = 400
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["recsdk_core.nn", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.export"]
)


def start(script: str | Path, *arguments: object, output: Path) -> BaseProcess:
    """Runs a script, whose standard output goes to a file, in a process that knows no table."""
    command = [str(script), *map(str, arguments)]
    process = _CONTEXT.Process(target=_run, args=(command, str(output)))
    process.start()
    return process


def status_of(process: BaseProcess) -> int | None:
    """Its exit status once it has ended; None if it does not end in time, and is killed."""
    process.join(SECONDS_TO_END)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status


def _run(command: list[str], output: str) -> None:
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
