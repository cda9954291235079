"""What is read of a shard on a device, row by row or as a whole.

Shape letters: n or N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import ExportBatch, IndexCut, _ext
from recsdk_core.checkpoint import Position
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.replacing import NewRows, shared_of
from recsdk_core.eviction import EvictionClock
from recsdk_core.stats import Explanation
from recsdk_sharding.device.trained_rows import TrainedRows

__all__ = ["Kept", "ReadableRows"]

_EXPORT_ROWS, _EXPORT_BYTES = 65_536, 2**24  # of a batch, by default; at least a row


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What rules keep of keys."""

    metadata: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Of eviction, (n,) by name."""
    records: Records | None = None
    """Of admission: keys without a row; None: the table has none."""
    clock: EvictionClock = field(default_factory=EvictionClock)


class ReadableRows(TrainedRows):
    """Rows on a device that can be looked up, exported, cut and counted."""

    def lookup(self, keys: NDArray[np.int64], *, return_outcomes: bool = False) -> Any:
        """The rows of keys (N,), read only: numpy float32 (N, D).

        A key without one reads the default. With `return_outcomes` returns (values, outcomes uint8
        (N,)).
        """
        return self._read(*self.index.map(keys, insert=False), return_outcomes)

    def find_or_insert(
        self,
        keys: NDArray[np.int64],
        *,
        lease: recsdk_core.Lease | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """As `lookup`, but unseen keys get a row first."""
        return self._read(*self.index.map(keys, insert=True, lease=lease), return_outcomes)

    @torch.no_grad()
    def _read(
        self, rows_N: NDArray[np.int64], outcomes_N: NDArray[np.uint8], return_outcomes: bool
    ) -> Any:
        self._write_new_rows(rows_N[outcomes_N <= recsdk_core.Outcome.INSERTED])
        readable_N = np.empty(len(rows_N), np.int64)
        whole = (0, len(rows_N), 0, self._first_shared, self._num_shared)
        parts: Any = tuple(np.array([number], np.int64) for number in whole)
        recsdk_core.join_rows(rows_N, outcomes_N, parts, readable_N)
        values = self._rows.read(torch.from_numpy(readable_N).to(self.device))
        if self.reads_initial_rows:
            has_none_N = outcomes_N > recsdk_core.Outcome.INSERTED
            values[has_none_N] = self.initial_rows(rows_N[has_none_N])
        return (values, outcomes_N) if return_outcomes else values

    @torch.no_grad()
    def shared_rows(self) -> ExportBatch:
        """As `recsdk_core.Table.shared_rows`."""
        self._rows.settle()
        keys = _ext.shared_row_keys(self._num_shared)
        return self._rows_of(keys, torch.from_numpy(self._shared_numbers()).to(self.device), True)

    def export(self, batch_size: int | None = None, *, state: bool = True) -> Iterator[ExportBatch]:
        """As `recsdk_core.Table.export`."""
        if batch_size is None:
            batch_size = self._rows_per_batch()
        if batch_size < 1:
            raise ValueError(f"DeviceTable.export: batch_size must be at least 1, got {batch_size}")
        return self._export(batch_size, state)

    def _rows_per_batch(self) -> int:
        width = self.dim + sum(width for _, width in self.state_fields)
        return min(max(_EXPORT_BYTES // (8 + 4 * width), 1), _EXPORT_ROWS)

    @torch.no_grad()
    def _export(self, batch_size: int, state: bool) -> Iterator[ExportBatch]:
        optimizer_fields = self.state_fields
        for keys, numbers in self.index.export(batch_size):
            if self.state_fields is not optimizer_fields:
                raise RuntimeError(
                    f"table {self.name!r}: got another optimizer since this export began; begin it "
                    "anew"
                )
            self._write_new_rows(numbers)  # of keys that came before this call
            yield self._rows_of(keys, torch.from_numpy(numbers).to(self.device), state)

    @torch.no_grad()
    def cut(self, *, changes_only: bool) -> IndexCut:
        """A cut of the index: of changes, the rows updated since `track_updates` are among them."""
        if changes_only:
            updated = self._rows.updated()
            self.index.note_changed(updated[updated < self.index.end_row])
        return self.index.cut(changes_only=changes_only)

    @torch.no_grad()
    def rows_of_cut(
        self, keys: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> Iterator[ExportBatch]:
        """The rows of keys (n,) of a cut, whose row numbers are (n,), as `export`."""
        self._write_new_rows(numbers)
        size = self._rows_per_batch()
        for begin in range(0, len(keys), size):
            some = slice(begin, begin + size)
            yield self._rows_of(keys[some], torch.from_numpy(numbers[some]).to(self.device), True)

    def track_updates(self) -> None:
        """Notes from here on which rows are updated, for `cut`."""
        self._rows.track_updates()

    def note_saved(self, position: Position | None) -> None:
        """Counts changes from here on: from the checkpoint at `position`."""
        self.position = position
        self.track_updates()

    def _rows_of(self, keys: NDArray[np.int64], rows_n: torch.Tensor, state: bool) -> ExportBatch:
        return ExportBatch(
            keys=keys,
            weights=self._rows.read(rows_n),
            state=self._rows.read_state(rows_n) if state else {},
        )

    @torch.no_grad()
    def rows(self) -> NewRows:
        """The rows that readers see now, by row number, with what the rules keep of keys.

        With eviction or admission BusyError while a save is under way.
        """
        kept = Kept()
        if not self.has_clock:
            keys, numbers = self.index.keys_and_rows()
        else:
            with self.index.cut() as cut:
                keys, numbers = cut.keys, cut.rows
                kept = self.kept_of(numbers)
        batches = list(self.rows_of_cut(keys, numbers))
        return NewRows(
            keys=keys,
            weights=np.concatenate([_no_rows(self.dim), *(each.weights for each in batches)]),
            state={
                name: np.concatenate([_no_rows(width), *(each.state[name] for each in batches)])
                for name, width in self.state_fields
            },
            update_count=self.update_count,
            log_decay=self.log_decay,
            metadata=kept.metadata,
            clock=kept.clock,
            records=kept.records,
            shared=shared_of(self.shared_rows()) if self._num_shared else None,
        )

    def kept_of(self, numbers: NDArray[np.int64]) -> Kept:
        """What the rules keep of the keys of rows (n,), ascending, and of keys without a row."""
        return Kept(
            metadata=self.index.metadata(numbers) if self.eviction is not None else {},
            records=None if self.admission is None else Records(*self.index.records().values()),
            clock=self.index.clock,
        )

    def explain(self, key: int) -> Explanation:
        """As `recsdk_core.Table.explain`."""
        return self.index.explain(key)

    def __len__(self) -> int:
        """Number of visible keys."""
        return len(self.index)

    def __contains__(self, key: object) -> bool:
        """True if the key has a visible row."""
        return key in self.index

    def stats(self) -> recsdk_core.TableStats:
        """Counts of keys and updates, and the device memory of rows; waits for the device."""
        return recsdk_core.TableStats(
            **vars(self.index.stats()),
            updates=self.update_count,
            evicted_by_request=self._evicted_by_request,
            nonfinite=self._rows.num_nonfinite,
            row_bytes=self._rows.num_bytes,
            checkpoint_copied_bytes=0,
            checkpoint_waits=0,
            checkpoint_wait_seconds=0.0,
        )

    def check_invariants(self) -> None:
        """Raises RecsdkError naming the first broken invariant of the index."""
        self.index.check_invariants()


def _no_rows(width: int) -> NDArray[np.float32]:
    return np.empty((0, width), np.float32)
