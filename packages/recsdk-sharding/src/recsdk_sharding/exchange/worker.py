"""One background thread that runs calls in the order in which they came.

Torch records no graph there: nothing that the host does for a batch is differentiated.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias, TypeVar

import torch

__all__ = ["Worker"]

T = TypeVar("T")
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], _Outcome[Any]] | None]"


class _Outcome(Future[T]):
    """A future whose `result` comes once the thread has let go of the call and its result.

    Else what they keep open, leases of a table say, would stay open a moment after the waiter has
    dropped the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()
        """Whether the thread has let go."""

    def result(self, timeout: float | None = None) -> T:
        """As a future's; the thread itself, in a callback, does not wait for itself."""
        try:
            return super().result(timeout)
        finally:
            if self.done() and not isinstance(threading.current_thread(), _Thread):
                self.is_free.wait()
            del self  # else an error would keep its own future alive, through this frame


class Worker:
    """A thread and its queue."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        # A daemon: a rank whose peers died would otherwise hang at exit until the group's timeout.
        self._thread = _Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call; its future cannot be cancelled."""
        future: _Outcome[T] = _Outcome()
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
                entry[1].is_free.set()
                entry[1].set_exception(CancelledError())
                num_dropped += 1

    def stop(self) -> None:
        """Ends the thread once it has run what is queued; returns at once."""
        self._calls.put(None)

    def join(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread's end; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


class _Thread(threading.Thread):
    """A worker's thread."""


def _run(calls: _Calls) -> None:
    torch.set_grad_enabled(False)  # once for the thread: each `no_grad` takes a dozen calls
    while (entry := calls.get()) is not None:
        call, future = entry
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        is_free = future.is_free
        del entry, call, future
        is_free.set()
