"""The module `torch.npu`: streams, events, memory and random numbers of the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from recsdk_npusim.library import operators

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "init",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]

_Device: TypeAlias = "torch.device | str | int | None"


def _index(device: _Device) -> int:
    """The device's number; the current one if it has none."""
    if isinstance(device, int):
        return device
    made = torch.device("npu" if device is None else device)
    return current_device() if made.index is None else made.index


def init() -> None:
    """Does nothing: the device is there from the start."""


_lazy_init = init


def is_available() -> bool:
    """True."""
    return True


def is_initialized() -> bool:
    """True."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """RECSDK_SIM_NPU_DEVICES, by default 8."""
    return int(operators.device_count())


def current_device() -> int:
    """The number of the thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    """Makes a device the thread's current one."""
    torch.accelerator.set_device_index(_index(device))


@contextmanager
def device(device: _Device) -> Iterator[None]:
    """Inside, a device is the thread's current one."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: _Device = None) -> str:
    """Says that it is a simulation."""
    return "simulated NPU"


class Stream(torch.Stream):
    """A queue of copies on a device."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    """A place in a stream."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        return super().__new__(cls, device="npu", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    """The stream that the thread's copies and operators run on."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    """The stream that is current unless another is set."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type())


def _device_type() -> int:
    return int(torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: torch.Stream) -> None:
    """Makes a stream the thread's current one."""
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Inside, a stream is the thread's current one, and its device too."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device_before = current_device()
            self._before = current_stream(self.stream.device)
            set_device(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            set_stream(self._before)
            set_device(self._device_before)


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which a stream is the current one; None changes nothing."""
    return StreamContext(stream)


def synchronize(device: _Device = None) -> None:
    """Waits for all streams of a device."""
    torch.accelerator.synchronize(torch.device("npu", _index(device)))


def _counts(device: _Device) -> tuple[int, int, int, int]:
    found: tuple[int, int, int, int] = operators.memory_counts(_index(device))
    return found


def memory_allocated(device: _Device = None) -> int:
    """Bytes in use."""
    return _counts(device)[0]


def memory_reserved(device: _Device = None) -> int:
    """Bytes in use or kept for reuse."""
    return _counts(device)[1]


def max_memory_allocated(device: _Device = None) -> int:
    """The most bytes in use so far."""
    return _counts(device)[2]


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Starts `max_memory_allocated` again."""
    operators.reset_peak(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total) bytes; without RECSDK_SIM_NPU_MEMORY as if there were 64 GiB."""
    _, reserved, _, limit = _counts(device)
    total = limit or 64 * 2**30
    return max(total - reserved, 0), total


def empty_cache() -> None:
    """Frees what is kept for reuse."""
    operators.empty_cache()


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    operators.seed(current_device(), _as_int64(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices."""
    for index in range(device_count()):
        operators.seed(index, _as_int64(seed))


def _as_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def get_rng_state(device: _Device = "npu") -> torch.Tensor:
    """The state of a device's generator, a cpu tensor."""
    state: torch.Tensor = operators.random_state(_index(device))
    return state


def set_rng_state(new_state: torch.Tensor, device: _Device = "npu") -> None:
    """Sets the state of a device's generator."""
    operators.set_random_state(_index(device), new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast may use."""
    return [torch.float16, torch.bfloat16]
