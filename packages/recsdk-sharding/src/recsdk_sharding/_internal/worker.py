"""One background thread that runs calls in the order in which they came."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias, TypeVar

__all__ = ["Worker"]

T = TypeVar("T")
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"


class Worker:
    """A thread and its queue."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        # A daemon: a rank whose peers died would otherwise hang at exit until the group's timeout.
        self._thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call; its future cannot be cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((call, future))
        return future

    def drop_queued(self) -> int:
        """Fails the calls that have not started with CancelledError; returns their number."""
        num_dropped = 0
        while True:
            try:
                entry = self._calls.get_nowait()
            except queue.Empty:
                return num_dropped
            if entry is not None:
                entry[1].set_exception(CancelledError())
                num_dropped += 1

    def stop(self) -> None:
        """Ends the thread once it has run what is queued; returns at once."""
        self._calls.put(None)

    def join(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread's end; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _run(calls: _Calls) -> None:
    while (entry := calls.get()) is not None:
        call, future = entry
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del entry, call, future  # the wait for the next call must keep nothing alive
