"""The rows and optimizer state of one table, in a store on a device: read and written by number.

Shape letters: R rows of the store, n or U rows by number, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import optim
from recsdk_sharding.device.parcel import sent
from recsdk_sharding.device.store import DeviceStore, Fields
from recsdk_sharding.device.writes import Write, Writes

__all__ = ["StoredRows", "array_of", "norms_of"]

_NORM_ROWS = 2**18  # that are copied at a time


class StoredRows:
    """Weights and optimizer state of a table, read and written by row number of the table.

    `write` writes all or nothing, as `Writes`. Call `settle` before the tensors are read. All calls
    belong to one thread and its current stream.
    """

    def __init__(
        self,
        table: str,
        weight_RD: torch.Tensor,
        optimizer: optim.Optimizer,
        fields: Fields,
        *,
        is_joint: bool,
        spare_value: float,
        num_shared: int,
    ) -> None:
        """`table`: its name, for messages; `weight_RD`, `is_joint`: as `DeviceStore.holding`.

        `fields`: name and width of each of the state; `spare_value`: what the last row has;
        `num_shared`: how many before it are shared by keys without a row.
        """
        self.weight_RD = weight_RD.detach()
        self.store, first = DeviceStore.holding(weight_RD, is_joint=is_joint)
        """Where they are, with those of other tables."""
        self.stored = self.store.add(
            first, len(self.weight_RD), optimizer, fields, spare_value, num_shared
        )
        """Which of the store's tables this is."""
        self._table = table
        self._is_updated_R: torch.Tensor | None = None  # uint8; 1: since `track_updates`

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.weight_RD.device

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Fields of optimizer state by name, float32 (R, width)."""
        return self.store.block_of(self.stored).rows_of(self.stored)

    def set_optimizer(
        self, optimizer: optim.Optimizer, fields: Fields, numbers: NDArray[Any]
    ) -> None:
        """The fields of another optimizer, fresh for the rows of these numbers (n,)."""
        self.stored.set_optimizer(optimizer, fields)
        if len(numbers):
            self._reset_state(torch.from_numpy(numbers).to(self.device))

    @property
    def num_bytes(self) -> int:
        """Device memory that they take, or will once the table is trained."""
        width = self.weight_RD.shape[1] + sum(width for _, width in self.stored.fields)
        return len(self.weight_RD) * width * self.weight_RD.element_size()

    @property
    def num_nonfinite(self) -> int:
        """Gradients of rows that were not finite, counted so far; waits for the device."""
        return self.store.nonfinite_of(self.stored)

    def norms(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """The norms of rows by number (n,), once the device has done what it was told before."""
        torch.accelerator.synchronize(self.device)
        parts = np.array_split(numbers, range(_NORM_ROWS, len(numbers), _NORM_ROWS))
        found = [
            norms_of(self.weight_RD.index_select(0, torch.from_numpy(part).to(self.device))).cpu()
            for part in parts
        ]
        return torch.cat(found).numpy()

    def settle(self) -> None:
        """Completes a write that failed half-way; raises if that fails again."""
        self.store.settle()

    def _reset_state(self, rows_n: torch.Tensor) -> None:
        for name, field in self.state.items():
            field.index_fill_(0, rows_n, self.stored.fresh[name])

    def begin(self, first: int, values: NDArray[np.float32]) -> None:
        """Writes rows (n, D) from number `first` on, with the state of new rows."""
        self.settle()
        self.weight_RD.narrow(0, first, len(values)).copy_(torch.from_numpy(values))
        if self.stored.block is not None:  # else it is fresh once it is made
            for name, field in self.state.items():
                field.narrow(0, first, len(values)).fill_(self.stored.fresh[name])

    def copy(self, sources: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Copies the weights of rows (n,) to others (n,), distinct and none of them, with fresh
        state; doing it again does no harm."""
        self.settle()
        both_2n = sent(np.stack([sources, numbers]), self.device)
        sources_n, rows_n = both_2n.unbind()
        self.weight_RD.index_copy_(0, rows_n, self.weight_RD.index_select(0, sources_n))
        self._reset_state(rows_n)

    def write(
        self,
        numbers: NDArray[np.int64],
        values: NDArray[np.float32],
        state: Mapping[str, NDArray[np.float32]] | None,
    ) -> None:
        """Writes rows by number (n,), with fresh state if None is given."""
        self.make_room(len(numbers), values, state).write(numbers)

    def make_room(
        self,
        num_rows: int,
        values: NDArray[np.float32],
        state: Mapping[str, NDArray[np.float32]] | None,
    ) -> RoomForRows:
        """Takes rows (n, D) and their state to the device, to be written once numbers are known.

        Raises ValueError or TypeError for arrays that do not fit, and what the device raises.
        """
        rows_n = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        on_device = partial(self._on_device, num_rows=num_rows)
        pairs = [(self.weight_RD, on_device("values", values, width=self.weight_RD.shape[1]))]
        if state is not None:
            if set(state) != set(self.state):
                raise ValueError(
                    f"table {self._table!r}: state must have the fields {sorted(self.state)}, got "
                    f"{sorted(state)}"
                )
            pairs += [
                (field, on_device(f"state {name!r}", state[name], width=field.shape[1]))
                for name, field in self.state.items()
            ]
        writes: list[Write] = [partial(into.index_copy_, 0, rows_n, rows) for into, rows in pairs]
        if state is None:
            writes.append(partial(self._reset_state, rows_n))
        writes.append(self.store.restore_spare_rows)  # which take what has no other
        return RoomForRows(rows_n, writes, self.store.writes)

    def _on_device(
        self, what: str, array: NDArray[Any], *, num_rows: int, width: int
    ) -> torch.Tensor:
        array = np.asarray(array)
        if array.dtype != np.float32:
            raise TypeError(
                f"table {self._table!r}: {what} must be float32, got {array.dtype}; convert it"
            )
        if array.shape != (num_rows, width):
            raise ValueError(
                f"table {self._table!r}: {what} must have shape ({num_rows}, {width}), got "
                f"{array.shape}"
            )
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def track_updates(self) -> None:
        """Notes from here on which rows are updated."""
        self._is_updated_R = self.store.track_updates(self.stored)

    def updated(self) -> NDArray[np.int64]:
        """The rows that were updated since `track_updates`, ascending (n,)."""
        assert self._is_updated_R is not None
        self.settle()
        return array_of(self._is_updated_R.nonzero().flatten())

    def gather(
        self, sources_n: torch.Tensor, rows_n: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Copies on the device: weights of some rows (n, D), and state of others (n, width)."""
        self.settle()
        state = {name: each.index_select(0, rows_n) for name, each in self.state.items()}
        return self.weight_RD.index_select(0, sources_n), state

    def read(self, rows_n: torch.Tensor) -> NDArray[np.float32]:
        """Rows by number, (n, D)."""
        return array_of(self.weight_RD.index_select(0, rows_n))

    def read_state(self, rows_n: torch.Tensor) -> dict[str, NDArray[np.float32]]:
        """Their state by field, (n, width)."""
        return {name: array_of(each.index_select(0, rows_n)) for name, each in self.state.items()}


class RoomForRows:
    """Rows on the device on their way into the store."""

    def __init__(self, rows_n: torch.Tensor, writes: Sequence[Write], into: Writes) -> None:
        self._rows_n = rows_n
        self._writes = writes
        self._into = into

    def write(self, numbers: NDArray[np.int64], *, has_begun: bool = False) -> None:
        """Writes them by number (n,); `has_begun` as `Writes.commit`."""

        def fill() -> None:
            self._rows_n.copy_(torch.from_numpy(numbers))

        self._into.commit([fill, *self._writes], has_begun=has_begun)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy on the host."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def norms_of(rows_nD: torch.Tensor) -> torch.Tensor:
    """The norms of rows, float32 (n,): column after column in double, as the engine takes them.

    In single precision where a device has no other.
    """
    wide = torch.float32 if rows_nD.device.type == "npu" else torch.float64
    total_n = torch.zeros(len(rows_nD), dtype=wide, device=rows_nD.device)
    for column_n in rows_nD.unbind(1):
        total_n += column_n.to(wide).square()
    return total_n.sqrt().to(torch.float32)
