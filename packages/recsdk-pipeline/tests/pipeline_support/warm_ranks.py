"""Ranks that run a script as torchrun does, forked from templates that have imported torchrec."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from rank_templates import Rank, start_rank

MODULES = ("recsdk_sharding", "recsdk_pipeline.hybrid_pipeline", "recsdk_pipeline.data")
OF_TEMPLATES = ("RECSDK_SIM_NPU", "RECSDK_SIM_NPU_ASYNC")  # what counts when torch is imported
SECONDS_TO_ABORT = 10


def start_ranks(
    num_ranks: int, command: Sequence[str], output: Path, variables: Mapping[str, str]
) -> list[Rank]:
    """Starts `command` (a script or -m module, with arguments) on ranks that print to `output`."""
    early = {name: variables[name] for name in OF_TEMPLATES if name in variables}
    shared = {**variables, **_variables_of_world(num_ranks)}
    ranks = [start_rank(_run, rank, early, MODULES) for rank in range(num_ranks)]
    for number, rank in enumerate(ranks):
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        rank.pipe.send((tuple(command), str(output), {**shared, **own}))
    return ranks


def statuses_of(ranks: Sequence[Rank], seconds: float) -> list[int | None]:
    """The ranks' exit statuses, once all have ended; None for one that died or had to be aborted.

    Ranks that don't end in time are aborted, all of them; each prints where its threads stand.
    """
    deadline = time.monotonic() + seconds
    statuses = [_status_of(rank, deadline) for rank in ranks]
    for rank in ranks:
        rank.end()
    return statuses


def _status_of(rank: Rank, deadline: float) -> int | None:
    if not rank.pipe.poll(max(0.0, deadline - time.monotonic())):
        os.kill(rank.pid, signal.SIGABRT)
        rank.pipe.poll(SECONDS_TO_ABORT)
        return None
    try:
        status: int = rank.pipe.recv()
    except EOFError:
        return None
    return status


def _variables_of_world(num_ranks: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


def _run(rank: int, pipe: Connection) -> None:
    """What a rank does: the command that comes through the pipe; its status goes back."""
    command, output, variables = pipe.recv()
    os.environ.update(variables)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    status = _status_of_script(list(command))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(status)


def _status_of_script(command: list[str]) -> int:
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
