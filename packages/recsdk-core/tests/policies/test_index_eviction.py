"""An index evicts as a table does, and goes on from what it keeps of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recsdk_core import CapacityError, Evict, Index, Table
from recsdk_core.checkpoint.replacing import rows_with_metadata

RULES = [
    Evict.lru(),
    Evict.lru(by="time", min_age=2),
    Evict.lfu(half_life=3.0),
    Evict.score(min_age=1),
]
ROOM: dict[str, Any] = {"max_rows": 24, "eviction_groups": 4}


def marks(rule: Evict, keys: np.ndarray, step: int) -> dict[str, Any]:
    """What a rule takes with keys."""
    if rule.by == "time":
        return {"times": keys % 5 + step}
    return {"scores": (keys % 7 - 3.5).astype(np.float32)} if rule.order == "score" else {}


def stream(num_steps: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.zipf(1.2, 12) % 90 + 4 * step for step in range(num_steps)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_does_as_a_table_and_goes_on_from_metadata(rule: Evict) -> None:
    table = Table(1, **ROOM, eviction=rule)
    indexes = [Index(**ROOM, eviction=rule)]
    in_flight: list[Any] = []
    for step, keys in enumerate(stream(42)):
        given = marks(rule, keys, step)
        leases = [each.lease(step) for each in (table, *indexes)]
        expected = table.map(keys, insert=True, lease=leases[0], **given)
        for index, lease in zip(indexes, leases[1:], strict=True):
            rows, outcomes = index.map(keys, insert=True, lease=lease, **given)
            assert outcomes.tolist() == expected[1].tolist()
            if index is indexes[0]:
                assert rows.tolist() == expected[0].tolist()
        in_flight.append(leases)
        if step % 3 == 2:  # what a batch in flight changed is not kept of keys yet
            assert_equal_metadata(table, indexes)
            in_flight = [lease.release() for of_step in in_flight for lease in of_step] and []
            if len(indexes) < 4:
                indexes.append(copy_of(indexes[-1], rule))
    assert table.stats().evicted > 50
    table.evict(fraction=0.5)
    for index in indexes:
        index.evict(fraction=0.5)
    assert_equal_metadata(table, indexes)
    assert indexes[0].stats().evicted == table.stats().evicted


def copy_of(index: Index, rule: Evict) -> Index:
    made = Index(**ROOM, eviction=rule)
    keys, rows = index.keys_and_rows()
    made.assign(keys, metadata=index.metadata(rows), clock=index.clock)
    return made


def assert_equal_metadata(table: Table, indexes: list[Index]) -> None:
    expected = rows_with_metadata(table)
    order = np.argsort(expected.keys)
    for index in indexes:
        keys, rows = index.keys_and_rows()
        assert sorted(keys.tolist()) == expected.keys[order].tolist()
        found = index.metadata(rows)
        assert list(found) == list(expected.metadata)
        for name, kept in expected.metadata.items():
            assert found[name].dtype == kept.dtype
            assert found[name][np.argsort(keys)].tolist() == kept[order].tolist(), name
        assert index.clock == expected.clock
        index.check_invariants()


def test_what_does_not_fit_is_refused() -> None:
    plain, index = Index(), Index(**ROOM, eviction=Evict.lfu())
    with pytest.raises(ValueError, match="eviction makes room within max_rows; set max_rows"):
        Index(eviction=Evict.lru())
    with pytest.raises(ValueError, match="with eviction only; set eviction"):
        plain.metadata(np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="counts steps with eviction or admission only; set one"):
        plain.clock  # noqa: B018
    with pytest.raises(ValueError, match="scores are given, and only calls that insert"):
        index.map(np.arange(2), insert=True, scores=np.zeros(2, np.float32))
    index.map(np.arange(9), insert=True)
    for rows in ([0, 9], [3, 2], [-1]):
        with pytest.raises(ValueError, match="row numbers must ascend"):
            index.metadata(np.array(rows))
    kept, clock = index.metadata(np.arange(9)), index.clock
    with pytest.raises(ValueError, match="clock belongs together with metadata or records"):
        index.assign(np.arange(9), metadata=kept)
    with pytest.raises(ValueError, match=r"are \['evict_step', 'evict_count'\], got \['evict_step"):
        index.assign(np.arange(9), metadata={"evict_step": kept["evict_step"]}, clock=clock)
    short = {name: of[:8] for name, of in kept.items()}
    many = {name: np.zeros(25, np.int64) for name in kept}
    with pytest.raises(ValueError, match="words of metadata must be 2 for each of 9 keys, got 16"):
        index.assign(np.arange(9), metadata=short, clock=clock)
    with pytest.raises(TypeError, match="metadata must be int64, got float64"):
        index.assign(np.arange(9), metadata={n: of * 1.0 for n, of in kept.items()}, clock=clock)
    with pytest.raises(CapacityError, match="raise max_rows"):
        index.assign(np.arange(25), metadata=many, clock=clock)
    assert sorted(index.keys_and_rows()[0].tolist()) == list(range(9))
    index.assign(np.arange(5))
    assert index.metadata(np.arange(5))["evict_count"].tolist() == [0] * 5


@pytest.mark.parametrize("rule", [*RULES[1:], Evict.lru(), Evict.lfu(min_age=2)], ids=str)
@pytest.mark.parametrize("claimed", [None, 0, 3])
def test_a_clock_before_what_is_known_of_keys_stands_at_the_latest(
    rule: Evict, claimed: int | None
) -> None:
    source = Index(**ROOM, eviction=rule)
    for step, keys in enumerate(stream(9)):
        source.map(keys, insert=True, **marks(rule, keys, step))
    expected, found = copy_of(source, rule), Index(**ROOM, eviction=rule)
    keys, rows = source.keys_and_rows()
    clock = replace(source.clock, step=claimed)
    found.assign(keys, metadata=source.metadata(rows), clock=clock)
    assert found.clock == expected.clock
    for step, keys in enumerate(stream(30)):
        for index in (expected, found):
            index.map(keys, insert=True, **marks(rule, keys, step))
            index.check_invariants()
        assert found.keys_and_rows()[0].tolist() == expected.keys_and_rows()[0].tolist()
    assert found.stats().evicted == expected.stats().evicted > 50
