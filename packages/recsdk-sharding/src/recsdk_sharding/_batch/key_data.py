"""What comes with ids for rules of admission and eviction, on its way to the tables that take it.

Shape letters: N keys, F features, S features of this rank's shards, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Index, KeyData, Table
from recsdk_sharding._batch.features import Features
from recsdk_sharding._configs.checking import int_of
from recsdk_sharding._configs.data_taken import DTYPES, evicts_by_time, taken_by
from recsdk_sharding.placement.layout import ShardFeatures

__all__ = [
    "ArrivedData",
    "SentData",
    "bits_of",
    "data_of_tables",
    "fill_of",
    "latest_in",
    "latest_of",
    "latest_of_shards",
    "require_data",
    "require_time",
    "set_time",
    "tables_with_time",
    "time_from",
]

_BEFORE_ALL = -(2**63)


def require_time(time: object) -> int:
    """The time, if it is one; raises TypeError or ValueError for anything else."""
    number = int_of("set_time: the time", time)
    if not _BEFORE_ALL < number < -_BEFORE_ALL:
        raise ValueError(f"set_time: the time must be in (-2**63, 2**63), got {number}")
    return number


def require_data(needed: Mapping[str, Mapping[str, str]], features: Features) -> None:
    """Raises ValueError if keys lack what tables need; `needed`: by name of the table."""
    if not len(features.keys_N):
        return
    for table, by_name in needed.items():
        for name, rule in by_name.items():
            if name not in features.data:
                raise ValueError(
                    f"table {table!r}: {rule} needs the {name} of ids; pass a "
                    f"KeyedJaggedTensorWithData with {name}"
                )


def tables_with_time(tables: Iterable[Any]) -> list[Any]:
    """Those of some tables that evict by time."""
    return [table for table in tables if evicts_by_time(getattr(table, "eviction", None))]


def set_time(tables: Iterable[Any], time: int) -> None:
    """Sets the time of tables that evict by time."""
    for table in tables:
        table.time = time


def time_from(table: Any, time: int | None, latest: int | None, num_untimed: int) -> int | None:
    """The time of a table that evicts by time, from a batch on; None: it never had any.

    `time`: what was set since the batch before, in place of the table's; `latest`: of the times of
    ids. Either may be none. Raises ValueError if the table has none either, and `num_untimed` of
    its ids come without.
    """
    known = [each for each in (table.time if time is None else time, latest) if each is not None]
    if not known and num_untimed:
        raise ValueError(
            f"table {table.name!r}: Evict.lru(by='time') needs the times of ids; pass a "
            "KeyedJaggedTensorWithTimestamp, or call set_time(...) of the collection before "
            "the first batch"
        )
    return max(known, default=None)


def latest_of(features: Features) -> NDArray[np.int64] | None:
    """The latest time of each feature's keys, int64 (F,); None: keys have no times."""
    times_N = features.data.get("times")
    if times_N is None:
        return None
    parts = times_N.split_with_sizes(features.counts)
    return np.array([int(p.max()) if len(p) else _BEFORE_ALL for p in parts], np.int64)


def latest_of_shards(
    latest_F: NDArray[np.int64] | None, placed: ShardFeatures, num_features_T: NDArray[np.int64]
) -> list[int | None]:
    """The latest time of each shard's keys, of `latest_of`; None: they have none."""
    if latest_F is None:
        return [None] * len(num_features_T)
    spans = pairwise([0, *num_features_T.cumsum().tolist()])
    return [latest_in(latest_F, placed.features_S[begin:end]) for begin, end in spans]


def latest_in(latest_F: NDArray[np.int64] | None, which: slice | NDArray[np.int64]) -> int | None:
    """The latest time of some features' keys, of `latest_of`; None: they have none."""
    if latest_F is None:
        return None
    latest = int(latest_F[which].max(initial=_BEFORE_ALL))
    return None if latest == _BEFORE_ALL else latest


def fill_of(name: str, now: int | None) -> int:
    """What a key has of which nothing came; `now`: the time of its table."""
    if name == "times":
        return now or 0
    return 1 if name == "counts" else 0


def data_of_tables(
    tables: Sequence[Table | Index],
    data: Mapping[str, torch.Tensor],
    sizes: Sequence[int],
    now_T: Sequence[int | None] | None = None,
) -> list[KeyData | None] | None:
    """What each table takes of what comes with all keys, `sizes` of each; None: none takes any.

    `now_T`: the time of each from these keys on; None: it stays.
    """
    taken = [
        [name for name in taken_by(table.eviction, table.admission) if name in data]
        for table in tables
    ]
    now_T = now_T or [None] * len(tables)
    if not any(taken) and all(now is None for now in now_T):
        return None
    parts = {name: own_N.split_with_sizes(list(sizes)) for name, own_N in data.items()}
    return [
        KeyData(**{name: parts[name][i] for name in names}, now=now)
        if names or now is not None
        else None
        for i, (names, now) in enumerate(zip(taken, now_T, strict=True))
    ]


def bits_of(names: Iterable[str]) -> int:
    """Names of what comes with keys, as `Splits.data`."""
    order = list(DTYPES)
    return sum(1 << order.index(name) for name in names)


def _names_of(bits: int) -> list[str]:
    return [name for i, name in enumerate(DTYPES) if bits >> i & 1]


@dataclass(frozen=True)
class SentData:
    """What comes with the keys that this rank sends.

    To each rank go int64 words: the latest time of each feature, if there are times, and then of
    everything a word for each key.
    """

    words: torch.Tensor
    """Those for rank 0 first."""
    num_words: list[int]
    """Words for each rank."""

    @staticmethod
    def of_features(
        features: Features, positions: torch.Tensor | None, num_keys: Sequence[int]
    ) -> SentData:
        """`positions`: which of the batch's keys each one sent is; `num_keys`: for each rank."""
        if not features.data:
            return SentData(torch.zeros(0, dtype=torch.int64), [0] * len(num_keys))
        assert positions is not None
        latest_F = latest_of(features)
        begin = torch.from_numpy(np.zeros(0, np.int64) if latest_F is None else latest_F)
        columns = [
            _as_words(features.data[name])
            .index_select(0, positions)
            .split_with_sizes(list(num_keys))
            for name in DTYPES
            if name in features.data
        ]
        pieces = [torch.cat([begin, *of_rank]) for of_rank in zip(*columns, strict=True)]
        return SentData(torch.cat(pieces), [len(piece) for piece in pieces])


@dataclass(frozen=True)
class ArrivedData:
    """What came with the keys of all ranks."""

    latest_F: NDArray[np.int64] | None
    """The latest time of each of the group's features; None: no rank had times."""
    of_ranks: list[dict[str, torch.Tensor]]
    """Of each rank by name, in the order of its keys."""

    @staticmethod
    def num_words(bits: Sequence[int], num_keys: Sequence[int], num_features: int) -> list[int]:
        """Words from each rank, of which `bits` says what comes with its keys."""
        return [
            len(_names_of(own)) * n + (num_features if "times" in _names_of(own) else 0)
            for own, n in zip(bits, num_keys, strict=True)
        ]

    @staticmethod
    def of_words(
        words: Sequence[torch.Tensor], bits: Sequence[int], num_features: int
    ) -> ArrivedData:
        """`words`: of each rank."""
        of_ranks, latest = [], []
        for own, of_rank in zip(bits, words, strict=True):
            names = _names_of(own)
            begin = num_features if "times" in names else 0
            latest += [of_rank[:begin].numpy()] if begin else []
            size = (len(of_rank) - begin) // len(names) if names else 0
            columns = of_rank[begin:].split_with_sizes([size] * len(names))
            pairs = zip(names, columns, strict=True)
            of_ranks.append({name: _of_words(name, column) for name, column in pairs})
        return ArrivedData(np.max(latest, axis=0) if latest else None, of_ranks)


def _as_words(numbers_N: torch.Tensor) -> torch.Tensor:
    if numbers_N.dtype == torch.float32:
        return numbers_N.contiguous().view(torch.int32).to(torch.int64)
    return numbers_N


def _of_words(name: str, words_N: torch.Tensor) -> torch.Tensor:
    if DTYPES[name] == torch.float32:
        return words_N.to(torch.int32).view(torch.float32)
    return words_N
