"""What of a batch tells ranks that tables which all of them hold have come apart.

Shape letters: N keys, S sampled keys, T shards, D row width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import Bags
from recsdk_sharding._rows.home import RowTable

__all__ = ["ReplicaSample", "RowSample", "UpdateSample"]

_NUM_KEYS = 8


@dataclass(frozen=True)
class RowSample:
    """A few keys of one table in a batch, mapped: the same on all ranks that hold the table."""

    step: int
    """The step of the batch."""
    table: Any
    """A `RowTable` that is read by row number."""
    rows_S: NDArray[np.int64]
    outcomes_S: NDArray[np.uint8]

    @staticmethod
    def of_step(
        step: int,
        tables: Sequence[RowTable],
        num_keys_T: Sequence[int],
        rows_N: NDArray[np.int64],
        outcomes_N: NDArray[np.uint8],
    ) -> RowSample | None:
        """Keys of one of the batch's tables, each table in its turn; None: it has none."""
        which = step % len(tables)
        num_keys = num_keys_T[which]
        if num_keys == 0:
            return None
        spread_S = np.arange(_NUM_KEYS) * num_keys // _NUM_KEYS
        at_S = sum(num_keys_T[:which]) + (spread_S + step) % num_keys
        return RowSample(step, tables[which], rows_N[at_S], outcomes_N[at_S])

    def said(self) -> int:
        """The step and what the rows are now, as `Splits.values`; the batch's lease must be open.

        Cost: reading the rows, and a checksum of 32 D bytes.
        """
        rows_SD = self.table.pool_rows(Bags(self.rows_S, self.outcomes_S))
        rows_SD[np.isnan(rows_SD)] = np.nan  # their bits are no part of the promise
        return _number(self.step, rows_SD)


@dataclass(frozen=True)
class UpdateSample:
    """A table on a device, whose rows are not read without a wait: how it was updated is compared
    in their place."""

    step: int
    """The step of the batch."""
    table: Any
    """A `DeviceTable`."""

    @staticmethod
    def of_step(step: int, tables: Sequence[Any]) -> UpdateSample:
        """Of one of the batch's tables, each in its turn."""
        return UpdateSample(step, tables[step % len(tables)])

    def said(self) -> int:
        """The step and how the update before it was made, as `Splits.values`."""
        return _number(self.step, repr(self.table.clock.last).encode())


ReplicaSample: TypeAlias = RowSample | UpdateSample


def _number(step: int, what: Any) -> int:
    return (step & 0x7FFF_FFFF) << 32 | zlib.crc32(what)
