"""Asynchronous mode finds what forgot to wait: each test plants one bug, and sees it do harm.

Each program is run as it should be, and then without the one line that makes it right.
"""

from __future__ import annotations

import torch

NPU = torch.device("npu")
SIZE = 1000


def pinned(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value).pin_memory()


def copied_on(side: torch.Stream, host: torch.Tensor) -> torch.Tensor:
    with torch.npu.stream(side):
        return host.to(NPU, non_blocking=True)


def is_right(result: torch.Tensor, value: float) -> bool:
    torch.npu.synchronize()
    return bool((result.cpu() == value).all())


def waits_for_stream(plant: bool) -> bool:
    side = torch.npu.Stream()
    data = copied_on(side, pinned(3.0))
    if not plant:
        torch.npu.current_stream().wait_stream(side)
    return is_right(data * 2, 6.0)


def records_stream(plant: bool) -> bool:
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    data = copied_on(side, pinned(3.0))
    main.wait_stream(side)
    result = pinned(0.0)
    result.copy_(data, non_blocking=True)
    if not plant:
        data.record_stream(main)
    del data
    other = copied_on(side, pinned(4.0))
    side.synchronize()
    main.synchronize()
    return bool((result == 3.0).all()) and is_right(other, 4.0)


def keeps_host_buffer(plant: bool) -> bool:
    host = pinned(3.0)
    data = host.to(NPU, non_blocking=True)
    if not plant:
        torch.npu.current_stream().synchronize()
    host.fill_(7.0)
    return is_right(data, 3.0)


def waits_for_event(plant: bool) -> bool:
    result = pinned(0.0)
    result.copy_(torch.full((SIZE,), 3.0, device=NPU), non_blocking=True)
    event = torch.npu.current_stream().record_event()
    if not plant:
        event.synchronize()
    return bool((result == 3.0).all())


def records_on_the_stream_of_the_copy(plant: bool) -> bool:
    side, main = torch.npu.Stream(), torch.npu.current_stream()
    data = copied_on(side, pinned(3.0))
    event = (main if plant else side).record_event()
    main.wait_event(event)
    return is_right(data * 2, 6.0)


def test_missing_wait_stream_is_found() -> None:
    assert waits_for_stream(plant=False)
    assert not waits_for_stream(plant=True)


def test_missing_record_stream_is_found() -> None:
    assert records_stream(plant=False)
    assert not records_stream(plant=True)


def test_reused_host_buffer_is_found() -> None:
    assert keeps_host_buffer(plant=False)
    assert not keeps_host_buffer(plant=True)


def test_missing_event_is_found() -> None:
    assert waits_for_event(plant=False)
    assert not waits_for_event(plant=True)


def test_wrong_stream_is_found() -> None:
    assert records_on_the_stream_of_the_copy(plant=False)
    assert not records_on_the_stream_of_the_copy(plant=True)
