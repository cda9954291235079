"""Which kernels tables on a device run on: torch's operators, or Triton's kernels on cuda."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from recsdk_core import BackendUnavailable
from recsdk_sharding.device import kernels, optimizers
from recsdk_sharding.device.kernels import Operation, offer_kernels

__all__ = ["SETTING", "choose_kernels", "fused_kernels"]

SETTING = "RECSDK_DEVICE_KERNELS"
_NAMES = ("torch", "triton")

_lock = threading.Lock()
_chosen: dict[str, str] = {}
_logger = logging.getLogger(__name__)


def choose_kernels(device: torch.device) -> str:
    """Chooses for all tables on a type of device, once a process; returns "torch" or "triton".

    RECSDK_DEVICE_KERNELS says which; unset, it is Triton's kernels on cuda if they work there, with
    a warning if they do not, and torch's operators elsewhere. They are tried on the device with a
    small batch; for batches and rows of other kinds they are compiled, or not, when these come.
    Raises ValueError for another name, and if a type of device has no such kernels;
    BackendUnavailable if Triton's are asked for and do not work.
    """
    with _lock:
        if device.type not in _chosen:
            _chosen[device.type] = _choose(device)
        return _chosen[device.type]


def _choose(device: torch.device) -> str:
    asked = os.environ.get(SETTING)
    if asked not in (None, *_NAMES):
        raise ValueError(f"{SETTING} must be one of {_NAMES}, got {asked!r}; or unset it")
    if asked == "triton" and device.type == "npu":
        raise ValueError(f"{SETTING}=triton: there are none for npu; unset it, or set it to torch")
    if asked == "torch" or device.type != "cuda":
        return "torch"
    try:
        offered = _working_kernels(device)
    except Exception as error:
        if asked == "triton":
            raise BackendUnavailable(
                f"{SETTING}=triton: Triton's kernels do not work here: {error!r}"
            ) from error
        warnings.warn(
            f"tables on {device.type} run on torch's operators, as Triton's kernels do not work "
            f"here: {error!r}; install the triton that belongs to this torch, or set "
            f"{SETTING}=torch",
            RuntimeWarning,
            stacklevel=2,
        )
        return "torch"
    offer_kernels(device.type, offered)
    _logger.info("tables on %s run on Triton's kernels", device.type)
    return "triton"


def _working_kernels(device: torch.device) -> Mapping[Operation, Callable[..., Any]]:
    from recsdk_sharding.device.fused.checking import check

    with torch.no_grad():
        check(device)
    return fused_kernels()


def fused_kernels() -> Mapping[Operation, Callable[..., Any]]:
    """Triton's kernels, by what they are offered for, with torch's operators for what Triton does
    not compile; imports triton."""
    from recsdk_sharding.device.fused import planning, pooling, summing, updating
    from recsdk_sharding.device.fused.falling_back import falling_back

    return {
        "pool_rows": falling_back(pooling.pool_rows, kernels.pool_rows),
        "plan_rows": falling_back(planning.plan_rows, kernels.plan_rows),
        "sum_gradients": falling_back(summing.sum_gradients, kernels.sum_gradients),
        "update_rows": falling_back(updating.update_rows, optimizers.update_rows),
        "pool_into": falling_back(pooling.pool_into, _does_nothing),
        "train_rows": falling_back(updating.train_rows, _does_nothing),
    }


def _does_nothing(*args: Any) -> bool:
    """The rest goes by steps."""
    return False
