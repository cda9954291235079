"""What a table says of a key is so: checked by making it come true."""

from __future__ import annotations

import numpy as np
import pytest

from recsdk_core import Admit, Evict, Index, Table


@pytest.mark.parametrize(
    "rule", [Evict.lru(), Evict.lfu(half_life=3.0), Evict.score(), Evict.lru(by="time")], ids=repr
)
def test_keys_leave_in_the_order_that_is_told(rule: Evict) -> None:
    table = Table(2, max_rows=40, eviction_groups=4, eviction=rule)
    random = np.random.default_rng(2)
    for _ in range(8):
        keys = random.zipf(1.5, 20) % 60
        more = {"times": random.integers(0, 9, 20)} if rule.by == "time" else {}
        scores = {"scores": random.random(20).astype(np.float32)} if rule.order == "score" else {}
        table.map(keys, insert=True, **more, **scores)
    there = [key for batch in table.export() for key in batch.keys.tolist()]
    told = {key: table.explain(key) for key in there}
    for key, found in told.items():
        rows, _ = table.map(np.array([key]), insert=False)
        assert (found.row, found.has_expired) == (int(rows[0]), False)
        group = [each for each in told.values() if each.group == found.group]
        assert found.group_rows == len(group)
        assert found.group_quota == 10
        assert f"{found.num_before} of these keys leave before it" in str(found)
    for limit in (20, 8, 0):
        table.evict(max_rows=limit)
        for key, found in told.items():
            assert found.num_before is not None
            num_left = found.group_rows - min(found.group_rows, limit // 4)
            assert (key in table) == (found.num_before >= num_left)


def test_columns_and_expiry_are_those_of_predicates() -> None:
    rule = Evict.lfu(half_life=1.0, min_age=4).expiring(ttl=4)
    table = Table(2, max_rows=100, eviction=rule)
    table.find_or_insert(np.array([-1, -1]))
    for _ in range(3):
        table.find_or_insert(np.array([2]))
    found = table.explain(2**64 - 1)
    assert (found.key, found.columns) == (-1, {"step": 1, "idle": 3, "count": 0.25, "age": 3})
    assert "it stays until it is 4 steps old" in found.reasons
    table.find_or_insert(np.array([2]))
    assert table.explain(-1).has_expired
    assert not table.explain(2).has_expired
    assert table.expire() == 1
    assert table.explain(-1).row is None


def test_keys_without_a_row() -> None:
    table = Table(2, max_rows=1, admission=Admit.count(3))
    table.find_or_insert(np.array([7, 7]))
    found = table.explain(7)
    assert (found.row, found.seen, found.num_before, found.columns) == (None, 2, None, {})
    assert "it was seen 2 times so far" in str(found)
    table.find_or_insert(np.array([7]))
    assert str(table.explain(7)) == "key 7: it has row 0; nobody leaves unless erased"
    assert "its group 0 has 1 of 1 rows: it is refused" in str(table.explain(8))
    assert str(Index().explain(8)) == "key 8: it has no row"
    with pytest.raises(ValueError, match="key must have 64 bits"):
        table.explain(2**64)


def test_batches_in_flight_are_not_seen() -> None:
    table = Table(2, max_rows=2, eviction_groups=1, eviction=Evict.lru())
    table.find_or_insert(np.array([1, 2]))
    with table.lease(5) as lease:
        table.map(np.array([2, 3]), insert=True, lease=lease)
        assert (table.explain(1).row, table.explain(3).row) == (0, None)
        assert table.explain(2).columns == {"step": 1, "idle": 0}
    assert (table.explain(1).row is None, table.explain(3).row is None) == (True, False)
