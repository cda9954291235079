"""Calls that several threads make, each once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


class SharedCalls:
    """Calls that whoever has time makes, in any order. Once one failed, no other is begun."""

    def __init__(self, calls: Iterable[Callable[[], None]] = ()) -> None:
        self._left = deque(calls)
        self._num_undone = len(self._left)
        self._is_done = threading.Condition()
        self._error: BaseException | None = None

    def help(self) -> None:
        """Make calls until each is begun."""
        while self._make_next():
            pass

    def finish(self) -> None:
        """Help, and wait for what others have begun; raise what the first call that failed did."""
        self.help()
        with self._is_done:
            self._is_done.wait_for(lambda: not self._num_undone)
        if self._error is not None:
            raise self._error

    def _make_next(self) -> bool:
        """Make a call that is not begun; False: there is none."""
        try:
            call = self._left.popleft()
        except IndexError:  # asked first, another thread could come between
            return False
        try:
            if self._error is None:
                call()
        except BaseException as error:
            self._error = self._error or error
        finally:
            del call  # its result may be large: free it before others go on
            with self._is_done:
                self._num_undone -= 1
                self._is_done.notify_all()
        return True
