"""Which kernels tables on a device run on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from recsdk_core import BackendUnavailable
from recsdk_sharding.device import kernel_choice
from recsdk_sharding.device.kernel_choice import SETTING, choose_kernels
from recsdk_sharding.device.kernels import fused_kernel, kernel, offer_kernels, register_kernel

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NPU: Any = SimpleNamespace(type="npu")
KERNELS = {"pool_rows": len, "pool_into": sum, "train_rows": any}


@pytest.fixture(autouse=True)
def first_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no table had been made yet, and kernels worked."""
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr(kernel_choice, "_working_kernels", lambda device: KERNELS)
    with mock.patch.dict(kernel_choice._chosen, clear=True):
        yield
    offer_kernels("cuda", {})


def test_they_are_tritons_on_cuda_alone() -> None:
    assert [choose_kernels(device) for device in (CUDA, NPU, CPU)] == ["triton", "torch", "torch"]
    assert kernel("cuda", "pool_rows", min) is len
    assert kernel("cuda", "plan_rows", min) is min
    assert kernel("npu", "pool_rows", min) is min
    assert fused_kernel("cuda", "train_rows") is any
    assert fused_kernel("cuda", "pool_into") is sum
    assert fused_kernel("npu", "train_rows") is None


def test_torchs_operators_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "torch")
    monkeypatch.setattr(kernel_choice, "_working_kernels", None)
    assert choose_kernels(CUDA) == "torch"
    assert kernel("cuda", "pool_rows", min) is min


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels(CUDA) == "triton"
    monkeypatch.setenv(SETTING, "torch")
    assert choose_kernels(torch.device("cuda", 1)) == "triton"


def broken(device: torch.device) -> None:
    raise OSError("no ptxas")


def test_kernels_that_do_not_work_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_working_kernels", broken)
    with pytest.warns(RuntimeWarning, match=r"torch's operators.*OSError\('no ptxas'\)") as told:
        assert choose_kernels(CUDA) == "torch"
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_kernels(CUDA) == "torch"
    assert kernel("cuda", "pool_rows", min) is min


def test_without_triton_there_are_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gone = dict.fromkeys(name for name in sys.modules if name.split(".")[0] == "triton")
    own = [name for name in sys.modules if name.startswith("recsdk_sharding.device.fused")]
    with mock.patch.dict(sys.modules, {**gone, "triton": None}):
        for name in own:
            del sys.modules[name]
        with pytest.warns(RuntimeWarning, match=f"triton.*install.*{SETTING}=torch"):
            assert choose_kernels(CUDA) == "torch"


def test_kernels_that_are_asked_for_have_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "triton")
    with monkeypatch.context() as now:
        now.setattr(kernel_choice, "_working_kernels", broken)
        with pytest.raises(BackendUnavailable, match=f"{SETTING}=triton.*no ptxas"):
            choose_kernels(CUDA)
    assert choose_kernels(CUDA) == "triton"
    with pytest.raises(ValueError, match="there are none for npu"):
        choose_kernels(NPU)


def test_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "fbgemm")
    with pytest.raises(ValueError, match=f"{SETTING} must be one of .*, got 'fbgemm'"):
        choose_kernels(CUDA)


def test_a_callers_kernel_comes_first() -> None:
    choose_kernels(CUDA)
    for operation in ("sum_gradients", "update_rows"):
        register_kernel("cuda", operation, max)
        assert kernel("cuda", operation, min) is max
        assert fused_kernel("cuda", "train_rows") is None  # it would pass over the caller's
        register_kernel("cuda", operation, None)
        assert fused_kernel("cuda", "pool_into") is sum
    register_kernel("cuda", "pool_rows", max)
    assert fused_kernel("cuda", "pool_into") is None
    register_kernel("cuda", "pool_rows", None)
    register_kernel("cuda", "train_rows", all)
    assert fused_kernel("cuda", "train_rows") is all
    register_kernel("cuda", "train_rows", None)
    assert fused_kernel("cuda", "train_rows") is any
