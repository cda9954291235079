"""Streams of ids, from files or arrays, in blocks.

Shapes: N ids of a trace, K of a block.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core._internal.checks import require_number
from recsdk_core.files import file_to_read, local_path
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, virtual_shards

__all__ = ["Trace", "open_trace"]

Int64s = NDArray[np.int64]
Companions = dict[str, NDArray[Any]]
"""What comes with the ids, by the names under which `Table.map` takes it: `COMPANIONS`."""
Block = tuple[Int64s, Companions]
"""The ids (K,), and what comes with each of them, (K,)."""

COMPANIONS = {"times": np.int64, "scores": np.float32, "clicks": np.int64}


@dataclass(frozen=True)
class Trace:
    """Ids in the order in which they come; read anew each time that `blocks` is called."""

    most_ids: int
    """N, or more where that is known only when all were read, as in Parquet without statistics."""
    brings: frozenset[str]
    """What comes with the ids: some of times, scores and clicks."""
    blocks: Callable[[int], Iterator[Block]]
    """Gives blocks of so many ids, the last of at most so many; none is empty."""
    remark: str | None = None
    """What to know of its figures."""

    @staticmethod
    def of_arrays(
        ids: Any, times: Any | None = None, *, scores: Any | None = None, clicks: Any | None = None
    ) -> Trace:
        """A trace of ids int64 or uint64 (N,), and of what comes with them, (N,) each.

        `times` int64, `scores` float32 and `clicks` int64 are what `Table.map` takes by these
        names; truth values are clicks, too. Raises ValueError or TypeError for other shapes or
        types.
        """
        keys = _as_keys(ids)
        given = {"times": times, "scores": scores, "clicks": clicks}
        data = {name: as_companion(name, x) for name, x in given.items() if x is not None}
        if keys.ndim != 1 or any(each.shape != keys.shape for each in data.values()):
            shapes = ", ".join(f"{n} {x.shape}" for n, x in {"ids": keys, **data}.items())
            raise ValueError(f"Trace: all arrays must be of one shape (N,), got {shapes}")

        def blocks(size: int) -> Iterator[Block]:
            return blocks_of(iter([(keys, data)]), size)

        return Trace(len(keys), frozenset(data), blocks)

    def num_distinct(self, sample: float) -> int:
        """About how many different ids there are, from those of a part of the virtual shards.

        `sample` is that part. Raises ValueError unless it is above 0, up to 1.
        """
        require_number("num_distinct", sample=sample)
        if not 0.0 < sample <= 1.0:
            raise ValueError(f"num_distinct: sample must be above 0, up to 1, got {sample}")
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
            ids, data = _joined(held)
            rest = num_held - num_held % size
            for start in range(0, rest, size):
                yield _cut(ids, data, start, start + size)
            held, num_held = [_cut(ids, data, rest, num_held)], num_held - rest
    if num_held:
        yield _joined(held)


def _joined(parts: list[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]
    names = parts[0][1]
    data = {name: np.concatenate([each[name] for _, each in parts]) for name in names}
    return np.concatenate([ids for ids, _ in parts]), data


def _cut(ids: Int64s, data: Companions, start: int, stop: int) -> Block:
    return ids[start:stop], {name: values[start:stop] for name, values in data.items()}


def is_sampled(ids: Int64s, sample: float) -> Any:
    """Which ids (K,) are of the first virtual shards, a part `sample` of them."""
    if sample == 1:
        return slice(None)
    return virtual_shards(ids) < sample * NUM_VIRTUAL_SHARDS


def open_trace(
    path: str | os.PathLike[str],
    column: str | None = None,
    time: str | None = None,
    *,
    score: str | None = None,
    clicks: str | None = None,
) -> Trace:
    """A trace of a .npz file, of Parquet files, or drawn by a description of such.

    `column` names the array or column of ids (integers, or in Parquet text, which is hashed, or
    lists of them); by default "ids", or the only one there is. What comes with the ids is named
    likewise, one value for each id, or in Parquet for each row: `time` of integers or, in Parquet,
    timestamps, which count microseconds; `score` of numbers; `clicks` of integers or truth values.
    An .npz file is read into memory, Parquet in batches; it needs pyarrow. Of a .json file, which
    `recsdk data describe --json` wrote, as many ids are drawn as the column has, by its Zipf
    exponent; nothing comes with them, and the trace has a `remark`. Raises FileNotFoundError,
    ValueError, TypeError or ImportError.
    """
    name = str(local_path(path))
    asked = {"times": time, "scores": score, "clicks": clicks}
    named = {"column": column, "time": time, "score": score, "clicks": clicks}
    for parameter, each in named.items():
        if each is not None and not isinstance(each, str):
            raise TypeError(f"open_trace: {parameter} must be a name or None, got {each!r}")
    wanted = {what: each for what, each in asked.items() if each is not None}
    if name.endswith(".json"):
        from recsdk_core.simulation.drawn_traces import open_description

        return open_description(name, lambda names: _chosen(column, names, name), wanted)
    if name.endswith(".npz"):
        return _open_npz(name, column, wanted)
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"path must have characters of UTF-8 only, got {name!r}; rename the file")
    if not os.path.isdir(name):
        file_to_read(name)
    try:
        from recsdk_core.simulation.parquet_traces import open_parquet
    except ImportError as error:
        text = 'traces in Parquet need pyarrow; run pip install "recsdk-core[parquet]"'
        raise ImportError(text) from error
    return open_parquet(name, lambda names: _chosen(column, names, name), wanted)


def _chosen(column: str | None, names: list[str], path: str) -> str:
    if column is None and "ids" in names:
        return "ids"
    if column is None and len(names) == 1:
        return names[0]
    if column in names:
        return str(column)
    if not names:
        raise ValueError(f"{path}: must have ids beside what other options name, and has none")
    what = "say which has the ids" if column is None else f"there is no {column!r}"
    raise ValueError(f"{path}: {what}; there are {', '.join(names) or 'none'}")


def _open_npz(path: str, column: str | None, wanted: Mapping[str, str]) -> Trace:
    file_to_read(path)
    with _reading_npz(path):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive")
        arrays = np.load(path, allow_pickle=False)
    with arrays:
        names = [each for each in arrays.files if each not in wanted.values()]
        ids = _named(arrays, _chosen(column, names, path), path)
        data = {what: _named(arrays, each, path) for what, each in wanted.items()}
    try:
        return Trace.of_arrays(ids, **data)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {str(error).removeprefix('Trace: ')}") from error


def _named(arrays: Any, name: str, path: str) -> Any:
    if name not in arrays.files:
        raise ValueError(f"{path}: there is no {name!r}; there are {', '.join(arrays.files)}")
    with _reading_npz(path):
        return arrays[name]


@contextmanager
def _reading_npz(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # numpy and zipfile raise kinds of their own
        raise ValueError(f"{path}: cannot be read as npz: {error}") from error


def _as_keys(ids: Any) -> Int64s:
    keys = _as_array("ids", ids)
    if keys.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {keys.dtype}")
    keys = keys.astype(np.int64, copy=False) if keys.itemsize < 8 else keys
    return np.ascontiguousarray(keys).view(np.int64)


def _as_array(name: str, values: Any) -> NDArray[Any]:
    """The values as an array; TypeError, which names them, for what cannot be one."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # tensors raise the last
        kind = type(values).__name__
        raise TypeError(f"{name} must be an array of numbers, got {kind}: {error}") from error


def as_companion(name: str, values: Any) -> NDArray[Any]:
    """What comes with ids, as `Table.map` takes it."""
    array = _as_array(name, values)
    wanted = {"times": "iuM", "scores": "iuf", "clicks": "iub"}[name]
    if array.dtype.kind not in wanted:
        kinds = {"times": "integers", "scores": "numbers", "clicks": "integers or truth values"}
        raise TypeError(f"{name} must be {kinds[name]}, got {array.dtype}")
    return np.ascontiguousarray(array, COMPANIONS[name])
