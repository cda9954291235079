"""Autocast on the device casts what it casts on cuda, and trains as on the cpu."""

from __future__ import annotations

import pytest
import torch
from torch import nn

NPU = torch.device("npu")
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_are_cast_by_torchs_lists(dtype: torch.dtype) -> None:
    x, y = torch.randn(3, 4, device=NPU), torch.randn(4, 3, device=NPU)
    with torch.autocast("npu", dtype=dtype):
        low = x @ y
        found = {
            "matmul": low,
            "relu": low.relu(),
            "softmax": low.softmax(0),
            "sum": low.sum(),
            "norm": low.norm(),
            "exp": low.exp(),
            "promoted": torch.addcmul(x, x, x.to(dtype)),
        }
        inside = torch.is_autocast_enabled("npu")
    assert inside
    assert (x @ y).dtype == torch.float32
    wide = {"softmax", "sum", "norm", "exp", "promoted"}
    for name, each in found.items():
        assert each.device.type == "npu"
        assert each.dtype == (torch.float32 if name in wide else dtype), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_gives_what_its_cast_copy_gives_and_trains_in_float32(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 2).to(NPU), torch.randn(3, 4, device=NPU)
    with torch.autocast("npu", dtype=dtype):
        out = layer(x)
    low = nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
    assert torch.equal(out.cpu(), low.cpu())
    out.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    expected = x.to(dtype).float().sum(0)
    assert torch.allclose(layer.weight.grad[0].cpu(), expected.cpu(), rtol=2e-2, atol=2e-2)


def test_a_loss_that_is_unsafe_in_16_bits_is_refused() -> None:
    x = torch.rand(3, device=NPU)
    with torch.autocast("npu", dtype=torch.float16), pytest.raises(RuntimeError, match="unsafe"):
        nn.functional.binary_cross_entropy(x, x)
