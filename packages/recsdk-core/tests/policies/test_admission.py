"""Which new keys get a row: by count, by chance, by both; what happens at the limit of counts.

Shape letter: N keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kept import keys_of
from numpy.typing import NDArray

from recsdk_core import Admit, CapacityError, Default, Evict, Outcome, Table
from recsdk_core.testing._room import key_hash

NOT, NEW, FOUND, REFUSED = (
    Outcome.NOT_ADMITTED,
    Outcome.INSERTED,
    Outcome.FOUND,
    Outcome.REFUSED,
)


def outcomes_of(table: Table, keys: Any, **more: Any) -> list[int]:
    found: list[int] = table.map(np.array(keys), insert=True, **more)[1].tolist()
    return found


def counts_of(table: Table) -> dict[int, int]:
    """Keys without a row, and how often they were seen."""
    cut = table._engine.cut(False, None)
    found = cut.admission
    cut.finish(False)
    assert found is not None
    keys, counts, *_ = found
    return dict(zip(keys.tolist(), counts.tolist(), strict=True))


def test_the_nth_occurrence_is_admitted_and_duplicates_count() -> None:
    table = Table(2, admission=Admit.count(3), default=Default.constant(0.5))
    values, outcomes = table.find_or_insert(np.array([7, 8, 7]), return_outcomes=True)
    assert outcomes.tolist() == [NOT, NOT, NOT]
    assert (values == 0.5).all()
    table.apply_gradients(np.array([7]), np.ones((1, 2), np.float32))
    assert outcomes_of(table, [8, 7, 7]) == [NOT, NEW, FOUND]
    assert counts_of(table) == {8: 2}
    assert outcomes_of(table, [9, 9, 9]) == [NEW, FOUND, FOUND]
    np.testing.assert_array_equal(
        table.lookup(np.array([7, 9])), Table(2).find_or_insert(np.array([7, 9]))
    )
    assert table.stats().outcomes[NOT] == 4


def test_counts_stand_for_occurrences() -> None:
    table = Table(2, admission=Admit.count(10))
    assert outcomes_of(table, [1, 2, 1], counts=np.array([4, 9, 5])) == [NOT] * 3
    assert counts_of(table) == {1: 9, 2: 9}
    assert outcomes_of(table, [3], counts=2**62) == [NEW]
    assert outcomes_of(table, [1, 2], counts=1) == [NEW, NEW]


def test_evaluation_counts_nothing_and_what_is_written_is_let_in() -> None:
    table = Table(2, admission=Admit.count(2))
    outcomes_of(table, [1])
    for _ in range(3):
        table.lookup(np.array([1, 2]))
        table.map(np.array([1, 2]), insert=False)
        table.pool(np.array([1, 2]), np.array([0, 2]))
        table.apply_gradients(np.array([1]), np.ones((1, 2), np.float32))
    assert counts_of(table) == {1: 1}
    table.upsert(np.array([1, 5]), np.ones((2, 2), np.float32))
    assert (keys_of(table), counts_of(table)) == ({1, 5}, {})
    outcomes_of(table, [6])
    table.erase(np.array([6, 1]))
    assert counts_of(table) == {}
    assert outcomes_of(table, [1, 6]) == [NOT, NOT]
    table.clear()
    assert counts_of(table) == {}


def test_order_threads_and_the_cut_of_a_step_decide_nothing() -> None:
    random = np.random.default_rng(3)
    rule = Admit.count(4, max_records=3000) | Admit.probability(0.02)
    room: dict[str, Any] = {"max_rows": 4000, "eviction": Evict.lru(), "admission": rule}
    whole, cut = (Table(2, num_threads=n, hash_seed=n, **room) for n in (1, 2))
    for step in range(25):
        keys = random.zipf(1.3, 9000) % 30_000 + 40 * step
        with whole.lease(step) as lease, cut.lease(step) as other:
            _, outcomes = whole.map(keys, insert=True, lease=lease)
            shuffled = random.permutation(keys)
            _, others = cut.map(shuffled, insert=True, lease=other)
            for kind in (NOT, REFUSED):
                assert set(keys[outcomes == kind]) == set(shuffled[others == kind])
    assert keys_of(whole) == keys_of(cut)
    assert counts_of(whole) == counts_of(cut)
    stats = whole.stats()
    assert stats.records_lost == cut.stats().records_lost > 1000
    assert 0 < stats.admission_records <= 3000
    whole.check_invariants()


def test_occurrences_of_keys_without_room_are_counted_however_a_step_is_cut() -> None:
    random = np.random.default_rng(6)
    rule = Admit.count(3) | Admit.probability(0.2)
    whole, cut = (Table(2, admission=rule, max_rows=4, eviction_groups=1) for _ in range(2))
    for table in (whole, cut):
        table.upsert(np.arange(-4, 0), np.ones((4, 2), np.float32))
    refused = set()
    for step in range(20):
        keys = random.zipf(1.4, 9)
        with whole.lease(step) as lease, cut.lease(step) as other:
            _, outcomes = whole.map(keys, insert=True, lease=lease)
            for part in (keys[:4].copy(), keys[4:].copy()):
                cut.map(part, insert=True, lease=other)
        refused |= set(keys[outcomes == REFUSED])
        assert counts_of(whole) == counts_of(cut)
        whole.check_invariants()
    counted = [key for key, count in counts_of(whole).items() if count >= 2]
    assert set(counted) & refused
    for table in (whole, cut):
        table.clear()
    whole.check_invariants()


def test_calls_of_one_step_draw_as_one() -> None:
    keys: NDArray[np.int64] = np.arange(20_000)
    rule = Admit.probability(0.1)
    once, twice = Table(1, admission=rule), Table(1, admission=rule)
    with once.lease(5) as lease:
        once.map(np.concatenate([keys, keys, keys]), insert=True, lease=lease)
    with twice.lease(5) as lease:
        twice.map(keys, insert=True, lease=lease)
        twice.map(keys, insert=True, counts=2, lease=lease)
    assert keys_of(once) == keys_of(twice)


def test_k_occurrences_are_admitted_as_often_as_they_should() -> None:
    keys = np.arange(100_000)
    for seed, counts in ((0, [1]), (1, [6]), (2, [1] * 6), (3, [2, 4])):
        table = Table(1, seed=seed, admission=Admit.probability(0.2))
        for count in counts:
            table.map(keys, insert=True, counts=count)
        expected = 1 - 0.8 ** sum(counts)
        assert abs(len(table) / len(keys) - expected) < 4 * np.sqrt(0.25 / len(keys))
        again = Table(1, seed=seed, admission=Admit.probability(0.2), hash_seed=9)
        for count in counts:
            again.map(keys[::-1].copy(), insert=True, counts=count)
        assert keys_of(again) == keys_of(table)
        assert table.stats().admission_records == 0
    other = Table(1, name="item", admission=Admit.probability(0.2))
    other.map(keys, insert=True)
    table = Table(1, admission=Admit.probability(0.2))
    table.map(keys, insert=True)
    assert 0.1 < len(keys_of(other) & keys_of(table)) / len(table) < 0.3


def test_and_and_or() -> None:
    always, seldom = Admit.probability(1.0), Admit.probability(1e-12)
    for rule, outcomes in (
        (Admit.count(2) & always, [NOT, NEW]),
        (Admit.count(2) & seldom, [NOT, NOT]),
        (Admit.count(2) | seldom, [NOT, NEW]),
        (Admit.count(2) | always, [NEW, FOUND]),
        ((seldom | Admit.count(1)) & (Admit.count(2) | seldom), [NOT, NEW]),
    ):
        table = Table(1, admission=rule)
        assert [outcomes_of(table, [4])[0] for _ in range(2)] == outcomes
    table = Table(1, admission=Admit.count(2) & seldom)
    for _ in range(5):
        outcomes_of(table, [4])
    assert counts_of(table) == {4: 2}  # it counts no further than the rule asks


def test_at_the_limit_the_counts_seen_longest_ago_leave() -> None:
    table = Table(1, admission=Admit.count(3, max_records=4))  # one group
    outcomes_of(table, [1, 2, 3])
    outcomes_of(table, [1])
    outcomes_of(table, [4, 5])
    left = min((2, 3), key=key_hash)
    assert counts_of(table).keys() == {1, 2, 3, 4, 5} - {left}
    assert table.stats().records_lost == 1
    # Those of the step stay: of six new ones two find no room, and count from 0 again.
    outcomes_of(table, [10, 11, 12, 13, 14, 15])
    ranked = sorted(range(10, 16), key=key_hash)
    assert counts_of(table) == dict.fromkeys(ranked[2:], 1)
    assert outcomes_of(table, np.repeat(ranked, 2)) == [NOT] * 4 + [NEW, FOUND] * 4
    table.check_invariants()


def test_room_is_another_matter() -> None:
    table = Table(1, max_rows=1, admission=Admit.count(2))
    assert outcomes_of(table, [1, 1, 2, 3]) == [NEW, FOUND, NOT, NOT]
    assert outcomes_of(table, [2]) == [REFUSED]
    assert outcomes_of(table, [4, 4]) == [REFUSED, REFUSED]
    assert counts_of(table) == {2: 2, 3: 1, 4: 2}
    table.erase(np.array([1]))
    assert outcomes_of(table, [2]) == [NEW]
    strict = Table(1, max_rows=1, on_full="raise", admission=Admit.count(2))
    outcomes_of(strict, [1, 1, 2, 3])
    with pytest.raises(CapacityError):
        outcomes_of(strict, [2, 5])
    assert counts_of(strict) == {2: 1, 3: 1}
    strict.check_invariants()
    leaving = Table(1, max_rows=1, eviction=Evict.lru(), admission=Admit.count(2))
    outcomes_of(leaving, [1, 1])
    assert outcomes_of(leaving, [2, 2]) == [NEW, FOUND]
    assert outcomes_of(leaving, [1]) == [NOT]  # it counts from 0 again
    assert keys_of(leaving) == {2}


def test_batches_in_flight_are_not_in_what_is_saved() -> None:
    table = Table(1, admission=Admit.count(2, max_records=8))
    outcomes_of(table, [1, 2])
    with table.lease(3) as lease:
        outcomes_of(table, [1, 2, 3], lease=lease)
        outcomes_of(table, [3, 4], lease=lease)
        assert counts_of(table) == {1: 1, 2: 1}
        assert len(table) == 0
    assert (counts_of(table), keys_of(table)) == ({4: 1}, {1, 2, 3})


def test_nor_if_batches_of_one_step_are_mapped_in_another_order() -> None:
    table = Table(1, admission=Admit.count(4, max_records=8))
    outcomes_of(table, [1])
    with table.lease(3) as first, table.lease(3) as second:
        outcomes_of(table, [1, 2], lease=second)
        outcomes_of(table, [1, 2, 5], lease=first)
        outcomes_of(table, [5], lease=second)
        assert counts_of(table) == {1: 1}
    assert counts_of(table) == {1: 3, 2: 2, 5: 2}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "luck"}, "kind must be 'count'"),
        ({"kind": "count"}, "takes n, got"),
        ({"kind": "count", "n": 0}, "n must be at least 1"),
        ({"kind": "count", "n": 3, "p": 0.5}, "takes n, got"),
        ({"kind": "probability", "p": 0.0}, "p must be above 0"),
        ({"kind": "probability", "p": 1.1}, "p must be above 0, up to 1"),
        ({"kind": "probability", "p": 0.5, "max_records": 9}, "the rule counts nothing"),
        ({"kind": "count", "n": 3, "max_records": 0}, "max_records must be at least 1"),
        ({"kind": "all"}, "takes parts, got"),
    ],
)
def test_rules_that_make_no_sense(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Admit(**rule)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="max_records is 3 in one rule and 4 in the other"):
        Admit.count(2, max_records=3) & Admit.count(4, max_records=4)
    with pytest.raises(TypeError, match="unsupported operand"):
        Admit.count(2) & 3  # type: ignore[operator]
    many = Admit.count(2)
    for _ in range(5):
        many = many | many
    with pytest.raises(ValueError, match="at most 63 terms"):
        many | many
    with pytest.raises(TypeError, match=r"admission must be an Admit.*got 3"):
        Table(2, admission=3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"admission.max_records must be at least the number of groups of keys, 64, got 5",
    ):
        Table(2, max_rows=2000, admission=Admit.count(2, max_records=5))
    keys = np.array([1, 2])
    plain, table = Table(2), Table(2, admission=Admit.count(2))
    for call, message in [
        (
            lambda: plain.map(keys, insert=True, counts=1),
            "counts are given, and only calls that insert",
        ),
        (
            lambda: table.map(keys, insert=False, counts=1),
            "counts are given, and only calls that insert",
        ),
        (lambda: table.map(keys, insert=True, counts=0), "counts must be 1 or more, got 0"),
        (
            lambda: table.map(keys, insert=True, counts=np.arange(3)),
            "counts must have one element per key, 2, got 3; or pass one",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    first, second = table.lease(1), table.lease(2)
    table.map(keys, insert=True, lease=second)
    with pytest.raises(ValueError, match="a batch of step 1 is mapped after one of step 2"):
        table.map(keys, insert=True, lease=first)
    assert counts_of(table) == {}
