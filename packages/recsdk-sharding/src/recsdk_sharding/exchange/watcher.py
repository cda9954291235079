"""A thread that closes the process groups of a device when another rank has failed."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

__all__ = ["Watcher"]

_SECONDS_BETWEEN = 0.5
_SECONDS_TO_STOP = 1.0


class Watcher:
    """Asks now and then whether a rank failed, and acts once.

    A rank cannot see in a device's group that another one has gone, as it does in gloo's.
    """

    def __init__(self, has_failed: Callable[[], bool], close: Callable[[], None]) -> None:
        self.has_found = False
        """Whether a rank failed."""
        self._has_failed = has_failed
        self._close = close
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recsdk-failures", daemon=True)
        self._thread.start()
        _watchers.add(self)

    def stop(self) -> None:
        """Ends the thread."""
        self._is_stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_SECONDS_TO_STOP)

    def _run(self) -> None:
        while not self._is_stopped.wait(_SECONDS_BETWEEN):
            try:
                if not self._has_failed():
                    continue
            except Exception:  # the store is gone, and with it the ranks' world
                return
            self.has_found = True
            self._close()
            return


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    for watcher in list(_watchers):
        watcher.stop()
