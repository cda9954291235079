"""Streams of ids, from files or arrays, in blocks.

Shapes: N ids of a trace, K of a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, virtual_shards

__all__ = ["Trace", "open_trace"]

Int64s = NDArray[np.int64]
Block = tuple[Int64s, Int64s | None]
"""The ids (K,), and their times (K,) if the trace has times."""


@dataclass(frozen=True)
class Trace:
    """Ids in the order in which they come; read anew each time that `blocks` is called."""

    most_ids: int
    """N, or more where that is known only when all were read, as in Parquet without statistics."""
    has_times: bool
    blocks: Callable[[int], Iterator[Block]]
    """Gives blocks of so many ids, the last of at most so many; none is empty."""
    remark: str | None = None
    """What to know of its figures."""

    @staticmethod
    def of_arrays(ids: Any, times: Any | None = None) -> Trace:
        """A trace of ids int64 or uint64 (N,), and of their times int64 (N,)."""
        keys = _as_keys(ids)
        when = None if times is None else np.ascontiguousarray(times, np.int64)
        if keys.ndim != 1 or (when is not None and when.shape != keys.shape):
            shapes = keys.shape if when is None else (keys.shape, when.shape)
            raise ValueError(
                f"Trace: ids, and times if given, must be of one shape (N,), got {shapes}"
            )

        def blocks(size: int) -> Iterator[Block]:
            return blocks_of(iter([(keys, when)]), size)

        return Trace(len(keys), when is not None, blocks)

    def num_distinct(self, sample: float) -> int:
        """About how many different ids there are, from those of a part of the virtual shards."""
        found: Int64s = np.empty(0, np.int64)
        for ids, _ in self.blocks(1 << 22):
            found = np.union1d(found, ids[is_sampled(ids, sample)])
        return round(len(found) / sample)


def blocks_of(parts: Iterator[Block], size: int) -> Iterator[Block]:
    """The same ids in blocks of `size`, and one of the rest."""
    held: list[Block] = []
    num_held = 0
    for part in parts:
        held.append(part)
        num_held += len(part[0])
        if num_held >= size:
            ids, times = _joined(held)
            rest = num_held - num_held % size
            for start in range(0, rest, size):
                yield _cut(ids, times, start, start + size)
            held, num_held = [_cut(ids, times, rest, num_held)], num_held - rest
    if num_held:
        yield _joined(held)


def _joined(parts: list[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]
    times = [each for _, each in parts if each is not None]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate(times) if times else None


def _cut(ids: Int64s, times: Int64s | None, start: int, stop: int) -> Block:
    return ids[start:stop], None if times is None else times[start:stop]


def is_sampled(ids: Int64s, sample: float) -> Any:
    """Which ids (K,) are of the first virtual shards, a part `sample` of them."""
    if sample == 1:
        return slice(None)
    return virtual_shards(ids) < sample * NUM_VIRTUAL_SHARDS


def open_trace(
    path: str | os.PathLike[str], column: str | None = None, time: str | None = None
) -> Trace:
    """A trace of a .npz file, of Parquet files, or drawn by a description of such.

    `column` names the array or column of ids (integers, or in Parquet lists of them); by default
    "ids", or the only one there is. `time` names one of integers or, in Parquet, timestamps, which
    count microseconds. An .npz file is read into memory, Parquet in batches; it needs pyarrow. Of a
    .json file, which `recsdk data describe --json` wrote, as many ids are drawn as the column has,
    by its Zipf exponent; they have no times, and the trace a `remark`. Raises FileNotFoundError,
    ValueError, TypeError or ImportError.
    """
    name = os.fspath(path)
    if name.endswith(".json"):
        from recsdk_core.simulation.drawn_traces import open_description

        return open_description(name, lambda names: _chosen(column, names, name), time)
    if name.endswith(".npz"):
        with np.load(name, allow_pickle=False) as arrays:
            chosen = _chosen(column, [each for each in arrays.files if each != time], name)
            return Trace.of_arrays(
                arrays[chosen], None if time is None else _named(arrays, time, name)
            )
    try:
        from recsdk_core.simulation.parquet_traces import open_parquet
    except ImportError as error:
        text = 'traces in Parquet need pyarrow; run pip install "recsdk-core[parquet]"'
        raise ImportError(text) from error
    return open_parquet(name, lambda names: _chosen(column, names, name), time)


def _chosen(column: str | None, names: list[str], path: str) -> str:
    if column is None and "ids" in names:
        return "ids"
    if column is None and len(names) == 1:
        return names[0]
    if column in names:
        return str(column)
    what = "say which has the ids" if column is None else f"there is no {column!r}"
    raise ValueError(f"{path}: {what}; there are {', '.join(names) or 'none'}")


def _named(arrays: Any, name: str, path: str) -> Any:
    if name not in arrays.files:
        raise ValueError(f"{path}: there is no {name!r}; there are {', '.join(arrays.files)}")
    return arrays[name]


def _as_keys(ids: Any) -> Int64s:
    keys = np.asarray(ids)
    if keys.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {keys.dtype}")
    keys = keys.astype(np.int64, copy=False) if keys.itemsize < 8 else keys
    return np.ascontiguousarray(keys).view(np.int64)
