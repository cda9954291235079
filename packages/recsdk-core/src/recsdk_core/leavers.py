"""What leaves a table: keys, why they left, and their rows as they were last.

Shape letters: n rows of a batch, D row width, S numbers of a row's state.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._internal.checks import int_if_given, int_within, require_finite, require_one_of
from recsdk_core._internal.packed_state import unpack_state

__all__ = [
    "IndexLeavers",
    "LeaveCause",
    "LeaverBatch",
    "LeaverSource",
    "Leavers",
    "LeftRows",
    "OnOverflow",
    "engine_overflow",
]

_SECONDS_BETWEEN_SIGNALS = 0.1
"""How long the engine waits before Python looks for Ctrl-C."""

OnOverflow: TypeAlias = Literal["count", "block", "raise"]
"""What happens when more rows leave than there are places for those yet to be read."""


class LeaveCause(enum.IntEnum):
    """Why a key left; arrays of causes are uint8 and hold these values."""

    EVICTED = 0
    """For another one, or by `Table.evict`."""
    ERASED = 1
    """By `Table.erase` or `Table.clear`."""
    EXPIRED = 2
    """Since it was not seen for long, see `Evict.expiring`."""


@dataclass(frozen=True, kw_only=True)
class LeaverBatch:
    """Some rows that left a table, in the order in which they left."""

    keys: NDArray[np.int64]
    """Keys, int64 (n,)."""
    causes: NDArray[np.uint8]
    """Why each left, uint8 (n,) of `LeaveCause`."""
    weights: NDArray[np.float32]
    """Weights, float32 (n, D)."""
    state: dict[str, NDArray[np.float32]]
    """Optimizer state, float32 (n, width) for each of `Table.state_fields`."""


class LeaverSource(Protocol):
    """What a `Leavers` reads: the engine's, or what keeps rows elsewhere. Thread-safe."""

    @property
    def max_rows(self) -> int:
        """Places."""

    def read(
        self, max_rows: int | None
    ) -> tuple[
        NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None
    ]:
        """Keys (n,), causes (n,), weights (n, D), and state (n, S) if rows have some."""

    def wait(self, seconds: float) -> bool:
        """Waits for the first row; whether there is one."""

    def size(self) -> int:
        """Rows that can be read now."""

    def num_lost(self) -> int:
        """Rows that found no place so far."""

    def close(self) -> None:
        """From here on what leaves is not kept."""


def engine_overflow(
    call: str, max_rows: int, on_overflow: OnOverflow, block_seconds: float
) -> tuple[int, _ext.OnOverflow, float]:
    """The arguments of `leavers` as the engine takes them; raises ValueError or TypeError."""
    num_places = int_within(call, 1, 2**63, max_rows=max_rows)
    require_one_of(call, ("count", "block", "raise"), on_overflow=on_overflow)
    require_finite(call, block_seconds=block_seconds)
    return num_places, _ext.OnOverflow[on_overflow.upper()], float(block_seconds)


@dataclass(frozen=True, kw_only=True)
class LeftRows:
    """Some keys that left an index, in the order in which they left."""

    keys: NDArray[np.int64]
    """Keys, int64 (n,)."""
    causes: NDArray[np.uint8]
    """Why each left, uint8 (n,) of `LeaveCause`."""
    rows: NDArray[np.int64]
    """The row number that each had, int64 (n,)."""


class IndexLeavers:
    """Keys that leave an index whose rows the caller keeps, from `Index.leavers` on.

    `take` gives a key once no batch in flight uses its row, and its row number, which may have been
    given to another key already. So copy rows before those of new keys are written. `make_rows` may
    ask `num_ended`: the rows that it is told to make come after so many that left. Places stay
    taken until `free_rows`. Thread-safe.

    >>> import numpy as np
    >>> from recsdk_core import Evict, Index
    >>> index = Index(max_rows=2, eviction=Evict.lru())
    >>> _ = index.map(np.array([1, 2]), insert=True)
    >>> leavers = index.leavers()
    >>> _ = index.map(np.array([2, 3]), insert=True)
    >>> left = leavers.take()
    >>> left.keys.tolist(), left.rows.tolist(), leavers.num_ended
    ([1], [0], 1)
    >>> leavers.free_rows(len(left.keys))
    """

    def __init__(self, engine: _ext.Leavers) -> None:
        """`Index.leavers` makes it."""
        self._engine = engine

    def take(self) -> LeftRows:
        """All that can be taken now; there may be none."""
        keys, causes, rows = self._engine.take()
        return LeftRows(keys=keys, causes=causes, rows=rows)

    def free_rows(self, count: int) -> None:
        """Gives back the places of so many rows that were taken; ValueError for fewer than 0."""
        self._engine.free_rows(int_within("IndexLeavers.free_rows", 0, 2**63, count=count))

    @property
    def num_ended(self) -> int:
        """Keys that could be taken so far, those that were included."""
        return self._engine.num_ended()

    @property
    def num_lost(self) -> int:
        """Keys that found no place so far."""
        return self._engine.num_lost()

    @property
    def max_rows(self) -> int:
        """Places."""
        return self._engine.max_rows

    def close(self) -> None:
        """From here on what leaves is not kept; what has left can still be taken. Idempotent."""
        self._engine.close()


class Leavers:
    """Rows that leave a table, from `Table.leavers` on until it is closed.

    A row can be read once no batch in flight uses it, with what that batch's update gave it. Keys
    that leave when all are replaced, as by a load, are not among them. Thread-safe, and runs
    without the GIL. May outlive the table.

    >>> import numpy as np
    >>> from recsdk_core import Evict, LeaveCause, Table
    >>> table = Table(dim=2, max_rows=2, eviction=Evict.lru())
    >>> _ = table.find_or_insert(np.array([1, 2]))
    >>> with table.leavers() as leavers:
    ...     _ = table.find_or_insert(np.array([2, 3]))
    ...     _ = table.erase(np.array([2]))
    ...     batch = leavers.read()
    >>> batch.keys.tolist(), [LeaveCause(cause).name for cause in batch.causes]
    ([1, 2], ['EVICTED', 'ERASED'])
    """

    def __init__(self, source: LeaverSource, fields: tuple[tuple[str, int], ...]) -> None:
        """`Table.leavers` makes it."""
        self._source = source
        self._fields = fields

    def read(self, max_rows: int | None = None, *, wait_seconds: float = 0.0) -> LeaverBatch:
        """Takes up to `max_rows` rows that left first; None: all that can be read.

        Waits up to `wait_seconds` for the first one, not once this is closed or the table is gone;
        so a batch may be empty. A Ctrl-C while it waits takes none; one just after it has taken
        rows, as it returns, loses them. Raises ValueError or TypeError for a bad argument.
        """
        require_finite("Leavers.read", wait_seconds=wait_seconds)
        if wait_seconds < 0.0:
            raise ValueError(f"Leavers.read: wait_seconds must be at least 0, got {wait_seconds}")
        most = int_if_given("Leavers.read", 1, 2**63, max_rows=max_rows)
        self._wait(wait_seconds)
        keys, causes, weights, packed = self._source.read(most)
        state = {} if packed is None else unpack_state(packed, self._fields)
        return LeaverBatch(keys=keys, causes=causes, weights=weights, state=state)

    def _wait(self, seconds: float) -> None:
        """Waits for a row, no longer than that, and not once no more will come."""
        now = time.monotonic()
        end = now + seconds
        while (rest := end - now) > 0.0:
            begin, piece = now, min(rest, _SECONDS_BETWEEN_SIGNALS)
            has_row = self._source.wait(piece)
            now = time.monotonic()
            if has_row or now - begin < piece / 2:
                return

    def __iter__(self) -> Iterator[LeaverBatch]:
        """What can be read now, in batches of at most 65,536 rows."""
        while len((batch := self.read(2**16)).keys):
            yield batch

    def __len__(self) -> int:
        """Rows that can be read now."""
        return self._source.size()

    @property
    def num_lost(self) -> int:
        """Rows that found no place so far."""
        return self._source.num_lost()

    @property
    def max_rows(self) -> int:
        """Places."""
        return self._source.max_rows

    def close(self) -> None:
        """From here on what leaves is not kept; what has left can still be read. Idempotent."""
        self._source.close()

    def __enter__(self) -> Leavers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
