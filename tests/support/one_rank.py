"""Models of one small table on one rank, for tests that hold a page to what runs.

Shape letters: B batch, N ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    get_default_hybrid_sharders,
)

__all__ = [
    "CPU",
    "IDS",
    "META",
    "Batch",
    "Model",
    "bag_config",
    "bags",
    "batch",
    "host_env",
    "optimized",
    "plan_of",
    "sequence_config",
    "sequences",
    "sharded",
    "sharders",
    "world_of_one",
]

CPU, META = torch.device("cpu"), torch.device("meta")
IDS = (-7, 2**62, -7)


@contextmanager
def world_of_one() -> Iterator[None]:
    """torch's process group of one rank, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        host_env.cache_clear()
        dist.destroy_process_group()


@functools.cache
def host_env() -> ShardingEnv:
    """The host group of the world of one."""
    return ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo"))


def sharders(**options: Any) -> list[Any]:
    return get_default_hybrid_sharders(host_env=host_env(), **options)


def bag_config(name: str = "user", **changes: Any) -> HashEmbeddingBagConfig:
    return HashEmbeddingBagConfig(**_fields(name, changes))


def sequence_config(name: str = "user", **changes: Any) -> HashEmbeddingConfig:
    return HashEmbeddingConfig(**_fields(name, changes))


def _fields(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {"embedding_dim": 4, "num_embeddings": 100, "feature_names": [name]}
    return {"name": name, **fields, **changes}


def bags(*configs: Any, device: Any = None, **options: Any) -> HashEmbeddingBagCollection:
    """A collection of bags, of one table by default."""
    return HashEmbeddingBagCollection(tables=[*configs] or [bag_config()], device=device, **options)


def sequences(*configs: Any, device: Any = None, **options: Any) -> HashEmbeddingCollection:
    """A collection of sequences, of one table by default."""
    tables = [*configs] or [sequence_config()]
    return HashEmbeddingCollection(tables=tables, device=device, **options)


def optimized(module: Any, kind: type = torch.optim.SGD, **arguments: Any) -> Any:
    """The module, with an optimizer in backward."""
    apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1, **arguments})
    return module


def batch(
    ids: Sequence[int] = IDS,
    lengths: Sequence[int] = (2, 0, 1),
    names: Sequence[str] = ("user",),
    **options: Any,
) -> KeyedJaggedTensor:
    """A batch of bags of one feature, the second of three empty."""
    values_N = torch.tensor(ids, dtype=torch.int64)
    return KeyedJaggedTensor([*names], values_N, lengths=torch.tensor(lengths), **options)


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    """What pipelines take."""

    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """Nothing: torch records on tensors of devices only, and raises for the cpu's."""

    def pin_memory(self) -> Batch:
        return Batch(self.ids.pin_memory())


class Model(nn.Module):
    """Returns (loss, output) of a `Batch`."""

    def __init__(self, ebc: Any) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = nn.Linear(4, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        output_B1 = self.over(self.ebc(batch.ids).values())
        return output_B1.square().sum(), output_B1


def plan_of(model: nn.Module, given: Sequence[Any] = (), **options: Any) -> Any:
    """The plan of torchrec's planner, by default for one cpu."""
    topology = options.pop("topology", None) or Topology(world_size=1, compute_device="cpu")
    planner = options.pop("planner", EmbeddingShardingPlanner)(topology=topology, **options)
    return planner.collective_plan(model, [*given] or sharders(), dist.GroupMember.WORLD)


def sharded(
    module: Any = None, plan: Any = None, wrap: Callable[..., nn.Module] = Model, **options: Any
) -> DistributedModelParallel:
    """A model of a collection, by default one of bags, sharded on the one rank."""
    model = wrap(optimized(bags(device=META)) if module is None else module)
    given = options.pop("sharders", None) or sharders()
    made = plan or plan_of(model, given)
    return DistributedModelParallel(model, device=CPU, plan=made, sharders=given, **options)
