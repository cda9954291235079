"""The configs of a collection's tables, from configs of this package or of torchrec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

from recsdk_sharding._configs.configs import (
    HashEmbeddingBagConfig,
    HashEmbeddingConfig,
    HashTableConfig,
)

__all__ = ["bag_configs", "sequence_configs"]

C = TypeVar("C", bound=HashTableConfig)


def bag_configs(tables: Sequence[Any], module: str) -> list[HashEmbeddingBagConfig]:
    """The configs of a collection with pooling: its own, and torchrec's `EmbeddingBagConfig`.

    Raises ValueError or TypeError if they cannot form one collection.
    """
    _check_list(tables, module)
    for table in tables:
        if not isinstance(table, EmbeddingBagConfig):
            raise TypeError(
                f"{module}: tables must be HashEmbeddingBagConfig, or torchrec's "
                f"EmbeddingBagConfig, got {type(table).__name__}"
            )
        if table.pooling == PoolingType.NONE:
            raise ValueError(
                f"{module}: table {table.name!r} has PoolingType.NONE, which gives a vector for "
                "each id; pass its config to HashEmbeddingCollection, or pool by SUM or MEAN"
            )
    return _distinct([_translated(table, HashEmbeddingBagConfig) for table in tables], module)


def sequence_configs(tables: Sequence[Any], module: str) -> list[HashEmbeddingConfig]:
    """The configs of a collection without pooling.

    Its own, torchrec's `EmbeddingConfig`, and those with pooling if it is `PoolingType.NONE`.
    Raises ValueError or TypeError if they cannot form one collection.
    """
    _check_list(tables, module)
    for table in tables:
        is_bag = isinstance(table, EmbeddingBagConfig)
        if not is_bag and not isinstance(table, EmbeddingConfig):
            raise TypeError(
                f"{module}: tables must be HashEmbeddingConfig, or torchrec's EmbeddingConfig, got "
                f"{type(table).__name__}"
            )
        if is_bag and table.pooling != PoolingType.NONE:
            raise ValueError(
                f"{module}: table {table.name!r} has pooling {table.pooling!r}, but these tables "
                "give a vector for each id; set PoolingType.NONE, or use HashEmbeddingBagCollection"
            )
    return _distinct([_translated(table, HashEmbeddingConfig) for table in tables], module)


def _check_list(tables: Any, module: str) -> None:
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        raise TypeError(
            f"{module}: tables must be a list of configs, got {type(tables).__name__}; pass "
            "tables=[config]"
        )
    if not tables:
        raise ValueError(f"{module} needs at least one table, got none")


def _distinct(tables: list[C], module: str) -> list[C]:
    repeated = [name for name, n in Counter(table.name for table in tables).items() if n > 1]
    if repeated:
        raise ValueError(f"{module}: table names must differ, got {repeated} more than once")
    return tables


def _translated(table: BaseEmbeddingConfig, kind: type[C]) -> C:
    """The config itself if it is of that kind; else a config of that kind with the same fields."""
    if isinstance(table, kind):
        return table
    taken = {field.name for field in fields(kind)} | {"pooling"}
    unknown = [field.name for field in fields(table) if field.name not in taken]
    if unknown:
        raise TypeError(
            f"table {table.name!r}: {type(table).__name__} has fields {unknown}, which mean "
            f"nothing to a hash table; pass a {kind.__name__}"
        )
    given = {
        field.name: getattr(table, field.name)
        for field in fields(table)
        if field.name != "pooling" or issubclass(kind, EmbeddingBagConfig)
    }
    return kind(**{**given, "feature_names": list(table.feature_names)})
