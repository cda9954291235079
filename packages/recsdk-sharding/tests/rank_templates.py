"""Processes that have imported what ranks need, from which ranks are forked.

A rank so begins at once, and is otherwise as one that was started by itself: a template has its
environment, one thread, and no process group.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from unittest import mock

Serve = Callable[[int, Connection], None]

SECONDS_TO_IMPORT = 300
NEEDED = ("torch", "recsdk_sharding", "worlds")


@dataclass(frozen=True)
class Rank:
    """A process, and the other end of the pipe that it serves."""

    pid: int
    pipe: Connection

    def end(self) -> None:
        """Kills the process, and waits until it has no pipe any more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.pipe.recv_bytes()
        self.pipe.close()


def start_rank(serve: Serve, rank: int, environment: Mapping[str, str]) -> Rank:
    """A process that runs `serve(rank, pipe)` with these variables beside those of this process.

    Even and odd ranks have different templates: in processes forked from one, sets of strings have
    one order, and ranks must not need that.
    """
    return _template(rank % 2, tuple(sorted(environment.items()))).start(serve, rank)


@functools.cache
def _template(_number: int, environment: tuple[tuple[str, str], ...]) -> _Template:
    return _Template(dict(environment))


class _Template:
    """A process to fork from. It ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with mock.patch.dict(os.environ, environment, OMP_NUM_THREADS="1"):
            context.Process(target=_fork_ranks, args=(theirs,), daemon=True).start()
        theirs.close()

    def start(self, serve: Serve, rank: int) -> Rank:
        ours, theirs = multiprocessing.Pipe()
        self._pipe.send((serve, rank))
        reduction.send_handle(self._pipe, theirs.fileno(), None)
        theirs.close()
        if not self._pipe.poll(SECONDS_TO_IMPORT):
            raise TimeoutError(f"no rank was started within {SECONDS_TO_IMPORT} s")
        return Rank(self._pipe.recv(), ours)


def _fork_ranks(pipe: Connection) -> None:
    for name in NEEDED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads; a forked process would have one of them"
    gc.freeze()  # else each rank would copy the pages of all that was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    with contextlib.suppress(EOFError):
        while True:
            serve, rank = pipe.recv()
            handle = reduction.recv_handle(pipe)
            pid = os.fork()
            if pid == 0:
                _be_rank(serve, rank, pipe, Connection(handle))
            os.close(handle)
            pipe.send(pid)


def _be_rank(serve: Serve, rank: int, pipe: Connection, own: Connection) -> None:
    try:
        import numpy
        import torch

        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pipe.close()
        torch.default_generator.seed()  # not the template's, which other ranks have too
        numpy.random.seed()
        serve(rank, own)
    finally:
        os._exit(0)
