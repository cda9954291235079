"""Keys expire by what the step before left: whatever their order, threads, ranks, or saves.

`testing.Eviction` says the same in plain Python; the state machine of tests/stateful compares small
tables call by call, and what leases hide. Shape letter: N keys.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evicting import RuledKeys
from kept import keys_of

from recsdk_core import Evict, Index, LeaveCause, Outcome, Table
from recsdk_core.checkpoint import compact
from recsdk_core.eviction import EvictionClock
from recsdk_core.testing import ReferenceTable, Room

MAX_ROWS = 3000
RULES = [
    Evict.lru().expiring(ttl=2, every=1),
    Evict.lru(by="time", min_age=2).expiring(ttl=9, rare_ttl=3, rare_count=3, every=2),
    Evict.lfu(half_life=2.5).expiring(rare_ttl=2, rare_count=2, every=3),
    Evict.score().expiring(ttl=4, rare_ttl=1, rare_count=2, every=2),
    Evict.lfu(half_life=2.5, min_age=1).expiring(share=0.1, every=3),
    Evict.lru(by="time").expiring(ttl=9, share=0.02, every=1),
    Evict.show_click(decay=0.5).expiring(share=0.3, every=4),
    Evict.show_click_totals(decay=0.5).expiring(share=0.3, every=4),
]


class Model(RuledKeys):
    """Those of a table, and which of them expired."""

    def __init__(self, rule: Evict) -> None:
        super().__init__(rule, MAX_ROWS)
        self.left: dict[LeaveCause, set[int]] = {}
        self.num_expired = self.num_evicted = 0

    def call_at(self, time: int, keys: Any) -> set[int]:
        """A call without a step; returns the keys refused."""
        self.eviction.time = time
        leaving, refused = self.call(keys.tolist(), {"times": time})
        expired = self.eviction.expiring
        self.left = {LeaveCause.EXPIRED: expired, LeaveCause.EVICTED: leaving - expired}
        self.num_expired += len(expired)
        self.num_evicted += len(leaving - expired)
        return refused


def stream(num_steps: int) -> list[Any]:
    """Power-law keys whose popular ones drift; one step in five brings none."""
    random = np.random.default_rng(5)
    return [
        (random.zipf(1.2, 0 if step % 5 == 4 else 1500) % 20_000 + 97 * step) * 0x9E3779B97F4A7C1
        for step in range(num_steps)
    ]


def set_time(table: Table, time: int) -> None:
    if table.eviction is not None and table.eviction.by == "time":
        table.time = time


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_who_expires_is_the_models_on_any_threads_ranks_and_after_any_save(
    rule: Evict, tmp_path: Path
) -> None:
    model = Model(rule)
    num_groups = 64
    borders = [num_groups * rank // 3 for rank in range(4)]

    def ranks_of() -> list[Table]:
        return [
            Table(1, max_rows=MAX_ROWS, eviction=rule, owned_groups=(begin, end))
            for begin, end in itertools.pairwise(borders)
        ]

    def empty(threads: int = 1) -> Table:
        return Table(1, max_rows=MAX_ROWS, eviction=rule, num_threads=threads)

    table, threaded, ranks = empty(), empty(3), ranks_of()
    random = np.random.default_rng(1)
    leavers = table.leavers(max_rows=100_000)
    room = Room(MAX_ROWS)
    for step, keys in enumerate(stream(16)):
        refused = model.call_at(2 * step, keys)
        owners = np.searchsorted(borders, [room.group(key) for key in keys.tolist()], "right") - 1
        for each in (table, threaded, *ranks):
            set_time(each, 2 * step)
        for rank, each in enumerate(ranks):
            each.map(keys[owners == rank], insert=True)
        order = random.permutation(len(keys))
        _, outcomes = table.map(keys[order], insert=True)
        assert set(keys[order][outcomes == Outcome.REFUSED].tolist()) == refused
        threaded.map(keys, insert=True)
        assert keys_of(table) == keys_of(threaded) == keys_of(*ranks) == model.metas.keys()
        batch = leavers.read()
        for cause, expected in model.left.items():
            assert set(batch.keys[batch.causes == cause].tolist()) == expected
        if step == 5:
            table.save(tmp_path / "full")
        if step == 8:  # goes on where others stood, and as other numbers of ranks
            table.save_delta(tmp_path / "delta")
            compact(tmp_path / "delta", tmp_path / "merged")
            merged = empty()
            merged.load(tmp_path / "merged")
            assert (keys_of(merged), merged.time) == (keys_of(table), table.time)
            threaded.load(tmp_path / "delta")
        if step == 11:
            threaded = copy.deepcopy(table)
        if step == 13:
            table.save(tmp_path / "last")
            table.load(tmp_path / "last")
    stats = table.stats()
    assert (stats.expired, stats.evicted) == (model.num_expired, model.num_evicted)
    assert stats.expired > 300
    for each in (table, threaded, *ranks):
        each.check_invariants()


def test_batches_in_flight_hide_who_expires_and_train_its_row() -> None:
    rule = Evict.lru().expiring(ttl=2, every=1)
    tables = [Table(2, eviction=rule), Table(2, eviction=rule)]
    for table in tables:
        table.find_or_insert(np.array([1, 2]))
    pipelined, plain = tables
    leases = []
    with pipelined.leavers() as leavers:
        for step, keys in enumerate(([3], [4], [2], [5]), 2):
            leases.append(pipelined.lease(step))
            pipelined.map(np.array(keys), insert=True, lease=leases[-1])
            plain.map(np.array(keys), insert=True)
        assert (keys_of(pipelined), pipelined.stats().expired) == ({1, 2}, 0)
        pipelined.apply_gradients(np.array([1]), np.full((1, 2), 100.0, np.float32))
        row = pipelined.lookup(np.array([1]))
        for lease in leases:
            lease.release()
        batch = leavers.read()
    assert batch.keys.tolist()[0] == 1
    assert set(batch.causes.tolist()) == {LeaveCause.EXPIRED}
    np.testing.assert_array_equal(batch.weights[:1], row)
    assert keys_of(pipelined) == keys_of(plain)
    assert pipelined.stats().expired == plain.stats().expired == len(batch.keys)


def test_a_call_that_fails_expires_nobody() -> None:
    rule = Evict.lru().expiring(ttl=1, every=2)
    table = Table(2, max_rows=3, eviction_groups=1, eviction=rule, on_full="raise")
    for key in (1, 2, 3):
        table.find_or_insert(np.array([key]))
    with pytest.raises(RuntimeError, match="is full"):
        table.find_or_insert(np.arange(3, 9))
    assert (keys_of(table), table.stats().expired) == ({1, 2, 3}, 0)
    table.check_invariants()
    table.find_or_insert(np.array([4]))
    assert (keys_of(table), table.stats().expired, table.stats().evicted) == ({3, 4}, 2, 0)
    table.check_invariants()


@pytest.mark.parametrize("others", [[], [8]])
def test_a_call_that_brings_the_time_expires_keys_by_it_alone(others: list[int]) -> None:
    """Of a table over ranks one may have a later key, and others none: all go by the same time."""
    table = Table(1, eviction=Evict.lru(by="time").expiring(ttl=5, every=1))
    keys, times = np.array([7, *others]), np.array([10, *[15] * len(others)])
    table.map(keys, insert=True, times=times, now=15)
    table.map(np.array([9]), insert=True, now=14)
    assert keys_of(table) == {7, 9, *others}
    table.map(np.array([6]), insert=True, now=16)
    assert keys_of(table) == {6, 9, *others}


def test_the_time_is_what_was_set_last_or_has_come_since(tmp_path: Path) -> None:
    """Not the latest of keys: those may leave, and be later than a time that was set back."""
    table = Table(1, eviction=Evict.lru(by="time").expiring(ttl=5, every=100))
    assert table.time is None
    table.map(np.array([7, 8, 9]), insert=True, times=np.array([10, 20, 18]))
    assert table.time == 20
    table.erase(np.array([8]))
    assert (table.time, table.explain(7).has_expired) == (20, True)
    table.time = 14
    table.map(np.array([6]), insert=True, times=3)
    table.save(tmp_path / "saved")
    loaded = Table(1, eviction=table.eviction)
    loaded.load(tmp_path / "saved")
    for each in (table, loaded):
        assert (each.time, each.explain(7).has_expired, each.explain(6).has_expired) == (
            14,
            False,
            True,
        )
        assert each.would_evict(where="step < 0")[LeaveCause.EXPIRED] == each.expire() == 1
        assert keys_of(each) == {7, 9}


def test_keys_of_unknown_time_move_no_clock_and_do_not_expire(tmp_path: Path) -> None:
    unknown = -(2**63)
    rule = Evict.lru(by="time").expiring(ttl=5, every=1)
    table, model = Table(1, eviction=rule), ReferenceTable(1, eviction=rule)
    for each in (table, model):
        each.map(np.array([1, 2]), insert=True, times=unknown)
        assert each.time is None
        with pytest.raises(ValueError, match="brings none"):
            each.map(np.array([3]), insert=True)
        each.map(np.array([3, 4]), insert=True, times=np.array([unknown, 10]))
        assert each.time == 10
        each.map(np.array([4]), insert=True, times=unknown)
        assert (each.time, each.expire()) == (10, 0)
        with pytest.raises(ValueError, match="now"):
            each.map(np.array([5]), insert=True, now=unknown)
        each.map(np.array([5]), insert=True, now=16)
        assert (len(each), each.time) == (4, 16)
    assert keys_of(table) == {1, 2, 3, 5}
    with pytest.raises(ValueError, match="time must be at least -9223372036854775807"):
        table.time = unknown
    table.save(tmp_path / "saved")
    loaded = Table(1, eviction=rule)
    loaded.load(tmp_path / "saved")
    assert (keys_of(loaded), loaded.time, loaded.expire()) == ({1, 2, 3, 5}, 16, 0)


def test_a_clock_without_a_time_has_the_latest_of_the_keys_that_are_assigned() -> None:
    rule = Evict.lru(by="time").expiring(ttl=5, every=100)
    index = Index(eviction=rule)
    index.map(np.array([7, 8]), insert=True, times=np.array([10, 20]))
    index.time = 3
    _, rows = index.keys_and_rows()
    for clock, expected in ((index.clock, 3), (EvictionClock(step=1), 20)):
        other = Index(eviction=rule)
        other.assign(np.array([7, 8]), metadata=index.metadata(rows), clock=clock)
        assert (other.time, other.expire()) == (expected, int(expected == 20))


def test_without_a_limit_and_on_demand() -> None:
    table = Table(2, eviction=Evict.lfu().expiring(ttl=3, rare_ttl=2, rare_count=2))
    table.find_or_insert(np.array([1, 2, 2]))
    for _ in range(2):
        table.find_or_insert(np.array([3]))
    counts = {LeaveCause.EVICTED: 1, LeaveCause.EXPIRED: 1}
    assert table.would_evict(where="count == 1 and idle >= 2") == counts
    assert table.expire() == 1
    assert keys_of(table) == {2, 3}
    assert table.expire() == 0
    with pytest.raises(ValueError, match="fraction is of max_rows, and there is no limit"):
        table.evict(fraction=0.5)
    assert table.evict(max_rows=1) == 1
    assert (table.stats().expired, table.stats().evicted) == (1, 1)
    with pytest.raises(ValueError, match="set a ttl or a share of eviction"):
        Table(2, max_rows=3, eviction=Evict.lru()).expire()


def test_a_share_leaves_in_the_order_of_its_rows() -> None:
    """Row numbers are given anew in that order, whatever the rule's is."""
    rule = Evict.lru().expiring(share=0.3, every=2)
    table = Table(dim=1, max_rows=20, eviction_groups=1, eviction=rule)
    leavers = table.leavers()
    keys = np.arange(17) * 7
    table.find_or_insert(keys)
    table.find_or_insert(keys[:1])
    left = leavers.read().keys
    assert left.tolist() == sorted(left)
    assert len(left) == 5
    assert [key in table for key in keys.tolist()] == [key not in left for key in keys.tolist()]


def test_a_part_of_all_keys_leaves_at_each_look() -> None:
    table = Table(dim=1, eviction=Evict.show_click(beta=2.0).expiring(share=0.25, every=2))
    keys = np.arange(10)
    table.find_or_insert(keys, clicks=keys % 5)
    table.find_or_insert(np.array([0]), clicks=0)  # step 2: of 10 keys 2, but 0 comes
    assert [key for key in range(10) if key not in table] == [5]
    found = table.would_evict(where="step < 0")
    assert found == {LeaveCause.EVICTED: 0, LeaveCause.EXPIRED: 2}
    assert table.expire() == 2
    assert 0 not in table  # two shows are worth less than a show and a click
    assert [table.expire() for _ in range(8)] == [1] * 7 + [0]  # one key at least
    assert table.stats().expired == 10


def test_keys_without_metadata_begin_when_they_are_loaded(tmp_path: Path) -> None:
    plain = Table(2)
    plain.find_or_insert(np.array([1, 2]))
    plain.save(tmp_path / "plain")
    for rule, num_left in ((Evict.lru(), 2), (Evict.lru(by="time"), 0)):
        table = Table(2, eviction=rule.expiring(ttl=3, every=1))
        table.load(tmp_path / "plain")
        for step in range(1, 6):
            set_time(table, 10 * step)
            assert len(keys_of(table) & {1, 2}) == 2 or step > 3
            table.find_or_insert(np.array([9]))
        assert table.stats().expired == num_left
    index = Index(eviction=Evict.lru().expiring(ttl=1, every=1))
    index.assign(np.array([1, 2]))
    for _ in range(3):
        index.map(np.array([2]), insert=True)
    assert (1 in index, 2 in index) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ttl": 0}, "ttl must be at least 1"),
        ({"ttl": True}, "ttl must be an int, got True"),
        ({"rare_ttl": 3}, "rare_ttl and rare_count belong together"),
        ({"rare_count": 3}, "rare_ttl and rare_count belong together"),
        ({"ttl": 3, "rare_ttl": 3, "rare_count": 2}, "rare_ttl must be below ttl, got 3 and 3"),
        ({"ttl": 3, "rare_ttl": 2, "rare_count": 1}, "rare_count must be at least 2"),
        ({"share": 0.0}, "share must be above 0, up to 1, got 0.0"),
        ({"share": 1.5}, "share must be above 0, up to 1, got 1.5"),
        ({"every": 3}, "expire_every is given, and no key expires; set ttl or share"),
        ({"ttl": 3, "every": 0}, "expire_every must be at least 1"),
    ],
)
def test_rules_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Evict.lru().expiring(**arguments)
    with pytest.raises(ValueError, match="give ttl, rare_ttl with rare_count, or share; got none"):
        Evict.lru().expiring()
    with pytest.raises(ValueError, match=r"expires keys already, .*ttl=3.*; give all in one call"):
        Evict.lru().expiring(ttl=3).expiring(share=0.5)
    with pytest.raises(ValueError, match="set max_rows too, or a ttl"):
        Table(2, eviction=Evict.lru())
