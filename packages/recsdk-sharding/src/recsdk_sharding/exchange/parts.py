"""Where the time of a step goes: seconds by named part, which torch's profiler shows too."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Any

from torch.profiler import record_function

from recsdk_sharding._compat.private import is_profiling

__all__ = ["Parts", "shown"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def shown(name: str) -> AbstractContextManager[Any]:
    """Inside, torch's profiler shows `recsdk::<name>` on this thread; else it costs nothing."""
    return record_function(f"recsdk::{name}") if is_profiling() else _NOTHING


class Parts:
    """The seconds that one thread has spent in each part of its work so far.

    Other threads may read them at any time. Parts must not be nested: each second counts once. A
    part costs about a microsecond.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By part, since this was made; of those that have ended."""
        self.open_since: float | None = None
        """When the part began in which the thread is, by `perf_counter`; None: in none."""
        self._made: dict[str, _Part] = {}

    def part(self, name: str) -> AbstractContextManager[None]:
        """Inside, time is the part's; the profiler shows it as `shown` does."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = _Part(self, name)
        return found


class _Part(AbstractContextManager[None]):
    """Used again and again, as parts are never nested."""

    def __init__(self, parts: Parts, name: str) -> None:
        self._parts = parts
        self._name = name
        self._shown: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if is_profiling():
            self._shown = shown(self._name)
            self._shown.__enter__()
        self._start = self._parts.open_since = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        spent, seconds = perf_counter() - self._start, self._parts.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + spent
        self._parts.open_since = None
        if self._shown is not None:
            self._shown.__exit__(kind, error, at)
            self._shown = None
