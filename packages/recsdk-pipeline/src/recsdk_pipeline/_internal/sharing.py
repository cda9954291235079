"""Whether a model shares anything with the models of other ranks."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule

__all__ = ["is_shared"]

_SHARED = (ShardedModule, DistributedDataParallel, FullyShardedDataParallel)


def is_shared(model: nn.Module) -> bool:
    """Whether a module in it is sharded, or trained by several ranks, by torch or torchrec."""
    return any(isinstance(part, _SHARED) for part in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
