"""The rows of a table on a device on their way into checkpoints: all of them, or what changed.

The index on the host knows which keys came and left. The device notes which rows were updated, in
a byte for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import _ext
from recsdk_core.checkpoint.model.held_back import warn_of_rows_held_back
from recsdk_core.checkpoint.model.shards import row_fields
from recsdk_core.checkpoint.reading import Progress
from recsdk_core.checkpoint.saving import Codec
from recsdk_core.checkpoint.stores import Target
from recsdk_sharding.device.table import DeviceTable

__all__ = ["DeviceCut", "take_saved_rows"]


class DeviceCut:
    """What a table holds between two steps, until `finish`: a `ShardCut`.

    Which keys is settled at once; their rows are read when they are written, so the table must not
    train before that.
    """

    def __init__(self, table: DeviceTable, host: recsdk_core.Table, is_delta: bool) -> None:
        """`is_delta`: only what changed. `host` describes the table, and is told its position."""
        self._table, self._host, self._is_delta = table, host, is_delta
        self.update_count, self.log_decay = table.update_count, table.log_decay
        warn_of_rows_held_back(table.index, "save")
        self._cut = table.cut(changes_only=is_delta)
        self._keys, self._numbers, self._left = self._cut.keys, self._cut.rows, self._cut.left
        self._causes = self._cut.causes
        self.eviction: _ext.EvictionState | None = None
        self.admission: tuple[NDArray[np.int64], ...] | None = None
        self._metadata: Mapping[str, NDArray[Any]] = {}
        self.shared_rows: tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]] | None = None
        if host.default.kind == "shared_rows":
            shared = table.shared_rows()
            parts = [shared.state[name] for name, _ in table.state_fields]
            none = np.empty((len(shared.keys), 0), np.float32)
            packed = np.concatenate([none, *parts], axis=1)
            self.shared_rows = shared.keys, shared.weights, packed
        if table.has_clock:
            kept = table.kept_of(self._numbers)
            step, time, counted = kept.clock.step, kept.clock.time, kept.records
            self.eviction = _ext.EvictionState(step or 0, None, step is not None, time)
            self._metadata = kept.metadata
            if counted is not None:
                clicks = np.zeros_like(counted.counts) if counted.clicks is None else counted.clicks
                self.admission = counted.keys, counted.counts, counted.steps, clicks

    @property
    def num_rows(self) -> int:
        """Rows that are written."""
        return len(self._keys)

    @property
    def num_erased(self) -> int:
        """Keys that left."""
        return len(self._left)

    def write(
        self, target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        """Writes a file of rows."""
        return _ext.write_row_file(
            target.write if progress is None else _counted(target, progress),
            kind="delta" if self._is_delta else "snapshot",
            dim=self._host.dim,
            fields=[(each.name, each.dtype, each.width) for each in row_fields(self._host)],
            blocks=self._blocks(),
            token=token,
            codec=codec,
            name=target.name,
            sums_content=target.sums_content,
        )

    def _blocks(self) -> Iterator[_ext.RowBlock]:
        begin = 0
        for batch in self._table.rows_of_cut(self._keys, self._numbers):
            end = begin + len(batch.keys)
            kept = {name: of[begin:end, None] for name, of in self._metadata.items()}
            yield _ext.RowBlock.rows(batch.keys, {"weight": batch.weights, **batch.state, **kept})
            begin = end
        for cause in np.unique(self._causes).tolist():
            yield _ext.RowBlock.erased(self._left[self._causes == cause], cause)

    def finish(self, durable: bool) -> None:
        """Ends the cut. Durable: changes count from it. Else it is as if it had never been."""
        self._cut.finish(durable)
        if durable:
            self._table.note_saved(self._host._position)


def _counted(target: Target, progress: Progress) -> Callable[[memoryview], None]:
    def write(piece: memoryview) -> None:
        target.write_all(piece)
        progress(len(piece))

    return write


def take_saved_rows(table: DeviceTable, host: recsdk_core.Table) -> None:
    """Gives a table the rows of one on the host that a checkpoint was loaded into."""
    table.take_rows_of(host)
    table.note_saved(host._position)
