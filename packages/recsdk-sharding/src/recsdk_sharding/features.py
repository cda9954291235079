"""From a `KeyedJaggedTensor` to mapped bags: what the unsharded and the sharded module share.

Shape letters: N keys, F features, B batch, C columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recsdk_core import Table, map_tables
from recsdk_core.nn.function import FeatureBags, TableBags

__all__ = ["Features", "TableInput", "map_features", "read_features"]

_KEY_TYPES = (torch.int64, torch.int32, torch.uint64)


@dataclass(frozen=True)
class Features:
    """Checked bags of F features, in the order that they were asked for."""

    keys_N: torch.Tensor
    """Keys, int64 (N,): feature by feature, sample by sample."""
    lengths_FB: torch.Tensor
    """Keys per bag, int64 (F, B)."""
    weights_N: torch.Tensor | None
    """float32 (N,), if weighted."""

    @property
    def batch_size(self) -> int:
        """Samples B."""
        return self.lengths_FB.shape[1]

    def counts(self) -> list[int]:
        """Keys of each feature."""
        counts: list[int] = self.lengths_FB.sum(1).tolist()
        return counts


def read_features(source: Any, names: Sequence[str], is_weighted: bool) -> Features:
    """The features `names` of a KeyedJaggedTensor (or TensorDict) on the cpu, checked.

    Keys int64, int32 (widened) or uint64 (the same bits). Raises TypeError or ValueError that says
    what is wrong: a missing feature, another dtype or device, lengths that do not match the keys.
    """
    kjt = maybe_td_to_kjt(source, None)
    if not isinstance(kjt, KeyedJaggedTensor):
        raise TypeError(f"expected a KeyedJaggedTensor, got {type(source).__name__}")
    positions = _positions(kjt, names)
    keys_N = _keys_of(kjt)
    lengths_FB = _lengths_of(kjt, len(keys_N))
    weights_N = _weights_of(kjt, len(keys_N)) if is_weighted else None
    if positions == list(range(len(lengths_FB))):
        return Features(keys_N, lengths_FB, weights_N)
    ends = list(accumulate(lengths_FB.sum(1).tolist(), initial=0))
    spans = [slice(ends[i], ends[i + 1]) for i in positions]
    return Features(
        torch.cat([keys_N[span] for span in spans]),
        lengths_FB[positions],
        None if weights_N is None else torch.cat([weights_N[span] for span in spans]),
    )


def _positions(kjt: KeyedJaggedTensor, names: Sequence[str]) -> list[int]:
    found = {name: index for index, name in enumerate(kjt.keys())}
    missing = sorted(set(names) - set(found))
    if missing:
        raise ValueError(f"the batch lacks the features {missing}; it has {list(kjt.keys())}")
    if kjt.variable_stride_per_key():
        raise ValueError("batches with another batch size per feature are not supported")
    return [found[name] for name in names]


def _keys_of(kjt: KeyedJaggedTensor) -> torch.Tensor:
    values: torch.Tensor = kjt.values()
    if values.device.type != "cpu":
        raise ValueError(f"ids must be on the cpu, got a tensor on {values.device}")
    if values.dtype not in _KEY_TYPES or values.dim() != 1:
        raise TypeError(
            f"ids must be a 1-d tensor of int64, got {values.dim()}-d {values.dtype}; convert them "
            "with .to(torch.int64), or hash other categories to 64 bits"
        )
    if values.dtype == torch.uint64:
        return values.view(torch.int64)
    return values.to(torch.int64)


def _lengths_of(kjt: KeyedJaggedTensor, num_keys: int) -> torch.Tensor:
    num_features = len(kjt.keys())
    lengths: torch.Tensor = kjt.lengths().to(torch.int64)
    if lengths.numel() != num_features * kjt.stride():
        raise ValueError(
            f"lengths must have {num_features} features x {kjt.stride()} samples, got "
            f"{lengths.numel()} numbers"
        )
    total, lowest = int(lengths.sum()), int(lengths.min()) if lengths.numel() else 0
    if total != num_keys or lowest < 0:
        raise ValueError(
            f"lengths must not be negative and add up to the {num_keys} ids, got a sum of {total} "
            f"and a least of {lowest}"
        )
    return lengths.view(num_features, kjt.stride())


def _weights_of(kjt: KeyedJaggedTensor, num_keys: int) -> torch.Tensor:
    weights: torch.Tensor | None = kjt.weights_or_none()
    if weights is None:
        raise ValueError("the collection is weighted, but the batch has no weights")
    if weights.dim() != 1 or weights.numel() != num_keys or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating point, one for each of the {num_keys} ids, got "
            f"{weights.dtype} of shape {tuple(weights.shape)}"
        )
    return weights.to(torch.float32)


@dataclass(frozen=True)
class TableInput:
    """Which features a table reads, and where their vectors go."""

    table: Table
    """The table."""
    features: list[int]
    """Positions of its features in `Features`."""
    columns: list[int]
    """First output column of each of them."""
    pooling: str
    """"sum" or "mean"."""


def map_features(
    inputs: Sequence[TableInput], features: Features, *, insert: bool, step: int | None
) -> list[TableBags]:
    """Maps the keys of all features of all tables, each table under a lease of its own.

    A key without a row gets one with `insert`, in the order of the features. If it raises, all
    leases are released.
    """
    bags = _SplitFeatures(features)
    leases = [entry.table.lease(step) for entry in inputs]
    try:
        calls = [(entry.table, bags.keys_of(entry.features)) for entry in inputs]
        mapped = map_tables(calls, insert, leases)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return [
        TableBags(table=entry.table, features=bags.mapped(entry, *found), lease=lease)
        for entry, found, lease in zip(inputs, mapped, leases, strict=True)
    ]


class _SplitFeatures:
    """Features cut apart."""

    def __init__(self, features: Features) -> None:
        counts = features.counts()
        self._counts = counts
        self._keys = features.keys_N.split_with_sizes(counts)
        weights = features.weights_N
        self._weights = None if weights is None else weights.split_with_sizes(counts)
        self._offsets_FB = torch.nn.functional.pad(features.lengths_FB.cumsum(1), (1, 0))

    def keys_of(self, positions: Sequence[int]) -> torch.Tensor:
        """The keys of some features, one after the other."""
        if len(positions) == 1:
            return self._keys[positions[0]]
        return torch.cat([self._keys[position] for position in positions])

    def mapped(
        self, entry: TableInput, rows_N: torch.Tensor, outcomes_N: torch.Tensor
    ) -> list[FeatureBags]:
        """The bags of a table's features, given the rows of `keys_of` its features."""
        counts = [self._counts[position] for position in entry.features]
        parts = zip(
            entry.features,
            entry.columns,
            rows_N.split_with_sizes(counts),
            outcomes_N.split_with_sizes(counts),
            strict=True,
        )
        return [
            FeatureBags(
                rows=rows,
                outcomes=outcomes,
                offsets=self._offsets_FB[position],
                weights=None if self._weights is None else self._weights[position],
                pooling=entry.pooling,
                column=column,
            )
            for position, column, rows, outcomes in parts
        ]
