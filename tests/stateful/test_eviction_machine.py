"""Table with eviction against ReferenceTable: each key that leaves or finds no room is compared.

The rules of TableMachine, and more that bring keys, times and scores.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from quick_folders import quick_folder
from recsdk_core import BusyError, CapacityError, Evict, Table, init, optim
from recsdk_core.testing import ReferenceTable
from recsdk_core.testing.strategies import predicates
from table_machine import DEFAULTS, IDS, NONFINITE, TableMachine, assert_same

RULES = [
    Evict.lru(),
    Evict.lru(by="time"),
    Evict.lfu(),
    Evict.lfu(half_life=3.0),
    Evict.score(),
    Evict.show_click(alpha=0.5, beta=2.0, decay=0.75),
    Evict.show_click(alpha=0.0, beta=1.0, decay=0.5),
    Evict.show_click(alpha=1.0, beta=0.0),
    Evict.show_click_totals(alpha=0.5, beta=2.0, decay=0.75),
    Evict.show_click_totals(alpha=1.0, beta=0.5, decay=0.125),
    Evict.low_norm(every=1),
    Evict.low_norm(every=3),
    Evict.low_norm(every=2, below=0.5),
    Evict.function(lambda step, count: 2 * count + step / 3, every=2),
    Evict.function(lambda now, time, score: score - (now - time) % 5, every=1),
]
ROOMS = [(5, None), (20, None), (20, 8), (40, 2), (None, None), (0, None)]
EXPIRIES: list[dict[str, int]] = [
    {},
    {},
    {"ttl": 3, "every": 1},
    {"ttl": 5, "rare_ttl": 2, "rare_count": 2, "every": 2},
    {"rare_ttl": 1, "rare_count": 3, "every": 3},
    {"share": 0.3, "every": 2},
    {"ttl": 5, "share": 0.2, "every": 1},
]
CHURNS: list[tuple[int, int | None] | None] = [None, (3, None), (8, 8), (100, 12)]
KEPT = ("evicted", "expired", "returned", "churn_lost", "outcomes")


class EvictionMachine(TableMachine):
    """A table that is nearly always full."""

    @initialize(
        eviction=st.sampled_from(RULES),
        min_age=st.sampled_from([0, 0, 2]),
        expiry=st.sampled_from(EXPIRIES),
        churn=st.sampled_from(CHURNS),
        room=st.sampled_from(ROOMS),
        optimizer=st.sampled_from([optim.SGD(lr=0.5), optim.Adam(lr=0.1)]),
        on_full=st.sampled_from(["refuse", "refuse", "raise"]),
        default=st.sampled_from(DEFAULTS),
        on_nonfinite=st.sampled_from(NONFINITE),
        hash_seed=st.integers(0, 2**64 - 1),
        num_threads=st.sampled_from([1, 2]),
        is_read=st.booleans(),
    )
    def make_tables(  # type: ignore[override]
        self,
        eviction: Evict,
        min_age: int,
        expiry: dict[str, int],
        churn: tuple[int, int | None] | None,
        room: tuple[int | None, int | None],
        hash_seed: int,
        num_threads: int,
        is_read: bool,
        **config: Any,
    ) -> None:
        rule = replace(eviction, min_age=min_age)
        self.rule = rule.expiring(**expiry) if expiry else rule
        if churn is not None:
            self.rule = self.rule.with_churn(churn[0], max_records=churn[1])
        room = room if self.rule.expires or room[0] is not None else ROOMS[0]
        config = {"seed": 3, "initializer": init.Uniform(low=-1.0, high=1.0), **config}
        config["max_rows"], config["eviction_groups"] = room
        self.table = Table(
            2, eviction=self.rule, hash_seed=hash_seed, num_threads=num_threads, **config
        )
        self.model = ReferenceTable(2, eviction=self.rule, **config)
        self.dim = 2
        self.last_step = 0
        self.taken: list[Any] = []
        self.readers = None
        if is_read:
            self.begin_to_read_leavers("count")
        self.max_rows = room[0] or 60
        self.set_time(0)

    @rule(time=st.integers(-3, 10))
    def set_time(self, time: int) -> None:
        if self.rule.by == "time":
            self.table.time = self.model.time = time

    @property
    def takes_scores(self) -> bool:
        return self.rule.order == "score" or "score" in self.rule.columns

    def data_for(self, data: st.DataObject, count: int) -> dict[str, Any]:
        """What so many keys bring, where the rule takes it."""
        found: dict[str, Any] = {}
        if self.rule.by == "time":
            if data.draw(st.booleans()):
                time = st.integers(-5, 10) | st.just(-(2**63))
                times = st.lists(time, min_size=count, max_size=count)
                found["times"] = np.array(data.draw(times), np.int64)
            found["now"] = data.draw(st.none() | st.integers(-3, 10))
        if self.rule.takes_clicks:
            clicks = st.lists(st.integers(0, 3), min_size=count, max_size=count)
            found["clicks"] = np.array(data.draw(clicks), np.int64)
            if data.draw(st.booleans()):
                found["counts"] = data.draw(st.integers(1, 3))
        if self.takes_scores and data.draw(st.booleans()):
            scores = st.lists(st.integers(-4, 4), min_size=count, max_size=count)
            found["scores"] = np.array(data.draw(scores), np.float32) / np.float32(4)
        return found

    @rule(data=st.data(), ids=IDS)
    def find_or_insert_with_data(self, data: st.DataObject, ids: Any) -> None:
        self.both("find_or_insert", ids, return_outcomes=True, **self.data_for(data, len(ids)))

    @rule(data=st.data(), start=st.integers(0, 100), count=st.integers(1, 60))
    def find_or_insert_many(self, data: st.DataObject, start: int, count: int) -> None:
        ids = np.arange(start, start + count) * 7
        self.both("find_or_insert", ids, return_outcomes=True, **self.data_for(data, count))

    @rule(data=st.data(), pair=TableMachine.leases, start=st.integers(0, 60))
    def map_many_under_lease(self, data: st.DataObject, pair: Any, start: int) -> None:
        lease, model_lease = pair
        if model_lease.is_released:
            return
        ids = np.arange(start, start + 12) * 7
        more = self.data_for(data, 12)
        try:
            expected_rows, expected = self.model.map(ids, insert=True, lease=model_lease, **more)
        except (BusyError, CapacityError, ValueError) as error:
            with pytest.raises(type(error)):
                self.table.map(ids, insert=True, lease=lease, **more)
            return
        rows, outcomes = self.table.map(ids, insert=True, lease=lease, **more)
        assert_same(outcomes, expected)
        assert_same(rows[outcomes <= 1], expected_rows[outcomes <= 1])

    @rule(max_rows=st.integers(0, 40))
    def evict(self, max_rows: int) -> None:
        self.both("evict", max_rows=max_rows)

    @precondition(lambda self: self.table.max_rows is not None)
    @rule(fraction=st.sampled_from([0.0, 0.25, 0.5]))
    def evict_a_fraction(self, fraction: float) -> None:
        self.both("evict", fraction=fraction)

    @precondition(lambda self: self.rule.expires)
    @rule()
    def expire(self) -> None:
        self.both("expire")

    @rule(data=st.data())
    def evict_where(self, data: st.DataObject) -> None:
        names = ["step", "idle"]
        names += ["time"] if self.rule.by == "time" else []
        is_counted = self.rule.order == "lfu" or self.rule.rare_count is not None
        is_counted |= "count" in self.rule.columns
        names += ["count"] if is_counted else []
        names += ["score"] if self.takes_scores or self.rule.takes_clicks else []
        names += {"low_norm": ["norm"], "function": ["place"]}.get(self.rule.order, [])
        names += ["age"] if self.rule.min_age else []
        text = data.draw(predicates(names))
        self.both("would_evict", where=text)
        self.both("evict", where=text)

    @rule(max_rows=st.integers(0, 40))
    def would_evict(self, max_rows: int) -> None:
        self.both("would_evict", max_rows=max_rows)

    @precondition(
        lambda self: not self.model._leases and self.readers is None and self.save is None
    )
    @rule(ids=IDS)
    def save_and_load(self, ids: Any) -> None:
        """What happens between the two is undone."""
        with quick_folder() as folder:
            self.table.save(folder + "/saved")
            time = self.model.time
            with contextlib.suppress(CapacityError):
                more = {"times": 11} if self.rule.by == "time" else {}
                self.table.map(
                    ids, insert=True, **more, **({"clicks": 1} if self.rule.takes_clicks else {})
                )
            counts = {name: getattr(self.table.stats(), name) for name in KEPT}
            self.table.load(folder + "/saved")
        assert self.table.time == time
        self.model.renumber()
        self.model._num_evicted, self.model._num_expired = counts["evicted"], counts["expired"]
        self.model._num_returned = counts["returned"]
        assert self.model._eviction is not None
        self.model._eviction.churn_lost = counts["churn_lost"]
        self.model._counts = dict(counts["outcomes"])

    @invariant()
    def has_the_same_keys(self) -> None:
        if hasattr(self, "table"):
            found = [batch.keys.tolist() for batch in self.table.export()]
            assert found == [batch.keys.tolist() for batch in self.model.export()]
            stats, expected = self.table.stats(), self.model.stats()
            for name in KEPT:
                assert getattr(stats, name) == getattr(expected, name), name
            assert self.table.time == (self.model.time if self.rule.by == "time" else None)


TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = settings(max_examples=2 * settings().max_examples)
