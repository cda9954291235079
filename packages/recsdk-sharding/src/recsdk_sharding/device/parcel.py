"""Arrays of the host that go to the device together: one pinned buffer and copy for each type."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_sharding.device.runs import Runs

__all__ = [
    "Item",
    "Parcel",
    "get_optional",
    "get_runs",
    "pinned_room",
    "put_optional",
    "put_runs",
    "sent",
]

Item: TypeAlias = tuple[torch.dtype, int]
"""Stands for one array of a parcel."""

_Write: TypeAlias = Callable[[NDArray[Any]], None]
_Entry: TypeAlias = tuple[int, _Write | None]
"""Size of an array, and what writes it; None: that comes later."""

_Buffer: TypeAlias = tuple[torch.dtype, list[int], list[slice], list[tuple[int, _Write]]]
"""A type; the size of each array of it, and where it lies; what writes which of them."""

_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Parcel:
    """Filled and sealed on any thread of the host, then sent and opened by one that uses it."""

    def __init__(self, *, is_pinned: bool = True) -> None:
        """`is_pinned`: False for arrays that stay on the host."""
        self._is_pinned = is_pinned
        self._entries: dict[torch.dtype, list[_Entry]] = {}
        self._buffers: list[tuple[torch.Tensor, list[int]]] = []
        self._rooms: dict[torch.dtype, list[NDArray[Any]]] = {}
        self._parts: dict[torch.dtype, list[torch.Tensor]] = {}
        self._sent: list[torch.Tensor] = []
        """The buffers on the device."""

    def put(self, array: NDArray[Any]) -> Item:
        """Adds an array (n,) of int32, int64 or float32."""

        def write(out: NDArray[Any]) -> None:
            out[:] = array

        return self.put_made(len(array), array.dtype, write)

    def put_made(self, size: int, dtype: np.dtype[Any], write: _Write | None) -> Item:
        """Adds an array (size,) that is written in its place when the parcel is sealed; None: see
        `put_room`."""
        type_ = _TYPES[dtype]
        entries = self._entries.setdefault(type_, [])
        entries.append((size, write))
        return type_, len(self._rooms.get(type_, ())) + len(entries) - 1

    def put_room(self, size: int, dtype: np.dtype[Any]) -> Item:
        """Adds an array (size,) that is written later: see `room`."""
        return self.put_made(size, dtype, None)

    def put_filled(self, buffer: torch.Tensor) -> Item:
        """Adds memory that is written already, of `pinned_room`; nothing of its type may wait."""
        type_ = buffer.dtype
        assert not self._entries.get(type_), "what waits for `seal` would change places with it"
        rooms = self._rooms.setdefault(type_, [])
        rooms.append(buffer.numpy())
        self._buffers.append((buffer, [len(buffer)]))
        return type_, len(rooms) - 1

    def seal(self) -> None:
        """Writes the arrays that were added since it was last called, to one buffer each type."""
        if self._entries:
            entries, self._entries = self._entries, {}
            self._write(_laid_out(entries))

    def _write(self, buffers: list[_Buffer]) -> None:
        for dtype, sizes, places, writes in buffers:
            size, is_pinned = places[-1].stop, self._is_pinned
            buffer = torch.empty(size, dtype=dtype, device="cpu", pin_memory=is_pinned)
            array = buffer.numpy()
            rooms = [array[place] for place in places]
            for number, write in writes:
                write(rooms[number])
            self._rooms[dtype] = [*self._rooms.get(dtype, ()), *rooms]
            self._buffers.append((buffer, sizes))

    def again(self) -> Callable[[], Parcel]:
        """Makes parcels of the same arrays, sealed. Call it before this one is sealed."""
        buffers = _laid_out(self._entries)

        def make() -> Parcel:
            made = Parcel(is_pinned=self._is_pinned)
            made._write(buffers)
            return made

        return make

    def room(self, item: Item) -> NDArray[Any]:
        """An array of a sealed parcel that was not sent yet, to be written."""
        dtype, index = item
        return self._rooms[dtype][index]

    def send(self, device: torch.device) -> None:
        """Starts the copies on the current stream; a second call does nothing."""
        for buffer, sizes in self._buffers:
            on_device = buffer.to(device, non_blocking=True)
            self._sent.append(on_device)
            self._parts.setdefault(buffer.dtype, []).extend(on_device.split_with_sizes(sizes))
        self._buffers, self._rooms = [], {}

    def get(self, item: Item) -> torch.Tensor:
        """An array on the device, for work on a stream that waits for the copies."""
        dtype, index = item
        return self._parts[dtype][index]

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        for buffer in self._sent:
            if buffer.device.type != "cpu":
                buffer.record_stream(stream)


def pinned_room(size: int) -> torch.Tensor:
    """Memory for int32 numbers that go to a device, (size,)."""
    return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array alone, on its way to a device by the current stream; nobody waits for it."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def _laid_out(entries: dict[torch.dtype, list[_Entry]]) -> list[_Buffer]:
    """How arrays lie in a buffer for each type."""
    buffers = []
    for dtype, of_type in entries.items():
        sizes = [size for size, _ in of_type]
        places = [
            slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)
        ]
        writes = [(i, write) for i, (_, write) in enumerate(of_type) if write is not None]
        buffers.append((dtype, sizes, places, writes))
    return buffers


def put_optional(parcel: Parcel, array: NDArray[Any] | None) -> Item | None:
    """Adds an array, if there is one."""
    return None if array is None else parcel.put(array)


def get_optional(parcel: Parcel, item: Item | None) -> torch.Tensor | None:
    """An array on the device, if there is one."""
    return None if item is None else parcel.get(item)


def put_runs(parcel: Parcel, runs: Runs[NDArray[np.int64]]) -> Runs[Item]:
    """Adds the plan of sums of runs."""
    steps = [(parcel.put(targets), parcel.put(sources)) for targets, sources in runs.steps]
    return Runs(steps, put_optional(parcel, runs.firsts))


def get_runs(parcel: Parcel, runs: Runs[Item]) -> Runs[torch.Tensor]:
    """The plan of sums of runs, on the device."""
    steps = [(parcel.get(targets), parcel.get(sources)) for targets, sources in runs.steps]
    return Runs(steps, get_optional(parcel, runs.firsts))
