"""Table with admission against ReferenceTable: each key that is let in or kept out is compared.

The rules of TableMachine, and more that bring keys and counts, with eviction and without.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from quick_folders import quick_folder
from recsdk_core import Admit, BusyError, CapacityError, Evict, Table, init, optim
from recsdk_core.testing import ReferenceTable
from recsdk_core.testing._room import key_of_hash
from table_machine import DEFAULTS, IDS, NONFINITE, TableMachine, assert_same

MANY = np.arange(160) * 7
# Of two virtual shards, so that they share counters of a sketch.
CLOSE = np.array([key_of_hash(i << 16 | i % 2) for i in range(96)])
SKETCH = 8 * 65_536  # one column for each virtual shard: all its keys share their counters
RULES = [
    Admit.count(2),
    Admit.count(4, max_records=8),
    Admit.count(3, max_records=40),
    Admit.probability(0.3),
    Admit.count(3, max_records=16) | Admit.probability(0.2),
    Admit.count(2) & (Admit.probability(0.5) | Admit.count(5)),
    Admit.show_click(alpha=0.1, beta=0.2, threshold=0.6, max_records=30),
    Admit.show_click(alpha=0.0, beta=1.0, threshold=2.0) | Admit.count(3),
    Admit.show_click_of_step(alpha=0.5, beta=1.0, threshold=2.0),
    Admit.show_click_of_step(beta=0.5, threshold=3.0) | Admit.count(3, max_records=16),
    Admit.show_click_of_step(threshold=2.0) & Admit.count_sketch(3, max_bytes=SKETCH),
    Admit.count_sketch(3, max_bytes=SKETCH),
    Admit.count_sketch(5, max_bytes=3 * SKETCH) & Admit.probability(0.6)
    | Admit.count_sketch(7, max_bytes=3 * SKETCH),
]
EVICTIONS = [
    None,
    Evict.lru(),
    Evict.lfu(half_life=3.0),
    Evict.show_click(alpha=1.0, beta=0.5, decay=0.5),
    Evict.show_click_totals(alpha=1.0, beta=0.5, decay=0.5),
]
ROOMS = [(None, None), (5, None), (20, 8), (40, 2), (0, None)]


class AdmissionMachine(TableMachine):
    """A table that most new keys are kept out of."""

    MOST_KEYS = 4000  # all counts are compared after each call

    @initialize(
        admission=st.sampled_from(RULES),
        eviction=st.sampled_from(EVICTIONS),
        room=st.sampled_from(ROOMS),
        optimizer=st.sampled_from([optim.SGD(lr=0.5), optim.Adam(lr=0.1)]),
        on_full=st.sampled_from(["refuse", "refuse", "raise"]),
        default=st.sampled_from(DEFAULTS),
        on_nonfinite=st.sampled_from(NONFINITE),
        seed=st.integers(0, 2**64 - 1),
        hash_seed=st.integers(0, 2**64 - 1),
        num_threads=st.sampled_from([1, 2]),
    )
    def make_tables(  # type: ignore[override]
        self,
        eviction: Evict | None,
        room: tuple[int | None, int | None],
        hash_seed: int,
        num_threads: int,
        **config: Any,
    ) -> None:
        config = {"initializer": init.Uniform(low=-1.0, high=1.0), **config}
        config["max_rows"], config["eviction_groups"] = room
        config["eviction"] = None if room[0] is None else eviction
        self.table = Table(2, hash_seed=hash_seed, num_threads=num_threads, **config)
        self.model = ReferenceTable(2, **config)
        self.dim = 2
        self.last_step = 0
        self.taken: list[Any] = []
        self.readers = None
        self.max_rows = room[0]

    def num_known(self) -> int:
        assert self.model._admission is not None
        return len(self.model) + len(self.model._admission.records)

    def takes_clicks(self) -> bool:
        rules = (self.table.eviction, self.table.admission)
        return any(rule is not None and rule.needs_clicks for rule in rules)

    @rule(data=st.data(), ids=IDS)
    def find_or_insert_with_counts(self, data: st.DataObject, ids: Any) -> None:
        def drawn(least: int) -> Any:
            numbers = st.lists(st.integers(least, 4), min_size=len(ids), max_size=len(ids))
            return np.array(data.draw(numbers), np.int64)

        more = {"clicks": drawn(0)} if self.takes_clicks() else {}
        self.both("find_or_insert", ids, counts=drawn(1), return_outcomes=True, **more)

    @rule(
        keys=st.sampled_from([MANY, CLOSE]),
        start=st.integers(0, 100),
        count=st.integers(1, 60),
        times=st.sampled_from([1, 2]),
    )
    def find_or_insert_many(self, keys: Any, start: int, count: int, times: int) -> None:
        ids = keys[start % len(keys) :][:count]
        more = {"clicks": times - 1} if self.takes_clicks() else {}
        self.both("find_or_insert", ids, counts=times, return_outcomes=True, **more)

    @rule(
        pair=TableMachine.leases,
        keys=st.sampled_from([MANY, CLOSE]),
        start=st.integers(0, 60),
        times=st.integers(1, 3),
    )
    def map_many_under_lease(self, pair: Any, keys: Any, start: int, times: int) -> None:
        lease, model_lease = pair
        if model_lease.is_released:
            return
        ids = keys[start : start + 12]
        more = {"counts": times} | ({"clicks": times - 1} if self.takes_clicks() else {})
        try:
            rows, outcomes = self.model.map(ids, insert=True, lease=model_lease, **more)
        except (BusyError, CapacityError, ValueError) as error:
            with pytest.raises(type(error)):
                self.table.map(ids, insert=True, lease=lease, **more)
            return
        actual, actual_outcomes = self.table.map(ids, insert=True, lease=lease, **more)
        assert_same(actual_outcomes, outcomes)
        assert_same(actual[outcomes <= 1], rows[outcomes <= 1])

    # What left meanwhile has left for who reads it.
    @precondition(
        lambda self: not self.model._leases and self.readers is None and self.save is None
    )
    @rule(ids=IDS)
    def save_and_load(self, ids: Any) -> None:
        """What happens between the two is undone."""
        with quick_folder() as folder:
            self.table.save(folder + "/saved")
            with contextlib.suppress(CapacityError):
                self.table.find_or_insert(ids, **({"clicks": 1} if self.takes_clicks() else {}))
            stats = self.table.stats()
            self.table.load(folder + "/saved")
        self.model.renumber()
        self.model._num_evicted = stats.evicted
        self.model._counts = dict(stats.outcomes)
        assert self.model._admission is not None
        self.model._admission.loaded()
        self.model._admission.num_lost = stats.records_lost

    @precondition(lambda self: not self.model._steps and self.save is None)
    @rule(ids=IDS)
    def save_a_delta(self, ids: Any) -> None:
        """A table that loads the chain has the same rows and counts."""
        with quick_folder() as folder:
            self.table.save(folder + "/0")
            more = {"clicks": 1} if self.takes_clicks() else {}
            self.both("find_or_insert", ids, return_outcomes=True, **more)
            self.table.save_delta(folder + "/1")
            other = self.table.empty_copy(num_threads=1)
            other.load(folder + "/1")
        assert counts_of(other) == counts_of(self.table)
        keys, others = (
            sorted(key for batch in table.export() for key in batch.keys.tolist())
            for table in (self.table, other)
        )
        assert keys == others

    @invariant()
    def has_the_same_keys_and_counts(self) -> None:
        if not hasattr(self, "table"):
            return
        found = [batch.keys.tolist() for batch in self.table.export()]
        assert found == [batch.keys.tolist() for batch in self.model.export()]
        expected = self.model.stats()
        for name in ("evicted", "admission_records", "records_lost", "outcomes"):
            assert getattr(self.table.stats(), name) == getattr(expected, name), name
        if self.save is not None:
            return  # a table has one cut at a time
        visible = self.model.visible_records()
        kept = [(key, visible[key]) for key in sorted(visible)]
        wanted = [(key, found.count, found.step, found.clicks) for key, found in kept]
        assert counts_of(self.table) == wanted


def counts_of(table: Table) -> list[tuple[int, ...]]:
    """Keys without a row, how often they were seen, in which step last, and their clicks."""
    cut = table._engine.cut(False, None)
    parts = [part.tolist() for part in cut.admission or ()]
    cut.finish(False)
    return list(zip(*parts, strict=True))


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=2 * settings().max_examples)
