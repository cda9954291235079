"""Keys leave a full table by a rule, whatever their order, the threads, or who has which groups.

`testing.Eviction` says the same in plain Python; the state machine of tests/stateful compares small
tables call by call, and what leases hide. Shape letter: N keys.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drifting import Batch, drifting
from evicting import RuledKeys
from hypothesis import example, given
from hypothesis import strategies as st
from kept import keys_of

from recsdk_core import CapacityError, Evict, Index, Outcome, Table
from recsdk_core.testing import ReferenceTable, Room
from recsdk_core.testing._clock import Clock

MAX_ROWS = 3000
RULES = [
    Evict.lru(),
    Evict.lru(by="time"),
    Evict.lfu(),
    Evict.lfu(half_life=2.5, min_age=5),
    Evict.score(),
    Evict.score(min_age=5),
]


def stream(rule: Evict, num_steps: int = 9) -> list[Batch]:
    return drifting(rule, num_steps, 1500)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_who_leaves_is_the_models_in_any_order_and_on_any_threads(rule: Evict) -> None:
    model = RuledKeys(rule, MAX_ROWS)
    tables = [Table(1, max_rows=MAX_ROWS, eviction=rule, num_threads=threads) for threads in (1, 3)]
    random = np.random.default_rng(1)
    num_left = num_refused = 0
    for step, (keys, more) in enumerate(stream(rule)):
        leaving, refused = model.call(keys.tolist(), more)
        erased = random.permutation(sorted(model.metas))[: 100 * (step % 2)]
        for key in erased.tolist():
            del model.metas[key]
        num_left += len(leaving)
        num_refused += len(refused)
        for table in tables:
            order = random.permutation(len(keys))
            shuffled = {name: values[order] for name, values in more.items()}
            _, outcomes = table.map(keys[order], insert=True, **shuffled)
            assert set(keys[order][outcomes == Outcome.REFUSED].tolist()) == refused
            table.erase(erased)
            assert keys_of(table) == model.metas.keys()
            assert table.stats().evicted == num_left
    for table in tables:
        table.check_invariants()
    assert num_left > 300
    assert num_refused > 0 or rule.min_age == 0


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_ranks_with_whole_groups_evict_as_one_table(rule: Evict, num_ranks: int) -> None:
    whole = Table(1, max_rows=MAX_ROWS, eviction=rule)
    num_groups = whole.eviction_groups
    assert num_groups == 64
    room = Room(MAX_ROWS)
    borders = [num_groups * rank // num_ranks for rank in range(num_ranks + 1)]
    ranks = [
        Table(1, max_rows=MAX_ROWS, eviction=rule, owned_groups=(begin, end))
        for begin, end in itertools.pairwise(borders)
    ]
    for keys, more in stream(rule):
        owners = np.searchsorted(borders, [room.group(key) for key in keys.tolist()], "right") - 1
        whole.map(keys, insert=True, **more)
        for rank, table in enumerate(ranks):
            is_own = owners == rank
            own = {name: values[is_own] for name, values in more.items()}
            table.map(keys[is_own], insert=True, **own)
    assert set().union(*map(keys_of, ranks)) == keys_of(whole)
    assert sum(table.stats().evicted for table in ranks) == whole.stats().evicted > 500


FALLING = [
    *RULES,
    Evict.show_click(alpha=0.3, beta=2.0, decay=0.9),
    Evict.show_click_totals(alpha=0.3, beta=2.0, decay=0.4),
    Evict.score().expiring(share=0.05, every=4),
]
"""Those of scores and times may place a key lower than before."""


@given(
    rule=st.sampled_from(FALLING),
    max_rows=st.sampled_from([64, 100, 300]),
    num_groups=st.sampled_from([1, 2]),
    erases=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(rule=Evict.score(), max_rows=128, num_groups=1, erases=False, seed=5)
@example(rule=Evict.lfu(), max_rows=128, num_groups=1, erases=True, seed=0)
def test_groups_too_large_to_order_whole_evict_as_the_model(
    rule: Evict, max_rows: int, num_groups: int, erases: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    config: dict[str, Any] = {"max_rows": max_rows, "eviction_groups": num_groups, "eviction": rule}
    table, model = Table(1, **config), ReferenceTable(1, **config)
    for step in range(100):
        count = int(random.integers(0, 20)) if step > 0 else max_rows
        keys = random.integers(0, 4 * max_rows, count)
        given = marks_of(rule, len(keys), random)
        _, outcomes = table.map(keys, insert=True, **given)
        assert outcomes.tolist() == model.map(keys, insert=True, **given)[1].tolist()
        if erases and step % 3 == 1:
            for each in (table, model):
                each.erase(keys[: len(keys) // 2])
                each.evict(max_rows=max(len(keys_of(each)) - 3, 0))
        table.check_invariants()
        assert keys_of(table) == keys_of(model)
        assert len(table) <= max_rows


def marks_of(rule: Evict, count: int, random: np.random.Generator) -> dict[str, Any]:
    """What so many keys bring, at random."""
    if rule.by == "time":
        return {"times": random.integers(0, 100, count)}
    if rule.needs_clicks:
        return {"clicks": random.integers(0, 3, count)}
    is_scored = rule.order == "score"
    return {"scores": random.normal(size=count).astype(np.float32)} if is_scored else {}


def test_many_keys_leave_at_once_on_all_threads() -> None:
    tables = [
        Table(1, max_rows=100_000, eviction=Evict.lru(), num_threads=threads, hash_seed=threads)
        for threads in (1, 5)
    ]
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 180_000)
    for begin in (0, 90_000):
        part = keys[begin : begin + 90_000]
        (rows, outcomes), (other_rows, other_outcomes) = (t.map(part, insert=True) for t in tables)
        has_row = outcomes <= Outcome.INSERTED
        np.testing.assert_array_equal(outcomes, other_outcomes)
        np.testing.assert_array_equal(rows[has_row], other_rows[has_row])
    assert keys_of(tables[0]) == keys_of(tables[1])
    assert tables[0].stats().evicted == tables[1].stats().evicted > 79_000
    for table in tables:
        table.check_invariants()


def test_an_evicted_row_stays_while_a_batch_uses_it() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru())
    first = np.array([1, 2])
    with table.lease() as lease:
        rows, _ = table.map(first, insert=True, lease=lease)
        later, _ = table.map(np.array([3, 4]), insert=True)
        assert set(rows.tolist()).isdisjoint(later.tolist())
    assert sorted(keys_of(table)) == [3, 4]
    again, _ = table.map(np.array([5]), insert=True)
    assert again[0] in rows


def test_readers_see_who_leaves_until_the_batch_is_done() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru())
    old = table.find_or_insert(np.array([1, 2]))
    with table.lease(1) as lease:
        table.find_or_insert(np.array([3, 4]), lease=lease)
        np.testing.assert_array_equal(table.lookup(np.array([1, 2])), old)
        assert (len(table), table.stats().evicted, 3 in table) == (2, 0, False)
    assert (keys_of(table), table.stats().evicted) == ({3, 4}, 2)
    assert table.stats().evicted_by_request == 0
    assert table.evict(max_rows=1) == table.stats().evicted_by_request == 1
    assert table.stats().evicted == 3


def test_batches_are_mapped_in_the_order_of_their_steps() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru())
    first, second = table.lease(1), table.lease(2)
    table.map(np.array([1, 2]), insert=True, lease=second)
    with pytest.raises(ValueError, match="a batch of step 1 is mapped after one of step 2"):
        table.map(np.array([3, 4]), insert=True, lease=first)
    first.release()
    second.release()
    assert keys_of(table) == {1, 2}
    table.check_invariants()


def test_a_returning_key_starts_from_its_initial_row() -> None:
    table = Table(2, max_rows=1, eviction=Evict.lfu())
    first = table.find_or_insert(np.array([1, 1, 1]))[:1]
    table.apply_gradients(np.array([1]), np.ones((1, 2), np.float32))
    table.find_or_insert(np.array([2]))
    np.testing.assert_array_equal(table.find_or_insert(np.array([1])), first)
    assert keys_of(table) == {1}


def test_evaluation_touches_nothing() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru())
    for key in (1, 2):
        table.find_or_insert(np.array([key]))
    table.lookup(np.array([1]))
    table.map(np.array([1]), insert=False)
    table.pool(np.array([1]), np.array([0, 1]))
    table.apply_gradients(np.array([1]), np.ones((1, 2), np.float32))
    table.find_or_insert(np.array([3]))
    assert keys_of(table) == {2, 3}


def test_young_keys_stay_and_others_are_refused() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru(min_age=3))
    table.find_or_insert(np.array([1, 2]))
    for _ in range(2):
        assert table.map(np.array([3]), insert=True)[1][0] == Outcome.REFUSED
    assert table.map(np.array([3]), insert=True)[1][0] == Outcome.INSERTED
    strict = Table(2, max_rows=2, eviction=Evict.lru(min_age=3), on_full="raise")
    strict.find_or_insert(np.array([1, 2]))
    with pytest.raises(CapacityError, match="is full: 2 of 2 rows are used"):
        strict.find_or_insert(np.array([3]))
    assert keys_of(strict) == {1, 2}
    strict.check_invariants()


@pytest.mark.parametrize("fraction", [0.1, 0.7, 0.9])
def test_a_fraction_is_what_is_written(fraction: float) -> None:
    table = Table(dim=1, max_rows=10, eviction=Evict.lru())
    table.find_or_insert(np.arange(10))
    assert table.evict(fraction=fraction) == round(10 * fraction)


def test_evicting_on_demand_leaves_each_group_its_part() -> None:
    table = Table(1, max_rows=MAX_ROWS, eviction=Evict.lfu())
    keys = np.arange(2 * MAX_ROWS)
    table.map(keys, insert=True)
    table.map(keys[::3].copy(), insert=True)
    before = len(table)
    assert table.evict(max_rows=MAX_ROWS // 2) == before - MAX_ROWS // 2
    room = Room(MAX_ROWS // 2, 64)
    counts = np.bincount([room.group(key) for key in keys_of(table)], minlength=64)
    assert counts.tolist() == [room.quota(group) for group in range(64)]
    assert table.evict(fraction=0.5) == 0
    assert table.evict(fraction=1.0) == MAX_ROWS // 2
    assert len(table) == 0
    table.check_invariants()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"order": "fifo"}, "order must be 'lru'"),
        ({"order": "lru", "by": "day"}, "by must be 'step'"),
        ({"order": "lfu", "by": "time"}, "by='time' is for lru"),
        ({"order": "lru", "half_life": 2.0}, "half_life is for lfu"),
        ({"order": "lfu", "half_life": 0.0}, "half_life must be a finite number above 0"),
        ({"order": "lfu", "half_life": float("inf")}, "half_life must be a finite"),
        ({"order": "lru", "min_age": -1}, "min_age must be at least 0"),
        ({"order": "lru", "min_age": 2**63}, "min_age must be at most"),
        ({"order": "lru", "min_age": True}, "min_age must be an int, got True"),
        ({"order": "lfu", "half_life": True}, "half_life must be a number, got True"),
        ({"order": "lfu", "half_life": 10**400}, "half_life is too large"),
    ],
)
def test_rules_that_make_no_sense(rule: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Evict(**rule)


def test_numbers_that_are_none_or_too_large() -> None:
    table = Table(2, max_rows=3, eviction=Evict.lru(by="time"))
    keys = np.array([1, 2])
    for call, kind, message in [
        (
            lambda: table.map(keys, insert=True, times=True),
            TypeError,
            "times must be an int, got True",
        ),
        (lambda: table.map(keys, insert=True, times=2**70), ValueError, "times must be at most"),
        (
            lambda: table.map(keys, insert=True, times=-(2**63) - 1),
            ValueError,
            "times must be at least",
        ),
        (lambda: table.upsert(keys, np.ones((2, 2), np.float32), times=2**63), ValueError, "times"),
        (lambda: setattr(table, "time", 2**63), ValueError, "time must be at most"),
        (lambda: table.evict(fraction=True), TypeError, "fraction must be a number, got True"),
        (lambda: table.evict(max_rows=True), TypeError, "max_rows must be an int, got True"),
        (lambda: table.evict(max_rows=2**63), ValueError, "max_rows must be at most"),
        (lambda: table.lease(True), TypeError, "step must be an int, got True"),
        (lambda: table.lease(2**63), ValueError, "step must be at most"),
    ]:
        with pytest.raises(kind, match=message):
            call()
    assert len(table) == 0
    table.map(keys, insert=True, times=np.int64(2**63 - 1))
    table.map(np.array([3, 4]), insert=True, times=-(2**63))
    assert keys_of(table) >= {3, 4}


def test_the_last_step_lasts() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru())
    with table.lease(2**63 - 1) as lease:
        table.map(np.array([1, 2]), insert=True, lease=lease)
    assert table.map(np.array([3]), insert=True)[1].tolist() == [Outcome.REFUSED]
    table.erase(np.array([1]))
    assert table.map(np.array([4, 5]), insert=True)[1].tolist().count(Outcome.INSERTED) == 1
    table.check_invariants()


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=8))
@example([-(2**63), 0, None])
def test_the_clock_counts_the_steps_between_any_two(steps: list[int | None]) -> None:
    index, model = Index(max_rows=100, eviction=Evict.lru()), Clock()
    of_leases = iter(sorted(step for step in steps if step is not None))
    for given_step in steps:
        step = None if given_step is None else next(of_leases)
        lease = None if step is None else index.lease(step)
        index.map(np.array([1]), insert=True, lease=lease)
        if lease is not None:
            lease.release()
        model.decided(model.step_of(step), step)
        assert index.clock.step == model.step


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="set max_rows too"):
        Table(2, eviction=Evict.lru())
    with pytest.raises(TypeError, match=r"eviction must be an Evict.*got 'lru'"):
        Table(2, max_rows=3, eviction="lru")  # type: ignore[arg-type]
    keys = np.array([1, 2])
    plain, by_time = Table(2, max_rows=3), Table(2, max_rows=3, eviction=Evict.lru(by="time"))
    scored = Table(2, max_rows=3, eviction=Evict.score())
    for call, message in [
        (lambda: plain.map(keys, insert=True, times=1), "times are given"),
        (lambda: plain.map(keys, insert=True, scores=np.ones(2, np.float32)), "scores are given"),
        (
            lambda: by_time.map(keys, insert=False, times=1),
            "times are given, and only calls that insert",
        ),
        (lambda: by_time.map(keys, insert=True), "the call brings none"),
        (
            lambda: by_time.map(keys, insert=True, times=np.arange(3)),
            "times must have one element per key, 2, got 3; or pass one for all",
        ),
        (
            lambda: scored.map(keys, insert=True, scores=np.ones(1, np.float32)),
            "scores must have one element per key, 2, got 1",
        ),
        (lambda: scored.upsert(keys, np.ones((2, 2), np.float32), times=4), "times are given"),
        (
            lambda: scored.find_or_insert(keys, scores=np.array([1, np.nan], np.float32)),
            "scores must be finite, got nan",
        ),
        (lambda: plain.evict(max_rows=1), "set eviction"),
        (lambda: scored.evict(), "one of fraction, max_rows and where"),
        (lambda: scored.evict(fraction=1.5), "fraction must be from 0 to 1"),
        (lambda: scored.evict(max_rows=-1), "max_rows must be at least 0"),
        (lambda: setattr(scored, "time", 3), "time is for eviction by time, got eviction="),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(plain) == len(by_time) == len(scored) == 0


def test_keys_without_times_need_a_time_once() -> None:
    table = Table(2, max_rows=9, eviction=Evict.lru(by="time").expiring(ttl=3, every=1))
    none = np.zeros(0, np.int64)
    for times in (None, none):
        assert table.find_or_insert(none, times=times).shape == (0, 2)
    table.find_or_insert(none, times=9)
    with pytest.raises(ValueError, match="pass times"):
        table.find_or_insert(np.array([2]))
    assert (len(table), table.time) == (0, None)
    table.find_or_insert(np.array([1]), times=5)
    table.find_or_insert(np.array([2]))
    assert (table.explain(2).columns["time"], table.time) == (5, 5)


def test_keys_that_come_back_soon_are_counted_and_those_erased_are_not() -> None:
    table = Table(2, max_rows=2, eviction=Evict.lru().with_churn(2))
    for key in (1, 2, 3, 4):  # 1 leaves at step 3, 2 at step 4
        table.map(np.array([key]), insert=True)
    table.erase(np.array([2, 3]))
    table.map(np.array([1, 2]), insert=True)  # step 5; 2 was forgotten
    assert (table.stats().returned, table.stats().churn_lost) == (1, 0)
    with table.lease(step=9) as lease:
        table.map(np.array([4]), insert=True, lease=lease)
        assert table.stats().returned == 1  # not seen by readers yet
    assert table.stats().returned == 2
    for _ in range(3):
        table.map(np.array([4]), insert=True)
    table.map(np.array([1, 2]), insert=True)  # one of them left four steps ago
    assert table.stats().returned == 2


def test_a_loaded_table_has_forgotten_who_left(tmp_path: Path) -> None:
    table = Table(2, max_rows=1, eviction=Evict.lru().with_churn(9, max_records=1))
    for key in (1, 2, 3):
        table.map(np.array([key]), insert=True)
    assert table.stats().churn_lost == 1
    table.save(tmp_path / "saved")
    table.load(tmp_path / "saved")
    table.map(np.array([2]), insert=True)
    assert (table.stats().returned, table.stats().churn_lost) == (0, 1)
    table.map(np.array([3]), insert=True)
    assert table.stats().returned == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"churn_steps": 0}, "churn_steps must be at least 1"),
        ({"churn_steps": 1, "churn_records": 0}, "churn_records must be at least 1"),
        ({"churn_records": 5}, "churn_records is given, and churn_steps is not"),
    ],
)
def test_wrong_settings_of_churn_are_named(more: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Evict(order="lru", **more)


def test_every_group_has_a_record_of_who_left() -> None:
    rule = Evict.lru().with_churn(5, max_records=7)
    with pytest.raises(
        ValueError, match="at least the number of groups of keys, 8, got .*; pass as many"
    ):
        Table(2, max_rows=20, eviction_groups=8, eviction=rule)
