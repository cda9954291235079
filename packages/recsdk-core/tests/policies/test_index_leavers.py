"""Who keeps rows beside an index reads which keys leave, and where their rows are.

A table, which copies its rows itself, says what must be read.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from recsdk_core import BusyError, CapacityError, Evict, Index, IndexLeavers, LeaveCause, Table

ROOM: dict[str, Any] = {"max_rows": 24, "eviction_groups": 4}
RULE = Evict.lru().expiring(ttl=2, every=2)


class _Rows:
    """Numbers of rows, written late: all that is known of a row until then is its key."""

    def __init__(self) -> None:
        self.index = Index(**ROOM, eviction=RULE, make_rows=self._make)
        self.memory = np.zeros(200, np.int64)
        self.leavers: IndexLeavers | None = None
        self.found: list[tuple[int, int, int]] = []
        self._made: list[tuple[int, int, int]] = []
        self._num_taken = 0

    def _make(self, keys: np.ndarray, rows: np.ndarray) -> None:
        ended = 0 if self.leavers is None else self.leavers.num_ended
        self._made += [(ended, *pair) for pair in zip(keys.tolist(), rows.tolist(), strict=True)]

    def write(self) -> None:
        """Copies what has left, then writes new rows."""
        made, self._made = self._made, []
        if self.leavers is not None:
            left = self.leavers.take()
            for key, cause, row in zip(left.keys, left.causes, left.rows, strict=True):
                before = [key for ended, key, at in made if at == row and ended <= self._num_taken]
                value = before[-1] if before else self.memory[row]
                self.found.append((int(key), int(cause), int(value)))
                self._num_taken += 1
            self.leavers.free_rows(len(left.keys))
        for _, key, row in made:
            self.memory[row] = key


@pytest.mark.parametrize("depth", [1, 3, 12])
@pytest.mark.parametrize("writes_every", [1, 5])
def test_it_says_what_a_table_says(depth: int, writes_every: int) -> None:
    random = np.random.default_rng(depth)
    own, table = _Rows(), Table(1, **ROOM, eviction=RULE)
    own.leavers, reader = own.index.leavers(), table.leavers()
    in_flight: list[Any] = []
    for step in range(60):
        keys = random.zipf(1.2, 12) % 90 + 4 * step
        leases = [each.lease(step) for each in (own.index, table)]
        for each, lease in zip((own.index, table), leases, strict=True):
            each.map(keys, insert=True, lease=lease)
        in_flight.append(leases)
        if len(in_flight) == depth:
            for lease in in_flight.pop(0):
                lease.release()
        if step % writes_every == 0:
            own.write()
    for leases in in_flight:
        for lease in leases:
            lease.release()
    for each in (own.index, table):
        each.erase(np.array([int(keys[0])]))
        each.evict(fraction=0.5)
        each.clear()
    own.write()
    batch = reader.read()
    assert [(key, cause) for key, cause, _ in own.found] == list(
        zip(batch.keys.tolist(), batch.causes.tolist(), strict=True)
    )
    assert all(key == value for key, _, value in own.found)
    assert {cause for _, cause, _ in own.found} == set(LeaveCause)
    assert own.leavers.num_ended == len(own.found) > 200


def _full(**options: Any) -> tuple[Index, IndexLeavers]:
    index = Index(max_rows=2, eviction_groups=1, eviction=Evict.lru())
    index.map(np.array([1]), insert=True)
    index.map(np.array([2]), insert=True)
    return index, index.leavers(max_rows=2, **options)


def test_places_stay_taken_until_they_are_given_back() -> None:
    index, leavers = _full()
    index.map(np.array([3, 4]), insert=True)
    assert leavers.take().keys.tolist() == [1, 2]
    index.map(np.array([5]), insert=True)
    assert (leavers.num_lost, leavers.num_ended, len(leavers.take().keys)) == (1, 2, 0)
    leavers.free_rows(1)
    index.map(np.array([6, 7]), insert=True)
    left = leavers.take()
    assert (leavers.num_lost, len(left.keys), leavers.max_rows) == (2, 1, 2)
    leavers.free_rows(99)
    leavers.close()
    index.map(np.array([8, 9]), insert=True)
    assert len(leavers.take().keys) == 0


def test_a_call_waits_for_places_that_were_taken_alone() -> None:
    index, leavers = _full(on_overflow="block")
    index.map(np.array([3]), insert=True)
    with pytest.raises(CapacityError, match="1 places are of keys that nobody has taken yet"):
        index.map(np.array([4, 5]), insert=True)  # who takes may wait for this call
    assert leavers.take().rows.tolist() == [0]
    thread = threading.Thread(target=lambda: leavers.free_rows(1))
    thread.start()
    index.map(np.array([4, 5]), insert=True)
    thread.join()
    assert leavers.num_lost == 0


def test_what_it_refuses() -> None:
    index, leavers = _full()
    with pytest.raises(BusyError, match="somebody reads what leaves already"):
        index.leavers()
    leavers.close()
    with pytest.raises(ValueError, match="Index.leavers: max_rows must be"):
        index.leavers(max_rows=0)
    with index.lease(9), pytest.raises(BusyError, match="leavers is not allowed while batches"):
        index.leavers()
    with pytest.raises(ValueError, match="IndexLeavers.free_rows: count must be"):
        leavers.free_rows(-1)
