"""The rows of a table on a device on their way into checkpoints: all of them, or what changed.

Which keys came and left, the index on the host knows, as every table of the engine does. Which rows
were updated is noted on the device, a byte for each.

Shape letters: n or N keys, R rows of the store.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import _ext
from recsdk_core.checkpoint import Position
from recsdk_sharding.device.table import DeviceTable

__all__ = ["DeviceCut", "table_to_load", "take_saved_rows"]

_BATCH = 65_536


class DeviceCut:
    """What a table holds between two steps, as a table of the engine's to be saved, until `finish`.

    Memory: a copy on the host of the rows to save.
    """

    def __init__(self, table: DeviceTable, is_delta: bool) -> None:
        """`is_delta`: only what changed since the last save or load."""
        self._table = table
        self.host = table.to_host(with_rows=not is_delta)
        """A table with the rows; of a delta it also knows which keys left."""
        self.host._position = table.index._position
        has_changes = is_delta and self.host._position is not None  # else saving it is refused
        self._keys = table.index._engine.cut(has_changes, None)
        try:
            if has_changes:
                self._fill()
        except BaseException:
            self._keys.finish(False)
            raise

    def _fill(self) -> None:
        """Makes what changed in the table the host's changes."""
        self.host._engine.cut(False, None).finish(True)
        self.host.update_count = self._table.update_count
        self.host.log_decay = self._table.log_decay
        entered, left = _read(self._keys)
        most = max(1, min(_BATCH, self._table.max_rows))  # keys beyond would be refused
        for begin in range(0, len(left), most):
            keys = left[begin : begin + most]
            self.host.upsert(keys, np.zeros((len(keys), self.host.dim), np.float32))
            self.host.erase(keys)
        for batch in self._table.export_changed(entered):
            self.host.upsert(batch.keys, batch.weights, batch.state or None)

    def finish(self, is_saved: bool) -> None:
        """Ends it. If it was saved, changes are counted from here; else they go on counting."""
        self._keys.finish(is_saved)
        if is_saved:
            _note_position(self._table, self.host._position)


def table_to_load(table: DeviceTable) -> recsdk_core.Table:
    """An empty table on the host that a checkpoint is loaded into, a delta too."""
    host = table.to_host(with_rows=False)
    host._position = table.index._position
    return host


def take_saved_rows(table: DeviceTable, host: recsdk_core.Table) -> None:
    """Gives a table the rows of a `table_to_load` that a checkpoint was loaded into."""
    table.take_rows_of(host)
    table.index._engine.cut(False, None).finish(True)
    _note_position(table, host._position)


def _note_position(table: DeviceTable, position: Position | None) -> None:
    table.index._position = position
    table.track_updates()


def _read(cut: _ext.Cut) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys that came, or came again, and those that left."""
    content = bytearray()

    def write(piece: memoryview) -> None:
        content.extend(piece)

    _ext.write_rows(cut, write, token=bytes(16))
    raw = bytes(content)
    file = _ext.RowFile(lambda offset, size: raw[offset : offset + size], len(raw), "changed keys")
    found: dict[str, list[NDArray[np.int64]]] = {"rows": [], "erased": []}
    while (block := file.next_block()) is not None:
        if block.kind in found:
            found[block.kind].append(np.array(block.keys))
    nothing = np.zeros(0, np.int64)
    return np.concatenate([nothing, *found["rows"]]), np.concatenate([nothing, *found["erased"]])
