"""What a table on a device has on the host: its keys, their row numbers, and new rows.

Shape letters: n or N keys, D row width.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import Outcome, init
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.device.batch import has_row

__all__ = ["HostIndex", "NumberedRows", "keys_only"]

_MadeRows: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys (n,) that a mapping call inserts, and their initial rows (n, D)."""

NumberedRows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Row numbers int64 (n,) and rows float32 (n, D), in pinned memory."""


class HostIndex:
    """Maps keys to row numbers by an engine table, and makes initial rows for the device.

    Mapping and `keep_new_rows` belong to the thread that maps, all else to the one that trains.
    """

    def __init__(self, config: HashTableConfig, max_rows: int, columns: tuple[int, int]) -> None:
        """`columns`: the first of the config's columns that rows have, and the one after the last.

        Beyond `max_rows` the config's `on_full` says what becomes of keys.
        """
        self._columns = columns
        self._maker = recsdk_core.Table(
            config.embedding_dim,
            name=config.name,
            initializer=config.row_initializer(),
            seed=config.seed,
            num_threads=1,
        )
        self.table = recsdk_core.Table(
            1,
            name=config.name,
            initializer=init.Custom(fn=self._make_rows),
            seed=config.seed,
            max_rows=max_rows,
            on_full=config.on_full,
        )
        """From keys to row numbers; its rows mean nothing."""
        self.own_lookups: Counter[Outcome] = Counter()
        """Those that nobody asked for, by outcome, which the table has counted too."""
        self._lock = threading.Lock()
        self._made: list[_MadeRows] = []
        self._unwritten: list[NumberedRows] = []

    def _make_rows(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Called by the table for its new keys, before it has them: makes their rows.

        What a custom initializer raises undoes the insertion.
        """
        first, last = self._columns
        made_nD = np.ascontiguousarray(self._maker.find_or_insert(keys)[:, first:last])
        self._maker.clear()
        with self._lock:
            self._made.append((keys.copy(), made_nD))

    def keep_new_rows(
        self,
        rows_N: NDArray[np.int64],
        outcomes_N: NDArray[np.uint8],
        lease: recsdk_core.Lease | None = None,
    ) -> None:
        """Keeps the initial rows of the keys just inserted until they are written to the device.

        To be called after each mapping call that may insert, with its lease. Rows that a failed
        call over many tables has left behind are taken care of too.
        """
        numbers = rows_N[outcomes_N == Outcome.INSERTED]
        with self._lock:
            made, self._made = self._made, []
        try:
            entries = self._numbered(made, numbers, lease)
        except BaseException:
            with self._lock:
                self._made = made + self._made
            raise
        with self._lock:
            self._unwritten += entries

    def _numbered(
        self,
        made: list[_MadeRows],
        numbers: NDArray[np.int64],
        lease: recsdk_core.Lease | None,
    ) -> list[NumberedRows]:
        """What was made, the last of it by a call that gave it `numbers`."""
        last = made[-1:] if len(numbers) else []
        entries = []
        for _, values in last:
            assert len(numbers) == len(values), "the table makes the rows of a call in its order"
            entries.append(_pinned(numbers, values))
        for keys, values in made[: len(made) - len(last)]:
            found, has_row_n = self.find(keys, lease)
            entries.append(_pinned(found[has_row_n], values[has_row_n]))
        return entries

    def settle(self) -> None:
        """As `keep_new_rows`, for readers: rows that they see must not be missed."""
        for entry in list(self._made):
            keys, values = entry
            numbers, has_row_n = self.find(keys)
            if not has_row_n.all():
                continue
            numbered = _pinned(numbers, values)
            with self._lock:
                if any(entry is each for each in self._made):
                    self._made = [each for each in self._made if each is not entry]
                    self._unwritten.append(numbered)

    def take_new_rows(self) -> list[NumberedRows]:
        """The rows to be written to the device, in this order."""
        with self._lock:
            entries, self._unwritten = self._unwritten, []
        return entries

    def put_back(self, entries: list[NumberedRows]) -> None:
        """Rows that could not be written; writing some twice is as good as once."""
        with self._lock:
            self._unwritten = entries + self._unwritten

    def forget_new_rows(self) -> None:
        """Drops what is to be written: other rows take their place."""
        with self._lock:
            self._made, self._unwritten = [], []

    def forget_made_rows(self) -> None:
        """Drops the rows of the last insertion, which come from elsewhere."""
        self._made = []

    def find(
        self, keys: NDArray[np.int64], lease: recsdk_core.Lease | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Row numbers, and which keys have one; noted in `own_lookups`."""
        numbers, outcomes = self.table.map(keys, insert=False, lease=lease)
        is_row = has_row(outcomes)
        num_found = int(is_row.sum())
        with self._lock:
            self.own_lookups[Outcome.FOUND] += num_found
            self.own_lookups[Outcome.MISSING] += len(keys) - num_found
        return numbers, is_row


def _pinned(numbers: NDArray[np.int64], values: NDArray[np.float32]) -> NumberedRows:
    return torch.from_numpy(numbers).pin_memory(), torch.from_numpy(values).pin_memory()


def keys_only(keys: NDArray[np.int64]) -> NewRows:
    """What a `HostIndex`'s table is to hold."""
    return NewRows(keys=keys, weights=np.zeros((len(keys), 1), np.float32))
