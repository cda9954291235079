"""Rows as arrays: ids, dense numbers, labels; and batches of them.

Shapes: N rows, K ids of one feature, C dense columns, L label columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import Shuffle
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.examples import Float32s, offsets_of
from recsdk_pipeline.data.keys import Int64s
from recsdk_pipeline.data.memory import concatenated, empty, shuffled, take_into, taken

_ITEMS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Bags:
    """The ids of one feature, and what stands beside each.

    With `at`, N is of that, and the rest is a list of bags that many rows share, without weights.
    """

    values: Int64s
    """(K,)"""
    offsets: Int64s | None = None
    """(N + 1,) bag n is values[offsets[n]:offsets[n + 1]]; None: each row has one place."""
    weights: Float32s | None = None
    """(K,)"""
    timestamps: Int64s | None = None
    """(K,)"""
    is_there: Any = None
    """bool (N,), without offsets: which places hold an id; None: all. Others hold anything."""
    at: Any = None
    """Integers (N,): row n has bag at[n]; None: bag n."""

    def take(self, rows: Int64s) -> Bags:
        """The bags of the rows `rows`, in that order."""
        if self.at is not None:
            return self._shared(taken(self.at, rows))
        if self.offsets is None:
            return self._of(lambda items: taken(items, rows), None)
        lengths = (self.offsets[1:] - self.offsets[:-1])[rows]
        offsets = offsets_of(lengths)
        shifts = self.offsets[:-1][rows] - offsets[:-1]
        return self._of(lambda items: _bags_taken(items, shifts, lengths, offsets), offsets)

    def part(self, start: int, stop: int) -> Bags:
        """The bags of the rows start..stop, without a copy of the ids."""
        if self.at is not None:
            return self._shared(self.at[start:stop])
        if self.offsets is None:
            return self._of(lambda items: items[start:stop], None)
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return self._of(lambda items: items[first:last], offsets - first)

    def plain(self) -> Bags:
        """The same without `at` and `is_there`, so that `values` are all ids and no more."""
        if self.at is not None:
            return self._shared(None).take(self.at)
        there = self.is_there
        if there is None:
            return self
        offsets = offsets_of(there)
        more = (None if each is None else each[there] for each in (self.weights, self.timestamps))
        return Bags(self.values[there], offsets, *more)

    def picks(self) -> bool:
        """Whether each row has one of the ids that rows share, which `write_ids` picks."""
        return self.at is not None and self.offsets is None and self.values.dtype == np.int64

    def write_ids(self, ids: Int64s) -> None:
        """Into int64 (K,), of plain bags or those that `picks`."""
        if self.at is None:
            np.copyto(ids, self.values, casting="unsafe")  # the same 64 bits
        else:
            take_into(ids, self.values, self.at)

    def lengths(self, num_rows: int) -> Any:
        """int64 (N,), or bool."""
        found = self._lengths()
        return np.ones(num_rows, bool) if found is None else found

    def write_lengths(self, lengths: Int64s) -> None:
        """Into int64 (N,), ones."""
        found = self._lengths()
        if found is not None:
            lengths[:] = found

    def _lengths(self) -> Any:
        """None: each is 1."""
        if self.offsets is None:
            return self.is_there
        lengths = self.offsets[1:] - self.offsets[:-1]
        return lengths if self.at is None else lengths[self.at]

    def _shared(self, at: Any) -> Bags:
        return Bags(self.values, self.offsets, at=at)

    def _of(self, pick: Callable[[Any], Any], offsets: Int64s | None) -> Bags:
        more = (self.weights, self.timestamps, self.is_there)
        if all(each is None for each in more):
            return Bags(pick(self.values), offsets)
        weights, times, there = (None if each is None else pick(each) for each in more)
        return Bags(pick(self.values), offsets, weights, times, there)


def _bags_taken(items: Any, shifts: Int64s, lengths: Int64s, offsets: Int64s) -> Any:
    """Bags of items: what belongs at n is items[n + shift of its bag]. Some at a time."""
    out = empty((int(offsets[-1]), *items.shape[1:]), items.dtype)
    for first, last in pairwise(_cuts(offsets)):
        begin, end = int(offsets[first]), int(offsets[last])
        places = np.arange(begin, end)
        places += np.repeat(shifts[first:last], lengths[first:last])
        take_into(out[begin:end], items, places)
    return out


def _cuts(offsets: Int64s) -> list[int]:
    """Bags between which to stop, so that few items lie between two of them."""
    if offsets[-1] <= _ITEMS_AT_ONCE:
        return [0, len(offsets) - 1]
    starts = np.arange(0, offsets[-1], _ITEMS_AT_ONCE)
    found: list[int] = np.unique([*np.searchsorted(offsets, starts), len(offsets) - 1]).tolist()
    return found


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
        bags = [each if each.picks() else each.plain() for each in self.bags.values()]
        has_weights = any(each.weights is not None for each in bags)
        has_times = any(each.timestamps is not None for each in bags)
        sparse = KeyedJaggedTensor(
            keys=list(self.bags),
            values=_ids(bags),
            lengths=self._lengths(),
            weights=_tensor([_or(b, b.weights, 1.0) for b in bags], np.float32)
            if has_weights
            else None,
        )
        times = _tensor([_or(b, b.timestamps, 0) for b in bags], np.int64) if has_times else None
        labels = self.labels[:, 0] if self.labels.shape[1] == 1 else self.labels
        return ClickBatch(
            dense=_tensor([self.dense], np.float32),
            sparse=sparse,
            labels=_tensor([labels], np.float32),
            timestamps=times,
        )

    def _lengths(self) -> torch.Tensor:
        """Of all bags, one feature after the other (F * N,)."""
        # Not by torch, whose idle threads spin: that cost more than all else.
        lengths = empty((len(self.bags), len(self)), np.int64)
        lengths.fill(1)
        for row, each in zip(lengths, self.bags.values(), strict=True):
            each.write_lengths(row)
        return torch.from_numpy(lengths.reshape(-1))


def joined(parts: Sequence[Rows], order: Shuffle | None = None) -> Rows:
    """The rows of all parts, at least one, one part after the other, or in another order.

    The bags of the parts are used up, one feature after the other, so that both need not be held.
    """
    if len(parts) == 1 and order is None:
        return parts[0]
    join = _Join(parts, order)
    return Rows(
        join.arrays([part.labels for part in parts]),
        join.arrays([part.dense for part in parts]),
        {name: join.bags(name) for name in list(parts[0].bags)},
    )


class _Join:
    """Joins column by column."""

    def __init__(self, parts: Sequence[Rows], order: Shuffle | None) -> None:
        self._parts, self._order = parts, order
        self._shared: dict[int, tuple[Any, Any]] = {}
        """By the id of an array, which is held so that no other gets it, what became of it."""

    def arrays(self, arrays: Sequence[Any]) -> Any:
        """One of a place for each row, in order."""
        if arrays[0] is None:
            return None
        if self._order is not None:
            return shuffled(arrays, self._order)
        return arrays[0] if len(arrays) == 1 else concatenated(arrays)

    def bags(self, name: str) -> Bags:
        bags = [part.bags.pop(name) for part in self._parts]
        first = bags[0]
        if all(each.at is not None and each.values is first.values for each in bags):
            return Bags(first.values, first.offsets, at=self._places([each.at for each in bags]))
        if any(each.offsets is not None or each.at is not None for each in bags):
            whole = self._of_any_lengths(bags)
            del first, bags
            return whole if self._order is None else whole.take(self._order.order())
        is_there: Sequence[Any] = [None]
        if any(each.is_there is not None for each in bags):
            is_there = self._lengths(bags)
        return Bags(
            self.arrays([each.values for each in bags]),
            None,
            self.arrays([each.weights for each in bags]),
            self.arrays([each.timestamps for each in bags]),
            self.arrays(is_there),
        )

    def _places(self, places: Sequence[Any]) -> Any:
        """Features may share them."""
        key = id(places[0])
        if key not in self._shared:
            self._shared[key] = places[0], self.arrays(places)
        return self._shared[key][1]

    def _of_any_lengths(self, bags: Sequence[Bags]) -> Bags:
        if len(bags) == 1 and bags[0].offsets is not None:
            return bags[0].plain()
        lengths = np.concatenate(self._lengths(bags))
        bags = [each.plain() for each in bags]
        return Bags(
            concatenated([each.values for each in bags]),
            offsets_of(lengths),
            _concatenated([each.weights for each in bags]),
            _concatenated([each.timestamps for each in bags]),
        )

    def _lengths(self, bags: Sequence[Bags]) -> list[Any]:
        return [each.lengths(len(part)) for each, part in zip(bags, self._parts, strict=True)]


def _concatenated(arrays: Sequence[Any]) -> Any:
    return None if arrays[0] is None else concatenated(arrays)


def _ids(bags: Sequence[Bags]) -> torch.Tensor:
    sizes = [len(each.values if each.at is None else each.at) for each in bags]
    whole = empty((sum(sizes),), np.int64)
    for each, stop, size in zip(bags, np.cumsum(sizes).tolist(), sizes, strict=True):
        each.write_ids(whole[stop - size : stop])
    return torch.from_numpy(whole)


def _or(bags: Bags, values: Any, default: float) -> Any:
    size = len(bags.values if bags.at is None else bags.at)
    return np.full(size, default) if values is None else values


def _tensor(parts: Sequence[Any], dtype: Any) -> torch.Tensor:
    whole = concatenated(parts) if parts else np.empty(0)
    return torch.from_numpy(whole.astype(dtype, copy=False))
