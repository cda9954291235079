"""The side stream, over a stand-in for a device with streams that keeps a diary."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recsdk_pipeline._internal.streams import SideStream


class Device:
    """Keeps what is asked of its streams, in order."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.main = SimpleNamespace(wait_event=lambda event: self.diary.append(f"wait {event}"))

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: f"mark after {self.diary[-1]}")

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.diary.append("enter")
        yield
        self.diary.append("leave")

    def current_stream(self, device: torch.device) -> Any:
        return self.main


class Part:
    def __init__(self, diary: list[str]) -> None:
        self._diary = diary

    def record_stream(self, stream: Any) -> None:
        self._diary.append("record")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def test_compute_stream_waits_for_the_copies_and_owns_them(device: Device) -> None:
    side = SideStream(torch.device("cuda"))
    with side.use():
        device.diary.append("copy")
        mark = side.mark()
    side.hand_over(mark, Part(device.diary), Part(device.diary))
    assert device.diary == ["enter", "copy", "leave", "wait mark after copy", "record", "record"]


def test_cpu_has_no_streams(device: Device) -> None:
    side = SideStream(torch.device("cpu"))
    with side.use():
        mark = side.mark()
    side.hand_over(mark, Part(device.diary))
    assert mark is None
    assert device.diary == []
