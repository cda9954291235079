"""No gradient gets lost on the device."""

from __future__ import annotations

import pytest
import torch

from recsdk_npusim import autograd

NPU = torch.device("npu")

KNOWN = [
    "fbgemm::batch_index_select_dim0",
    "fbgemm::batch_index_select_dim0_tensor",
    "fbgemm::group_index_select_dim0",
    "fbgemm::permute_duplicate_pooled_embs_auto_grad_split",
    "fbgemm::permute_pooled_embs_auto_grad_split",
]


@pytest.fixture(scope="module", autouse=True)
def fbgemm() -> None:
    import fbgemm_gpu  # noqa: F401


def test_the_list_is_computed_and_bridged() -> None:
    assert autograd.bridged_operators() == KNOWN
    assert autograd.cpu_only_autograd_operators() == []


def selected(device: torch.device) -> torch.Tensor:
    values = torch.arange(15.0).to(device).requires_grad_()
    rows = torch.tensor([1, 0, 1], device=device)
    result = torch.ops.fbgemm.batch_index_select_dim0(values, rows, [2, 1], [3, 2], [3, 3])
    result.square().sum().backward()
    assert values.grad is not None
    return values.grad.cpu()


def test_a_bridged_operator_has_the_gradient_of_the_cpu() -> None:
    assert torch.equal(selected(NPU), selected(torch.device("cpu")))


def permuted(device: torch.device) -> torch.Tensor:
    values = torch.arange(8.0).view(2, 4).to(device).requires_grad_()
    offsets, order = torch.tensor([0, 1, 4], device=device), torch.tensor([1, 0], device=device)
    inverse = torch.tensor([0, 3, 4], device=device)
    permute = torch.ops.fbgemm.permute_pooled_embs_auto_grad
    (
        permute(values, offsets, order, inverse, order) * torch.arange(4.0, device=device)
    ).sum().backward()
    assert values.grad is not None
    return values.grad.cpu()


def test_an_operator_with_an_autograd_kernel_for_all_devices_keeps_it() -> None:
    assert torch.equal(permuted(NPU), permuted(torch.device("cpu")))


def test_an_operator_without_autograd_kernel_raises() -> None:
    library = torch.library.Library("npusim_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    values = torch.ones(3, device=NPU)
    assert torch.ops.npusim_test.double(values).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="has no gradient on npu"):
        torch.ops.npusim_test.double(values.requires_grad_())
    with torch.no_grad():
        assert torch.ops.npusim_test.double(values).tolist() == [2, 2, 2]
