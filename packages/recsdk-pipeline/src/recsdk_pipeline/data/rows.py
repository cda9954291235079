"""Rows as arrays: ids, dense numbers, labels; and batches of them.

Shapes: N rows, K ids of one feature, C dense columns, L label columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.examples import Float32s, IdBags
from recsdk_pipeline.data.keys import Int64s
from recsdk_pipeline.data.memory import concatenated, taken


@dataclass(frozen=True)
class Bags:
    """The ids of one feature, and what stands beside each."""

    values: Int64s
    """(K,)"""
    offsets: Int64s | None = None
    """(N + 1,) bag n is values[offsets[n]:offsets[n + 1]]; None: each row has one id."""
    weights: Float32s | None = None
    """(K,)"""
    timestamps: Int64s | None = None
    """(K,)"""

    def take(self, rows: Int64s) -> Bags:
        """The bags of the rows `rows`, in that order."""
        if self.offsets is None:
            return self._of(lambda items: taken(items, rows), None)
        if len(self.values) < len(self.offsets) and not (np.diff(self.offsets) > 1).any():
            return self._take_single(rows)
        places = IdBags(values=np.arange(len(self.values)), offsets=self.offsets).take(rows)
        return self._of(lambda items: taken(items, places.values), places.offsets)

    def _take_single(self, rows: Int64s) -> Bags:
        """`take` where no bag has more than one id."""
        assert self.offsets is not None
        starts, stops = self.offsets.take(rows), self.offsets.take(rows + 1)
        places = starts[starts < stops]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(stops - starts, out=offsets[1:])
        return self._of(lambda items: taken(items, places), offsets)

    def part(self, start: int, stop: int) -> Bags:
        """The bags of the rows start..stop, without a copy of the ids."""
        if self.offsets is None:
            return self._of(lambda items: items[start:stop], None)
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return self._of(lambda items: items[first:last], offsets - first)

    def lengths(self, num_rows: int) -> Int64s:
        """(N,)"""
        return np.ones(num_rows, np.int64) if self.offsets is None else np.diff(self.offsets)

    def _of(self, pick: Callable[[Any], Any], offsets: Int64s | None) -> Bags:
        weights = None if self.weights is None else pick(self.weights)
        times = None if self.timestamps is None else pick(self.timestamps)
        return Bags(pick(self.values), offsets, weights, times)


@dataclass(frozen=True)
class Rows:
    """N rows in columns."""

    labels: Float32s
    """(N, L)"""
    dense: Float32s
    """(N, C)"""
    bags: dict[str, Bags]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int64s) -> Rows:
        """The rows `rows`, in that order."""
        bags = {name: each.take(rows) for name, each in self.bags.items()}
        return Rows(taken(self.labels, rows), taken(self.dense, rows), bags)

    def part(self, start: int, stop: int) -> Rows:
        """The rows start..stop, without a copy of the ids."""
        bags = {name: each.part(start, stop) for name, each in self.bags.items()}
        return Rows(self.labels[start:stop], self.dense[start:stop], bags)

    def batch(self) -> ClickBatch:
        """The same rows as a batch of tensors."""
        bags = list(self.bags.values())
        has_weights = any(each.weights is not None for each in bags)
        has_times = any(each.timestamps is not None for each in bags)
        sparse = KeyedJaggedTensor(
            keys=list(self.bags),
            values=_tensor([each.values for each in bags], np.int64),
            lengths=self._lengths(),
            weights=_tensor([_or(b, b.weights, 1.0) for b in bags], np.float32)
            if has_weights
            else None,
        )
        times = _tensor([_or(b, b.timestamps, 0) for b in bags], np.int64) if has_times else None
        labels = self.labels[:, 0] if self.labels.shape[1] == 1 else self.labels
        return ClickBatch(
            dense=torch.from_numpy(self.dense.copy()),
            sparse=sparse,
            labels=torch.from_numpy(labels.copy()),
            timestamps=times,
        )

    def _lengths(self) -> torch.Tensor:
        """Of all bags, one feature after the other (F * N,)."""
        if all(each.offsets is None for each in self.bags.values()):
            return torch.ones(len(self.bags) * len(self), dtype=torch.int64)
        return _tensor([each.lengths(len(self)) for each in self.bags.values()], np.int64)


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, at least one, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        concatenated([part.labels for part in parts]),
        concatenated([part.dense for part in parts]),
        {name: _joined(parts, name) for name in parts[0].bags},
    )


def _joined(parts: Sequence[Rows], name: str) -> Bags:
    bags = [part.bags[name] for part in parts]
    offsets = None
    if any(each.offsets is not None for each in bags):
        lengths = [each.lengths(len(part)) for each, part in zip(bags, parts, strict=True)]
        offsets = IdBags.of_lengths(bags[0].values, np.concatenate(lengths)).offsets
    return Bags(
        concatenated([each.values for each in bags]),
        offsets,
        _concatenated([each.weights for each in bags]),
        _concatenated([each.timestamps for each in bags]),
    )


def _concatenated(arrays: list[Any]) -> Any:
    return None if arrays[0] is None else concatenated(arrays)


def _or(bags: Bags, values: Any, default: float) -> Any:
    return np.full(len(bags.values), default) if values is None else values


def _tensor(parts: Sequence[Any], dtype: Any) -> torch.Tensor:
    whole = concatenated(parts) if parts else np.empty(0)
    return torch.from_numpy(whole.astype(dtype, copy=False))
