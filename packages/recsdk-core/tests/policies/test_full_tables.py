"""`on_full="raise"`: calls that would need more than `max_rows` rows raise and change nothing.

The outcomes of tables that refuse, and row numbers afterwards, are the stateful tests' part.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from recsdk_core import CapacityError, Outcome, Table, map_tables


def full_table(**arguments: Any) -> Table:
    """A table of keys 0 to 3 that has room for no other."""
    table = Table(2, name="user", max_rows=4, on_full="raise", **arguments)
    table.find_or_insert(np.arange(4))
    return table


def test_every_call_that_inserts_raises_and_changes_nothing() -> None:
    table = full_table()
    keys, values = np.array([0, 9]), np.ones((2, 2), np.float32)
    before, stats = table.lookup(np.arange(4)), table.stats()
    for call in (
        lambda: table.find_or_insert(keys),
        lambda: table.map(keys, insert=True),
        lambda: table.upsert(keys, values),
        lambda: table.pool(keys, np.array([0, 2]), insert=True),
    ):
        with pytest.raises(
            CapacityError, match="table 'user' is full: 4 of 4 rows are used; raise"
        ):
            call()
    assert table.stats().outcomes == stats.outcomes
    assert (table.lookup(np.arange(4)) == before).all()
    assert 9 not in table
    table.erase(np.array([2]))
    _, outcomes = table.map(np.array([9, 9]), insert=True)
    assert outcomes.tolist() == [Outcome.INSERTED, Outcome.FOUND]


def test_of_many_tables_those_with_room_have_their_part_done() -> None:
    table, other = full_table(), Table(2, name="item")
    with pytest.raises(CapacityError, match="table 'user' is full"):
        map_tables([(table, np.array([9])), (other, np.array([9]))], insert=True)
    assert (len(table), len(other)) == (4, 1)


def test_copies_raise_too() -> None:
    table = full_table()
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table)), table.empty_copy()):
        assert twin.on_full == "raise"
    with pytest.raises(CapacityError):
        copy.deepcopy(table).find_or_insert(np.array([7]))


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="on_full must be 'refuse' or 'raise', got 'drop'"):
        Table(2, on_full="drop")  # type: ignore[arg-type]
