"""How often the host waits for the device: as the simulated NPU counts, or as torch warns on cuda.

What torch does not see there: collectives, and calls of CUDA that are not its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from device_type import IS_CUDA

_TORCH_SAYS = "called a synchronizing CUDA operation"


@dataclass
class Waits:
    """Filled at the end of `counting_waits`."""

    said: str = ""
    """How often, and where if that is known; empty: never."""


@contextmanager
def counting_waits() -> Iterator[Waits]:
    """Inside, waits of all threads are counted."""
    found = Waits()
    if IS_CUDA:
        yield from _on_cuda(found)
        return
    from recsdk_npusim.counting import counting

    with counting() as counted:
        yield found
    if counted.waits:
        found.said = f"{counted.waits} waits"


def _on_cuda(found: Waits) -> Iterator[Waits]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in warned if _TORCH_SAYS in str(each.message)]
    found.said = ", ".join(f"{Path(each.filename).name}:{each.lineno}" for each in waits)
