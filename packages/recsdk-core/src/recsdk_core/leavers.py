"""What leaves a table: keys, why they left, and their rows as they were last.

Shape letters: n rows of a batch, D row width.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._internal.checks import require_finite, require_int
from recsdk_core._internal.packed_state import unpack_state

__all__ = ["LeaveCause", "LeaverBatch", "Leavers", "OnOverflow"]

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

    def __init__(self, engine: _ext.Leavers, fields: tuple[tuple[str, int], ...]) -> None:
        """`Table.leavers` makes it."""
        self._engine = engine
        self._fields = fields

    def read(self, max_rows: int | None = None, *, wait_seconds: float = 0.0) -> LeaverBatch:
        """Takes up to `max_rows` rows that left first; None: all that can be read.

        Waits up to `wait_seconds` for the first one, not once this is closed or the table is gone;
        so a batch may be empty. Raises ValueError or TypeError for a bad argument.
        """
        require_finite("Leavers.read", wait_seconds=wait_seconds)
        if wait_seconds < 0.0:
            raise ValueError(f"Leavers.read: wait_seconds must be at least 0, got {wait_seconds}")
        if max_rows is not None:
            require_int("Leavers.read", 1, max_rows=max_rows)
        if wait_seconds > 0.0:
            self._engine.wait(wait_seconds)
        keys, causes, weights, packed = self._engine.read(max_rows)
        state = {} if packed is None else unpack_state(packed, self._fields)
        return LeaverBatch(keys=keys, causes=causes, weights=weights, state=state)

    def __iter__(self) -> Iterator[LeaverBatch]:
        """What can be read now, in batches of at most 65,536 rows."""
        while len((batch := self.read(2**16)).keys):
            yield batch

    def __len__(self) -> int:
        """Rows that can be read now."""
        return self._engine.size()

    @property
    def num_lost(self) -> int:
        """Rows that found no place so far."""
        return self._engine.num_lost()

    @property
    def max_rows(self) -> int:
        """Places."""
        return self._engine.max_rows

    def close(self) -> None:
        """From here on what leaves is not kept; what has left can still be read. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Leavers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
