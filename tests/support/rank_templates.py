"""Processes that have imported what ranks need, from which ranks are forked.

A rank so begins at once, and is otherwise as one that was started by itself: a template has its
environment, one thread, and no process group.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

Serve = Callable[[int, Connection], None]

# What a rank has from its start, and no template of its own for it: no import reads it, or a rank
# does for itself what the import would.
READ_LATER = ("RECSDK_SHARED_MEMORY", "RECSDK_SIM_NPU", "RECSDK_SIM_NPU_ASYNC")

SECONDS_TO_IMPORT = 300
SECONDS_TO_END = 10


class RankError(AssertionError):
    """A rank was not started, or a function raised on it; has that rank's traceback."""


def begin_torchrec() -> None:
    """Makes what torchrec keeps per process, and all ranks have to make together."""
    import torch.distributed as dist
    from torchrec.distributed import collective_utils

    if hasattr(collective_utils, "init_collective_validation"):  # torchrec 1.6 has none
        collective_utils.init_collective_validation(dist.GroupMember.WORLD)


@dataclass(frozen=True)
class Rank:
    """A process, and the other end of the pipe that it serves."""

    pid: int
    pipe: Connection

    def end(self) -> None:
        """Kills the process, and waits some time until it has no pipe any more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll(SECONDS_TO_END):  # what it forked may keep the pipe
                self.pipe.recv_bytes()
        self.pipe.close()


def start_rank(
    serve: Serve, rank: int, environment: Mapping[str, str], modules: Sequence[str]
) -> Rank:
    """A process that runs `serve(rank, pipe)` with these variables beside those of this process.

    It has imported `modules` already, and torch.

    Even and odd ranks have different templates: in processes forked from one, sets of strings have
    one order, and ranks must not need that. Raises RankError if the template has died or does not
    answer; the next rank has a new one.
    """
    early = {name: value for name, value in environment.items() if name not in READ_LATER}
    name = (rank % 2, tuple(sorted(early.items())), tuple(modules))
    if name not in _templates:
        _templates[name] = _Template(early, modules)
    try:
        return _templates[name].start(serve, rank, environment)
    except (EOFError, OSError) as error:
        code = _templates.pop(name).exit_code()
        state = "does not answer" if code is None else f"died with exit code {code}"
        raise RankError(f"rank {rank} was not started: its template {state}: {error!r}") from error


class _Template:
    """A process to fork from. It ends with this one."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with mock.patch.dict(os.environ, environment, OMP_NUM_THREADS="1"):
            self._process = context.Process(target=_fork_ranks, args=(theirs, modules))
            self._process.start()
        theirs.close()

    def start(self, serve: Serve, rank: int, environment: Mapping[str, str]) -> Rank:
        ours, theirs = multiprocessing.Pipe()
        self._pipe.send((serve, rank, dict(environment)))
        reduction.send_handle(self._pipe, theirs.fileno(), None)
        theirs.close()
        if not self._pipe.poll(SECONDS_TO_IMPORT):
            raise TimeoutError(f"no rank was started within {SECONDS_TO_IMPORT} s")
        return Rank(self._pipe.recv(), ours)

    def close(self) -> None:
        """Has it end."""
        self._pipe.close()

    def exit_code(self) -> int | None:
        """None if it does not end."""
        self._process.join(SECONDS_TO_END)
        return self._process.exitcode


_templates: dict[tuple[int, tuple[tuple[str, str], ...], tuple[str, ...]], _Template] = {}


@atexit.register
def _end_templates() -> None:
    # Before multiprocessing waits for them. They are no daemons: ranks have processes of their own.
    for template in _templates.values():
        template.close()


def _fork_ranks(pipe: Connection, modules: Sequence[str]) -> None:
    gc.disable()  # nothing that imports make is garbage
    for name in ("torch", *modules):
        importlib.import_module(name)
    start = _fork_rank if _can_fork() else _spawn_rank
    gc.freeze()  # else each rank would copy the pages of all that was imported
    gc.enable()
    signal.signal(signal.SIGCHLD, _reap)
    with contextlib.suppress(EOFError):
        while True:
            serve, rank, environment = pipe.recv()
            own = Connection(reduction.recv_handle(pipe))
            pid = start(pipe, serve, rank, environment, own)
            own.close()
            pipe.send(pid)


def _can_fork() -> bool:
    """Whether a forked process would have all threads of this one; only a CUDA build starts some
    when it is imported."""
    import torch

    threads = [Path(task, "comm").read_text().strip() for task in _tasks()]
    assert len(threads) == 1 or torch.version.cuda, f"threads: {threads}"
    return len(threads) == 1


def _tasks() -> list[str]:
    return [entry.path for entry in os.scandir("/proc/self/task")]


def _fork_rank(
    pipe: Connection, serve: Serve, rank: int, environment: dict[str, str], own: Connection
) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        pipe.close()
        _be_rank(serve, rank, own)
    return pid


def _spawn_rank(
    pipe: Connection, serve: Serve, rank: int, environment: dict[str, str], own: Connection
) -> int:
    """It imports everything again."""
    process = multiprocessing.get_context("spawn").Process(target=_be_rank, args=(serve, rank, own))
    with mock.patch.dict(os.environ, environment):
        process.start()
    assert process.pid is not None
    return process.pid


def _reap(*_: object) -> None:
    """Takes in ranks that have ended: so their processor time counts as the template's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _load_simulated_npu() -> None:
    """As torch does when it is imported."""
    import torch

    if os.environ.get("RECSDK_SIM_NPU") == "1" and "torch_npu" not in sys.modules:
        torch._import_device_backends()  # type: ignore[no-untyped-call]


def _be_rank(serve: Serve, rank: int, own: Connection) -> None:
    try:
        import numpy
        import torch

        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _load_simulated_npu()
        multiprocessing.set_start_method(None, force=True)  # the default; the template was spawned
        torch.default_generator.seed()  # not the template's, which other ranks have too
        numpy.random.seed()
        serve(rank, own)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
