"""An index with a rule of admission decides as a table with it, and gives its counts to another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recsdk_core import Admit, Evict, Index, Lease, Outcome, Table
from recsdk_core.checkpoint.replacing import rows_with_metadata

NAMES = ("admit_keys", "admit_counts", "admit_steps")
RULE = Admit.count(3, max_records=16) | Admit.probability(0.1)
SKETCH = Admit.count_sketch(3, max_bytes=2**19) | Admit.probability(0.1)
CONFIG = {"name": "user", "seed": 7, "max_rows": 24, "eviction_groups": 4, "admission": RULE}


@pytest.mark.parametrize("admission", [RULE, SKETCH], ids=["exact", "sketch"])
def test_an_index_and_its_copies_do_as_a_table(admission: Admit) -> None:
    config: dict[str, Any] = CONFIG | {"admission": admission}
    for rule in (None, Evict.lru()):
        table = Table(1, **config, eviction=rule)
        index = Index(**config, eviction=rule)
        source = np.random.default_rng(4)
        flying: list[list[Lease]] = []
        for step in range(60):
            keys = source.zipf(1.3, 20) % 60
            both = (table, index)
            flying.append([each.lease(step=step) for each in both])
            counts = source.integers(1, 3, len(keys))
            found = [
                each.map(keys, insert=True, lease=lease, counts=counts)[1]
                for each, lease in zip(both, flying[-1], strict=True)
            ]
            assert found[0].tolist() == found[1].tolist()
            while len(flying) > 3 * (step % 10 > 0):  # the copy is made while none is open
                for lease in flying.pop(0):
                    lease.release()
            assert_equal_records(table, index)
            if step % 10 == 0:
                index = copy_of(index, config | {"eviction": rule})
        assert table.stats().outcomes[Outcome.NOT_ADMITTED] > 50
        assert (table.stats().records_lost > 10) == (admission == RULE)
        for leases in flying:
            for lease in leases:
                lease.release()
        written = np.array([1000, 1001])
        table.upsert(written, np.ones((2, 1), np.float32))
        index.map(written, insert=True, admits_all=True)
        assert_equal_records(table, index)
        assert sorted(index.keys_and_rows()[0]) == sorted(rows_with_metadata(table).keys)


def copy_of(index: Index, config: dict[str, Any]) -> Index:
    made = Index(**config)
    made.map(np.arange(90, 99), insert=True)  # which the copy forgets
    keys, rows = index.keys_and_rows()
    metadata = None if config["eviction"] is None else index.metadata(rows)
    made.assign(keys, metadata=metadata, records=index.records(), clock=index.clock)
    return made


def assert_equal_records(table: Table, index: Index) -> None:
    expected = rows_with_metadata(table)
    assert expected.records is not None
    found = index.records()
    for name, kept in zip(NAMES, ("keys", "counts", "steps"), strict=True):
        assert found[name].tolist() == getattr(expected.records, kept).tolist(), name
    assert index.clock == expected.clock
    index.check_invariants()


def test_what_does_not_fit_is_refused() -> None:
    plain, index = Index(), Index(**CONFIG)  # type: ignore[arg-type]
    keys = np.arange(4)
    index.map(keys, insert=True)
    counted, clock = index.records(), index.clock
    with pytest.raises(ValueError, match="counted with admission only; set it"):
        plain.records()
    with pytest.raises(ValueError, match="with admission=None records are"):
        plain.assign(keys, records=counted, clock=clock)
    with pytest.raises(ValueError, match="belongs together with metadata or records"):
        index.assign(keys, records=counted)
    with pytest.raises(ValueError, match=r"got \['admit_keys'\]"):
        index.assign(keys, records={"admit_keys": keys}, clock=clock)
    with pytest.raises(ValueError, match="key 0 has a row and a count of keys without one"):
        index.assign(keys, records=counted, clock=clock)
    twice = {**counted, "admit_keys": np.zeros(4, np.int64)}
    with pytest.raises(ValueError, match="count of key 0 comes twice"):
        index.assign(keys[:0], records=twice, clock=clock)
    with pytest.raises(
        ValueError, match=r"steps must have one element for each key, [0-9]+, got [0-9]+"
    ):
        index.assign(keys[:0], records={**counted, "admit_steps": keys[:1]}, clock=clock)
    with pytest.raises(ValueError, match="admits_all is of calls that insert"):
        index.map(keys, insert=False, admits_all=True)
    with index.lease(step=9) as lease, pytest.raises(ValueError, match="cannot admit all keys"):
        index.map(keys, insert=True, lease=lease, admits_all=True)
    with pytest.raises(TypeError, match="admission must be an Admit"):
        Index(admission=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be"):
        Index(seed=-1)
    assert index.records()["admit_keys"].tolist() == keys.tolist()
    index.assign(np.arange(50, 54))
    assert index.records()["admit_keys"].tolist() == []


def test_a_clock_before_what_was_counted_stands_at_the_latest() -> None:
    source = Index(**CONFIG)  # type: ignore[arg-type]
    for step in range(9):
        source.map(np.arange(3 * step, 3 * step + 6), insert=True)
    expected, found = copy_of(source, CONFIG | {"eviction": None}), Index(**CONFIG)  # type: ignore[arg-type]
    clock = replace(source.clock, step=2)
    found.assign(source.keys_and_rows()[0], records=source.records(), clock=clock)
    assert found.clock == expected.clock
    for step in range(20):
        for index in (expected, found):
            index.map(np.arange(2 * step, 2 * step + 9), insert=True)
            index.check_invariants()
        records = [
            {n: of.tolist() for n, of in each.records().items()} for each in (found, expected)
        ]
        assert records[0] == records[1]


def test_counts_divide_as_without_a_limit_of_rows() -> None:
    """An index whose `max_rows` is the memory of its rows keeps the counts that a table keeps."""
    rule = Admit.count(3, max_records=40)
    table = Table(1, admission=rule)
    room: dict[str, Any] = {"max_rows": 10_000, "eviction_groups": 8, "admission": rule}
    index, other = Index(**room, record_groups=1), Index(**room)
    source = np.random.default_rng(5)
    for _ in range(30):
        keys = source.integers(0, 90, 20)
        found = [each.map(keys, insert=True)[1].tolist() for each in (table, index)]
        assert found[0] == found[1]
        other.map(keys, insert=True)
        assert_equal_records(table, index)
    assert index.stats().records_lost == table.stats().records_lost > 0
    assert other.records()["admit_keys"].tolist() != index.records()["admit_keys"].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"record_groups": 2}, "record_groups divide max_records of admission; set it too"),
        ({"admission": Admit.count(2), "record_groups": 2}, "divide max_records of admission"),
        ({"admission": RULE, "record_groups": 3}, "record_groups must be a power of two .*, got 3"),
        ({"admission": RULE, "record_groups": 32}, "max_records must be at least .*, 32, got 16"),
        ({"admission": RULE, "record_groups": 0}, "record_groups must be at least 1"),
    ],
)
def test_groups_of_counts_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Index(**arguments)
