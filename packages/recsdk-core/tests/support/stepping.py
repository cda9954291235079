"""Saves in threads that stop before each operation of their store, so that tests order these."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from recsdk_core import CheckpointError
from recsdk_core.files import place_lock

MEMORY = ("exists", "ls", "isfile", "makedirs", "pipe_file", "cat_file", "open", "size", "rm",
          "rm_file")  # fmt: skip
LOCAL = ("mkdir", "rename", "link", "open", "close", "unlink", "rmdir", "stat", "lstat", "listdir")
CHANGES = ("mkdir", "makedirs", "rename", "link", "open", "unlink", "rmdir", "pipe_file", "rm",
           "rm_file")  # fmt: skip


class Killed(BaseException):
    """Comes out of every operation of a save that was killed, also of those that clean up."""


class Stepped(threading.Thread):
    """A save that does one operation of its store for each `step`."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._go, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._is_killed = False
        self._files: set[int] = set()
        self.is_inside = False
        """Whether it is within an operation, which may consist of others."""
        self.is_done = False
        self.error: str | None = None
        """What it failed with; None if it did not."""
        self.calls: list[tuple[int, str, str]] = []
        """Clock, name and first argument of each operation."""
        self.start()

    def run(self) -> None:
        self._go.acquire()
        try:
            self._work()
        except (CheckpointError, FileExistsError, BlockingIOError) as error:
            self.error = str(error)
        except Killed:
            self.error = "killed"
        finally:
            self.is_done = True
            self._rests.release()

    def step(self) -> None:
        """Has it do one operation, or end."""
        self._go.release()
        assert self._rests.acquire(timeout=60)

    def kill(self) -> None:
        """Has it do nothing more; the system closes its files and so ends its locks."""
        self._is_killed = True
        while not self.is_done:
            self.step()
        for file in self._files:
            os.close(file)
        place_lock._open.difference_update(self._files)

    def do(self, clock: Clock, name: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """One operation, when it is this save's turn."""
        if not self._is_killed:
            self._rests.release()
            self._go.acquire()
        if self._is_killed:
            raise Killed
        clock.now += 1
        self.calls.append((clock.now, name, next((a for a in args if isinstance(a, str)), "")))
        self.is_inside = True
        try:
            found = call(*args, **more)
        finally:
            self.is_inside = False
        if call is os_open:
            self._files.add(found)
        elif call is os_close:
            self._files.discard(args[0])
        return found

    @property
    def has_changed(self) -> bool:
        """Whether its last operation was one that changes something."""
        return bool(self.calls) and self.calls[-1][1] in CHANGES

    def time_of_last(self, name: str, end: str = "", before: float = inf) -> int:
        """When it last did an operation, on a path that ends so, before that time."""
        times = [at for at, done, path in self.calls if done == name and path.endswith(end)]
        return max(at for at in times if at < before)


os_open, os_close = os.open, os.close


def _no_lock(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@contextmanager
def stepping(*, has_locks: bool = True) -> Iterator[Clock]:
    """Stops the threads of `Stepped`, and no others, before each operation."""
    clock = Clock()
    flock = fcntl.flock
    if not has_locks:
        fcntl.flock = _no_lock
    places: list[tuple[Any, Sequence[str]]] = [
        (MemoryFileSystem, MEMORY), (os, LOCAL), (fcntl, ("flock",)),
    ]  # fmt: skip
    before = [(place, name, getattr(place, name)) for place, names in places for name in names]
    for place, name, call in before:
        setattr(place, name, _stopping(call, name, clock))
    sync, pause = os.fsync, place_lock._SECONDS_BETWEEN
    os.fsync = lambda _: None  # no power is lost here
    place_lock._SECONDS_BETWEEN = 0.0  # the steps say when a lock is tried again, not the clock
    try:
        yield clock
    finally:
        os.fsync, place_lock._SECONDS_BETWEEN = sync, pause
        for place, name, call in before:
            setattr(place, name, call)
        fcntl.flock = flock


class Clock:
    """Counts operations."""

    def __init__(self) -> None:
        self.now = 0


def _stopping(call: Any, name: str, clock: Clock) -> Any:
    def stop(*args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread()
        if not isinstance(thread, Stepped) or thread.is_inside:
            return call(*args, **kwargs)
        return thread.do(clock, name, call, *args, **kwargs)

    return stop
