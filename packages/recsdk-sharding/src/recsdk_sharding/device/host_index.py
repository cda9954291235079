"""What a table on a device keeps on the host: keys, their row numbers, and unwritten new rows.

Shape letters: n keys, D row width.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import CapacityError, Index, initial_rows
from recsdk_core.init import Custom
from recsdk_core.virtual_shards import eviction_group_quotas, eviction_groups_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.device.leaving import DeviceLeavers
from recsdk_sharding.placement.devices import row_budget, rows_with_eviction
from recsdk_sharding.placement.layout import Shard

__all__ = [
    "HostIndex",
    "NumberedRows",
    "WaitingRows",
    "is_limited",
    "latest_rows",
    "limit_of",
    "rows_of_shard",
]


@dataclass(frozen=True)
class NumberedRows:
    """New rows of one call, to be written to the device."""

    numbers_n: torch.Tensor
    """Row numbers, int64 (n,), in pinned memory."""
    values_nD: torch.Tensor
    """Rows, float32 (n, D), in pinned memory."""
    num_ended: int
    """How many rows had left before, of those that are read."""

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The row numbers as an array."""
        numbers_n: NDArray[np.int64] = self.numbers_n.numpy()
        return numbers_n


@dataclass(frozen=True)
class WaitingRows:
    """New rows of one call that begin with shared rows, once a batch with them is read."""

    call: int
    """How many such calls came before."""
    numbers: NDArray[np.int64]
    """Of the rows, (n,)."""
    shared: NDArray[np.int64]
    """Which of the shared rows each begins with, (n,)."""
    num_ended: int
    """How many rows had left before, of those that are read."""


def is_limited(config: HashTableConfig) -> bool:
    """Whether `max_rows` limits the table; else the memory that was planned for it does."""
    if config.max_rows is None:
        return False
    return config.eviction is not None or config.max_rows <= config.num_embeddings


def limit_of(config: HashTableConfig, shard: Shard) -> int:
    """The most keys of a shard, unless it has other memory than was planned: its part of
    `max_rows`, or of `num_embeddings`."""
    if is_limited(config):
        return _quota_of(config, shard)
    return row_budget(config.num_embeddings, shard.ranks.share_of(shard.index))


def rows_of_shard(config: HashTableConfig, shard: Shard) -> int:
    """The rows for which a shard takes memory: more than it has keys if keys leave."""
    limit = limit_of(config, shard)
    rows = limit if config.eviction is None else rows_with_eviction(limit)
    return max(rows, row_budget(config.num_embeddings, shard.ranks.share_of(shard.index)))


def _quota_of(config: HashTableConfig, shard: Shard) -> int:
    """The rows that the groups of a shard have of `max_rows`."""
    assert config.max_rows is not None
    assert config.num_groups is not None
    quotas = eviction_group_quotas(config.max_rows, config.num_groups)
    return int(quotas[slice(*(shard.owned_groups(config.num_groups) or (None, None)))].sum())


class HostIndex:
    """Maps keys to row numbers, and keeps initial rows until they are written to the device.

    One thread may map while another, the one that trains, calls all else.
    """

    def __init__(self, config: HashTableConfig, capacity: int, shard: Shard) -> None:
        """`shard`: which rows and columns of the config's table there are.

        Beyond the `limit` the config's `on_full` says what becomes of more. The device has
        `capacity` rows: a call that would need more, because leases keep rows of erased keys back,
        raises CapacityError.
        """
        self._config = config
        self._capacity = capacity
        self._columns = shard.columns
        is_by_groups = is_limited(config)
        has_spare = is_by_groups or config.eviction is not None
        self.limit = limit_of(config, shard) if has_spare else capacity
        """The most keys."""
        self.limits: dict[str, Any] = {"max_rows": self.limit, "eviction_groups": 1}
        """How the index is limited, as arguments of it."""
        if is_by_groups:
            self.limits = {"max_rows": config.max_rows, "eviction_groups": config.num_groups}
        self._initializer = config.row_initializer()
        self.index = Index(
            name=config.name,
            **self.limits,
            owned_groups=shard.owned_groups(config.num_groups) if is_by_groups else None,
            on_full=config.on_full,
            eviction=config.eviction,
            admission=config.admission,
            default=config.default,
            seed=config.seed,
            record_groups=None if is_by_groups else config.record_groups,
            make_rows=(_CheckingMaker if self._calls_readers else _Maker)(self),
        )
        """From keys to row numbers."""
        self.norms: Callable[[NDArray[np.int64]], NDArray[np.float32]] | None = None
        """Takes the norms of rows by number (n,), with those that are not written yet."""
        self._lock = threading.Lock()
        self._unwritten: list[NumberedRows] = []
        self._num_calls = 0
        self._waiting: list[WaitingRows] = []  # in the order of their calls
        self._call_of_row: NDArray[np.int64] | None = None  # the last that made it; -1: none
        if config.default.begin_with == "shared_row":
            self._call_of_row = np.full(capacity, -1)
        self._given = threading.local()
        self._news: set[int] = set()
        self._news_key = 0
        self._reader: Callable[[], DeviceLeavers | None] = _nobody

    @property
    def _calls_readers(self) -> bool:
        reads_initial_rows = self._config.default.kind == "initial_row"
        return reads_initial_rows and isinstance(self._initializer, Custom)

    @property
    def reader(self) -> DeviceLeavers | None:
        """Who reads what leaves."""
        return self._reader()

    @reader.setter
    def reader(self, reader: DeviceLeavers) -> None:
        with self._lock:  # else a thread that takes new rows might miss it
            self._reader = weakref.ref(reader)
            self._news.add(self._news_key)

    def tell(self, news: set[int], key: int) -> None:
        """Adds `key` to the set whenever rows are to be written or copied: it is not told yet."""
        self._news, self._news_key = news, key

    def forget_reader(self) -> None:
        """It is closed, and has all that left."""
        self._reader = _nobody

    def _num_ended(self) -> int:
        reader = self._reader()
        return 0 if reader is None else reader.queue.num_ended

    def _make_rows(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Makes the rows of new keys; the index calls it before anybody sees the keys.

        What it raises undoes the insertion: CapacityError, and errors of a custom initializer.
        """
        if rows.max() >= self._capacity:
            raise CapacityError(f"table {self.index.name!r}: {self._why_none_is_free()}")
        if self._call_of_row is not None:
            self._let_wait(keys, rows)
            return
        if self._are_given:
            return
        values = torch.from_numpy(self.initial_rows(keys)).pin_memory()
        numbers = torch.from_numpy(rows.copy()).pin_memory()
        with self._lock:
            self._unwritten.append(NumberedRows(numbers, values, self._num_ended()))
            self._news.add(self._news_key)

    @property
    def _are_given(self) -> bool:
        return getattr(self._given, "rows", False)

    def _let_wait(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        assert self._call_of_row is not None
        assert self._config.default.n is not None
        shared = eviction_groups_of(keys, self._config.default.n)
        with self._lock:
            if self._are_given:
                self._call_of_row[rows] = -1
                return
            made = WaitingRows(self._num_calls, rows.copy(), shared, self._num_ended())
            self._waiting.append(made)
            self._call_of_row[rows] = self._num_calls
            self._num_calls += 1

    @property
    def begins_with_shared(self) -> bool:
        """Whether new rows begin with shared ones, and wait until a batch with them is read."""
        return self._call_of_row is not None

    def last_call_of(self, rows: NDArray[np.int64]) -> int:
        """The last call that made one of these rows (n,), all of which have keys; -1: none."""
        assert self._call_of_row is not None
        with self._lock:
            return int(self._call_of_row[rows].max(initial=-1))

    def take_waiting(self, last_call: int | None) -> list[WaitingRows]:
        """The rows to begin now: those of calls up to this one (None: of all), each once."""
        with self._lock:
            count = len(self._waiting)
            if last_call is not None:
                count = sum(each.call <= last_call for each in self._waiting)
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return [found for found in map(self._own_of, taken) if len(found.numbers)]

    def _own_of(self, rows: WaitingRows) -> WaitingRows:
        """Without rows that came to other keys since."""
        assert self._call_of_row is not None
        is_own = self._call_of_row[rows.numbers] == rows.call
        return replace(rows, numbers=rows.numbers[is_own], shared=rows.shared[is_own])

    def waiting_rows(self) -> list[WaitingRows]:
        """All that wait, left where they are; some may have come to other keys since."""
        with self._lock:
            return list(self._waiting)

    def put_back_waiting(self, rows: list[WaitingRows]) -> None:
        """Takes back rows that could not begin."""
        with self._lock:
            self._waiting = rows + self._waiting

    def initial_rows(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The shard's columns of the initial rows of keys (n,)."""
        config, (first, last) = self._config, self._columns
        made_nD = initial_rows(
            keys,
            config.embedding_dim,
            initializer=self._initializer,
            name=config.name,
            seed=config.seed,
        )
        return np.ascontiguousarray(made_nD[:, first:last])

    def _why_none_is_free(self) -> str:
        if self.index.eviction is None:
            return (
                "leases keep rows of erased keys back, and the device has no others; release "
                "leases before inserting"
            )
        return (
            f"the device has {self._capacity} rows, and batches in flight keep back those of "
            f"ids that left, beyond the {self.limit} ids that may be there; raise num_embeddings, "
            "which the device memory of a table follows, or map fewer batches ahead"
        )

    @contextmanager
    def given_rows(self) -> Iterator[None]:
        """Inside, new keys that this thread maps get their rows from elsewhere."""
        self._given.rows = True
        try:
            yield
        finally:
            self._given.rows = False

    def take_new_rows(self) -> list[NumberedRows]:
        """The rows to be written to the device, in this order; see `latest_rows`."""
        with self._lock:
            entries, self._unwritten = self._unwritten, []
            if self._reader() is None:
                self._news.discard(self._news_key)
        return entries

    def unwritten_rows(self) -> list[NumberedRows]:
        """What `take_new_rows` would give, left where it is."""
        with self._lock:
            return list(self._unwritten)

    def put_back(self, entries: list[NumberedRows]) -> None:
        """Takes back rows that could not be written; writing some twice is as good as once."""
        with self._lock:
            self._unwritten = entries + self._unwritten
            self._news.add(self._news_key)

    def forget_new_rows(self) -> None:
        """Drops what is to be written: other rows take their place."""
        with self._lock:
            self._unwritten, self._waiting = [], []


class _Maker:
    """What the index asks for rows."""

    def __init__(self, owner: HostIndex) -> None:
        self._owner = owner

    def __call__(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        self._owner._make_rows(keys, rows)

    def norms(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The norms of rows by number (n,)."""
        assert self._owner.norms is not None
        return self._owner.norms(rows)


class _CheckingMaker(_Maker):
    """The same where keys without a row read rows that a function makes, which may raise."""

    def check(self, keys: NDArray[np.int64]) -> None:
        """Raises what making the initial rows of keys (n,) raises."""
        self._owner.initial_rows(keys)


def _nobody() -> None:
    """Nobody reads what leaves."""


def latest_rows(entries: Sequence[NumberedRows]) -> Sequence[NumberedRows]:
    """The rows without those that came to others since: their keys left before they were read.

    A device writes equal row numbers of one call in any order.
    """
    if len(entries) < 2:
        return entries
    numbers = np.concatenate([each.numbers for each in entries])
    _, last = np.unique(numbers[::-1], return_index=True)
    if len(last) == len(numbers):
        return entries
    is_last = np.zeros(len(numbers), np.bool_)
    is_last[len(numbers) - 1 - last] = True
    parts = np.split(is_last, np.cumsum([len(each.numbers) for each in entries])[:-1])
    kept = [torch.from_numpy(part.nonzero()[0]) for part in parts]
    return [
        NumberedRows(
            each.numbers_n[own].pin_memory(), each.values_nD[own].pin_memory(), each.num_ended
        )
        for each, own in zip(entries, kept, strict=True)
        if len(own)
    ]
