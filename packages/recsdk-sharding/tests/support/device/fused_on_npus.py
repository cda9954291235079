"""Runs Triton's kernels, interpreted, on the memory of simulated NPUs; for functions of ranks.

So they are tried in whole steps without a CUDA device. The simulation counts torch's operators;
here launches are counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from recsdk_sharding.device.kernel_choice import fused_kernels
from recsdk_sharding.device.kernels import offer_kernels


@contextmanager
def fused_on_npus() -> Iterator[list[str]]:
    """Gives the names of the kernels that are launched inside."""
    from recsdk_sharding.device.fused import planning, pooling, summing, updating

    launched: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if 0 not in grid:
            launched.append(kernel.fn.__name__)
            torch.npu.synchronize()  # copies come late there
            with _disable_current_modes():  # what is interpreted is no operator of the device
                kernel[grid](*map(_on_host, args), **constants)

    offer_kernels("npu", fused_kernels())
    try:
        with ExitStack() as patches:
            for module in (planning, pooling, summing, updating):
                patches.enter_context(mock.patch.object(module, "launch", launch))
            yield launched
    finally:
        offer_kernels("npu", {})


def with_fused(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What a function returns with these kernels, and those that it launched."""
    with fused_on_npus() as launched:
        return function(*args), launched


def _on_host(argument: Any) -> Any:
    """A tensor over the same memory, which a simulated device has on the host."""
    if not isinstance(argument, torch.Tensor):
        return argument
    storage = argument.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(argument.shape, dtype=argument.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=argument.dtype)
    return whole.as_strided(argument.size(), argument.stride(), argument.storage_offset())
