"""Which ranks share a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule

from recsdk_sharding import failing_together
from recsdk_sharding.exchange import HostExchange

__all__ = ["guard_of"]

_SHARED = (ShardedModule, DistributedDataParallel, FullyShardedDataParallel)


def guard_of(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """What makes the ranks that share a model fail together.

    They share one in which a module is sharded, or trained by several ranks, by torch or torchrec.
    Any other is this rank's own.
    """
    groups = [_group_of(part) for part in model.modules() if isinstance(part, _SHARED)]
    groups += [None for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not groups:
        return nullcontext
    of_ranks = {None if g is None else tuple(dist.get_process_group_ranks(g)) for g in groups}
    return partial(failing_together, groups[0] if len(of_ranks) == 1 else None)


def _group_of(part: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share a module; None: all, as far as is known."""
    exchange = getattr(part, "host_exchange", None)
    if isinstance(exchange, HostExchange):
        return exchange.group
    if isinstance(part, DistributedDataParallel):
        group: dist.ProcessGroup = part.process_group
        return group
    return None
