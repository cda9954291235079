"""Operators, views, random numbers and modules give on the device what they give on the cpu."""

from __future__ import annotations

import copy
import io

import pytest
import torch

NPU = torch.device("npu")


def both(function, *tensors: torch.Tensor) -> None:
    """The function gives equal results on both devices."""
    expected = function(*[tensor.clone() for tensor in tensors])
    found = function(*[tensor.to(NPU) for tensor in tensors])
    assert found.device.type == "npu"
    assert found.shape == expected.shape
    assert torch.equal(found.cpu(), expected)


MATRIX = torch.arange(12.0).view(3, 4)
INDEX = torch.tensor([2, 0, 2])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: (x.t() @ x).relu(),
        lambda x: x.t().contiguous().view(-1),
        lambda x: x[1:, ::2].reshape(-1),
        lambda x: x.expand(2, 3, 4),
        lambda x: x.unfold(1, 2, 1),
        lambda x: torch.cat([x, x[:0], x], dim=0),
        lambda x: torch.where(x > 3, x, 0.0),
        lambda x: torch.nonzero(x > 3),
        lambda x: x.to(torch.int64).to(torch.float64),
        lambda x: torch.stack(x.split([1, 3], dim=1)[:1]),
        lambda x: x.add_(1).mul_(x),
        lambda x: x.sort(descending=True).values,
        lambda x: torch.zeros_like(x).index_add_(0, torch.tensor([0, 1, 1], device=x.device), x),
    ],
)
def test_equals_cpu(function) -> None:
    both(function, MATRIX)


def test_in_place_on_a_view_writes_to_its_base() -> None:
    base = MATRIX.to(NPU)
    base[1].zero_()
    base.t()[0].add_(5)
    expected = MATRIX.clone()
    expected[1].zero_()
    expected.t()[0].add_(5)
    assert torch.equal(base.cpu(), expected)


def test_out_is_resized() -> None:
    out = torch.empty(0, device=NPU)
    torch.add(MATRIX.to(NPU), 1, out=out)
    assert torch.equal(out.cpu(), MATRIX + 1)


def test_resize_keeps_values() -> None:
    tensor = torch.arange(4.0).to(NPU)
    tensor.resize_(6)
    assert tensor[:4].tolist() == [0, 1, 2, 3]


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MATRIX.to(NPU) + MATRIX
    with pytest.raises(RuntimeError, match="same device"):
        MATRIX.to("npu:0") + MATRIX.to("npu:1")
    with pytest.raises(TypeError, match="npu"):
        MATRIX.to(NPU).numpy()


def test_host_indices_and_scalars_are_taken() -> None:
    assert torch.equal(MATRIX.to(NPU)[INDEX].cpu(), MATRIX[INDEX])
    assert torch.equal((MATRIX.to(NPU) * torch.tensor(2.0)).cpu(), MATRIX * 2)


def test_devices_are_apart() -> None:
    tensor = torch.ones(2, device="npu:1")
    assert tensor.device.index == 1
    assert (tensor + 1).device.index == 1
    assert tensor.to("npu:0").device.index == 0
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.npu.set_device(torch.npu.device_count())


def test_random_numbers_follow_the_device_seed() -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device=NPU), torch.nn.functional.dropout(torch.ones(64, device=NPU))
    state = torch.npu.get_rng_state()
    later = torch.rand(4, device=NPU)
    torch.manual_seed(3)
    again = torch.randn(4, device=NPU), torch.nn.functional.dropout(torch.ones(64, device=NPU))
    torch.npu.set_rng_state(state)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.rand(4, device=NPU).cpu(), later.cpu())
    one, other = (torch.Generator(device=NPU).manual_seed(9) for _ in range(2))
    drawn = [torch.rand(3, device=NPU, generator=each).cpu() for each in (one, other)]
    assert torch.equal(*drawn)


def test_a_module_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    on_cpu = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    on_npu = copy.deepcopy(on_cpu).to(NPU)
    for module, inputs in ((on_cpu, MATRIX), (on_npu, MATRIX.to(NPU))):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
    for expected, found in zip(on_cpu.parameters(), on_npu.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


def test_saves_and_loads() -> None:
    buffer = io.BytesIO()
    torch.save({"x": MATRIX.to(NPU)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["x"]
    assert loaded.device.type == "npu"
    assert torch.equal(loaded.cpu(), MATRIX)


def test_pinned_memory_is_known() -> None:
    pinned = MATRIX.pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not MATRIX.is_pinned()
    assert torch.equal(pinned.to(NPU, non_blocking=True).cpu(), MATRIX)
