"""Makes models on all ranks that share tables, or on none."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardingPlan

from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding._modules.sharded_tables import configs_of
from recsdk_sharding._modules.sharders import host_of
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection
from recsdk_sharding.exchange import HostExchange
from recsdk_sharding.exchange.calls import calling, open_call
from recsdk_sharding.exchange.failures import failing_together

__all__ = ["HASH_MODULES", "has_hash_modules", "made_together"]

HASH_MODULES = (HashEmbeddingBagCollection, HashEmbeddingCollection, HashEmbeddingBag)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def has_hash_modules(module: Any) -> bool:
    """Whether a model has hash tables."""
    return isinstance(module, nn.Module) and any(
        isinstance(child, HASH_MODULES) for child in module.modules()
    )


@contextmanager
def made_together(
    what: str, arguments: Mapping[str, Any], check: Callable[[], Mapping[str, Any]]
) -> Iterator[None]:
    """Inside, a model is made on all ranks, or on none; first its arguments are checked on all.

    `arguments`: by the names of `DistributedModelParallel`. `check` raises for what cannot be
    right, and gives further arguments that all ranks must be given alike, as plain data. If no
    sharder says which ranks these are, one that fails closes the process groups.
    """
    exchange = _exchange_of(arguments)
    if open_call() is not None:  # a function of ours that makes models has begun
        check()
        yield
    elif exchange is not None:
        with calling(what, exchange) as call:
            call.begin(lambda: {**check(), **_shared(arguments)})
            yield
    elif has_hash_modules(arguments.get("module")):
        with failing_together():
            check()
            yield
    else:
        check()
        yield


def _exchange_of(arguments: Mapping[str, Any]) -> HostExchange | None:
    """That of the ranks among which tables are spread; None: one rank, or it cannot be told."""
    sharders = arguments.get("sharders")
    hosts = map(host_of, sharders) if isinstance(sharders, Sequence) else ()
    exchange = next((host.exchange for host in hosts if host is not None), None)
    if exchange is None or exchange.world_size == 1:
        return None
    size = getattr(arguments.get("env"), "world_size", exchange.world_size)
    return exchange if size == exchange.world_size else None


def _shared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks must be given alike, as they tell each other."""
    device, plan = arguments.get("device"), arguments.get("plan")
    hosts = [(each, host_of(each)) for each in arguments["sharders"]]
    for_hash_tables = [(each, host.ranks.rule) for each, host in hosts if host is not None]
    return {
        "the type of device": None if device is None else device.type,
        "the list of hash tables of the module": list(_tables_of(arguments["module"])),
        "what the sharders were made with": [
            (type(each).__name__, rule, sorted(each.qcomm_codecs_registry or {}), each.options)
            for each, rule in for_hash_tables
        ],
        "plan": None if plan is None else _digest_of(plan),
    }


def _tables_of(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    for path, child in module.named_modules():
        if isinstance(child, (HashEmbeddingBagCollection, HashEmbeddingCollection)):
            for config in configs_of(child):
                yield path, config.name, config.embedding_dim, tuple(config.feature_names)
        elif isinstance(child, HashEmbeddingBag):
            yield path, child.table.name, child.table.dim


def _digest_of(plan: ShardingPlan) -> str:
    text = _ADDRESS.sub("", repr({path: plan.plan[path] for path in sorted(plan.plan)}))
    return f"a plan of {sorted(plan.plan)}, crc {zlib.crc32(text.encode()):08x}"
