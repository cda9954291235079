"""What torch.export records of the collections of frozen tables: an operator for each feature.

A recorded batch has sizes that are known only when the program runs, so nothing here asks for them.

Shape letters: N keys, B samples, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recsdk_core.nn import ServingEmbedding, ServingEmbeddingBag
from recsdk_core.serving import ServingTable
from recsdk_sharding._batch.features import keys_of, positions_of, weights_of

__all__ = ["RecordedBags", "is_exporting", "readers_of", "recorded_bags"]

_check: Any = torch._check


def is_exporting() -> bool:
    """Whether torch.export records what runs."""
    # The public is_exporting is True in all that torch 2.11 compiles.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def readers_of(
    configs: Sequence[BaseEmbeddingConfig], tables: Mapping[str, ServingTable]
) -> dict[str, Any]:
    """What is recorded for each table, by name: the modules of recsdk-core, which export."""
    found: dict[str, Any] = {}
    for config in configs:
        table = tables[config.name]
        pooling = getattr(config, "pooling", None)
        if pooling is None:
            found[config.name] = ServingEmbedding(table)
        else:
            mode: Any = "mean" if pooling == PoolingType.MEAN else "sum"
            found[config.name] = ServingEmbeddingBag(table, mode=mode, include_last_offset=True)
    return found


@dataclass(frozen=True)
class RecordedBags:
    """The bags of one feature."""

    keys_N: torch.Tensor
    lengths_B: torch.Tensor
    weights_N: torch.Tensor | None

    def offsets(self) -> torch.Tensor:
        """Where bags begin, and the last one's end."""
        return torch.cat([self.lengths_B.new_zeros(1), self.lengths_B.cumsum(0)])


def recorded_bags(source: Any, names: Sequence[str], is_weighted: bool) -> list[RecordedBags]:
    """The features `names` of a batch that is recorded. Raises as `read_features`; a program that
    was exported raises RuntimeError for lengths that are more than the ids."""
    kjt = maybe_td_to_kjt(source, None)
    if not isinstance(kjt, KeyedJaggedTensor):
        raise TypeError(f"features must be a KeyedJaggedTensor, got {type(source).__name__}")
    if kjt.variable_stride_per_key():
        raise ValueError(
            "torch.export cannot record a batch with another batch size per feature; pass one with "
            "the same for all"
        )
    every = list(kjt.keys())
    positions = positions_of(kjt, names)
    keys_N = keys_of(kjt)
    weights_N = weights_of(kjt, keys_N.shape[0]) if is_weighted else None
    lengths_G = kjt.lengths().to(torch.int64).flatten()
    num_bags = lengths_G.shape[0] // len(every)
    _check(num_bags * len(every) == lengths_G.shape[0])
    bags, begin = [], 0
    for feature in range(len(every)):
        lengths_B = lengths_G.narrow(0, feature * num_bags, num_bags)
        count: Any = lengths_B.sum().item()
        _check(count >= 0)
        _check(begin + count <= keys_N.shape[0])
        weights = None if weights_N is None else weights_N.narrow(0, begin, count)
        bags.append(RecordedBags(keys_N.narrow(0, begin, count), lengths_B, weights))
        begin = begin + count
    return bags if positions is None else [bags[position] for position in positions]
