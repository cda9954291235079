"""What leaves a table on a device: keys at once, rows once the thread that trains copies them.

A row that nobody uses any more stays on the device as it is until another key's values are written
over it, which only that thread does. So it copies what has left first, on the device, and whoever
reads waits for the copy.

Shape letters: n rows that left, E new rows that are not written yet, D row width, S numbers of a
row's state.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import IndexLeavers, LeftRows
from recsdk_sharding.device.parcel import sent
from recsdk_sharding.device.stored_rows import StoredRows, array_of
from recsdk_sharding.placement.devices import mark_of, wait_for

if TYPE_CHECKING:
    from recsdk_sharding.device.host_index import NumberedRows, WaitingRows

__all__ = ["CopiedRows", "DeviceLeavers", "UncopiedRows", "UnwrittenRows", "copied_rows"]

_Read: TypeAlias = tuple[
    NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None
]


@dataclass(frozen=True)
class UncopiedRows:
    """Rows that left, and how many did before the first of them."""

    first: int
    left: LeftRows


class _Made(Protocol):
    """New rows of one call."""

    @property
    def numbers(self) -> NDArray[np.int64]: ...
    @property
    def num_ended(self) -> int: ...


@dataclass(frozen=True)
class UnwrittenRows:
    """New rows of a table that are not on the device yet, in the order in which they were made."""

    made: Sequence[NumberedRows]
    waiting: Sequence[WaitingRows]
    """Those that begin with shared rows."""
    first_shared: int
    """The number of the first shared row."""


@dataclass(frozen=True)
class _MadeRows:
    """Which new rows are not written yet."""

    numbers_E: NDArray[np.int64]
    """Row numbers, in the order in which they were made."""
    num_ended_E: NDArray[np.int64]
    """How many rows had left before each was made, ascending."""

    @staticmethod
    def of(calls: Sequence[_Made]) -> _MadeRows:
        """Those of calls, in order."""
        numbers = [np.empty(0, np.int64), *(each.numbers for each in calls)]
        counts = np.array([each.num_ended for each in calls], np.int64)
        return _MadeRows(np.concatenate(numbers), counts.repeat(list(map(len, numbers[1:]))))

    def last_of(self, rows: UncopiedRows) -> NDArray[np.int64]:
        """Which of them each of the rows that left was, (n,); -1: none, as it was written."""
        found_n = np.full(len(rows.left.rows), -1)
        places: dict[int, list[int]] = {}
        for place in np.flatnonzero(np.isin(self.numbers_E, rows.left.rows)).tolist():
            places.setdefault(int(self.numbers_E[place]), []).append(place)
        for which in np.flatnonzero(np.isin(rows.left.rows, self.numbers_E)).tolist():
            own = np.array(places[int(rows.left.rows[which])])
            own = own[self.num_ended_E[own] <= rows.first + which]
            found_n[which] = own[-1] if len(own) else -1
        return found_n


@dataclass
class CopiedRows:
    """Rows that left, copied on the device."""

    left: LeftRows
    weights_nD: torch.Tensor
    state: Mapping[str, torch.Tensor]
    """(n, width) by field."""
    fresh: Mapping[str, float]
    """What each field of a new row begins with."""
    is_fresh_n: NDArray[np.bool_]
    """Whether a row was never written, so that its state is that of a new row."""
    places_m: NDArray[np.int64]
    """Which rows were only made on the host, (m,)."""
    values_mD: NDArray[np.float32]
    """Those."""
    mark: torch.Event | None = None
    """Behind the copies."""
    _on_host: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    def on_host(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Weights (n, D) and state (n, S); waits for the device."""
        if self._on_host is None:
            wait_for(self.mark)
            weights_nD = array_of(self.weights_nD)
            weights_nD[self.places_m] = self.values_mD
            none = np.empty((len(weights_nD), 0), np.float32)
            fields = [array_of(each) for each in self.state.values()]
            for name, of_rows in zip(self.state, fields, strict=True):
                of_rows[self.is_fresh_n] = self.fresh[name]
            self.weights_nD, self.state = self.weights_nD[:0].clone(), {}  # frees device memory
            self._on_host = weights_nD, np.concatenate([none, *fields], axis=1)
        return self._on_host


def copied_rows(rows: UncopiedRows, new: UnwrittenRows, stored: StoredRows) -> CopiedRows:
    """Copies rows that left on the device, as they are there, or would be once they are written."""
    numbers_n = rows.left.rows
    made_n = _MadeRows.of(new.made).last_of(rows)
    waits_n = _MadeRows.of(new.waiting).last_of(rows)
    sources_n, is_waiting_n = numbers_n.copy(), waits_n >= 0
    if is_waiting_n.any():  # a row that was never read begins only now
        shared = np.concatenate([each.shared for each in new.waiting])
        sources_n[is_waiting_n] = shared[waits_n[is_waiting_n]] + new.first_shared
    places_m = np.flatnonzero(made_n >= 0)
    values_mD = np.empty((0, stored.weight_RD.shape[1]), np.float32)
    if len(places_m):
        values_mD = torch.cat([each.values_nD for each in new.made]).numpy()[made_n[places_m]]
    both = (sent(each, stored.device) for each in (sources_n, numbers_n))
    weights_nD, state = stored.gather(*both)
    return CopiedRows(
        left=rows.left,
        weights_nD=weights_nD,
        state=state,
        fresh=stored.stored.fresh,
        is_fresh_n=(made_n >= 0) | is_waiting_n,
        places_m=places_m,
        values_mD=values_mD,
        mark=mark_of(stored.device),
    )


class DeviceLeavers:
    """What a `recsdk_core.Leavers` of a table on a device reads."""

    def __init__(self, queue: IndexLeavers, dim: int, state_width: int) -> None:
        """`dim`, `state_width`: D and S. Made by the thread that trains."""
        self.queue = queue
        """The keys."""
        self._copy: Callable[[], Callable[[], None] | None] = _gone
        self._shape = dim, state_width
        self._thread = threading.get_ident()
        self._reading = threading.Lock()
        self._has_rows = threading.Condition()
        self._copied: deque[CopiedRows] = deque()
        self._num_read = 0  # of the first of them
        self._num_rows = 0
        self.is_closed = False
        """Whether nothing that leaves from now on is kept."""
        self._num_taken = 0
        self._uncopied: list[UncopiedRows] = []
        self._close_with_table: weakref.finalize[Any, Any] | None = None

    def read_from(self, table: object, copy: Callable[[], None]) -> None:
        """`copy`, a method of the table: has what left copied, which the thread that trains does.

        This is closed once the table is gone.
        """
        self._copy = weakref.WeakMethod(copy)
        self._close_with_table = weakref.finalize(table, _close, weakref.ref(self))

    # ---- of the thread that trains --------------------------------------------------------------

    def take(self) -> Sequence[UncopiedRows]:
        """All that left and is not copied yet, in order; `add` says that it is."""
        left = self.queue.take()
        if len(left.keys):
            self._uncopied.append(UncopiedRows(self._num_taken, left))
            self._num_taken += len(left.keys)
        return self._uncopied

    def add(self, copied: Sequence[CopiedRows]) -> None:
        """What `take` gave last was copied."""
        self._uncopied = []
        with self._has_rows:
            self._copied.extend(copied)
            self._num_rows += sum(len(each.left.keys) for each in copied)
            self._has_rows.notify_all()

    # ---- of readers -----------------------------------------------------------------------------

    @property
    def max_rows(self) -> int:
        """Places."""
        return self.queue.max_rows

    def read(self, max_rows: int | None) -> _Read:
        """Keys (n,), causes (n,), weights (n, D), and state (n, S) if rows have some."""
        self._copy_own()
        dim, state_width = self._shape
        parts: list[Any] = [
            (
                np.empty(0, np.int64),
                np.empty(0, np.uint8),
                np.empty((0, dim), np.float32),
                np.empty((0, state_width), np.float32),
            )
        ]
        wanted = self.size() if max_rows is None else max_rows
        with self._reading:
            self._bring_to_host(wanted)
            while wanted and self._copied:
                parts.append(self._read_first(wanted))
                wanted -= len(parts[-1][0])
        keys, causes, weights, state = (np.concatenate(each) for each in zip(*parts, strict=True))
        self.queue.free_rows(len(keys))
        return keys, causes, weights, state if state_width else None

    def _bring_to_host(self, wanted: int) -> None:
        """So many rows: what raises does so before any is read. Who calls it reads alone."""
        wanted += self._num_read
        for copied in tuple(self._copied):
            if wanted <= 0:
                break
            copied.on_host()
            wanted -= len(copied.left.keys)

    def _read_first(self, at_most: int) -> tuple[NDArray[Any], ...]:
        """Rows of the first copy; who calls it reads alone."""
        first = self._copied[0]
        some = slice(self._num_read, self._num_read + at_most)
        columns = first.left.keys, first.left.causes, *first.on_host()
        found = tuple(column[some] for column in columns)
        with self._has_rows:
            self._num_read += len(found[0])
            self._num_rows -= len(found[0])
            if self._num_read == len(first.left.keys):
                self._copied.popleft()
                self._num_read = 0
        return found

    def _copy_own(self) -> None:
        copy = self._copy()
        if copy is not None and threading.get_ident() == self._thread:
            copy()

    def wait(self, seconds: float) -> bool:
        """Waits for the first row, until this is closed or the table gone; whether there is one."""
        self._copy_own()
        with self._has_rows:
            self._has_rows.wait_for(lambda: self._num_rows > 0 or self.is_closed, seconds)
            return self._num_rows > 0

    def size(self) -> int:
        """Rows that can be read now."""
        self._copy_own()
        return self._num_rows

    def num_lost(self) -> int:
        """Rows that found no place so far."""
        return self.queue.num_lost

    def close(self) -> None:
        """From here on what leaves is not kept; what was copied can still be read."""
        self._copy_own()
        self.queue.close()
        with self._has_rows:
            self.is_closed = True
            self._has_rows.notify_all()
        if self._close_with_table is not None:
            self._close_with_table.detach()


def _gone() -> None:
    """There is no table."""


def _close(reader: Callable[[], DeviceLeavers | None]) -> None:
    own = reader()
    if own is not None:
        own.close()
