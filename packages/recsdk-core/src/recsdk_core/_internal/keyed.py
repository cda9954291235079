"""What an index and a table share: keys, their row numbers, batches in flight.

Shape letters: N keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._internal.checks import (
    int_if_given,
    int_of,
    int_within,
    require_finite,
    require_table_name,
)
from recsdk_core._internal.explaining import explained
from recsdk_core._internal.groups import groups_of
from recsdk_core._internal.interruptions import held_back
from recsdk_core.admission import Admit
from recsdk_core.eviction import Evict
from recsdk_core.leavers import LeaveCause
from recsdk_core.outcome import Outcome
from recsdk_core.predicates import Kept, Predicate
from recsdk_core.stats import Explanation
from recsdk_core.virtual_shards import default_eviction_groups

__all__ = [
    "INT64",
    "NO_TIME",
    "UINT64",
    "Array",
    "Keyed",
    "Limits",
    "OnFull",
    "columns_of_words",
    "limits_of",
    "now_of",
    "step_of",
    "times_of",
    "type_of_metadata",
]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""
OnFull: TypeAlias = Literal["refuse", "raise"]
"""What happens to keys that find no room."""

UINT64 = 2**64
INT64 = 2**63
NO_TIME = -(2**63)
"""In place of a key's time: none is known."""
_MAX_THREADS = 1024


class Limits(NamedTuple):
    """Arguments of a constructor, as Python's ints."""

    max_rows: int | None
    eviction_groups: int | None
    owned_groups: tuple[int, int] | None
    num_threads: int | None
    hash_seed: int | None


def limits_of(
    kind: str,
    *,
    name: str,
    max_rows: int | None,
    eviction_groups: int | None,
    owned_groups: tuple[int, int] | None,
    num_threads: int | None,
    hash_seed: int | None,
) -> Limits:
    """The limits; ValueError or TypeError, which names the argument or the name that is wrong."""
    most = int_if_given(kind, 0, INT64, max_rows=max_rows)
    limits = Limits(
        most,
        *groups_of(kind, most, eviction_groups, owned_groups),
        int_if_given(kind, 1, _MAX_THREADS + 1, num_threads=num_threads),
        int_if_given(kind, 0, UINT64, hash_seed=hash_seed),
    )
    require_table_name(kind, name)
    return limits


class Keyed:
    """Keys and their row numbers; the engine's object is `_engine`."""

    _engine: _ext.Table | _ext.Index
    _name: str
    _limits: Limits
    _on_full: OnFull
    _eviction: Evict | None
    _admission: Admit | None = None
    _time: int | None
    _evicted_by_request: int

    @property
    def max_rows(self) -> int | None:
        """Keys beyond this number find no room; None: no limit."""
        return self._limits.max_rows

    @property
    def eviction_groups(self) -> int | None:
        """Groups of keys that have an equal part of `max_rows` each; None: no limit."""
        limits = self._limits
        if limits.max_rows is None or limits.eviction_groups is not None:
            return limits.eviction_groups
        return default_eviction_groups(limits.max_rows)

    @property
    def owned_groups(self) -> tuple[int, int] | None:
        """The first group whose keys may come, and the one after the last; None: all may."""
        return self._limits.owned_groups

    @property
    def on_full(self) -> OnFull:
        """What happens to keys that find no room: refused, or the call raises CapacityError."""
        return self._on_full

    @property
    def eviction(self) -> Evict | None:
        """Who leaves when it is full; None: nobody."""
        return self._eviction

    @property
    def time(self) -> int | None:
        """By which keys expire, and that of keys that come without one; `Evict.lru(by="time")`.

        It is what was set last, here or as `now` of `Table.map`, or a later one that has come with
        keys since; None: there was none yet. It may be set back. Batches in flight may have moved
        it on. What is set meanwhile saves have once these batches have ended. Setting it raises
        ValueError without eviction by time, and unless it fits an int64; -2**63 stands for none.
        """
        return self._engine.time()

    @time.setter
    def time(self, value: int) -> None:
        kind = type(self).__name__
        number = int_within(kind, NO_TIME + 1, INT64, time=value)
        if self._eviction is None or self._eviction.by != "time":
            raise ValueError(
                f"{kind}: time is for eviction by time, got eviction={self._eviction}; "
                f"make the {kind.lower()} with eviction=Evict.lru(by='time')"
            )
        self._engine.set_time(number)

    def lease(self, step: int | None = None) -> _ext.Lease:
        """Opens a batch in flight; use as a context manager or call `release()`.

        While a lease lives, rows of keys erased meanwhile are not given to other keys. If it
        carries a step, keys inserted under it are seen by later batches but not by readers
        (`lookup`, `len`, `export`, `stats`) until it and all earlier leases with a step are
        released. It releases itself when it is garbage collected, and may be released from any
        thread.

        Raises ValueError if `step` is below that of a lease taken before, or beyond int64, and
        TypeError if it is no int.
        """
        return self._engine.lease(step_of(f"{type(self).__name__}.lease", step))

    def map(self, keys: Array, *, insert: bool) -> tuple[Array, Array]:
        """Rows int64 (N,) and outcomes uint8 (N,) of keys (N,)."""
        raise NotImplementedError

    def erase(self, keys: Array, *, return_outcomes: bool = False) -> Any:
        """Takes keys (N,) out.

        The first of duplicates is FOUND, the rest MISSING. With `return_outcomes` returns outcomes
        uint8 (N,), else None. A row is given to another key only when no lease taken before is
        open. A key that returns starts from its initial row. Counts that `Admit.count` and
        `Admit.show_click` keep of these keys are forgotten, also of those that are MISSING. Raises
        BusyError while leases with a step are open.
        """
        return self._engine.erase(keys, return_outcomes)

    def evict(
        self,
        *,
        fraction: float | None = None,
        max_rows: int | None = None,
        where: str | None = None,
    ) -> int:
        """Makes room: the lowest keys leave until each group has at most its part of a limit.

        The limit is `max_rows`, or its own less a `fraction` of it, from 0 to 1, rounded down.
        It divides over groups as that. With `where` those leave of whom that is true, such as
        "idle > 100 and count < 3", see `recsdk_core.predicates.Predicate`. Keys that the next step
        will find below `min_age` stay in any case. Returns how many left. The call is no step.
        Raises ValueError without eviction, unless one of the three is given, or for a predicate
        that cannot be read or asks for what the rule does not keep; BusyError while leases with a
        step are open. Cost: that of evicting; of `where` also a look at all keys, while other calls
        wait.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=100, eviction=Evict.lfu())
        >>> _ = table.find_or_insert(np.arange(100))
        >>> table.evict(fraction=0.25), len(table)
        (25, 75)
        """
        limit = self._limit_of("evict", fraction, max_rows, where)
        choose = None if where is None else self._choosing(where)
        with held_back():  # until they are counted
            if choose is None:
                num_evicted = self._engine.evict(limit)
            else:
                num_evicted = self._engine.evict_where(choose, False)
            self._evicted_by_request += num_evicted
        return num_evicted

    def expire(self) -> int:
        """Makes the keys leave that have expired by now, rather than at the next look; how many.

        The call is no step. Raises ValueError unless keys expire, see `Evict.expiring`; BusyError
        while leases with a step are open. Cost: a look at each key.
        """
        return self._engine.expire()

    def would_evict(
        self,
        *,
        fraction: float | None = None,
        max_rows: int | None = None,
        where: str | None = None,
    ) -> dict[LeaveCause, int]:
        """How many keys `evict` with these arguments would make leave now, by cause; nobody does.

        Where keys expire, EXPIRED is how many `expire` would; some may be counted twice.
        Raises what `evict` raises, and costs as much.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=100, eviction=Evict.lfu())
        >>> _ = table.find_or_insert(np.array([7, 7, 8, 9]))
        >>> table.would_evict(where="count < 2"), len(table)
        ({<LeaveCause.EVICTED: 0>: 2}, 3)
        """
        limit = self._limit_of("would_evict", fraction, max_rows, where)
        if where is None:
            counts = {LeaveCause.EVICTED: self._engine.would_evict(limit)}
        else:
            counts = {LeaveCause.EVICTED: self._engine.evict_where(self._choosing(where), True)}
        if self._eviction is not None and self._eviction.expires:
            counts[LeaveCause.EXPIRED] = self._engine.would_expire()
        return counts

    def _limit_of(
        self, call: str, fraction: float | None, max_rows: int | None, where: str | None
    ) -> int:
        """The limit of rows that arguments of `evict` mean; 0 with `where`."""
        name = f"{type(self).__name__}.{call}"
        asked = {"fraction": fraction, "max_rows": max_rows, "where": where}
        given = [each for each, value in asked.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"{name}: pass one of fraction, max_rows and where, got {got}")
        if where is not None:
            return 0
        if fraction is not None:
            require_finite(name, fraction=fraction)
            if not 0.0 <= fraction <= 1.0:
                raise ValueError(f"{name}: fraction must be from 0 to 1, got {fraction}")
            if self.max_rows is None:
                raise ValueError(
                    f"{name}: fraction is of max_rows, and there is no limit; pass max_rows here"
                )
            # As it is written: in binary 10 * (1 - 0.9) is below 1.
            max_rows = int(self.max_rows * (1 - Fraction(str(float(fraction)))))
        return int_within(name, 0, INT64, max_rows=max_rows)

    def _choosing(self, where: str) -> Callable[[int, NDArray[np.int64], NDArray[np.uint8]], None]:
        """What tells the engine of which keys a predicate is true."""
        predicate = Predicate(where)
        names = self._engine.metadata_names()
        predicate.require(names, f"{type(self).__name__.lower()} {self._name!r}")
        rule = self._eviction

        def choose(step: int, words: NDArray[np.int64], leaves_n: NDArray[np.uint8]) -> None:
            kept = Kept.by_rule(columns_of_words(names, words), step, rule)
            leaves_n[:] = predicate.matches(kept)

        return choose

    def explain(self, key: int) -> Explanation:
        """How a key of 64 bits, signed or unsigned, stands: its row, and what would take it out.

        Raises TypeError for what is no integer, ValueError for one beyond 64 bits. Cost: a look at
        all keys, so it is for people.

        >>> import numpy as np
        >>> from recsdk_core import Evict, Table
        >>> table = Table(dim=2, max_rows=2, eviction=Evict.lru())
        >>> for key in (5, 6):
        ...     _ = table.find_or_insert(np.array([key]))
        >>> found = table.explain(5)
        >>> found.columns, found.num_before, found.reasons[0]
        ({'step': 1, 'idle': 1}, 0, 'it has row 0')
        """
        number = int_of(f"{type(self).__name__}.explain", key=key)
        if not -INT64 <= number < UINT64:
            raise ValueError(f"{type(self).__name__}.explain: key must have 64 bits, got {number}")
        standing = self._engine.standing(number % UINT64)
        names = self._engine.metadata_names() if standing["row"] is not None else []
        metadata = columns_of_words(names, standing["words"])
        signed = (number + INT64) % UINT64 - INT64
        return explained(signed, standing, metadata, self._eviction, self._admission)

    def steps_to_look(self, step: int) -> int | None:
        """How many steps after this one `Evict.low_norm` looks at norms again; None: it does not.

        `step` is that of the next lease to be mapped, and leases count on by 1. All batches before
        the one with the look must be trained when that is mapped. Raises BusyError if the batch of
        `step` itself begins with a look, and one before it is in flight: its mapping would fail so.
        """
        call = f"{type(self).__name__}.steps_to_look"
        return self._engine.steps_to_look(int_within(call, -INT64, INT64, step=step))

    def decided(self) -> tuple[int, int]:
        """How many keys have a row, and the last step, 0 without eviction and admission.

        Batches in flight are included. Two that are given the same calls say the same, whenever
        leases are released; so who keeps several alike can compare them. Cost: O(1).
        """
        return self._engine.decided()

    def clear(self) -> None:
        """Takes every key out, and forgets what was counted of keys without a row.

        The clock of eviction and admission goes on. Raises BusyError while leases with a step are
        open.
        """
        self._engine.clear()

    def reserve(self, num_rows: int) -> None:
        """Makes room for `num_rows` rows in all, so that inserting up to there is steady.

        The memory is cleared now, and the index takes the shape for that many keys at once. If it
        then holds far fewer, finding them is slower.
        """
        call = f"{type(self).__name__}.reserve"
        self._engine.reserve(int_within(call, 0, INT64, num_rows=num_rows))

    def check_idle(self) -> None:
        """Raises BusyError while leases or a save are open, so that rows cannot be replaced."""
        self._engine.check_idle()

    def check_invariants(self) -> None:
        """Raises RecsdkError naming the first broken invariant. Reads the whole index."""
        self._engine.check_invariants()

    def __len__(self) -> int:
        """Number of visible keys."""
        return self._engine.size()

    def __contains__(self, key: object) -> bool:
        """True if the key has a visible row; for many keys use `map(keys, insert=False)`.

        An integer that does not fit into 64 bits, signed or unsigned, has none. Raises TypeError
        for what is no integer.
        """
        number = int_of(type(self).__name__, key=key)
        if not -INT64 <= number < UINT64:
            return False
        _, outcomes = self.map(np.array([number % UINT64], dtype=np.uint64), insert=False)
        return bool(outcomes[0] == Outcome.FOUND)


_FLOATS = ("evict_score", "evict_norm", "evict_place")


def type_of_metadata(name: str) -> Any:
    """The dtype of what eviction keeps under this name."""
    return np.float32 if name in _FLOATS else np.int64


def columns_of_words(names: Sequence[str], words: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What eviction keeps of n keys, (n,) by name, from the engine's words (n * W,)."""
    words_nw = words.reshape(-1, max(len(names), 1))
    columns: dict[str, NDArray[Any]] = {}
    for place, name in enumerate(names):
        words_n = words_nw[:, place]
        is_float = type_of_metadata(name) == np.float32
        bits_n: NDArray[Any] = words_n.astype(np.uint32) if is_float else words_n
        columns[name] = bits_n.copy().view(type_of_metadata(name))
    return columns


def step_of(owner: str, step: int | None) -> int | None:
    """The step of a lease as Python's int; TypeError or ValueError for what is none."""
    return None if step is None else int_within(owner, -INT64, INT64, step=step)


def now_of(owner: str, now: int | None) -> int | None:
    """The time that a call sets as Python's int; TypeError or ValueError for what is none."""
    return None if now is None else int_within(owner, NO_TIME + 1, INT64, now=now)


def times_of(times: Array | int | None, name: str = "times") -> Array | None:
    """Times, or counts, as the engine takes them: one for all as (1,)."""
    # Not by its shape, which a nested tensor has none of.
    if times is None or not hasattr(times, "__index__") or getattr(times, "ndim", 0) != 0:
        return times
    return np.array([int_within("Table", -INT64, INT64, **{name: times})], np.int64)
