"""Counts what a program hands to the simulated devices: what a simulation can say of speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from recsdk_npusim.library import operators as _compiled

__all__ = ["Counts", "counting"]


@dataclass
class Counts:
    """What all devices of this process were given, by all threads."""

    operators: dict[str, int] = field(default_factory=dict)
    """Operators that compute or copy on a device, by name; no views, no allocations."""
    waits: int = 0
    """How often the host waited, or would on cuda: for a number, a size or an error that a device
    knows, or for a copy from or to one without `non_blocking` or pinned memory."""
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    seconds: float = 0.0
    """Processor time of the operators and copies: what a program of the host does not take where
    there is a device. It says nothing about the speed of one."""

    @property
    def num_operators(self) -> int:
        """How many operators."""
        return sum(self.operators.values())


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts inside; what it gives is filled at the end. One count runs at a time."""
    found = Counts()
    _compiled.start_counting(True)
    try:
        yield found
    finally:
        counted = _compiled.counted()
        _compiled.start_counting(False)
        found.operators, found.waits, found.bytes_to_device, *rest = counted
        found.bytes_to_host, found.seconds = rest
