"""Scripts in processes that are forked from templates: as if started, but without the imports."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from ports import reserved_ports
from rank_templates import Rank, start_rank

MODULES = (
    "recsdk_sharding",
    "recsdk_pipeline.hybrid_pipeline",
    "recsdk_pipeline.data",
    "recsdk_pipeline.demo.worker",  # and so torchmetrics, with all that draws its curves
    "torch.distributed.optim",  # which torchrec imports to apply an optimizer
)
OF_TEMPLATES = ("RECSDK_SIM_NPU", "RECSDK_SIM_NPU_ASYNC")  # what counts when torch is imported
SECONDS_TO_ABORT = 10
PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h
_ports_held: dict[int, ExitStack] = {}
"""What reserves the port of a world, by the process of its first rank."""


def start_scripts(
    command: Sequence[str],
    output: Path,
    variables_of_each: Sequence[Mapping[str, str]],
    *,
    folder: Path | None = None,
    modules: Sequence[str] = MODULES,
    num_templates: int = 2,
    has_end_of_python: bool = False,
) -> list[Rank]:
    """Starts `command`, a script or -m module with arguments, in a process for each mapping.

    Each has those variables beside those of this process, and has imported `modules`. All append
    to `output`, and run in `folder`, by default here. None begins before all are there: a template
    may take longer to import than one waits for the other. `num_templates`: 1 for scripts that need
    no sets of strings in several orders. `has_end_of_python`: they end as Python does, while their
    threads go on; if not, once they have called what is to be called at exit.
    """
    started = []
    run = _run_to_the_end_of_python if has_end_of_python else _run
    for rank, variables in enumerate(variables_of_each):
        early = {name: variables[name] for name in OF_TEMPLATES if name in variables}
        started.append(start_rank(run, rank % num_templates, early, modules))
    for each, variables in zip(started, variables_of_each, strict=True):
        each.pipe.send((tuple(command), str(output), dict(variables), str(folder or Path.cwd())))
    return started


def start_ranks(
    num_ranks: int,
    command: Sequence[str],
    output: Path,
    variables: Mapping[str, str],
    *,
    folder: Path | None = None,
    modules: Sequence[str] = MODULES,
    num_templates: int = 2,
) -> list[Rank]:
    """Starts `command` in a process for each rank, with the variables that torchrun sets."""
    with ExitStack() as held:
        [port] = held.enter_context(reserved_ports())
        world = {**variables, **_variables_of_world(num_ranks, port)}
        each = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        started = start_scripts(
            command, output, each, folder=folder, modules=modules, num_templates=num_templates
        )
        _ports_held[started[0].pid] = held.pop_all()
    return started


def _variables_of_world(num_ranks: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


def statuses_of(started: Sequence[Rank], seconds: float) -> list[int | None]:
    """The scripts' exit statuses, once all have ended; None for one that died or was aborted.

    Scripts that don't end in time are aborted, all of them; each prints where its threads stand.
    """
    deadline = time.monotonic() + seconds
    statuses = [_status_of(each, deadline) for each in started]
    for each in started:
        each.end()
        if each.pid in _ports_held:
            _ports_held.pop(each.pid).close()
    return statuses


def _status_of(started: Rank, deadline: float) -> int | None:
    if not started.pipe.poll(max(0.0, deadline - time.monotonic())):
        os.kill(started.pid, signal.SIGABRT)
        started.pipe.poll(SECONDS_TO_ABORT)
        return None
    try:
        status: int = started.pipe.recv()
    except EOFError:
        return None
    return status


def _run(rank: int, pipe: Connection) -> None:
    """What the process does: the command that comes through the pipe; its status goes back."""
    status = _status_of_script(_prepared(pipe))
    atexit._run_exitfuncs()  # as a process of its own would; one that is forked does not
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(status)


def _run_to_the_end_of_python(rank: int, pipe: Connection) -> None:
    """Likewise, by a process of its own, of which this one says how it ended."""
    command = _prepared(pipe)
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGABRT)
        ctypes.pythonapi.Py_Exit(_status_of_script(command))
    _, status = os.waitpid(pid, 0)
    pipe.send(os.waitstatus_to_exitcode(status))


def _prepared(pipe: Connection) -> list[str]:
    """The command that comes through the pipe; its variables, folder and output are set."""
    command, output, variables, folder = pipe.recv()
    os.environ.update(variables)
    os.chdir(folder)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    return list(command)


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
