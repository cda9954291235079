"""Checks what plans, constraints and fused_params say of a hash table; names what it refuses.

torchrec hands such settings to fbgemm's kernels, which hash tables do not use. A setting is taken
if it says what hash tables do anyway; any other, also one that a later torchrec adds, is a
ValueError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode, ParameterSharding
from torchrec.modules.embedding_configs import DataType

from recsdk_core import Evict

__all__ = [
    "HONOURED_CONSTRAINTS",
    "HONOURED_IN_PLANS",
    "KERNEL_SETTINGS",
    "Subject",
    "check_columns_of",
    "check_constraints",
    "check_fused_params",
    "check_groups_of",
    "check_names",
    "check_plan",
    "check_shared_rows_of",
    "kernel_of",
    "num_column_shards",
    "num_row_shards",
]

HONOURED_IN_PLANS = frozenset({"sharding_type", "compute_kernel", "ranks", "sharding_spec"})
"""Fields of torchrec's `ParameterSharding` that hash tables honour, beside `KERNEL_SETTINGS`."""

HONOURED_CONSTRAINTS = frozenset(
    {
        "sharding_types",
        "compute_kernels",
        "min_partition",
        "pooling_factors",
        "num_poolings",
        "batch_sizes",
        "is_weighted",
        "device_group",
        "feature_names",
        "expected_rows",
        "growth",
    }
)
"""Fields of `ParameterConstraints`, and of `HashParameterConstraints`, that hash tables honour."""

_REPLICATED = "data_parallel"


@dataclass(frozen=True)
class Subject:
    """The table that settings are for; None: not known yet."""

    name: str
    """Its name in messages."""
    has_half_rows: bool | None = None
    """Whether rows are stored in 16 bits."""
    device_type: str | None = None
    """Where the rows will be."""


@dataclass(frozen=True)
class _Setting:
    is_what_happens: Callable[[Any, Subject], bool]
    """Whether a value says what hash tables do."""
    advice: str


def _is_rounding(value: Any, subject: Subject) -> bool:
    return value is True or (value is False and not subject.has_half_rows)


def _is_placement(value: Any, subject: Subject) -> bool:
    return value is False or (value is True and subject.device_type != "cpu")


KERNEL_SETTINGS: Mapping[str, _Setting] = {
    "cache_params": _Setting(
        lambda *_: False,
        "rows are never cached, but all where the plan puts them; leave it out",
    ),
    "enforce_hbm": _Setting(
        _is_placement, "rows are in device memory on npu and cuda only; leave it out on the cpu"
    ),
    "stochastic_rounding": _Setting(
        _is_rounding, "rows of 16 bits are always rounded stochastically; use DataType.FP32"
    ),
    "bounds_check_mode": _Setting(
        lambda value, _: value == BoundsCheckMode.NONE,
        "every 64-bit id is legal, so there are no bounds; leave it out",
    ),
    "output_dtype": _Setting(
        lambda value, _: getattr(value, "name", None) == DataType.FP32.name,
        "results are float32; convert what the module gives",
    ),
    "key_value_params": _Setting(
        lambda *_: False, "rows are in memory, not in a store of keys and values; leave it out"
    ),
}
"""Settings of fbgemm's kernels that may be given if they say what hash tables do anyway."""

_OF_OPTIMIZERS = ("optimizer", "learning_rate", "eps", "beta", "weight_decay", "momentum")


def kernel_of(sharding_type: str) -> str:
    """The kernel that a plan must name for hash tables that are sharded by this type."""
    return "dense" if sharding_type == _REPLICATED else "fused"


def check_names(what: str, params: Any, names: list[str]) -> None:
    """Raises TypeError or ValueError unless the plan of a module has its tables, and no other."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"{what}: its plan must be a dict of ParameterSharding by table, got "
            f"{type(params).__name__}"
        )
    if set(params) != set(names):
        raise ValueError(
            f"{what}: its plan is for tables {sorted(params)}, but it has {sorted(names)}; make "
            "the plan of this module"
        )


def check_plan(subject: Subject, sharding: Any, types: tuple[str, ...]) -> None:
    """Raises TypeError or ValueError if a table's entry in a plan asks for the impossible."""
    what = f"table {subject.name!r}: the plan"
    if not isinstance(sharding, ParameterSharding):
        raise TypeError(
            f"{what} must have a torchrec ParameterSharding, got {type(sharding).__name__}"
        )
    kind, kernel = sharding.sharding_type, sharding.compute_kernel
    if kind not in types:
        raise ValueError(
            f"{what} says {kind}, but these tables are sharded by one of {list(types)}; constrain "
            "it with ParameterConstraints(sharding_types=[...])"
        )
    if kernel != kernel_of(kind):
        raise ValueError(
            f"{what} says compute_kernel {kernel!r}; hash tables are sharded {kind} with "
            f"{kernel_of(kind)!r}: leave compute_kernel out of a plan made by hand, and "
            "compute_kernels out of ParameterConstraints"
        )
    if kind != _REPLICATED and not (sharding.ranks and sharding.sharding_spec):
        raise ValueError(
            f"{what} says {kind}, but not where: ranks={sharding.ranks}, "
            f"sharding_spec={sharding.sharding_spec}; make it with torchrec's planner, or with "
            "construct_module_sharding_plan"
        )
    _check_fields(f"{what} says", subject, sharding, HONOURED_IN_PLANS)


def check_groups_of(
    table: str, num_groups: int | None, num_row_shards: int, rule: str = "virtual_shard"
) -> None:
    """Raises ValueError unless each of so many row shards can have whole groups of the table."""
    if num_groups is None or num_row_shards == 1:
        return
    if rule != "virtual_shard":
        raise ValueError(
            f"table {table!r}: max_rows, or max_records of admission, divides over groups of ids, "
            f"which rank_rule={rule!r} does not keep together; leave rank_rule at 'virtual_shard', "
            "plan the table table_wise, or leave the limit out"
        )
    if num_groups < num_row_shards:
        raise ValueError(
            f"table {table!r}: its rows are cut over {num_row_shards} ranks, and its limits divide "
            f"over {num_groups} group{'s' * (num_groups > 1)} of ids, which ranks have whole; set "
            f"eviction_groups to a power of two from {num_row_shards} on, which must be at most "
            "max_rows and what max_records of admission is (without max_rows raise that), or plan "
            "the table table_wise or column_wise"
        )


def check_shared_rows_of(
    table: str, num_shared: int | None, num_row_shards: int, rule: str = "virtual_shard"
) -> None:
    """Raises ValueError unless each of so many row shards can have whole shared rows."""
    if num_shared is None or num_row_shards == 1:
        return
    if rule != "virtual_shard":
        raise ValueError(
            f"table {table!r}: ids that share a row belong together, which rank_rule={rule!r} does "
            "not keep; leave rank_rule at 'virtual_shard', plan the table table_wise, or take "
            "another default"
        )
    if num_shared < num_row_shards or num_shared & (num_shared - 1):
        raise ValueError(
            f"table {table!r}: its rows are cut over {num_row_shards} ranks, and its default is "
            f"{num_shared} shared row{'s' * (num_shared > 1)}, which ranks have whole; take "
            f"Default.shared_rows(n) with n a power of two from {num_row_shards} on, or plan the "
            "table table_wise or column_wise"
        )


def check_columns_of(table: str, eviction: Evict | None, num_column_shards: int) -> None:
    """Raises ValueError if a rule needs whole rows, and columns are cut."""
    if num_column_shards == 1 or eviction is None or eviction.order != "low_norm":
        return
    raise ValueError(
        f"table {table!r}: Evict.low_norm() needs the norm of whole rows, and the plan cuts their "
        f"columns into {num_column_shards}; plan the table row_wise, table_wise, table_row_wise or "
        "data_parallel"
    )


def num_column_shards(sharding: Any) -> int:
    """Into how many ranges a plan cuts a table's columns."""
    if sharding.sharding_spec is None:
        return 1
    return len({shard.shard_offsets[1] for shard in sharding.sharding_spec.shards})


def num_row_shards(sharding: Any) -> int:
    """Over how many ranks a plan cuts a table's rows."""
    if sharding.sharding_spec is None:
        return 1
    columns = Counter(shard.shard_offsets[1] for shard in sharding.sharding_spec.shards)
    return max(columns.values(), default=1)


def check_constraints(
    subject: Subject,
    constraints: ParameterConstraints,
    types: tuple[str, ...],
    features: list[str] | None,
    compute_device: str,
) -> None:
    """Raises TypeError or ValueError if constraints of a table ask for the impossible."""
    what = f"table {subject.name!r}: its constraints"
    _check_choice(what, "sharding_types", constraints.sharding_types, types)
    chosen = [kind for kind in types if kind in (constraints.sharding_types or types)]
    kernels = tuple(dict.fromkeys(kernel_of(kind) for kind in chosen))
    _check_choice(what, "compute_kernels", constraints.compute_kernels, kernels)
    if constraints.device_group not in (None, compute_device):
        raise ValueError(
            f"{what} say device_group={constraints.device_group!r}, so a plan for "
            f"{compute_device!r} would leave the table out; leave it out of them"
        )
    names = constraints.feature_names
    if None not in (names, features) and sorted(names) != sorted(features or []):
        raise ValueError(
            f"{what} say feature_names={names}, but the table's are {features}; leave it out"
        )
    _check_fields(f"{what} say", subject, constraints, HONOURED_CONSTRAINTS)


def _check_choice(what: str, field: str, given: Any, allowed: tuple[str, ...]) -> None:
    if given is None:
        return
    if isinstance(given, str) or not isinstance(given, (list, tuple, set)):
        raise TypeError(f"{what} must have a list as {field}, got {given!r}")
    if given and not set(given) & set(allowed):
        raise ValueError(f"{what} say {field}={list(given)}; choose of {list(allowed)}")


def check_fused_params(subject: Subject, fused_params: Any) -> None:
    """Raises TypeError or ValueError for fused_params that ask for what hash tables do not do."""
    if fused_params is None:
        return
    if not isinstance(fused_params, Mapping):
        raise TypeError(f"{subject.name}: fused_params must be a dict, got {fused_params!r}")
    for name, value in fused_params.items():
        advice = "it is for fbgemm's kernels, which these tables do without; leave it out"
        if name.startswith(_OF_OPTIMIZERS):
            advice = "give the optimizer to apply_optimizer_in_backward"
        _check_value(f"{subject.name}: fused_params has", subject, name, value, advice)


def _check_fields(what: str, subject: Subject, given: Any, honoured: frozenset[str]) -> None:
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in honoured and value != (default := _default_of(field)):
            advice = f"hash tables do not go by it; leave it at {default!r}"
            _check_value(what, subject, field.name, value, advice)


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _check_value(what: str, subject: Subject, name: str, value: Any, advice: str) -> None:
    setting = KERNEL_SETTINGS.get(name)
    if setting is None:
        raise ValueError(f"{what} {name}={value!r}: {advice}")
    if not setting.is_what_happens(value, subject):
        raise ValueError(f"{what} {name}={value!r}: {setting.advice}")
