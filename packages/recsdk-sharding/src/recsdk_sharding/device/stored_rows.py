"""The rows and optimizer state of a table, as tensors on a device.

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
from recsdk_sharding.device.kernels import kernel
from recsdk_sharding.device.optimizers import Step, initial_state, update_rows
from recsdk_sharding.device.writes import Write, Writes

__all__ = ["StoredRows", "array_of"]


class StoredRows:
    """Weights and optimizer state, read, updated and written by row number.

    `update` and `write` write all or nothing, as `Writes`. Call `settle` before the tensors are
    read. All calls belong to one thread and its current stream.
    """

    def __init__(
        self,
        table: str,
        weight_RD: torch.Tensor,
        fields: Sequence[tuple[str, int]],
        optimizer: optim.Optimizer,
    ) -> None:
        """`table`: its name, for messages; `fields`: name and width of each of the state."""
        like = weight_RD.detach()
        self.weight_RD = weight_RD
        self.state = {name: like.new_zeros(len(like), width) for name, width in fields}
        """Fields of optimizer state by name, float32 (R, width)."""
        self._table = table
        self._fresh = {name: initial_state(optimizer, name) for name in self.state}
        self._num_nonfinite = like.new_zeros(1, dtype=torch.int64)
        self._is_updated_R: torch.Tensor | None = None  # uint8; 1: since `track_updates`
        self._writes = Writes()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.weight_RD.device

    def set_optimizer(
        self, optimizer: optim.Optimizer, fields: Sequence[tuple[str, int]], numbers: NDArray[Any]
    ) -> None:
        """The fields of another optimizer, fresh for the rows of these numbers (n,)."""
        like = self.weight_RD.detach()
        fresh = {name: initial_state(optimizer, name) for name, _ in fields}
        state = {name: like.new_zeros(len(like), width) for name, width in fields}
        rows_n = torch.from_numpy(numbers).to(self.device)
        for name, field in state.items():
            field.index_fill_(0, rows_n, fresh[name])
        self.state, self._fresh = state, fresh

    @property
    def num_bytes(self) -> int:
        """Device memory that they take."""
        return sum(each.numel() * each.element_size() for each in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [self.weight_RD, *self.state.values()]

    @property
    def num_nonfinite(self) -> int:
        """Gradients of rows that were not finite, counted so far; waits for the device."""
        self.settle()
        return int(self._num_nonfinite)

    def settle(self) -> None:
        """Completes a write that failed half-way; raises if that fails again."""
        self._writes.finish()

    def forget(self) -> None:
        """Drops what `settle` would complete: nobody reads those rows any more."""
        self._writes.forget()

    def update(
        self,
        step: Step,
        rows_U: torch.Tensor,
        grad_UD: torch.Tensor,
        *,
        num_bad: torch.Tensor,
        is_kept_U: torch.Tensor | None,
        note: Write,
    ) -> None:
        """One optimizer update of distinct rows, and `note` along with it.

        `num_bad`: how many gradients are not finite, int64 (); `is_kept_U`: rows to leave alone. If
        it raises, nothing has changed.
        """
        run = kernel(self.device.type, "update_rows", update_rows)
        along: list[Write] = [
            note,
            partial(self._num_nonfinite.copy_, self._num_nonfinite + num_bad),
        ]
        if self._is_updated_R is not None:
            along.append(partial(self._is_updated_R.index_fill_, 0, rows_U, 1))
        writes = run(step, self.weight_RD, self.state, rows_U, grad_UD, is_kept_U)
        if writes is None:  # a kernel that has made them
            self._writes.commit(along, has_begun=True)
        else:
            self._writes.commit([*writes[:1], *along, *writes[1:]])

    def write_new(self, numbers_n: torch.Tensor, values_nD: torch.Tensor) -> None:
        """Writes rows from pinned memory, with fresh state. If it raises, do it again."""
        rows_n = numbers_n.to(self.device, non_blocking=True)
        self.weight_RD.index_copy_(0, rows_n, values_nD.to(self.device, non_blocking=True))
        self._reset_state(rows_n)

    def _reset_state(self, rows_n: torch.Tensor) -> None:
        for name, field in self.state.items():
            field.index_fill_(0, rows_n, self._fresh[name])

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
        return RoomForRows(rows_n, writes, self._writes)

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
        if self._is_updated_R is None:
            shape = len(self.weight_RD)
            self._is_updated_R = self.weight_RD.detach().new_zeros(shape, dtype=torch.uint8)
        else:
            self._is_updated_R.zero_()

    def updated(self) -> NDArray[np.int64]:
        """The rows that were updated since `track_updates`, ascending (n,)."""
        assert self._is_updated_R is not None
        return array_of(self._is_updated_R.nonzero().flatten())

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
