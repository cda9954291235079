"""One background thread that runs calls in the order in which they came.

Torch records no graph there: nothing that the host does for a batch is differentiated.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch

__all__ = ["Pending", "Worker"]

T = TypeVar("T")
_Entry: TypeAlias = "tuple[Callable[[], Any], Callable[[], None], Pending[Any]]"
_Calls: TypeAlias = "queue.SimpleQueue[_Entry | None]"


class Pending(Generic[T]):
    """What a queued call will give. It comes once the thread has let go of the call and its result.

    Else what they keep open, leases of a table say, would stay open a moment after the waiter has
    dropped the result. It is one lock; futures and events take forty calls of Python a batch.
    """

    __slots__ = ("_error", "_is_under_way", "_result")

    def __init__(self) -> None:
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_under_way = threading.Lock()
        """Held until the thread has let go."""
        self._is_under_way.acquire()

    def result(self, timeout: float | None = None) -> T:
        """What the call returned; raises what it raised, or CancelledError if it was dropped.

        Waits for it, at most `timeout` seconds: then it raises TimeoutError. Any thread may ask,
        any number of times, but for the one that runs the call. While the interpreter is torn down
        it waits for nothing, as no other thread runs any more.
        """
        if sys.is_finalizing():
            timeout = 0.0
        if timeout is None:
            with self._is_under_way:
                pass
        elif self._is_under_way.acquire(timeout=timeout):
            self._is_under_way.release()
        else:
            raise TimeoutError(f"a call of the worker has not ended within {timeout} s")
        try:
            if self._error is not None:
                raise self._error
            return cast(T, self._result)
        finally:
            del self  # else the error would keep itself alive, through this frame


class Worker:
    """A thread and its queue."""

    def __init__(self, name: str) -> None:
        if sys.is_finalizing():
            raise RuntimeError("the interpreter is torn down: no thread can be started any more")
        self._calls: _Calls = queue.SimpleQueue()
        # A daemon: a rank whose peers died would otherwise hang at exit until the group's timeout.
        self._thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(
        self, call: Callable[[], T], dropped: Callable[[], None] = lambda: None
    ) -> Pending[T]:
        """Queues a call; `dropped` is called in its place if it is dropped."""
        pending: Pending[T] = Pending()
        self._calls.put((call, dropped, pending))
        return pending

    def drop_queued(self) -> int:
        """Drops the calls that have not started, see `submit`; returns their number."""
        num_dropped = 0
        while True:
            try:
                entry = self._calls.get_nowait()
            except queue.Empty:
                return num_dropped
            if entry is not None:
                _, dropped, pending = entry
                dropped()
                pending._error = CancelledError()
                pending._is_under_way.release()
                num_dropped += 1

    def stop(self) -> None:
        """Ends the thread once it has run what is queued; returns at once."""
        self._calls.put(None)

    def join(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread's end; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _run(calls: _Calls) -> None:
    torch.set_grad_enabled(False)  # once for the thread: each `no_grad` takes a dozen calls
    while (entry := calls.get()) is not None:
        call, dropped, pending = entry
        try:
            pending._result = call()
        except BaseException as error:
            pending._error = error
        is_under_way = pending._is_under_way
        del entry, call, dropped, pending
        is_under_way.release()
