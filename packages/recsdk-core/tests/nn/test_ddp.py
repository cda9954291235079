"""Under DistributedDataParallel one rank works, more than one is refused, as FSDP is on any.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_processes
from packaging.version import Version
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from recsdk_core import optim
from recsdk_core.nn import HashEmbedding

IS_ASKED_BY_BROADCAST = Version(torch.__version__) >= Version("2.12")
"""Else `distribute_module` replaces the parameter unseen, and the first forward refuses."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = HashEmbedding(2, optimizer=optim.SGD())
        self.dense = nn.Linear(2, 1)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embedding(keys))  # type: ignore[no-any-return]


def refuse_sharding(world_size: int) -> None:
    """What takes parameters apart over ranks would leave each its own rows."""
    mesh = init_device_mesh("cpu", (world_size,))
    calls: list[Callable[[nn.Module], Any]] = [
        lambda model: fully_shard(model, mesh=mesh),
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    ]
    if IS_ASKED_BY_BROADCAST:
        calls.append(lambda model: distribute_module(model, mesh))
    for call in calls:
        with pytest.raises(ValueError, match="cannot use `weight`.*as FSDP does.*recsdk-sharding"):
            call(Model())
    with pytest.raises((ValueError, RuntimeError), match="recsdk-sharding"):
        distribute_module(Model(), mesh)(torch.arange(4))
    model = Model()
    plain = nn.Parameter(torch.empty(0, 2))
    model.embedding._parameters["weight"] = nn.Parameter(distribute_tensor(plain, mesh))
    with pytest.raises(RuntimeError, match="was made a DTensor.*recsdk-sharding"):
        model(torch.arange(4))


def run_rank(rank: int, world_size: int, store: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    try:
        refuse_sharding(world_size)
        model = DistributedDataParallel(Model())
        if world_size == 1:
            for _ in range(3):
                model(torch.arange(4)).sum().backward()
            assert model.module.embedding.table.update_count == 3
            grad = model.module.embedding.weight.grad  # the wrapper makes an empty one
            assert grad is None or grad.numel() == 0
            return
        with pytest.raises(RuntimeError, match="DistributedDataParallel with 2 ranks"):
            model(torch.arange(4))
        model.module(torch.arange(4)).sum().backward()  # without the wrapper: as on one rank
    finally:
        distributed.destroy_process_group()


def test_ddp_on_one_rank(tmp_path: Path) -> None:
    run_rank(0, 1, str(tmp_path / "store"))


def test_ddp_on_two_ranks(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = [
        warm_processes.start(__file__, rank, 2, store, output=tmp_path / f"printed_{rank}")
        for rank in range(2)
    ]
    assert [warm_processes.status_of(rank) for rank in ranks] == [0, 0]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
