"""A save that runs in the background while training goes on."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

from recsdk_core import _ext
from recsdk_core._internal.checks import require_number
from recsdk_core.checkpoint.reading import Position, Progress
from recsdk_core.errors import CheckpointError

__all__ = ["SaveHandle"]

_MOST_SECONDS_TO_END = 10.0


class SaveHandle:
    """A save under way, as `Table.save_async` returns it.

    If the interpreter exits first, the save is given up in good order: its files are removed, and
    what was at its place stays. After a fork the save goes on in the parent; in the child the
    handle has ended with an error. Thread-safe.
    """

    def __init__(
        self,
        work: Callable[[Progress], Position],
        cut: _ext.Cut,
        total_bytes: int,
        location: str,
    ) -> None:
        self._work = work
        self._cut = cut
        self._total = total_bytes
        self._location = location
        self._done_bytes = 0
        self._given_up = ""
        self._is_inherited = False
        self._finished = threading.Event()
        self._result: Position | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="recsdk-save", daemon=True)
        _under_way.add(self)
        try:
            self._thread.start()
        except BaseException:  # there may be no more threads
            _under_way.discard(self)
            raise

    def _run(self) -> None:
        try:
            self._result = self._work(self._count)
        except BaseException as error:
            self._error = error
        finally:
            _under_way.discard(self)
            self._finished.set()

    def _count(self, num_bytes: int) -> None:
        if self._given_up:
            raise CheckpointError(f"{self._location}: the save was given up {self._given_up}")
        self._done_bytes += num_bytes

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SaveHandle cannot be copied or pickled: its save runs once, on a thread of this "
            "process; share the handle itself, or its result()"
        )

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished.is_set()

    @property
    def progress(self) -> float:
        """The share of bytes written so far, 0 to 1; 1 only when the checkpoint is complete."""
        if self.is_done:
            return 1.0 if self._error is None else self._share()
        return min(self._share(), 0.99)

    def _share(self) -> float:
        return min(self._done_bytes / max(self._total, 1), 1.0)

    @property
    def copied_bytes(self) -> int:
        """Bytes of copies of rows that were updated since the cut and are not yet written."""
        return self._cut.copied_bytes

    @property
    def max_copied_bytes(self) -> int:
        """The most bytes of copies so far."""
        return self._cut.max_copied_bytes

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the save has ended, `timeout` seconds at most.

        None: as long as it takes. Raises what the save raised, TimeoutError if it has not ended,
        and ValueError for a timeout that is not a number.
        """
        if timeout is not None:
            require_number("SaveHandle", timeout=timeout)
            if timeout != timeout:
                raise ValueError("SaveHandle: timeout must be a number of seconds, got nan")
            timeout = min(max(float(timeout), 0.0), threading.TIMEOUT_MAX)
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self._location}: the save has not ended within {timeout} s")
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> Position:
        """Waits as `wait`; returns where the checkpoint stands.

        Raises as `wait` does, and CheckpointError for a save that has ended without a result.
        """
        self.wait(timeout)
        if self._result is None:
            raise CheckpointError(f"{self._location}: the save has no result")
        return self._result

    def _end_inherited_cut(self) -> None:
        """In a child of fork ends the cut, which nobody reads there; its changes still count.

        It takes the table's locks, which a fork may have found taken, so it waits until the child
        uses the table.
        """
        if self._is_inherited:
            self._cut.finish(False)

    def _end_in_child(self) -> None:
        self._is_inherited = True
        self._error = CheckpointError(
            f"{self._location}: the save goes on in the process that this one was forked from; "
            "wait for it there"
        )
        self._finished = threading.Event()  # the old event's lock may be held for ever
        self._finished.set()

    def _give_up(self, why: str) -> None:
        """Ends the save soon, unless it is complete by then; waits for that, but not for ever."""
        self._given_up = why
        self._thread.join(_MOST_SECONDS_TO_END)


_under_way: weakref.WeakSet[SaveHandle] = weakref.WeakSet()


def _end_all_in_child() -> None:
    handles = list(_under_way)
    _under_way.clear()
    for handle in handles:
        handle._end_in_child()


os.register_at_fork(after_in_child=_end_all_in_child)


@atexit.register
def _abandon_all() -> None:
    for handle in list(_under_way):
        handle._give_up("at exit")
