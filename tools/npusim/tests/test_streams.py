"""What streams, events and freed memory do asynchronously."""

from __future__ import annotations

import time

import torch

NPU = torch.device("npu")


def test_a_copy_runs_when_it_is_waited_for() -> None:
    host = torch.arange(8.0).pin_memory()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        data = host.to(NPU, non_blocking=True)
        event = side.record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert side.query()
    assert data.tolist() == host.tolist()


def test_pinned_memory_is_used_again_once_its_copies_have_run() -> None:
    host = torch.arange(1000.0).pin_memory()
    place = host.data_ptr()
    data = host.to(NPU, non_blocking=True)
    del host
    while_copied = torch.empty(1000, pin_memory=True)
    assert while_copied.data_ptr() != place
    assert data.tolist() == list(range(1000))  # waits
    again = torch.empty(900, pin_memory=True)
    assert again.data_ptr() == place
    assert again.isnan().all()


def test_asking_again_and_again_ends() -> None:
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        torch.ones(8).pin_memory().to(NPU, non_blocking=True)
    while not side.query():
        time.sleep(0.001)


def test_an_operator_drains_its_own_stream_only() -> None:
    one, other = torch.npu.Stream(), torch.npu.Stream()
    copies = []
    for stream in (one, other):
        with torch.npu.stream(stream):
            copies.append(torch.ones(8).pin_memory().to(NPU, non_blocking=True))
    with torch.npu.stream(one):
        assert copies[0].sum().item() == 8
    assert not other.query()


def test_pageable_memory_is_copied_at_once() -> None:
    host = torch.ones(8)
    data = host.to(NPU, non_blocking=True)
    host.zero_()
    assert data.sum().item() == 8


def test_a_freed_pinned_buffer_is_kept_until_it_is_copied() -> None:
    data = torch.full((100_000,), 3.0).pin_memory().to(NPU, non_blocking=True)
    filler = [torch.zeros(100_000).pin_memory() for _ in range(4)]
    assert data.sum().item() == 300_000
    assert all(each.sum() == 0 for each in filler)


def test_freed_memory_is_poisoned_and_reused_at_once() -> None:
    data = torch.ones(5000, device=NPU)
    place = data.data_ptr()
    del data
    again = torch.empty(5000, device=NPU)
    assert again.data_ptr() == place
    assert torch.isnan(again).all()


def test_recorded_memory_is_not_reused_before_its_user_is_done() -> None:
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        data = torch.ones(7000, device=NPU)
    main = torch.npu.current_stream()
    main.wait_stream(side)
    torch.empty(7000).pin_memory().copy_(data, non_blocking=True)
    data.record_stream(main)
    place = data.data_ptr()
    del data
    with torch.npu.stream(side):
        other = torch.empty(7000, device=NPU)
        assert other.data_ptr() != place
        main.synchronize()
        assert torch.empty(7000, device=NPU).data_ptr() == place


def test_waiting_for_one_another_s_past_ends() -> None:
    one, other = torch.npu.Stream(), torch.npu.Stream()
    for _ in range(20):
        for stream, before in ((one, other), (other, one)):
            stream.wait_stream(before)
            with torch.npu.stream(stream):
                data = torch.ones(8).pin_memory().to(NPU, non_blocking=True)
    other.synchronize()
    assert data.cpu().tolist() == [1.0] * 8


def test_contexts_restore_stream_and_device() -> None:
    before = torch.npu.current_stream()
    with torch.npu.device(1):
        stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        assert torch.npu.current_device() == 1
        assert torch.npu.current_stream() == stream
    assert torch.npu.current_device() == 0
    assert torch.npu.current_stream() == before == torch.npu.default_stream()
