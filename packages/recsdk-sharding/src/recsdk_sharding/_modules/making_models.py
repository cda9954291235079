"""Makes models on all ranks that share tables, or on none."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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

__all__ = ["HASH_MODULES", "has_hash_modules", "made_together", "shown_alike"]

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
    sharder says which ranks these are, one that fails closes the process groups. A model without
    hash tables, or of this rank alone, concerns no other rank.
    """
    exchange = _exchange_of(arguments)
    size = None if exchange is None else exchange.world_size
    of_env = getattr(arguments.get("env"), "world_size", size)
    is_begun = open_call() is not None  # by a function of ours that makes models
    with nullcontext() if exchange is None else failing_together(exchange.group):
        is_model = isinstance(arguments.get("module"), nn.Module) or exchange is None
        is_plain = is_model and not has_hash_modules(arguments.get("module"))
    if is_begun or is_plain or 1 in (size, of_env):
        check()
        yield
    elif exchange is not None and size == of_env:
        with calling(what, exchange) as call:
            call.begin(lambda: {**check(), **_shared(arguments)})
            yield
    else:
        with failing_together():
            check()
            yield


def _exchange_of(arguments: Mapping[str, Any]) -> HostExchange | None:
    """That of the ranks among which tables are spread; None: no sharder says it."""
    sharders = arguments.get("sharders")
    hosts = map(host_of, sharders) if isinstance(sharders, Sequence) else ()
    return next((host.exchange for host in hosts if host is not None), None)


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
    of_modules = [(path, _in_order(plan.plan[path])) for path in sorted(plan.plan)]
    crc = zlib.crc32(shown_alike(of_modules).encode())
    return f"a plan of {sorted(plan.plan)}, crc {crc:08x}"


def shown_alike(value: Any) -> str:
    """How a value shows itself, without what differs from process to process."""
    return _ADDRESS.sub("", repr(value))


def _in_order(of_module: Any) -> Any:
    """A module's plan, whatever the order in which its tables were put in."""
    is_by_table = isinstance(of_module, Mapping)
    return sorted(of_module.items(), key=lambda item: str(item[0])) if is_by_table else of_module
