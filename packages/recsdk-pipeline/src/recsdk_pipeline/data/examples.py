"""Examples in columns, and what a data set offers to training.

Shapes: B examples, F features, N ids of one feature, C dense columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline._internal.checks import int_of
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.keys import Int64s

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class IdBags:
    """One bag of ids per example."""

    values: Int64s
    """(N,) the ids of all bags, one bag after the other."""

    offsets: Int64s
    """(B + 1,) bag b is values[offsets[b]:offsets[b + 1]]."""

    @classmethod
    def single(cls, values: Int64s) -> IdBags:
        """One id per example."""
        return cls(values=values, offsets=np.arange(len(values) + 1, dtype=np.int64))

    @classmethod
    def of_lengths(cls, values: Int64s, lengths: Int64s) -> IdBags:
        """Bags of the given lengths."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values=values, offsets=offsets)

    @classmethod
    def of_lists(cls, bags: Sequence[Sequence[int]]) -> IdBags:
        """Bags given as lists."""
        flat = np.fromiter((key for bag in bags for key in bag), np.int64)
        return cls.of_lengths(flat, np.fromiter(map(len, bags), np.int64, len(bags)))

    @property
    def lengths(self) -> Int64s:
        """(B,) number of ids of each bag."""
        return np.diff(self.offsets)

    def take(self, rows: Int64s) -> IdBags:
        """The bags of the examples `rows`, in that order."""
        lengths = self.lengths[rows]
        taken = IdBags.of_lengths(np.empty(0, np.int64), lengths).offsets
        within = np.arange(taken[-1], dtype=np.int64) - np.repeat(taken[:-1], lengths)
        positions = np.repeat(self.offsets[:-1][rows], lengths) + within
        return IdBags(values=self.values[positions], offsets=taken)

    def part(self, start: int, stop: int) -> IdBags:
        """The bags of the examples start..stop, without a copy of the ids."""
        offsets = self.offsets[start : stop + 1]
        values = self.values[offsets[0] : offsets[-1]]
        return IdBags(values=values, offsets=offsets - offsets[0])


@dataclass(frozen=True, kw_only=True)
class Examples:
    """B examples in columns."""

    labels: Float32s
    """(B,) 1 for a click, 0 for none."""

    dense: Float32s
    """(B, C)."""

    bags: Mapping[str, IdBags]
    """The ids of each feature."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int64s) -> Examples:
        """The examples `rows`, in that order."""
        bags = {name: bags.take(rows) for name, bags in self.bags.items()}
        return Examples(labels=self.labels[rows], dense=self.dense[rows], bags=bags)

    def part(self, start: int, stop: int) -> Examples:
        """The examples start..stop."""
        bags = {name: bags.part(start, stop) for name, bags in self.bags.items()}
        return Examples(labels=self.labels[start:stop], dense=self.dense[start:stop], bags=bags)

    def batch(self) -> ClickBatch:
        """The same examples as a batch of tensors."""
        sparse = KeyedJaggedTensor(
            keys=list(self.bags),
            values=torch.from_numpy(np.concatenate([b.values for b in self.bags.values()])),
            lengths=torch.from_numpy(np.concatenate([b.lengths for b in self.bags.values()])),
        )
        dense = torch.from_numpy(np.ascontiguousarray(self.dense))
        return ClickBatch(dense=dense, sparse=sparse, labels=torch.from_numpy(self.labels.copy()))


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of each step's examples a rank reads."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", int_of("rank", self.rank))
        object.__setattr__(self, "world_size", int_of("world_size", self.world_size))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not one of {self.world_size} ranks, counted from 0"
            )

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's part of the examples start..stop; parts differ by one example at most."""
        size = stop - start
        first = start + size * self.rank // self.world_size
        return first, start + size * (self.rank + 1) // self.world_size

    def of(self, examples: Examples) -> Examples:
        """This rank's part of one step's examples."""
        return examples.part(*self.bounds(0, len(examples)))


class ClickData(Protocol):
    """What training needs of a data set.

    A step's examples are the same for any number of ranks, and every rank gets the same number
    of batches: a batch of a rank may be smaller than another's, or empty.
    """

    features: tuple[str, ...]
    """Names of the features, in the order of the batches' bags."""

    num_dense: int
    """Number of dense columns C, at least 1."""

    num_train: int
    """Examples of an epoch."""

    num_held_out: int
    """Examples kept for evaluation, at least 1."""

    def train(self, *, epoch: int, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's part of each step of `batch_size` examples."""
        ...

    def held_out(self, *, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's part of the examples kept for evaluation."""
        ...
