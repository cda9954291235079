"""A slow table in pure Python with the interface of Table: what the engine is tested against.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core._internal.keyed import NO_TIME
from recsdk_core.admission import Admit
from recsdk_core.errors import BusyError, CapacityError, NonFiniteError
from recsdk_core.eviction import Evict
from recsdk_core.init import Initializer, Uniform
from recsdk_core.leavers import LeaveCause, LeaverBatch
from recsdk_core.optim import SGD, Optimizer
from recsdk_core.outcome import Default, Outcome
from recsdk_core.table import ExportBatch, OnFull, TableStats
from recsdk_core.testing import _arithmetic, _optimizers
from recsdk_core.testing._admission import Admission, AdmissionRecord
from recsdk_core.testing._clock import Clock
from recsdk_core.testing._eviction import Eviction, KeyMeta, Seen, norm_of, number_at
from recsdk_core.testing._initial_rows import initial_rows
from recsdk_core.testing._predicates import columns_of, is_true
from recsdk_core.testing._room import Room, key_hash, shared_keys
from recsdk_core.testing._rounding import random_halves, round_nearest, round_stochastic

__all__ = ["ReferenceLease", "ReferenceLeavers", "ReferenceTable"]

F32 = np.float32
Floats: TypeAlias = NDArray[np.float32]
Keys: TypeAlias = NDArray[Any]
Outcomes: TypeAlias = NDArray[np.uint8]


@dataclass(eq=False)
class _Row:
    number: int
    weights: Floats
    state: dict[str, Floats]
    is_in_flight: bool
    waits: bool = False
    """It is yet to begin, with the shared row that its key then has."""
    meta: KeyMeta | None = None
    has_expired: bool = False


@dataclass(eq=False)
class _KeptBack:
    """A row that its key has left, while leases may use it."""

    epoch: int
    key: int
    row: _Row
    cause: LeaveCause
    reader: ReferenceLeavers | None
    """Who read what leaves when it left."""


class ReferenceLeavers:
    """What leaves a ReferenceTable; holds any number of rows."""

    def __init__(self, table: ReferenceTable) -> None:
        self._table = table
        self._left: list[_KeptBack] = []

    def __len__(self) -> int:
        return len(self._left)

    def read(self, max_rows: int | None = None) -> LeaverBatch:
        """Takes the rows that left first."""
        taken = self._left[:max_rows]
        self._left = self._left[len(taken) :]
        rows = [each.row for each in taken]
        state = {
            name: np.array([row.state[name] for row in rows], F32).reshape(-1, width)
            for name, width in self._table.state_fields
        }
        weights = np.array([row.weights for row in rows], F32).reshape(-1, self._table.dim)
        return LeaverBatch(
            keys=np.array([each.key for each in taken], np.int64),
            causes=np.array([each.cause for each in taken], np.uint8),
            weights=weights,
            state=state,
        )

    def close(self) -> None:
        """From here on what leaves is not kept."""
        self._table._leavers = None


class ReferenceLease:
    """A batch in flight of a ReferenceTable."""

    def __init__(self, table: ReferenceTable, step: int | None, epoch: int) -> None:
        self.step = step
        self.is_released = False
        self._table = table
        self._epoch = epoch
        self._new: list[tuple[int, _Row]] = []
        self._evicted: list[tuple[int, _Row]] = []
        self._outcomes: list[Outcomes] = []
        self._num_returned = 0
        self._records_before: list[tuple[int, int, AdmissionRecord | None]] = []
        """(number of the call, key, its count before) of keys without a row that it counted."""

    def release(self) -> None:
        """Ends the batch. Idempotent."""
        self.is_released = True
        self._table._publish()

    def __enter__(self) -> ReferenceLease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@dataclass(frozen=True)
class _Trained:
    """A row that is trained."""

    key: int
    """Or the number of a shared row."""
    is_shared: bool = False


class ReferenceTable:
    """The same results as Table, bit for bit, from a dict and numpy; takes and gives numpy only.

    It takes the arguments of Table, without `num_threads` and `hash_seed`, which change no result.
    It has all initializers but TruncatedNormal. Cost: microseconds to milliseconds a key.

    >>> import numpy as np
    >>> from recsdk_core import Table
    >>> from recsdk_core.testing import ReferenceTable
    >>> keys = np.array([3, -3, 3])
    >>> same = Table(dim=5).find_or_insert(keys) == ReferenceTable(dim=5).find_or_insert(keys)
    >>> bool(same.all())
    True
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str = "table",
        optimizer: Optimizer = SGD(),
        initializer: Initializer = Uniform(low=-0.01, high=0.01),
        seed: int = 0,
        max_rows: int | None = None,
        eviction_groups: int | None = None,
        owned_groups: tuple[int, int] | None = None,
        on_full: OnFull = "refuse",
        eviction: Evict | None = None,
        admission: Admit | None = None,
        default: Default = Default(),
        on_nonfinite: Literal["apply", "raise", "skip"] = "apply",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        rounding: Literal["stochastic", "nearest"] = "stochastic",
    ) -> None:
        self.dim = dim
        self.name = name
        self.seed = seed
        self.max_rows = max_rows
        self._room = None if max_rows is None else Room(max_rows, eviction_groups, owned_groups)
        self.on_full = on_full
        self.eviction = eviction
        self._eviction = None if eviction is None else self._make_eviction(eviction)
        self.admission = admission
        self._admission = (
            None if admission is None else Admission(admission, seed, name, self._room)
        )
        self._clock = Clock() if self._eviction is None else self._eviction.clock
        self.time: int | None = None
        self.default = default
        self.initializer = initializer
        self.optimizer = optimizer
        self.update_count = 0
        self.log_decay = 0.0
        self.dtype = dtype
        self._rounding = rounding
        self._on_nonfinite = on_nonfinite
        self._rows: dict[int, _Row] = {}
        self._shared = [
            _Row(-1, self._initial(key), _optimizers.fresh_state(optimizer, dim), False)
            for key in shared_keys(default.n or 0)
        ]
        self._counts = dict.fromkeys(Outcome, 0)
        self._num_erased = self._num_nonfinite = self._num_evicted = self._num_requested = 0
        self._num_expired = self._num_returned = 0
        self._leases: list[ReferenceLease] = []  # open, oldest first
        self._steps: list[ReferenceLease] = []  # with a step, until visible
        self._num_counting_calls = 0
        self._last_step: int | None = None
        self._next_epoch = 0
        self._end_row = 0
        self._free: list[int] = []  # the last is given next
        self._kept_back: list[_KeptBack] = []
        self._leavers: ReferenceLeavers | None = None

    def _make_eviction(self, eviction: Evict) -> Eviction:
        if self._room is None and not eviction.expires:
            raise ValueError("eviction makes room within max_rows; set max_rows too")
        is_limited = self._room is not None
        return Eviction(eviction, self._room or Room(2**32 - 1, 1), is_limited=is_limited)

    def _initial(self, key: int) -> Floats:
        """The weights that a key begins with."""
        keys = np.array([key], np.int64)
        made = initial_rows(self.initializer, self.seed, self.name, keys, self.dim)
        return round_nearest(made[0].copy(), self.dtype)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next updates."""
        return self.optimizer.lr

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimizer = replace(self.optimizer, lr=float(value))

    @property
    def state_fields(self) -> tuple[tuple[str, int], ...]:
        """(name, width) of each field of optimizer state that a row has."""
        return _optimizers.state_fields(self.optimizer, self.dim)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Gives all rows fresh state, as Table does; BusyError while leases are open."""
        if self._leases or self._steps:
            raise BusyError("not allowed while batches are in flight")
        self.optimizer, self.log_decay = optimizer, 0.0
        for row in (*self._rows.values(), *self._shared):
            row.state = _optimizers.fresh_state(optimizer, self.dim)
        self.renumber()
        if self._admission is not None:
            self._admission.loaded()
            self._admission.num_lost = 0
        if self._eviction is not None:
            self._eviction.churn_lost = 0
        self._num_erased = self._num_nonfinite = self._num_evicted = self._num_requested = 0
        self._num_expired = self._num_returned = 0
        self._counts = dict.fromkeys(Outcome, 0)
        if self._eviction is None and self._admission is None and not self._shared:
            self._counts[Outcome.INSERTED] = len(self._rows)

    def lease(self, step: int | None = None) -> ReferenceLease:
        """Opens a batch in flight; ValueError for a step below that of the lease before."""
        if step is not None:
            if self._last_step is not None and step < self._last_step:
                raise ValueError(f"step {step} is below {self._last_step}")
            self._last_step = step
        lease = ReferenceLease(self, step, self._next_epoch)
        self._next_epoch += 1
        self._leases.append(lease)
        if step is not None:
            self._steps.append(lease)
        return lease

    def _publish(self) -> None:
        self._leases = [lease for lease in self._leases if not lease.is_released]
        while self._steps and self._steps[0].is_released:
            lease = self._steps.pop(0)
            for key, row in lease._new:
                self._begin(key, row)
            for key, row in sorted(lease._evicted, key=lambda entry: (entry[0], entry[1].number)):
                self._leave(key, row)
            for _, row in lease._new:
                row.is_in_flight = False
            for outcomes in lease._outcomes:
                self._count(outcomes)
            self._num_returned += lease._num_returned
        self._free_rows()

    def _free_rows(self) -> None:
        """Gives back rows that no open lease can be using."""
        oldest = self._leases[0]._epoch if self._leases else self._next_epoch
        freed = [kept for kept in self._kept_back if kept.epoch <= oldest]
        self._kept_back = self._kept_back[len(freed) :]
        self._free += [kept.row.number for kept in freed]
        if self._leavers is not None:
            self._leavers._left += [kept for kept in freed if kept.reader is self._leavers]

    def _keep_back(self, key: int, row: _Row, cause: LeaveCause) -> None:
        self._kept_back.append(_KeptBack(self._next_epoch, key, row, cause, self._leavers))

    def leavers(self) -> ReferenceLeavers:
        """Reads what leaves from now on; BusyError if somebody does, or steps are in flight."""
        self._require_no_steps()
        if self._leavers is not None:
            raise BusyError("somebody reads what leaves already")
        self._leavers = ReferenceLeavers(self)
        return self._leavers

    def _require_no_steps(self) -> None:
        if self._steps:
            raise BusyError("not allowed while batches are in flight")

    def _count(self, outcomes: Outcomes) -> None:
        for outcome in outcomes:
            self._counts[Outcome(outcome)] += 1

    def map(
        self,
        keys: Keys,
        *,
        insert: bool,
        lease: ReferenceLease | None = None,
        times: Any = None,
        scores: Any = None,
        counts: Any = None,
        clicks: Any = None,
        now: int | None = None,
    ) -> tuple[NDArray[np.int64], Outcomes]:
        """Finds the rows of keys (N,), and with `insert` gives a row to each unseen key."""
        is_in_flight = lease is not None and lease.step is not None
        if insert:
            self._require_clicks(keys, clicks)
            if not is_in_flight:
                self._require_no_steps()
            batch = lease if is_in_flight else None
            with self._at(now, times, len(keys)):
                seen = self._seen(keys, times, scores, counts, clicks)
                rows, outcomes = self._insert(_as_ints(keys), seen, batch, counts, clicks)
        else:
            found = [self._find(key, sees_in_flight=is_in_flight) for key in _as_ints(keys)]
            rows = np.array([row.number if row else 0 for row in found], np.int64)
            outcomes = _outcomes([Outcome.FOUND if row else Outcome.MISSING for row in found])
        if is_in_flight and lease is not None:
            lease._outcomes.append(outcomes)
        else:
            self._count(outcomes)
        return rows, outcomes

    @contextmanager
    def _at(self, now: int | None, times: Any, num_keys: int) -> Iterator[None]:
        """`now` of a call, or later times of its keys, is the table's time unless it fails."""
        before = self.time
        if now is not None:
            if self._eviction is None or self._eviction.rule.by != "time":
                raise ValueError("now is for eviction by time")
            if now == NO_TIME:
                raise ValueError("now is a time")
            self.time = now
        try:
            yield
        except BaseException:
            self.time = before
            raise
        if now is None and times is not None and num_keys:
            latest = int(np.max(times))
            if latest == NO_TIME:
                return
            self.time = latest if self.time is None else max(self.time, latest)

    def _find(self, key: int, *, sees_in_flight: bool = False) -> _Row | None:
        row = self._rows.get(key)
        if sees_in_flight or (row is not None and not row.is_in_flight):
            return row
        return next((row for other, row in self._leaving() if other == key), None)

    def _leaving(self) -> list[tuple[int, _Row]]:
        """Keys that batches in flight evicted, and that readers still see."""
        evicted = [entry for lease in self._steps for entry in lease._evicted]
        return [(key, row) for key, row in evicted if not row.is_in_flight]

    @property
    def _needs_clicks(self) -> bool:
        return any(rule and rule.rule.needs_clicks for rule in (self._eviction, self._admission))

    def _require_clicks(self, keys: Keys, clicks: Any) -> None:
        if self._needs_clicks and clicks is None and len(_as_ints(keys)) > 0:
            raise ValueError("a rule goes by clicks, and the call brings none")

    def _seen(
        self, keys: Keys, times: Any, scores: Any, counts: Any = None, clicks: Any = None
    ) -> dict[int, Seen]:
        if self._eviction is None:
            return {}
        if self._eviction.rule.by == "time" and times is None:
            times = self.time
            if times is None:
                raise ValueError("eviction goes by time, and the call brings none")
        return self._eviction.seen(_as_ints(keys), times, scores, counts, clicks)

    def _metas(self) -> dict[int, KeyMeta]:
        return {key: row.meta for key, row in self._rows.items() if row.meta is not None}

    def _settle(
        self,
        seen: dict[int, Seen],
        new: list[int],
        leaving: list[int],
        lease: ReferenceLease | None,
    ) -> None:
        """What a call changes of metadata, who has returned, and whom it evicts."""
        lease_step = None if lease is None else lease.step
        step = self._step_of(lease_step)
        self._clock.decided(step, lease_step)
        if self._eviction is None:
            return
        for key in seen:
            if key in self._rows:
                row = self._rows[key]
                row.meta = self._eviction.touched(row.meta, seen[key], step)
        self._count_returned(new, step, lease)
        self._evict(leaving, lease, self._eviction.expiring)

    def _count_returned(self, new: list[int], step: int, lease: ReferenceLease | None) -> None:
        assert self._eviction is not None
        count = self._eviction.came(new, step)
        if lease is None:
            self._num_returned += count
        else:
            lease._num_returned += count

    def _in_order(self, keys: Iterable[int]) -> list[int]:
        return sorted(keys, key=lambda key: self._rows[key].number)

    def _evict(
        self, leaving: list[int], lease: ReferenceLease | None, expiring: Collection[int] = ()
    ) -> None:
        if self._eviction is not None:
            self._eviction.left(leaving, self._eviction.step)
        for key in leaving:
            row = self._rows.pop(key)
            row.has_expired = key in expiring
            if lease is None:
                self._leave(key, row)
            else:
                lease._evicted.append((key, row))
        self._free_rows()

    def _leave(self, key: int, row: _Row) -> None:
        self._keep_back(key, row, LeaveCause.EXPIRED if row.has_expired else LeaveCause.EVICTED)
        self._num_expired += row.has_expired
        self._num_evicted += not row.has_expired

    def expire(self) -> int:
        """Makes the keys leave that have expired."""
        self._require_no_steps()
        expired = self._expired()
        self._evict(expired, None, expired)
        return len(expired)

    def _expired(self) -> list[int]:
        if self._eviction is None or not self._eviction.rule.expires:
            raise ValueError("expire needs keys that expire")
        self._eviction.time = self.time
        expired = self._eviction.expired(self._metas(), self._eviction.step_of(None))
        return self._in_order(expired)

    def evict(self, **request: Any) -> int:
        """Makes room: the lowest keys leave, or those of whom a predicate is true."""
        leaving = self._asked(**request)
        self._evict(leaving, None)
        self._num_requested += len(leaving)
        return len(leaving)

    def would_evict(self, **request: Any) -> dict[LeaveCause, int]:
        """How many keys `evict` would make leave."""
        counts = {LeaveCause.EVICTED: len(self._asked(**request))}
        if self._eviction is not None and self._eviction.rule.expires:
            counts[LeaveCause.EXPIRED] = len(self._expired())
        return counts

    def _asked(
        self,
        *,
        fraction: float | None = None,
        max_rows: int | None = None,
        where: str | None = None,
    ) -> list[int]:
        if self._eviction is None:
            raise ValueError("evict needs a rule who leaves")
        self._require_no_steps()
        if where is not None:
            rule, step = self._eviction.rule, self._eviction.step
            in_order = sorted(self._rows.items(), key=lambda item: item[1].number)
            return [
                key
                for key, row in in_order
                if row.meta is not None
                and self._eviction.may_leave(row.meta, self._eviction.step_of(None))
                and is_true(where, columns_of(row.meta, rule, step), rule)
            ]
        if fraction is not None:
            max_rows = int((self.max_rows or 0) * (1 - Fraction(str(float(fraction)))))
        return self._eviction.beyond(self._metas(), max_rows or 0)

    def _insert(
        self,
        keys: list[int],
        seen: dict[int, Seen],
        lease: ReferenceLease | None,
        counts: Any = None,
        clicks: Any = None,
    ) -> tuple[NDArray[np.int64], Outcomes]:
        lease_step = None if lease is None else lease.step
        kept_out, settle = self._kept_out(keys, counts, clicks, lease)
        let_in = [key for key in keys if key not in kept_out]
        new, leaving = self._with_room(
            let_in, {k: v for k, v in seen.items() if k not in kept_out}, lease_step
        )
        weights = initial_rows(
            self.initializer, self.seed, self.name, np.array(new, np.int64), self.dim
        )
        first = dict.fromkeys(new, True)
        for key, row_weights in zip(new, weights, strict=True):
            rounded = round_nearest(row_weights.copy(), self.dtype)
            row = self._add(key, rounded, is_in_flight=lease is not None)
            row.waits = self.default.begin_with == "shared_row"
            if lease is None:
                self._begin(key, row)
        if lease is not None:
            lease._new += [(key, self._rows[key]) for key in new]
        outcomes = [
            (Outcome.NOT_ADMITTED if key in kept_out else Outcome.REFUSED)
            if key not in self._rows
            else (Outcome.INSERTED if first.pop(key, False) else Outcome.FOUND)
            for key in keys
        ]
        settle()
        rows = [self._rows[key].number if key in self._rows else 0 for key in keys]
        self._settle(seen, new, leaving, lease)
        return np.array(rows, np.int64), _outcomes(outcomes)

    def _begin(self, key: int, row: _Row) -> None:
        """Gives a row that waits what its key's shared row has."""
        if row.waits:
            row.weights = self._shared[self._which_shared(key)].weights.copy()
        row.waits = False

    def _step_of(self, lease_step: int | None) -> int:
        """Tables without rules take batches in any order."""
        if self._eviction is None and self._admission is None:
            return 0
        return self._clock.step_of(lease_step)

    def _kept_out(
        self, keys: list[int], counts: Any, clicks: Any, lease: ReferenceLease | None
    ) -> tuple[set[int], Callable[[], None]]:
        """The keys that the rule keeps out, and what counts them once the others have rows."""
        step = self._step_of(None if lease is None else lease.step)
        admission = self._admission
        if admission is None:
            return set(), lambda: None
        seen: dict[int, int] = {}
        clicked: dict[int, int] = {}
        for i, key in enumerate(keys):
            if key not in self._rows:
                seen[key] = seen.get(key, 0) + number_at(counts, i, 1)
                clicked[key] = clicked.get(key, 0) + number_at(clicks, i, 0)
        admitted = admission.admitted(seen, step, clicked)

        def settle() -> None:
            before = dict(admission.records)
            admission.decided(seen, self._rows, step)
            if lease is not None:
                self._num_counting_calls += 1
                after = admission.records
                lease._records_before += [
                    (self._num_counting_calls, key, before.get(key))
                    for key in before.keys() | after.keys()
                    if key in seen or before.get(key) != after.get(key)
                ]

        return seen.keys() - admitted, settle

    def visible_records(self) -> dict[int, AdmissionRecord]:
        """How often keys without a row were seen, without batches in flight."""
        if self._admission is None:
            return {}
        found = dict(self._admission.records)
        changes = [change for lease in self._steps for change in lease._records_before]
        # Batches of one step call in any order. What a key was before the first call stays.
        for _, key, before in sorted(changes, key=lambda change: -change[0]):
            if before is None:
                found.pop(key, None)
            else:
                found[key] = before
        return found

    def _with_room(
        self, keys: list[int], seen: dict[int, Seen], lease_step: int | None
    ) -> tuple[list[int], list[int]]:
        """The keys without a row for which there is room, each once, and those that leave."""
        new = [key for key in dict.fromkeys(keys) if key not in self._rows]
        leaving: list[int] = []
        step = self._step_of(lease_step)
        if self._eviction is not None:
            self._eviction.time = self.time
            metas = self._measured(self._eviction, step, lease_step)
            leaving, refused = self._eviction.decide(metas, seen, step)
            expiring = self._eviction.expiring
            leaving = [key for key in leaving if key not in expiring] + self._in_order(expiring)
        else:
            refused = self._room.refused(new, self._rows) if self._room else set()
        if self.on_full == "raise" and refused:
            raise CapacityError(f"table {self.name!r} is full: {self.max_rows} rows")
        if self._eviction is not None:
            for key, meta in metas.items():
                self._rows[key].meta = meta
        return [key for key in new if key not in refused], leaving

    def _measured(
        self, eviction: Eviction, step: int, lease_step: int | None
    ) -> dict[int, KeyMeta]:
        """What is kept of keys once a step has begun with a look, if it does."""
        metas = self._metas()
        if eviction.rule.order not in ("low_norm", "function") or not eviction.is_look_due(step):
            return metas
        if eviction.rule.order == "function":
            found = eviction.places(metas)
            return {key: meta.measured_as(found[key]) for key, meta in metas.items()}
        if any(not each.is_released and each.step != lease_step for each in self._steps):
            raise BusyError("a batch of a step before a look at norms is in flight")
        norms = {key: norm_of(self._rows[key].weights.tolist()) for key in metas}
        return {key: meta.measured_as(norms[key]) for key, meta in metas.items()}

    def renumber(self) -> None:
        """Gives rows the numbers that they have once the table is saved and loaded."""
        self._clock.forget_lease(had_leases=self._last_step is not None)
        if self._eviction is not None:
            self._eviction.forget()
        for number, row in enumerate(sorted(self._rows.values(), key=lambda row: row.number)):
            row.number = number
        self._end_row, self._free, self._kept_back = len(self._rows), [], []

    def _add(self, key: int, weights: Floats, *, is_in_flight: bool = False) -> _Row:
        if self._free:
            number = self._free.pop()
        else:
            number, self._end_row = self._end_row, self._end_row + 1
        state = _optimizers.fresh_state(self.optimizer, self.dim)
        self._rows[key] = row = _Row(number, weights, state, is_in_flight)
        return row

    def _read(self, keys: list[int], *, sees_in_flight: bool) -> Floats:
        values = np.full((len(keys), self.dim), self.default.value, F32)
        for i, key in enumerate(keys):
            row = self._find(key, sees_in_flight=sees_in_flight)
            if row is not None:
                self._begin(key, row)
                values[i] = row.weights
            elif self._shared:
                values[i] = self._shared[self._which_shared(key)].weights
            elif self.default.kind == "initial_row":
                values[i] = self._initial(key)
        return values

    def _which_shared(self, key: int) -> int:
        return (key_hash(key) & 0xFFFF) * len(self._shared) >> 16

    def shared_rows(self) -> ExportBatch:
        """The rows that keys without one share."""
        weights = [row.weights for row in self._shared]
        none = np.empty((0, self.dim), F32)
        return ExportBatch(
            keys=np.array(shared_keys(len(self._shared)), np.int64),
            weights=np.stack(weights) if weights else none,
            state={
                name: np.array([row.state[name] for row in self._shared], F32).reshape(-1, width)
                for name, width in self.state_fields
            },
        )

    def find_or_insert(
        self,
        keys: Keys,
        *,
        lease: ReferenceLease | None = None,
        times: Any = None,
        scores: Any = None,
        counts: Any = None,
        clicks: Any = None,
        now: int | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """The rows of keys (N,), made where they do not exist."""
        more = {"times": times, "scores": scores, "counts": counts, "clicks": clicks}
        _, outcomes = self.map(keys, insert=True, lease=lease, now=now, **more)
        values = self._read(_as_ints(keys), sees_in_flight=True)
        return (values, outcomes) if return_outcomes else values

    def lookup(self, keys: Keys, *, return_outcomes: bool = False) -> Any:
        """The rows of keys (N,), read only."""
        _, outcomes = self.map(keys, insert=False)
        values = self._read(_as_ints(keys), sees_in_flight=False)
        return (values, outcomes) if return_outcomes else values

    def upsert(
        self,
        keys: Keys,
        values: Floats,
        state: Mapping[str, Floats] | None = None,
        *,
        times: Any = None,
        scores: Any = None,
        clicks: Any = None,
        now: int | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """Writes values (N, D) as the weights of keys (N,)."""
        self._require_no_steps()
        with self._at(now, times, len(keys)):
            seen = self._seen(keys, times, scores, None, clicks)
            new, leaving = self._with_room(_as_ints(keys), seen, None)
        admitted = set(new)
        if self._admission is not None:
            self._admission.forget(new)
        outcomes = []
        for i, key in enumerate(_as_ints(keys)):
            row = self._rows.get(key)
            outcomes.append(Outcome.INSERTED if row is None else Outcome.FOUND)
            if row is None and key not in admitted:
                outcomes[-1] = Outcome.REFUSED
                continue
            row = row or self._add(key, np.zeros(self.dim, F32))
            row.weights = round_nearest(np.array(values[i], F32), self.dtype)
            row.state = _optimizers.fresh_state(self.optimizer, self.dim)
            if state is not None:
                row.state = {name: np.array(given[i], F32) for name, given in state.items()}
        self._settle(seen, new, leaving, None)
        self._count(_outcomes(outcomes))
        return _outcomes(outcomes) if return_outcomes else None

    def erase(self, keys: Keys, *, return_outcomes: bool = False) -> Any:
        """Takes keys (N,) out of the table."""
        self._require_no_steps()
        outcomes = []
        if self._admission is not None:
            self._admission.forget(_as_ints(keys))
        if self._eviction is not None:
            self._eviction.forget(_as_ints(keys))
        for key in _as_ints(keys):
            row = self._rows.pop(key, None)
            outcomes.append(Outcome.MISSING if row is None else Outcome.FOUND)
            if row is not None:
                self._keep_back(key, row, LeaveCause.ERASED)
                self._num_erased += 1
        self._free_rows()
        self._count(_outcomes(outcomes))
        return _outcomes(outcomes) if return_outcomes else None

    def clear(self) -> None:
        """Takes every key out; the lowest row is given next."""
        self._require_no_steps()
        for key, row in sorted(self._rows.items(), key=lambda entry: -entry[1].number):
            self._keep_back(key, row, LeaveCause.ERASED)
            self._num_erased += 1
        self._rows.clear()
        if self._admission is not None:
            self._admission.clear()
        if self._eviction is not None:
            self._eviction.forget()
        self._free_rows()

    def apply_gradients(
        self, keys: Keys, gradients: Floats, *, return_outcomes: bool = False
    ) -> Any:
        """One optimizer update with `gradients` (N, D) of keys (N,)."""
        _, outcomes = self._train(keys, np.arange(len(keys) + 1), gradients, None, "sum")
        self._count(outcomes)
        return outcomes if return_outcomes else None

    def pool(
        self,
        keys: Keys,
        offsets: NDArray[Any],
        weights: Floats | None = None,
        pooling: str = "sum",
        *,
        insert: bool = False,
        lease: ReferenceLease | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """Reduces bags of keys to one vector each: (B, D); ValueError where clicks are needed."""
        if insert and self._needs_clicks:
            raise ValueError("a rule goes by clicks, which pool does not take")
        _, outcomes = self.map(keys, insert=insert, lease=lease)
        sees_in_flight = insert or (lease is not None and lease.step is not None)
        values = self._read(_as_ints(keys), sees_in_flight=sees_in_flight)
        pooled = np.zeros((len(offsets) - 1, self.dim), F32)
        for b, part in enumerate(_slices(offsets)):
            for i in range(part.start, part.stop):
                pooled[b] += values[i] if weights is None else weights[i] * values[i]
            divisor = _divisor(pooling, weights, part)
            if pooling == "mean":
                pooled[b] = pooled[b] / divisor if divisor != 0 else 0
        return (pooled, outcomes) if return_outcomes else pooled

    def pool_backward(
        self,
        keys: Keys,
        offsets: NDArray[Any],
        grad: Floats,
        weights: Floats | None = None,
        pooling: str = "sum",
        *,
        return_weights_grad: bool = False,
    ) -> Any:
        """One optimizer update with the gradient (B, D) of pooled bags."""
        weights_grad, outcomes = self._train(keys, offsets, grad, weights, pooling)
        self._count(outcomes)
        return weights_grad if return_weights_grad else None

    def _train(
        self,
        keys: Keys,
        offsets: NDArray[Any],
        grad: Floats,
        weights: Floats | None,
        pooling: str,
    ) -> tuple[Floats, Outcomes]:
        """(gradient of the weights, outcomes), after the update."""
        names = _as_ints(keys)
        found = [self._find(key) for key in names]
        sums: dict[_Trained, Floats] = {}
        for b, part in enumerate(_slices(offsets)):
            divisor = _divisor(pooling, weights, part)
            for i in range(part.start, part.stop):
                trained = _Trained(names[i])
                if found[i] is None:
                    if not self._shared:
                        continue
                    trained = _Trained(self._which_shared(names[i]), is_shared=True)
                weight = F32(1) if weights is None else weights[i]
                scale = weight / divisor if divisor != 0 else F32(0)
                sums[trained] = sums.get(trained, F32(-0.0)) + grad[b] * scale
        weights_grad = self._weights_grad(names, offsets, grad, weights, pooling)
        self._update(sums)
        return weights_grad, _outcomes([Outcome.FOUND if r else Outcome.MISSING for r in found])

    def _update(self, sums: dict[_Trained, Floats]) -> None:
        bad = {trained for trained, total in sums.items() if not np.isfinite(total).all()}
        if bad and self._on_nonfinite == "raise":
            raise NonFiniteError(f"{len(bad)} rows have gradients that are not finite")
        self._num_nonfinite += len(bad)
        step = _optimizers.Step(self.optimizer, self.update_count + 1, self.log_decay)
        self.update_count += 1
        self.log_decay = _optimizers.next_log_decay(self.optimizer, self.log_decay)
        for trained, total in sums.items():
            if trained in bad and self._on_nonfinite == "skip":
                continue
            row = self._shared[trained.key] if trained.is_shared else self._find(trained.key)
            assert row is not None
            key = trained.key
            if trained.is_shared:
                key = shared_keys(len(self._shared))[key]
            with np.errstate(all="ignore"):  # gradients need not be finite
                _optimizers.update_row(step, row.weights, row.state, total)
                row.weights = self._rounded(row.weights, key, step.t)

    def _rounded(self, weights: Floats, key: int, t: int) -> Floats:
        if self._rounding == "nearest":
            return round_nearest(weights, self.dtype)
        random = random_halves(self.seed, self.name, np.array([key]), t, self.dim)
        return round_stochastic(weights, self.dtype, random[0])

    def _weights_grad(
        self,
        keys: list[int],
        offsets: NDArray[Any],
        grad: Floats,
        weights: Floats | None,
        pooling: str,
    ) -> Floats:
        values = self._read(keys, sees_in_flight=False)
        result = np.zeros(len(keys), F32)
        for b, part in enumerate(_slices(offsets)):
            weighted = F32(0)
            for i in range(part.start, part.stop):
                result[i] = _arithmetic.dot(grad[b], values[i])
                weighted += result[i] if weights is None else weights[i] * result[i]
            divisor = _divisor(pooling, weights, part)
            if pooling == "mean" and divisor == 0:
                result[part] = 0
            elif pooling == "mean":
                result[part] = (result[part] - weighted / divisor) / divisor
        return result

    def export(self, batch_size: int | None = None, *, state: bool = True) -> Iterator[ExportBatch]:
        """Visible rows in batches, in ascending order of row number."""
        visible = [(row.number, key, row) for key, row in (*self._rows.items(), *self._leaving())]
        visible = sorted(entry for entry in visible if not entry[2].is_in_flight)
        state_fields = self.state_fields if state else ()
        batch_size = batch_size or max(len(visible), 1)
        for begin in range(0, len(visible), batch_size):
            part = visible[begin : begin + batch_size]
            yield ExportBatch(
                keys=np.array([key for _, key, _ in part], np.int64),
                weights=np.stack([row.weights for _, _, row in part]),
                state={n: np.stack([row.state[n] for _, _, row in part]) for n, _ in state_fields},
            )

    def stats(self) -> TableStats:
        """Cumulative counts; what belongs to memory, the index or checkpoints is 0."""
        counts: dict[str, Any] = dict.fromkeys((field.name for field in fields(TableStats)), 0)
        counts |= {
            "num_rows": len(self),
            "num_rows_in_flight": sum(row.is_in_flight for row in self._every_row()),
            "num_rows_held_back": sum(len(step._new) for step in self._steps if step.is_released),
            "outcomes": dict(self._counts),
            "erased": self._num_erased,
            "evicted": self._num_evicted,
            "expired": self._num_expired,
            "returned": self._num_returned,
            "churn_lost": 0 if self._eviction is None else self._eviction.churn_lost,
            "evicted_by_request": self._num_requested,
            "admission_records": 0 if self._admission is None else self._admission.num_records,
            "records_lost": 0 if self._admission is None else self._admission.num_lost,
            "updates": self.update_count,
            "nonfinite": self._num_nonfinite,
        }
        return TableStats(**counts)

    def reserve(self, num_rows: int) -> None:
        """Does nothing."""

    def memory_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        weights = self.dim * (4 if self.dtype == "float32" else 2)
        state = 4 * sum(width for _, width in self.state_fields)
        return (weights + state) * len(self._rows)

    def check_invariants(self) -> None:
        """Does nothing: a dict has none."""

    def __len__(self) -> int:
        return sum(not row.is_in_flight for row in self._every_row())

    def _every_row(self) -> list[_Row]:
        evicted = [row for lease in self._steps for _, row in lease._evicted]
        return [*self._rows.values(), *evicted]

    def __contains__(self, key: int) -> bool:
        _, outcomes = self.map(np.array([key % 2**64], np.uint64), insert=False)
        return bool(outcomes[0] == Outcome.FOUND)


def _as_ints(keys: Keys) -> list[int]:
    """Keys of any integer type as signed 64-bit ints."""
    wide = keys.astype(np.int64) if keys.dtype == np.int32 else keys.view(np.int64)
    ints: list[int] = wide.tolist()
    return ints


def _outcomes(values: list[Outcome]) -> Outcomes:
    return np.array(values, np.uint8)


def _slices(offsets: NDArray[Any]) -> list[slice]:
    bounds = offsets.tolist()
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _divisor(pooling: str, weights: Floats | None, part: slice) -> Any:
    return _arithmetic.bag_divisor(
        pooling, None if weights is None else weights[part], part.stop - part.start
    )
