"""What leaves a table can be read, in order and by value, through a queue of a fixed size.

The state machines of tests/stateful compare each row that leaves, batches in flight and their
readers with a plain model; here are the queue's limits, threads, and who ends it.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest

from recsdk_core import BusyError, CapacityError, Evict, LeaveCause, Outcome, Table, optim
from recsdk_core.leavers import OnOverflow

EVICTED, ERASED = LeaveCause.EVICTED, LeaveCause.ERASED


def full_table(num_rows: int = 4, **config: Any) -> Table:
    """Keys 0 to `num_rows` - 1, seen in that order."""
    table = Table(2, max_rows=num_rows, eviction_groups=1, eviction=Evict.lru(), **config)
    for key in range(num_rows):
        table.find_or_insert(np.array([key]))
    return table


def test_a_row_is_read_with_what_the_batch_in_flight_gave_it() -> None:
    table = full_table(2, optimizer=optim.Adagrad(lr=0.5))
    leavers = table.leavers()
    with table.lease(1) as lease:
        rows = table.map(np.array([0]), insert=True, lease=lease)[0]
        with table.lease(2) as later:
            table.map(np.array([8, 9]), insert=True, lease=later)
            assert len(leavers) == 0
        assert len(leavers) == 0
        grads = np.ones((1, 2), np.float32)
        expected = table.lookup(np.array([0])) - np.float32(0.5)
        table.apply_gradients(np.array([0]), grads)
        assert rows[0] == 0
    batch = leavers.read()
    by_key = dict(zip(batch.keys.tolist(), batch.weights, strict=True))
    assert by_key.keys() == {0, 1}
    np.testing.assert_allclose(by_key[0], expected[0], rtol=1e-6)
    assert batch.state["sum"][batch.keys.tolist().index(0)].tolist() == [1.0, 1.0]


def test_those_that_find_no_place_are_counted() -> None:
    table = full_table()
    leavers = table.leavers(max_rows=2)
    table.find_or_insert(np.array([7, 8, 9]))
    assert (len(leavers), leavers.num_lost, table.stats().evicted) == (2, 1, 3)
    assert leavers.read(1).keys.tolist() == [0]
    table.clear()
    batch = leavers.read()
    assert batch.keys.tolist()[0] == 1
    assert batch.causes.tolist() == [EVICTED, ERASED]
    assert leavers.num_lost == 4
    assert leavers.read().weights.shape == (0, 2)


@pytest.mark.parametrize("has_parent", [False, True])
def test_a_call_that_would_lose_some_changes_nothing(has_parent: bool, tmp_path: Any) -> None:
    table = full_table()
    if has_parent:
        table.save(tmp_path / "full")
    leavers = table.leavers(max_rows=2, on_overflow="raise")
    before = [batch.keys.tolist() for batch in table.export()]
    calls: list[Any] = [
        lambda: table.find_or_insert(np.array([7, 8, 9])),
        lambda: table.upsert(np.array([7, 8, 9]), np.ones((3, 2), np.float32)),
        lambda: table.erase(np.array([0, 1, 2, 2, 77])),
        lambda: table.evict(max_rows=1),
        table.clear,
    ]
    for call in calls:
        with pytest.raises(CapacityError, match="keys would leave, and the reader of leavers has"):
            call()
        assert [batch.keys.tolist() for batch in table.export()] == before
        table.check_invariants()
    with table.lease(5) as lease:
        table.map(np.array([7, 8]), insert=True, lease=lease)
        with pytest.raises(CapacityError, match="room for 0 of max_rows 2"):
            table.map(np.array([9]), insert=True, lease=lease)
    assert leavers.read().keys.tolist() == [0, 1]
    assert table.erase(np.array([2, 2, 3, 77]), return_outcomes=True).tolist() == [
        Outcome.FOUND,
        Outcome.MISSING,
        Outcome.FOUND,
        Outcome.MISSING,
    ]
    assert leavers.read().causes.tolist() == [ERASED, ERASED]


def test_a_writer_waits_for_a_reader() -> None:
    table = full_table(100)
    leavers = table.leavers(max_rows=100, on_overflow="block")
    found: list[int] = []

    def read() -> None:
        while len((batch := leavers.read(7, wait_seconds=60.0)).keys):
            found.extend(batch.keys.tolist())

    reader = threading.Thread(target=read)
    reader.start()
    for begin in range(100, 2000, 50):
        table.find_or_insert(np.arange(begin, begin + 50))
    leavers.close()
    reader.join()
    found += leavers.read().keys.tolist()
    assert sorted(found) == list(range(1900))
    assert leavers.num_lost == 0


def test_what_batches_in_flight_keep_is_told() -> None:
    table = full_table()
    leavers = table.leavers(max_rows=2, on_overflow="block")
    with table.lease():
        table.erase(np.array([0]))
        with pytest.raises(CapacityError, match="1 places are of rows that batches in flight may"):
            table.erase(np.array([1, 2]))
    table.erase(np.array([1]))
    assert leavers.read().keys.tolist() == [0, 1]
    assert len(table) == 2


def test_a_writer_that_nobody_reads_for_fails_in_the_end() -> None:
    table = full_table()
    leavers = table.leavers(max_rows=2, on_overflow="block", block_seconds=0.01)
    with pytest.raises(CapacityError, match="even once all is read; raise its max_rows"):
        table.find_or_insert(np.array([7, 8, 9]))
    table.find_or_insert(np.array([7, 8]))
    with pytest.raises(BusyError, match="nobody has read for 0.01"):
        table.find_or_insert(np.array([9]))
    assert 9 not in table
    leavers.read()
    table.find_or_insert(np.array([9]))


def test_closing_lets_a_writer_go_on() -> None:
    table = full_table()
    leavers = table.leavers(max_rows=1, on_overflow="block")
    table.find_or_insert(np.array([7]))
    writer = threading.Thread(target=table.find_or_insert, args=(np.array([8]),))
    writer.start()
    leavers.close()
    writer.join()
    assert 8 in table
    assert leavers.read().keys.tolist() == [0]


def test_one_reads_at_a_time_and_may_outlive_the_table() -> None:
    table = full_table()
    with table.leavers() as leavers:
        with pytest.raises(BusyError, match="somebody reads what leaves already"):
            table.leavers()
        table.erase(np.array([2]))
    with table.leavers() as again:
        table.erase(np.array([3]))
        del table
        assert again.read(wait_seconds=60.0).keys.tolist() == [3]
        assert again.read(wait_seconds=60.0).keys.tolist() == []
    assert leavers.read().keys.tolist() == [2]


def test_reading_begins_between_batches() -> None:
    table = full_table()
    with table.lease(1), pytest.raises(BusyError, match="leavers is not allowed while batches"):
        table.leavers()
    kept = table.lease()
    table.erase(np.array([0]))
    leavers = table.leavers()
    table.erase(np.array([1]))
    assert len(leavers) == 0
    kept.release()
    assert leavers.read().keys.tolist() == [1]


@pytest.mark.parametrize("changes", [{"on_overflow": "drop"}, {"max_rows": 0}, {"max_rows": True}])
def test_arguments_that_make_no_sense(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises((TypeError, ValueError), match=f"Table.leavers: {name} must be"):
        full_table().leavers(**changes)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_waiting_is_for_a_while(seconds: float) -> None:
    with pytest.raises(ValueError, match="block_seconds"):
        full_table().leavers(block_seconds=seconds)
    if seconds != 0.0:
        with pytest.raises(ValueError, match="wait_seconds"):
            full_table().leavers().read(wait_seconds=seconds)


def test_overflow_is_one_of_three() -> None:
    for on_overflow in OnOverflow.__args__:
        assert full_table().leavers(on_overflow=on_overflow).max_rows == 65_536


def test_ctrl_c_ends_waiting_and_loses_nothing() -> None:
    table = full_table()
    leavers = table.leavers()
    main = threading.main_thread().ident
    assert threading.get_ident() == main
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            leavers.read(wait_seconds=600.0)  # it would end by the tests' time limit
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    table.erase(np.array([0]))
    assert leavers.read(wait_seconds=60.0).keys.tolist() == [0]
