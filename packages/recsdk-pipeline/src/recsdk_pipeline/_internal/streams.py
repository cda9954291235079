"""A stream beside the compute stream, on devices that have streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torchrec.streamable import Multistreamable


class SideStream:
    """Where batches are copied to the device while the compute stream works.

    On a device without streams (cpu) everything runs where it is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        make = getattr(self._module, "Stream", None)
        self._stream: Any = None if make is None else make(device=device)

    def use(self) -> AbstractContextManager[Any]:
        """Work launched inside runs on the side stream."""
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def mark(self) -> Any:
        """Return a mark behind all work launched on the side stream so far."""
        return None if self._stream is None else self._stream.record_event()

    def hand_over(self, mark: Any, *parts: Multistreamable) -> None:
        """Let the current stream wait for `mark`, then use `parts` freely."""
        if self._stream is None:
            return
        current = self._module.current_stream(self._device)
        if mark is not None:
            current.wait_event(mark)
        for part in parts:
            part.record_stream(current)
