"""An index whose rows the caller keeps."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import (
    BusyError,
    CapacityError,
    Index,
    Outcome,
    Table,
    init,
    initial_rows,
    map_tables,
)

KEYS = np.array([7, -1, 7, 2**63 - 1])


@pytest.mark.parametrize("copied_by", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_index_whose_rows_are_elsewhere_is_not_copied(copied_by: Any) -> None:
    index = Index(name="user")
    index.map(KEYS, insert=True)
    with pytest.raises(TypeError, match=r"index 'user' cannot be copied or pickled: .* to assign"):
        copied_by(index)


class Rows:
    """Rows of one's own: the key that each was made for."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self.error: Exception | None = None

    def __call__(self, keys: Any, rows: Any) -> None:
        if self.error is not None:
            raise self.error
        self.keys.update(zip(rows.tolist(), keys.tolist(), strict=True))


def test_map_gives_rows_in_input_order() -> None:
    index = Index()
    rows, outcomes = index.map(KEYS, insert=True)
    assert rows.tolist() == [0, 1, 0, 2]
    assert outcomes.tolist() == [1, 1, 0, 1]
    assert len(index) == 3
    assert 7 in index
    assert 8 not in index
    assert 2**64 - 1 in index  # the 64 bits of -1
    assert 2**70 not in index
    assert index.end_row == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": ""}, ValueError),
        ({"name": 3}, ValueError),
        ({"max_rows": -1}, ValueError),
        ({"max_rows": 1.5}, TypeError),
        ({"num_threads": 0}, ValueError),
        ({"hash_seed": 2**64}, ValueError),
        ({"on_full": "grow"}, ValueError),
        ({"make_rows": 3}, TypeError),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Index(**arguments)


def test_a_full_one_refuses_or_raises() -> None:
    refusing = Index(max_rows=2)
    _, outcomes = refusing.map(np.array([1, 2, 3]), insert=True)
    assert outcomes.tolist() == [Outcome.INSERTED, Outcome.INSERTED, Outcome.REFUSED]
    raising = Index(max_rows=2, on_full="raise")
    with pytest.raises(CapacityError, match="index 'index' is full"):
        raising.map(np.array([1, 2, 3]), insert=True)
    assert len(raising) == 0


def test_make_rows_sees_new_keys_once_and_may_fail() -> None:
    made = Rows()
    index = Index(make_rows=made)
    index.map(np.array([5, 6, 5]), insert=True)
    assert made.keys == {0: 5, 1: 6}
    made.error = KeyError("no row")
    with pytest.raises(KeyError):
        index.map(np.array([6, 7]), insert=True)
    assert len(index) == 2
    index.check_invariants()
    made.error = None
    index.map(np.array([6, 7]), insert=True)
    assert made.keys == {0: 5, 1: 6, 2: 7}


def test_make_rows_must_not_call_the_index() -> None:
    index: Index = Index(make_rows=lambda keys, rows: len(index))
    with pytest.raises(BusyError):
        index.map(np.array([1]), insert=True)
    assert len(index) == 0


def test_an_index_that_its_rows_refer_to_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.index = Index(make_rows=self.make)

        def make(self, keys: Any, rows: Any) -> None:
            pass

    gone = weakref.ref(Owner())
    gc.collect()
    assert gone() is None


def test_keys_in_flight_are_not_seen() -> None:
    index = Index()
    with index.lease(3) as lease:
        rows, outcomes = index.map(np.array([1]), insert=True, lease=lease)
        assert outcomes.tolist() == [Outcome.INSERTED]
        assert len(index) == 0
        with pytest.raises(BusyError):
            index.erase(np.array([1]))
    assert index.keys_and_rows()[0].tolist() == [1]
    assert index.erase(np.array([1, 1]), return_outcomes=True).tolist() == [0, 3]
    assert index.stats().erased == 1
    assert rows.tolist() == [0]


def test_many_indexes_and_tables_are_mapped_at_once() -> None:
    index, table = Index(), Table(dim=2)
    found = map_tables([(index, KEYS), (table, KEYS)], insert=True)
    assert [rows.tolist() for rows, _ in found] == [[0, 1, 0, 2]] * 2
    with pytest.raises(TypeError, match="Table or Index"):
        map_tables([(3, KEYS)], insert=True)  # type: ignore[list-item]


def test_assign_replaces_all_keys_or_none() -> None:
    index = Index(max_rows=3)
    index.map(np.array([1, 2]), insert=True)
    with pytest.raises(ValueError, match="key 5 comes twice"):
        index.assign(np.array([5, 5]))
    with pytest.raises(CapacityError):
        index.assign(np.arange(4))
    with index.lease(), pytest.raises(BusyError):
        index.assign(np.array([5]))
    with index.lease(), pytest.raises(BusyError):
        index.check_idle()
    assert index.keys_and_rows()[0].tolist() == [1, 2]
    index.assign(np.array([9, -9, 0]))
    keys, rows = index.keys_and_rows()
    assert (keys.tolist(), rows.tolist()) == ([9, -9, 0], [0, 1, 2])
    assert index.is_tracking


def test_keys_are_exported_in_batches() -> None:
    index = Index()
    assert list(index.export()) == []
    index.assign(np.array([9, -9, 0, 4]))
    batches = [(keys.tolist(), rows.tolist()) for keys, rows in index.export(3)]
    assert batches == [([9, -9, 0], [0, 1, 2]), ([4], [3])]
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        index.export(0)


def test_a_cut_keeps_what_it_found() -> None:
    index = Index()
    index.map(np.array([1, 2]), insert=True)
    cut = index.cut()
    with pytest.raises(BusyError):
        index.cut()
    index.erase(np.array([1]))
    assert (cut.keys.tolist(), cut.rows.tolist(), cut.left.tolist()) == ([1, 2], [0, 1], [])
    cut.finish(True)
    with index.cut(changes_only=True) as changes:
        assert (changes.keys.tolist(), changes.left.tolist()) == ([], [1])
    index.note_changed(np.array([1]))
    with index.cut(changes_only=True) as changes:
        assert (changes.keys.tolist(), changes.left.tolist()) == ([2], [1])
    with pytest.raises(ValueError, match="row numbers must be .*, got 2"):
        index.note_changed(np.array([2]))


def test_a_cut_of_changes_needs_one_to_build_on() -> None:
    index = Index()
    assert not index.is_tracking
    with pytest.raises(ValueError, match="no cut that changes could build on"):
        index.cut(changes_only=True)


_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["map", "erase", "durable", "abandoned", "note"]),
        st.lists(st.integers(-6, 6), max_size=6),
    ),
    max_size=12,
)


@given(_CALLS)
def test_changes_are_those_of_a_set(calls: list[tuple[str, list[int]]]) -> None:
    index = Index()
    index.cut().finish(True)
    there: set[int] = set()
    came: set[int] = set()
    left: set[int] = set()
    for call, drawn in calls:
        keys = np.array(drawn, dtype=np.int64)
        if call == "map":
            index.map(keys, insert=True)
            came |= set(drawn) - there
            left -= set(drawn)
            there |= set(drawn)
        elif call == "erase":
            index.erase(keys)
            left |= there & set(drawn)
            came -= set(drawn)
            there -= set(drawn)
        elif call == "note":
            found, outcomes = index.map(keys, insert=False)
            index.note_changed(found[outcomes == Outcome.FOUND])
            came |= there & set(drawn)
        else:
            with index.cut(changes_only=True) as cut:
                assert set(cut.keys.tolist()) == came
                assert set(cut.left.tolist()) >= left
                assert not set(cut.left.tolist()) & there
                if call == "durable":
                    cut.finish(True)
                    came, left = set(), set()
    assert set(index.keys_and_rows()[0].tolist()) == there
    index.check_invariants()


def test_threads_map_side_by_side() -> None:
    made = Rows()
    index = Index(make_rows=made)
    keys = np.arange(2000)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(index.map(keys, insert=True)[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((rows == found[0]).all() for rows in found)
    assert made.keys == dict(zip(found[0].tolist(), keys.tolist(), strict=True))


@pytest.mark.parametrize(
    "initializer",
    [
        init.Constant(value=2.0),
        init.Uniform(low=-1.0, high=3.0),
        init.Normal(stddev=0.1),
        init.TruncatedNormal(),
        init.Custom(fn=lambda keys, values: np.copyto(values, keys[:, None])),
    ],
)
def test_initial_rows_are_those_of_a_table(initializer: init.Initializer) -> None:
    table = Table(dim=5, name="user", seed=4, initializer=initializer)
    made = initial_rows(KEYS, 5, initializer=initializer, name="user", seed=4)
    np.testing.assert_array_equal(made, table.find_or_insert(KEYS))
    assert initial_rows(KEYS[:0], 5, initializer=initializer, name="user").shape == (0, 5)
    with pytest.raises(ValueError, match="dim"):
        initial_rows(KEYS, 0, initializer=initializer, name="user")
    with pytest.raises(ValueError, match="name"):
        initial_rows(KEYS, 2, initializer=initializer, name="")
