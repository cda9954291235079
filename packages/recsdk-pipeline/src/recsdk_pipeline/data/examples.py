"""Examples in columns, and what a data set offers to training.

Shapes: B examples, F features, N ids of one feature, C dense columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline._internal.checks import int_of, int_within, list_of
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.keys import Int64s

Float32s = npt.NDArray[np.float32]

_PLAIN = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
"""Types of ids that numpy takes as they are. True is an int of another type."""


def offsets_of(lengths: Any) -> Int64s:
    """Where bags of these lengths begin, and the last one ends: (B + 1,)."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def check_step(batch_size: Any, share: Any) -> int:
    """The size of a step; raises TypeError or ValueError for a wrong one, or for no share."""
    if not isinstance(share, Share):
        raise TypeError(f"share must be a Share, got {share!r:.100}")
    return int_within("batch_size", batch_size, 1)


def _ints_of(name: str, given: Any) -> Int64s:
    """An array of integers (N,) as int64; TypeError for another."""
    if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in "iu":
        got = f"{given.dtype} {given.shape}" if isinstance(given, np.ndarray) else f"{given!r:.100}"
        raise TypeError(f"{name} must be a numpy array of integers of one dimension, got {got}")
    return given.astype(np.int64, copy=False)


def _first_wrong(lists: list[list[Any]]) -> str:
    """The first item that is no 64-bit id, and its bag."""
    items = ((number, each) for number, bag in enumerate(lists) for each in bag)
    number, wrong = next((number, each) for number, each in items if not _is_id(each))
    return f"{wrong!r:.100} in bags[{number}]"


def _is_id(item: Any) -> bool:
    try:
        return -(2**63) <= int_of("an id", item) < 2**63
    except TypeError:
        return False


def _rows_of(rows: Any, count: int) -> Int64s:
    """Numbers of so many examples; below 0 they count from the end."""
    found = _ints_of("rows", rows)
    if len(found) and not (-count <= int(found.min()) and int(found.max()) < count):
        raise IndexError(f"rows must be numbers of {count} examples, got {found!r:.100}")
    return found


def _stretch_of(start: Any, stop: Any, count: int | None) -> tuple[int, int]:
    """The bounds of a stretch of so many examples, or of any number; as Python's ints."""
    after = None if count is None else count + 1
    first, last = int_within("start", start, 0, after), int_within("stop", stop, 0, after)
    if last < first:
        raise ValueError(f"stop must be at least start, {first}, got {last}")
    return first, last


@dataclass(frozen=True, kw_only=True)
class IdBags:
    """One bag of ids per example."""

    values: Int64s
    """(N,) the ids of all bags, one bag after the other."""

    offsets: Int64s
    """(B + 1,) bag b is values[offsets[b]:offsets[b + 1]]."""

    @classmethod
    def single(cls, values: Int64s) -> IdBags:
        """One id per example. Raises TypeError for what is no array of integers (N,)."""
        ids = _ints_of("values", values)
        return cls(values=ids, offsets=np.arange(len(ids) + 1, dtype=np.int64))

    @classmethod
    def of_lengths(cls, values: Int64s, lengths: Int64s) -> IdBags:
        """Bags of the given lengths.

        Raises TypeError for what are no arrays of integers (N,) and (B,), ValueError for lengths
        that are negative or do not add up to N.
        """
        ids, counts = _ints_of("values", values), _ints_of("lengths", lengths)
        if len(counts) and int(counts.min()) < 0:
            raise ValueError(f"lengths must be at least 0, got {int(counts.min())}")
        offsets = offsets_of(counts)
        if offsets[-1] != len(ids):
            raise ValueError(
                f"lengths must add up to the number of values, {len(ids)}, got {offsets[-1]}"
            )
        return cls(values=ids, offsets=offsets)

    @classmethod
    def of_lists(cls, bags: Sequence[Sequence[int]]) -> IdBags:
        """Bags given as lists.

        Raises TypeError or ValueError for what are no 64-bit ids, which True and False are not.
        """
        lists = [
            list_of(f"bags[{number}]", bag) for number, bag in enumerate(list_of("bags", bags))
        ]
        ids = list(chain.from_iterable(lists))
        if set(map(type, ids)) <= _PLAIN:
            plain: Iterable[int] = ids
        else:
            plain = (int_of("an id", each) for each in ids)
        try:
            flat = np.fromiter(plain, np.int64, len(ids))
        except TypeError:
            raise TypeError(f"bags must be lists of ints, got {_first_wrong(lists)}") from None
        except OverflowError:
            wrong = _first_wrong(lists)
            raise ValueError(f"bags must have ids in [-2**63, 2**63), got {wrong}") from None
        return cls(values=flat, offsets=offsets_of([len(each) for each in lists]))

    @property
    def lengths(self) -> Int64s:
        """(B,) number of ids of each bag."""
        return np.diff(self.offsets)

    def take(self, rows: Int64s) -> IdBags:
        """The bags of the examples `rows`, in that order.

        Raises TypeError or IndexError for what are no numbers of examples.
        """
        rows = _rows_of(rows, len(self.offsets) - 1)
        lengths = self.lengths[rows]
        taken = offsets_of(lengths)
        within = np.arange(taken[-1], dtype=np.int64) - np.repeat(taken[:-1], lengths)
        positions = np.repeat(self.offsets[:-1][rows], lengths) + within
        return IdBags(values=self.values[positions], offsets=taken)

    def part(self, start: int, stop: int) -> IdBags:
        """The bags of the examples start..stop, without a copy of the ids.

        Raises TypeError or ValueError for what is no stretch of them.
        """
        start, stop = _stretch_of(start, stop, len(self.offsets) - 1)
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
        """The examples `rows`, in that order. Raises as `IdBags.take`."""
        rows = _rows_of(rows, len(self))
        bags = {name: bags.take(rows) for name, bags in self.bags.items()}
        return Examples(labels=self.labels[rows], dense=self.dense[rows], bags=bags)

    def part(self, start: int, stop: int) -> Examples:
        """The examples start..stop. Raises as `IdBags.part`."""
        start, stop = _stretch_of(start, stop, len(self))
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
        world_size = int_within("world_size", self.world_size, 1)
        object.__setattr__(self, "world_size", world_size)
        object.__setattr__(self, "rank", int_within("rank", self.rank, 0, world_size))

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's part of the examples start..stop; parts differ by one example at most.

        Raises TypeError or ValueError for what is no stretch of examples.
        """
        start, stop = _stretch_of(start, stop, None)
        size = stop - start
        first = start + size * self.rank // self.world_size
        return first, start + size * (self.rank + 1) // self.world_size

    def of(self, examples: Examples) -> Examples:
        """This rank's part of one step's examples. Raises TypeError for what are none."""
        if not isinstance(examples, Examples):
            raise TypeError(f"examples must be Examples, got {type(examples).__name__}")
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
