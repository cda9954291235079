"""Runs Triton's kernels, interpreted, on the memory of simulated NPUs; for functions of ranks.

So they are tried in whole steps without a CUDA device. The simulation counts torch's operators;
here launches are counted.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from loops import plain
from on_ranks import own_batches
from plans import PLANS
from setups import SGD, on_npu, with_room
from torch.utils._python_dispatch import _disable_current_modes
from worlds import new_model, optimizer_of, shard

from recsdk_core import RecsdkError
from recsdk_sharding.device.kernel_choice import fused_kernels
from recsdk_sharding.device.kernels import offer_kernels
from recsdk_sharding.exchange import go_on


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


def train_otherwise_on_one_rank(sharding: str, what: str, bad_rank: int) -> list[str]:
    """How training ends: alike, while one rank has other kernels or another rate, and once that is
    over and a state is loaded."""
    options = {"on_nonfinite": "raise"} if what.endswith("by steps") else {}
    setup = with_room(on_npu(replace(SGD, plan=PLANS[2][sharding], options=options)))
    model = shard(new_model(setup, "meta"), setup)
    optimizer, batches = optimizer_of(model, 0.1), own_batches([[5, 5]] * 4, weighted=False)

    def train(under: AbstractContextManager[Any]) -> str:
        said = "trained"
        with fused_on_npus(), under:
            try:
                list(plain(model, optimizer, batches))
            except RecsdkError as error:
                said = str(error)
        go_on(model)
        return said

    alike = train(nullcontext())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    otherwise = train(OTHERWISE[what](model) if dist.get_rank() == bad_rank else nullcontext())
    model.load_state_dict(state)
    return [alike, otherwise, train(nullcontext())]


@contextmanager
def _on_torchs_operators(model: Any) -> Iterator[None]:
    offer_kernels("npu", {})
    yield


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """As if the C compiler failed at what starts these kernels."""
    from recsdk_sharding.device.fused import pooling, summing, updating
    from recsdk_sharding.device.fused.launching import NotCompiled

    def refuse(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if kernel.fn.__name__ in names:
            raise NotCompiled(f"Triton does not compile {kernel.fn.__name__}")
        launch(kernel, grid, *args, **constants)

    launch = updating.launch
    with ExitStack() as patches, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that torch's operators run
        for module in (pooling, summing, updating):
            patches.enter_context(mock.patch.object(module, "launch", refuse))
        yield


@contextmanager
def _at_another_rate(model: Any) -> Iterator[None]:
    groups = model.fused_optimizer.param_groups
    for group in groups:
        group["lr"] /= 2
    yield
    for group in groups:
        group["lr"] *= 2


OTHERWISE: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "torch": _on_torchs_operators,
    "no update": lambda _: _without("_update"),
    "no sums": lambda _: _without("_sum_pieces"),
    "no update, by steps": lambda _: _without("_update"),
    "no sums, by steps": lambda _: _without("_sum_pieces"),
    "no pooling": lambda _: _without("_pool"),
    "rate": _at_another_rate,
}
"""What is otherwise on one rank, by name; but for pooling, replicas come apart by it."""
