"""What is handed to a device is counted: operators, waits of the host, and bytes."""

from __future__ import annotations

import time

import torch

from recsdk_npusim.counting import counting

NPU = torch.device("npu")


def test_operators_are_counted_by_name_and_views_are_not() -> None:
    data = torch.ones(6, device=NPU)
    with counting() as found:
        shape = data.view(2, 3).narrow(0, 0, 1).t()
        (shape + 1).mul_(2)
        torch.empty(4, device=NPU)
        data.clone()
    assert found.operators == {"aten::add": 1, "aten::mul": 1, "aten::copy_": 1}
    assert found.num_operators == 3
    assert (found.waits, found.bytes_to_device, found.bytes_to_host) == (0, 0, 0)


def test_what_the_host_reads_is_a_wait() -> None:
    data = torch.ones(6, device=NPU)
    pinned = torch.zeros(6).pin_memory()
    with counting() as found:
        data.sum().item()
        data.nonzero()
        data.cpu()
        pinned.copy_(data, non_blocking=True)
    assert found.waits == 3
    assert found.bytes_to_host == 2 * 24
    torch.npu.synchronize()


def test_bytes_that_go_over_are_counted() -> None:
    with counting() as found:
        torch.ones(5).pin_memory().to(NPU, non_blocking=True)
        torch.arange(3).to(NPU)
    assert found.bytes_to_device == 5 * 4 + 3 * 8
    assert found.waits == 1  # for the second, which blocks


def test_the_time_of_operators_is_counted_and_that_of_views_is_not() -> None:
    data = torch.rand(200_000, device=NPU)
    with counting() as views:
        data.view(2, -1)
    with counting() as found:
        data.sort()
        data.cpu()
    assert views.seconds == 0
    assert 0 < found.seconds <= time.process_time()


def test_nothing_is_counted_outside() -> None:
    with counting() as first:
        torch.ones(2, device=NPU)
    torch.ones(2, device=NPU)
    with counting() as second:
        pass
    assert first.num_operators == 1
    assert second.num_operators == 0
