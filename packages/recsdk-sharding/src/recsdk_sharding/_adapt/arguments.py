"""Checks torchrec's arguments for models with hash tables before torchrec uses them.

torchrec leaves a module without a plan unsharded, skips what it does not know, and fails only where
it first uses a wrong argument. So importing the package adapts its planner's enumerator and
`DistributedModelParallel`: with sharders of hash tables, arguments, constraints and plans are
checked first. For models and sharders without hash tables nothing changes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from recsdk_core import Evict
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding._configs.configs import limit_groups
from recsdk_sharding._configs.settings import (
    Subject,
    check_columns_of,
    check_constraints,
    check_groups_of,
    check_shared_rows_of,
)
from recsdk_sharding._modules.feature_processed import (
    HashFeatureProcessedEmbeddingBagCollectionSharder,
)
from recsdk_sharding._modules.making_models import HASH_MODULES
from recsdk_sharding._modules.sharded_tables import configs_of
from recsdk_sharding._modules.sharders import (
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingCollectionSharder,
)
from recsdk_sharding._modules.sharding_types import POOLED_TYPES, SEQUENCE_TYPES
from recsdk_sharding._modules.single_bag import HashEmbeddingBagSharder
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection

__all__ = [
    "check_constraint_types",
    "check_model_arguments",
    "check_modules_arguments",
    "check_planned",
    "with_whole_groups",
]

_HASH_SHARDERS = (
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingCollectionSharder,
    HashEmbeddingBagSharder,
    HashFeatureProcessedEmbeddingBagCollectionSharder,
)


def check_constraint_types(constraints: Any) -> None:
    """Raises TypeError unless a planner's constraints are a dict of ParameterConstraints."""
    values = constraints.values() if isinstance(constraints, Mapping) else [constraints]
    wrong = [type(each).__name__ for each in values if not isinstance(each, ParameterConstraints)]
    if constraints is not None and wrong:
        raise TypeError(
            "constraints must be a dict of ParameterConstraints by the table's name, got "
            f"{wrong[0]}" + (" in a dict" if isinstance(constraints, Mapping) else "")
        )


@dataclass(frozen=True)
class _PlannedTable:
    """The facts that a table's constraints are checked against."""

    name: str
    has_half_rows: bool
    features: list[str] | None
    types: tuple[str, ...]


def check_planned(module: nn.Module, sharders: Any, constraints: Any, compute_device: str) -> None:
    """Raises TypeError or ValueError for constraints or sharders that hash tables cannot honour.

    `compute_device` is the type of device that is planned for.
    """
    found = [child for child in module.modules() if isinstance(child, HASH_MODULES)]
    if not found:
        return
    _check_sharders(module, sharders)
    tables = [table for child in found for table in _tables_of(child)]
    _warn_of_names(module, sharders, constraints or {}, {table.name for table in tables})
    for table in tables:
        given = (constraints or {}).get(table.name)
        if given is not None:
            subject = Subject(table.name, table.has_half_rows, compute_device)
            check_constraints(subject, given, table.types, table.features, compute_device)


def with_whole_groups(options: list[Any]) -> list[Any]:
    """The ways to shard tables, less those by which ranks lack whole groups of ids, or rows.

    Raises ValueError if a table that needs them has no other way.
    """
    kept, failed = [], {}
    for option in options:
        module = option.module[1]
        try:
            if isinstance(module, HASH_MODULES):
                cuts = _num_cuts(option)
                check_groups_of(option.name, _num_groups(module, option.name), cuts)
                check_shared_rows_of(option.name, _num_shared(module, option.name), cuts)
                columns = len({shard.offset[1] for shard in option.shards})
                check_columns_of(option.name, _eviction(module, option.name), columns)
            kept.append(option)
        except ValueError as error:
            failed[option.name, id(module)] = error
    left = {(option.name, id(option.module[1])) for option in kept}
    for table, refusal in failed.items():
        if table not in left:
            raise refusal
    return kept


def _num_groups(module: Any, table: str) -> int | None:
    if isinstance(module, HashEmbeddingBag):
        return limit_groups(module.table.eviction_groups, module.table.admission)
    [config] = [config for config in configs_of(module) if config.name == table]
    groups: int | None = config.num_groups
    return groups


def _eviction(module: Any, table: str) -> Evict | None:
    if isinstance(module, HashEmbeddingBag):
        return module.table.eviction
    [config] = [config for config in configs_of(module) if config.name == table]
    rule: Evict | None = config.eviction
    return rule


def _num_shared(module: Any, table: str) -> int | None:
    if isinstance(module, HashEmbeddingBag):
        return module.table.default.n
    [config] = [config for config in configs_of(module) if config.name == table]
    n: int | None = config.default.n
    return n


def _num_cuts(option: Any) -> int:
    """Over how many ranks the option cuts rows."""
    columns = Counter(shard.offset[1] for shard in option.shards)
    is_copied = option.sharding_type == ShardingType.DATA_PARALLEL.value
    return 1 if is_copied else max(columns.values(), default=1)


def _tables_of(module: Any) -> Iterator[_PlannedTable]:
    if isinstance(module, HashEmbeddingBag):
        table = module.table
        yield _PlannedTable(table.name, table.dtype != "float32", None, POOLED_TYPES)
        return
    types = POOLED_TYPES if isinstance(module, HashEmbeddingBagCollection) else SEQUENCE_TYPES
    for config in configs_of(module):
        has_half_rows = config.dtype != "float32"
        yield _PlannedTable(config.name, has_half_rows, list(config.feature_names), types)


def _warn_of_names(
    module: nn.Module, sharders: Any, constraints: Mapping[str, Any], hash_tables: set[str]
) -> None:
    """Warns of constraints for tables that the model does not have: one dict may serve many."""
    by_type = {sharder.module_type: sharder for sharder in sharders or ()}
    known = set(hash_tables)
    for path, child in module.named_modules():
        if type(child) in by_type:
            known |= set(by_type[type(child)].shardable_parameters(child))
        if any(True for _ in child.parameters(recurse=False)):
            known.add(path.rpartition(".")[2])  # torchrec's tables that no sharder takes
    if unknown := sorted(set(constraints) - known):
        warnings.warn(
            f"constraints name {unknown}, and the model has no such table, so they do nothing; its "
            f"hash tables are {sorted(hash_tables)}",
            stacklevel=4,
        )


def check_modules_arguments(arguments: Mapping[str, Any]) -> None:
    """Checks the arguments of torchrec's `shard_modules`, as `check_model_arguments` does.

    Also raises ValueError for hash tables that it would leave unsharded, one copy on each rank.
    """
    module, given = arguments.get("module"), arguments.get("sharders") or ()
    has_sharder = any(isinstance(sharder, _HASH_SHARDERS) for sharder in given)
    is_over_ranks = dist.is_initialized() and dist.get_world_size() > 1
    if isinstance(module, nn.Module) and not has_sharder and is_over_ranks:
        for path, child in module.named_modules():
            if isinstance(child, HASH_MODULES):
                raise ValueError(
                    f"shard_modules: module {path!r} is a {type(child).__name__}, but sharders "
                    "has none for it, so that each rank would train its own; pass those of "
                    "recsdk_sharding.get_default_hybrid_sharders(host_env=...)"
                )
    check_model_arguments(arguments, "shard_modules")


def check_model_arguments(
    arguments: Mapping[str, Any], what: str = "DistributedModelParallel"
) -> None:
    """Raises TypeError or ValueError if arguments of DistributedModelParallel cannot be right.

    If no sharder is for hash tables, checks only that the plan has none. `what` is the model's name
    in messages.
    """
    sharders = arguments.get("sharders")
    if isinstance(sharders, _HASH_SHARDERS):
        raise TypeError(
            f"{what}: sharders must be a list, got {type(sharders).__name__}; pass what "
            "get_default_hybrid_sharders gives"
        )
    if not isinstance(sharders, Sequence) or not any(
        isinstance(s, _HASH_SHARDERS) for s in sharders
    ):
        _check_planned_have_sharders(arguments, what)
        return
    module, plan, device = (arguments.get(name) for name in ("module", "plan", "device"))
    if not isinstance(module, nn.Module):
        raise TypeError(f"{what}: module must be a torch.nn.Module, got {_called(module)}")
    if device is not None and not isinstance(device, torch.device):
        raise TypeError(
            f"{what}: device must be a torch.device, got {_called(device)}; pass "
            f"torch.device({device!r})"
        )
    if plan is not None and not isinstance(plan, ShardingPlan):
        raise TypeError(
            f"{what}: plan must be a torchrec ShardingPlan, got {_called(plan)}; pass what the "
            "planner's collective_plan gives, or ShardingPlan(plan={path: plan of module})"
        )
    _check_sharders(module, sharders)
    _check_names(module, what)
    if plan is not None:
        _check_covers(module, plan, what)
    _check_planned_have_sharders(arguments, what)


def _check_planned_have_sharders(arguments: Mapping[str, Any], what: str) -> None:
    """Raises ValueError for hash tables in the plan that no sharder is for: torchrec's KeyError."""
    module, plan, sharders = (arguments.get(name) for name in ("module", "plan", "sharders"))
    if not isinstance(module, nn.Module) or not isinstance(plan, ShardingPlan):
        return
    if isinstance(sharders, Iterator):  # torchrec takes one, which can be gone through once
        return
    known = {each.module_type for each in sharders or () if isinstance(each, ModuleSharder)}
    for path, child in module.named_modules():
        is_planned = isinstance(child, HASH_MODULES) and plan.get_plan_for_module(path)
        if is_planned and type(child) not in known:
            raise ValueError(
                f"{what}: the plan shards {path!r}, a {type(child).__name__}, and sharders has "
                "none for it; pass those that the plan was made with, of "
                "recsdk_sharding.get_default_hybrid_sharders(host_env=...)"
            )


def _called(value: Any) -> str:
    return f"{value!r}" if isinstance(value, str) else type(value).__name__


def _check_sharders(module: nn.Module, sharders: Any) -> None:
    """Raises ValueError if a torchrec sharder would shard hash tables as its own."""
    by_type = {
        sharder.module_type: sharder
        for sharder in sharders or ()
        if isinstance(sharder, ModuleSharder) and not isinstance(sharder, _HASH_SHARDERS)
    }
    for path, child in module.named_modules():
        sharder = by_type.get(type(child))
        if sharder is None:
            continue
        inner = [each for each in child.modules() if isinstance(each, HASH_MODULES)]
        if inner:
            raise ValueError(
                f"module {path!r}: {type(sharder).__name__} would shard the "
                f"{type(inner[0]).__name__} in this {type(child).__name__} as a table of torchrec "
                f"with a row for each id; take it out of the {type(child).__name__}"
            )


def _check_names(module: nn.Module, what: str) -> None:
    """Raises ValueError for hash tables that one module has under two names.

    torchrec shards the first of them only. (Of two modules, each may have them.)
    """
    for path, parent in module.named_modules():
        names: dict[int, list[str]] = {}
        for name, child in parent._modules.items():
            if isinstance(child, HASH_MODULES):
                names.setdefault(id(child), []).append(f"{path}.{name}" if path else name)
        for of_child in names.values():
            if len(of_child) > 1:
                raise ValueError(
                    f"{what}: {of_child} are one module, and torchrec shards it under the first "
                    "name only; keep that one, and call it in both places"
                )


def _check_covers(module: nn.Module, plan: ShardingPlan, what: str) -> None:
    """Raises ValueError for hash tables without a plan, which would stay unsharded."""
    planned = set(plan.plan)
    paths: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, HASH_MODULES):
            paths.setdefault(id(child), []).append(path)
    for of_module in paths.values():
        if not any(_or_above(path) & planned for path in of_module):
            raise ValueError(
                f"{what}: the plan has no entry for {of_module[0]!r}, so its hash tables would "
                f"stay unsharded; it has {sorted(planned)}; make the plan of this model with the "
                "same sharders, or leave plan out"
            )


def _or_above(path: str) -> set[str]:
    """The path, and those of the modules around it."""
    parts = path.split(".") if path else []
    return {".".join(parts[:count]) for count in range(len(parts) + 1)}
