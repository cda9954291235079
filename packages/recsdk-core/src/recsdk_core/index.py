"""A growing map from raw 64-bit keys to row numbers, for rows that may lie anywhere.

Shape letters: n or N keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._ext import IndexCut, Lease
from recsdk_core._internal.checks import int_if_given, int_within, require_bool
from recsdk_core._internal.config import (
    engine_admission,
    engine_default,
    engine_eviction,
    engine_on_full,
)
from recsdk_core._internal.keyed import (
    UINT64,
    Array,
    Keyed,
    OnFull,
    columns_of_words,
    limits_of,
    now_of,
    times_of,
    type_of_metadata,
)
from recsdk_core.admission import RECORDS, Admit, record_names
from recsdk_core.eviction import Evict, EvictionClock
from recsdk_core.leavers import IndexLeavers, OnOverflow, engine_overflow
from recsdk_core.outcome import Default, Outcome
from recsdk_core.stats import IndexStats
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = ["Index", "IndexCut", "MakeRows"]

MakeRows: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], Any]
"""Makes the rows of keys int64 (n,) at distinct row numbers int64 (n,)."""

_BATCH = 2**16


class Index(Keyed):
    """Gives raw 64-bit keys row numbers, for rows that the caller keeps.

    Every 64-bit pattern is a legal key. Row numbers are given in input order, from 0 on; those of
    keys that left are given again. They never change while their key is there. A `Table` is an
    index with rows. Array arguments, results and thread safety are as those of `Table`.

    >>> import numpy as np
    >>> from recsdk_core import Index
    >>> index = Index(name="user", max_rows=2)
    >>> rows, outcomes = index.map(np.array([8, -1, 8, 70]), insert=True)
    >>> rows[:3].tolist(), outcomes.tolist()
    ([0, 1, 0], [1, 1, 0, 2])
    >>> index.erase(np.array([8]))
    >>> index.map(np.array([70]), insert=True)[0].tolist()
    [0]
    """

    _engine: _ext.Index

    def __init__(
        self,
        *,
        name: str = "index",
        max_rows: int | None = None,
        eviction_groups: int | None = None,
        owned_groups: tuple[int, int] | None = None,
        on_full: OnFull = "refuse",
        eviction: Evict | None = None,
        admission: Admit | None = None,
        default: Default = Default(),
        seed: int = 0,
        make_rows: MakeRows | None = None,
        num_threads: int | None = None,
        hash_seed: int | None = None,
        record_groups: int | None = None,
    ) -> None:
        """Makes an empty index; it takes no memory until the first insertion.

        At `max_rows` keys (None: no limit) further keys are refused, or under `on_full="raise"` the
        call that brings them raises CapacityError and changes nothing. `eviction_groups` and
        `owned_groups` say how `max_rows` divides over groups of keys, see Table. With `eviction`,
        which needs `max_rows`, others leave for keys that come, see `Evict`. With `admission` only
        some new keys get a row, see `Admit`; what it draws follows from `seed`, 0 to 2**64 - 1, and
        `name`, as in a Table that has the same. `record_groups`, a power of two, says over how many
        groups of keys its `max_records` divides (None: those of `max_rows`), for an index whose
        `max_rows` is the memory of its rows and no limit on keys. `default` says what `map` gives
        in place of the row number of a key without a row: with `Default.shared_rows` which of these
        it reads, with `Default.initial_row` the key itself. Row numbers may lie beyond `max_rows`
        while leases keep back rows of keys that left, and with eviction by the new keys of a call.

        Each call that inserts keys calls `make_rows` with them and their row numbers, in the order
        of the call, before anybody sees them. It runs under the index's lock and must not call the
        index (BusyError). What it raises takes the insertion back. Without it the outcomes say
        which rows are new.
        Messages give `name`. `num_threads`, 1 to 1024, limits the threads of this index's calls
        (None: the pool's size). No result depends on `hash_seed` (None: random).

        Raises ValueError or TypeError naming the argument that is wrong.
        """
        limits = limits_of(
            "Index",
            name=name,
            max_rows=max_rows,
            eviction_groups=eviction_groups,
            owned_groups=owned_groups,
            num_threads=num_threads,
            hash_seed=hash_seed,
        )
        number = int_within("Index", 0, UINT64, seed=seed)
        most = NUM_VIRTUAL_SHARDS + 1
        num_groups = int_if_given("Index", 1, most, record_groups=record_groups)
        if make_rows is not None and not callable(make_rows):
            raise TypeError(f"Index: make_rows must be callable, got {type(make_rows).__name__}")
        self._engine = _ext.Index(
            name,
            limits.hash_seed,
            limits.max_rows,
            limits.eviction_groups,
            limits.owned_groups,
            engine_on_full(on_full),
            make_rows,
            limits.num_threads,
            engine_eviction(eviction, limits.max_rows),
            engine_admission(admission),
            number,
            engine_default(default),
            num_groups,
        )
        self._admission, self._default = admission, default
        self._name, self._limits, self._on_full = name, limits, on_full
        self._eviction, self._evicted_by_request = eviction, 0

    @property
    def name(self) -> str:
        """What messages call the index."""
        return self._name

    @property
    def admission(self) -> Admit | None:
        """Which new keys get a row; None: all."""
        return self._admission

    @property
    def default(self) -> Default:
        """What a key without a row reads."""
        return self._default

    @property
    def end_row(self) -> int:
        """One past the highest row number that was ever given."""
        return self._engine.end_row()

    @property
    def is_tracking(self) -> bool:
        """Whether a cut may be of changes only."""
        return self._engine.is_tracking()

    def map(
        self,
        keys: Array,
        *,
        insert: bool,
        lease: Lease | None = None,
        times: Array | int | None = None,
        scores: Array | None = None,
        counts: Array | int | None = None,
        clicks: Array | int | None = None,
        now: int | None = None,
        admits_all: bool = False,
    ) -> tuple[Array, Array]:
        """Finds the rows of keys (N,), and with `insert` gives a row to each unseen key.

        Returns (rows int64 (N,), outcomes uint8 (N,)); a key without a row has an unspecified row
        number. Of a new key that occurs several times the first is INSERTED, the rest FOUND. Row
        numbers are given in input order. Which keys are REFUSED depends on the keys of the call,
        not on their order: in a group of keys that has too little room, those that are lowest by a
        fixed hash. Empty input is fine. With eviction others leave instead. `times`, `scores`,
        `counts`, `clicks` and `now` are for rules, see `Table.map`. With `admits_all` no rule of
        admission keeps a key out, as in `Table.upsert`.

        Raises BusyError when inserting without a step while leases with a step are open, and
        CapacityError under `on_full="raise"`. Raises ValueError for times, scores, counts, clicks
        or now that the rules do not take, or that they need and do not get, and for `admits_all`
        without `insert` or with a lease that has a step. Also raises OutOfMemoryError, and what
        `make_rows` raises.
        Cost: one cache line per key, plus one row per insertion.
        """
        times, counts = times_of(times), times_of(counts, "counts")
        clicks = times_of(clicks, "clicks")
        now = now_of("Index.map", now)
        return self._engine.map(keys, insert, lease, times, scores, counts, clicks, now, admits_all)

    def assign(
        self,
        keys: Array,
        *,
        metadata: Mapping[str, Array] | None = None,
        records: Mapping[str, Array] | None = None,
        clock: EvictionClock | None = None,
    ) -> None:
        """Replaces all keys by distinct keys (N,): key i gets row i, and `make_rows` is not called.

        With eviction `metadata`, as the method of that name gives it, says what was known of them.
        With admission `records` is what `records()` gave of keys without a row; those beyond its
        limit leave. With either comes `clock`: where their clock stands. Its step is at least
        that in which the latest of them was seen; without a time it has the latest of theirs.
        Without all three keys count as never seen, and there was no step. Changes are tracked from
        here on. Raises BusyError while leases or a cut are open, CapacityError beyond `max_rows` or
        a group's part of it, and ValueError if a key comes twice, or for what the rules do not
        take, or lack; then nothing has changed.
        """
        if metadata is None and records is None and clock is None:
            self._engine.assign(keys, None, None, None, None, None, None)
            return
        if clock is None or (metadata is None and records is None):
            raise ValueError(
                "Index.assign: clock belongs together with metadata or records; pass both or none"
            )
        names = self._engine.metadata_names()
        self._require_names("eviction", self._eviction, "metadata", names, metadata or {})
        wanted = record_names(self._admission)
        self._require_names("admission", self._admission, "records", wanted, records or {})
        columns = [_words((metadata or {})[name], type_of_metadata(name)) for name in names]
        words = np.stack(columns, 1).reshape(-1) if columns else np.zeros(0, np.int64)
        nothing = np.zeros(0, np.int64)
        counted = [(records or {}).get(name, nothing) for name in RECORDS[:3]]
        counted.append((records or {}).get(RECORDS[3]))
        state = _ext.EvictionState(clock.step or 0, None, clock.step is not None, clock.time)
        self._engine.assign(keys, words, state, *counted)

    def _require_names(
        self, setting: str, rule: Any, what: str, wanted: Sequence[str], given: Mapping[str, Array]
    ) -> None:
        if set(wanted) != set(given):
            raise ValueError(
                f"index {self._name!r}: with {setting}={rule} {what} are {list(wanted)}, got "
                f"{sorted(given)}"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"index {self._name!r} cannot be copied or pickled: rows of the caller's go with its "
            "row numbers; give the keys of keys_and_rows() to assign of another Index"
        )

    def records(self) -> dict[str, NDArray[np.int64]]:
        """What admission knows of keys without a row, as readers see it: int64 (m,) by name.

        "admit_keys", ascending, "admit_counts", how often each was seen as far as the rule asks,
        "admit_steps", the step that saw it last, and with `Admit.show_click` "admit_clicks".
        Raises ValueError without admission.

        >>> import numpy as np
        >>> from recsdk_core import Admit, Index
        >>> index = Index(admission=Admit.count(3))
        >>> _ = index.map(np.array([5, 6, 5]), insert=True)
        >>> {name: found.tolist() for name, found in index.records().items()}
        {'admit_keys': [5, 6], 'admit_counts': [2, 1], 'admit_steps': [1, 1]}
        """
        found = dict(zip(RECORDS, self._engine.records(), strict=True))
        return {name: found[name] for name in record_names(self._admission)}

    def metadata(self, rows: Array) -> dict[str, NDArray[Any]]:
        """What eviction keeps of the keys of rows int64 (n,), ascending, as readers see it.

        (n,) by name, such as "evict_step" int64 or "evict_score" float32. Rows without a visible
        key have any. Raises ValueError without eviction, and for rows out of range or order. Cost:
        a look at each row, and at what batches in flight have touched.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Index
        >>> index = Index(max_rows=9, eviction=Evict.lru())
        >>> for key in (5, 6, 5):
        ...     rows, _ = index.map(np.array([key]), insert=True)
        >>> {name: kept.tolist() for name, kept in index.metadata(np.array([0, 1])).items()}
        {'evict_step': [3, 2]}
        """
        names = self._engine.metadata_names()
        return columns_of_words(names, self._engine.metadata(rows))

    @property
    def clock(self) -> EvictionClock:
        """Where the clock of eviction and admission stands to readers.

        Raises ValueError without both.
        """
        state = self._engine.eviction_state()
        return EvictionClock(step=state.step if state.is_begun else None, time=state.time)

    def keys_and_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Visible keys int64 (n,) and their rows int64 (n,), in ascending order of row number.

        Keys that come or leave while it runs may or may not be seen. Counts no outcome.
        """
        nothing = np.zeros(0, np.int64)
        keys, rows = zip((nothing, nothing), *self.export(), strict=True)
        return np.concatenate(keys), np.concatenate(rows)

    def export(
        self, batch_size: int = _BATCH
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """What `keys_and_rows` gives, in batches of up to `batch_size`; ValueError below 1."""
        return self._export(int_within("Index.export", 1, batch_size=batch_size))

    def _export(self, batch_size: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        begin, is_last = 0, False
        while not is_last:
            capacity = min(batch_size, len(self) + 1)  # what a batch takes before it is filled
            begin, keys, rows = self._engine.export_keys(begin, capacity)
            is_last = len(keys) < capacity
            if len(keys):
                yield keys, rows

    def cut(self, *, changes_only: bool = False) -> IndexCut:
        """The keys as they are now, or only what came and left since the last durable cut.

        A cut has `keys` int64 (n,) and `rows` int64 (n,): all visible keys, or with `changes_only`
        those that came, came again, or were named by `note_changed`. It also has `left` int64 (m,):
        keys that left and are not there again, ascending. End it by `finish(durable)`. Durable:
        changes count from the cut on. Else it is as if it had never been. As a context manager it
        ends as not durable, unless `finish` was called. From the first durable cut on changes are
        tracked, which takes a bit per row, and the keys that leave.

        Raises BusyError while a cut is open, and ValueError if `changes_only` without a durable cut
        or an `assign` before. Cost: a copy of these keys.

        >>> import numpy as np
        >>> from recsdk_core import Index
        >>> index = Index()
        >>> index.cut().finish(True)
        >>> _ = index.map(np.array([5, 6]), insert=True)
        >>> with index.cut(changes_only=True) as cut:
        ...     cut.keys.tolist(), cut.rows.tolist(), cut.left.tolist()
        ([5, 6], [0, 1], [])
        """
        require_bool("Index.cut", changes_only=changes_only)
        return self._engine.cut(changes_only)

    def note_changed(self, rows: Array) -> None:
        """Adds the keys of rows int64 (n,) to those that the next cut of changes names.

        Does nothing before the first durable cut. Raises ValueError for a row number out of range.
        """
        self._engine.note_changed(rows)

    def leavers(
        self,
        *,
        max_rows: int = 65_536,
        on_overflow: OnOverflow = "count",
        block_seconds: float = 60.0,
    ) -> IndexLeavers:
        """Reads which keys leave from now on, why, and where their rows are.

        Arguments and errors are those of `Table.leavers`; a call that is to wait does so for places
        of what was taken and not freed yet. Cost: nothing unless it is called. See `IndexLeavers`.
        """
        options = engine_overflow("Index.leavers", max_rows, on_overflow, block_seconds)
        return IndexLeavers(self._engine.leavers(*options))

    def stats(self) -> IndexStats:
        """Cumulative counts and sizes."""
        counts = self._engine.stats()
        outcomes = {kind: counts["outcomes"][kind] for kind in Outcome}
        return IndexStats(**{**counts, "outcomes": outcomes})

    def __repr__(self) -> str:
        limit = "" if self.max_rows is None else f", max_rows={self.max_rows}"
        return f"Index(name={self._name!r}, keys={len(self)}{limit})"


def _words(values: Array, kind: Any) -> NDArray[np.int64]:
    """Numbers as words of 64 bits, of which they are the first bytes."""
    values_n: NDArray[Any] = np.asarray(values)
    if values_n.dtype != kind:
        raise TypeError(f"Index.assign: metadata must be {np.dtype(kind)}, got {values_n.dtype}")
    bits_n: NDArray[Any] = values_n if kind == np.int64 else values_n.view(np.uint32)
    return bits_n.astype(np.int64)
