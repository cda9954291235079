"""The leases of a batch, which may be given up although something keeps its graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

from recsdk_core.table import Lease
from recsdk_core.tables import release_leases

__all__ = ["BatchLeases", "leave_failed", "note_lookup", "noting_lookups"]


class BatchLeases:
    """The leases of a batch that is mapped; its backward ends them, or `abandon` does.

    Without either they end when nothing refers to them: a traceback that is kept does. A backward
    may begin in another thread, which goes on for a while after the step that it is of has failed.
    """

    def __init__(self, leases: Sequence[Lease | None]) -> None:
        self._leases = leases
        self._is_abandoned = False
        self._lock = Lock()

    def begin_backward(self) -> None:
        """Leaves the leases to a backward. Raises RuntimeError once they are abandoned."""
        with self._lock:
            self._leases = ()
        if self._is_abandoned:
            raise RuntimeError(
                "this forward's step failed and its batch was given up, so it has no backward; run "
                "forward again"
            )

    def abandon(self) -> None:
        """Ends the leases, unless a backward has begun."""
        with self._lock:
            leases, self._leases = self._leases, ()
            self._is_abandoned |= bool(leases)
        release_leases(leases)


_noted: ContextVar[list[BatchLeases] | None] = ContextVar("_noted", default=None)


@contextmanager
def noting_lookups(found: list[BatchLeases]) -> Iterator[None]:
    """Inside, `found` gets the leases of the batches that are looked up, or have failed."""
    token = _noted.set(found)
    try:
        yield
    finally:
        _noted.reset(token)


def note_lookup(leases: Iterable[BatchLeases]) -> None:
    """Says that batches with these leases are looked up from here on."""
    found = _noted.get()
    if found is not None:
        found.extend(leases)


def leave_failed(leases: Iterable[BatchLeases]) -> None:
    """Says that batches with these leases have failed, and ends them unless somebody notes that.

    Who waits ahead for a batch notes it: its keys may show to readers at its turn, not before.
    """
    found = _noted.get()
    if found is not None:
        found.extend(leases)
        return
    for each in leases:
        each.abandon()
