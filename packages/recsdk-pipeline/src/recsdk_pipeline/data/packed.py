"""Batches cut right out of a window: each row has one id of each feature, and nothing beside it.

Each is one piece of memory, which a worker sends as such. Shapes: F features, N rows, C dense
columns, L label columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import Shuffle
from recsdk_pipeline._internal.lengths import lengths_of_one
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.examples import Float32s
from recsdk_pipeline.data.keys import Int64s
from recsdk_pipeline.data.memory import contiguous, empty
from recsdk_pipeline.data.rows import Bags, Rows, joined

_BYTES_AT_ONCE = 4 << 20
"""Of columns that one thread puts in place: few enough for others to help."""

_Column = tuple[list[Any], list[Any]]
"""Arrays that have its rows, one after the other, and arrays that get them."""


@dataclass(frozen=True)
class Packed:
    """N rows in one piece of memory."""

    features: tuple[str, ...]
    memory: Any
    """All of it, bytes: ids, dense numbers, labels."""
    ids: Int64s
    """(F, N)"""
    dense: Float32s
    """(N, C)"""
    labels: Float32s
    """(N, L)"""

    @classmethod
    def empty(cls, features: Sequence[str], num_rows: int, num_dense: int, labels: int) -> Packed:
        """Rows of any values."""
        wide, beside = 8 * len(features) * num_rows, 4 * num_dense * num_rows
        memory = empty((wide + beside + 4 * labels * num_rows,), np.uint8)
        return cls(
            tuple(features),
            memory,
            memory[:wide].view(np.int64).reshape(len(features), num_rows),
            memory[wide : wide + beside].view(np.float32).reshape(num_rows, num_dense),
            memory[wide + beside :].view(np.float32).reshape(num_rows, labels),
        )

    @classmethod
    def joined(cls, parts: Sequence[Packed]) -> Packed:
        """The rows of all parts, of the same columns, one part after the other."""
        first = parts[0]
        shapes = (first.dense.shape[1], first.labels.shape[1])
        whole = cls.empty(first.features, sum(map(len, parts)), *shapes)
        np.concatenate([part.ids for part in parts], axis=1, out=whole.ids)
        np.concatenate([part.dense for part in parts], out=whole.dense)
        np.concatenate([part.labels for part in parts], out=whole.labels)
        return whole

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self) -> Rows:
        """The same, in columns."""
        bags = {name: Bags(ids) for name, ids in zip(self.features, self.ids, strict=True)}
        return Rows(self.labels, self.dense, bags)

    def batch(self) -> ClickBatch:
        """The same rows as a batch of tensors, of this memory."""
        if not self.ids.size:
            return self.rows().batch()
        # Each view by numpy would be a storage of its own, and be sent by itself.
        memory = torch.from_numpy(self.memory)
        wide, beside = self.ids.nbytes, self.dense.nbytes
        labels = memory[wide + beside :].view(torch.float32)
        sparse = KeyedJaggedTensor(
            keys=list(self.features),
            values=memory[:wide].view(torch.int64),
            lengths=lengths_of_one(self.ids.size),
        )
        return ClickBatch(
            dense=memory[wide : wide + beside].view(torch.float32).view(self.dense.shape),
            sparse=sparse,
            labels=labels if self.labels.shape[1] == 1 else labels.view(self.labels.shape),
        )


def joined_stretches(parts: Sequence[Rows | Packed]) -> Rows | Packed:
    """The rows of all parts, at least one, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    packed = [part for part in parts if isinstance(part, Packed)]
    if len(packed) == len(parts):
        return Packed.joined(packed)
    return joined([part.rows() if isinstance(part, Packed) else part for part in parts])


class Placing:
    """Puts the rows of a window in stretches that end where batches do."""

    def __init__(self, parts: Sequence[Rows], order: Shuffle | None, ends: Sequence[int]) -> None:
        """Of all parts, at least one, in this order, in stretches that end at `ends`."""
        self._parts, self._order, self._ends = parts, order, ends
        self._found: list[Packed] | list[Rows] = []

    def calls(self) -> list[Callable[[], None]]:
        """What is to be done, in any order and by any threads at once."""
        if not all(_packs(part) for part in self._parts):
            return [self._join]
        first = self._parts[0]
        shape = (tuple(first.bags), first.dense.shape[1], first.labels.shape[1])
        found = [
            Packed.empty(shape[0], stop - start, *shape[1:]) for start, stop in pairwise(self._ends)
        ]
        self._found = found
        columns = self._columns(found)
        at_once = max(1, _BYTES_AT_ONCE // max(8, 8 * self._ends[-1]))
        some = [columns[first : first + at_once] for first in range(0, len(columns), at_once)]
        return [partial(self._fill, each) for each in some]

    def found(self) -> list[Packed] | list[Rows]:
        """The stretches, when all calls were made."""
        return self._found

    def _join(self) -> None:
        whole = joined(self._parts, self._order)
        found = [whole.part(start, stop) for start, stop in pairwise(self._ends)]
        if len(found) > 1:
            # It may wait for the next window's rows, and would hold all of this one meanwhile.
            found[-1] = found[-1].take(np.arange(len(found[-1])))
        self._found = found

    def _columns(self, found: Sequence[Packed]) -> list[_Column]:
        parts = self._parts
        return [
            ([part.dense for part in parts], [each.dense for each in found]),
            ([part.labels for part in parts], [each.labels for each in found]),
            *(
                ([part.bags[name].values for part in parts], [each.ids[number] for each in found])
                for number, name in enumerate(parts[0].bags)
            ),
        ]

    def _fill(self, columns: Sequence[_Column]) -> None:
        skip = self._ends[0]
        if self._order is not None:
            self._order.write([(list(map(contiguous, of)), into) for of, into in columns], skip)
            return
        for parts, into in columns:
            _fill_in_order(parts, into, skip)


def _packs(rows: Rows) -> bool:
    return all(
        each.values.dtype == np.int64
        and each.offsets is None
        and each.at is None
        and each.is_there is None
        and each.weights is None
        and each.timestamps is None
        for each in rows.bags.values()
    )


def _fill_in_order(parts: Iterable[Any], stretches: Iterable[Any], skip: int) -> None:
    left = iter(parts)
    part = next(left)
    while skip > len(part):
        skip, part = skip - len(part), next(left)
    part = part[skip:]
    for out in stretches:
        while len(out) > len(part):
            out[: len(part)] = part
            out, part = out[len(part) :], next(left)
        out[:], part = part[: len(out)], part[len(out) :]
