"""Row numbers that a mapping call writes as those of stores which have the rows of many tables."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from engine_threads import engine_threads
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import (
    CapacityError,
    Default,
    Index,
    Outcome,
    StoreNumbers,
    join_rows,
    map_joined,
)

DEFAULTS = [Default(), Default(kind="shared_rows", n=3), Default(kind="initial_row")]


def placing(defaults: list[Default]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First rows, default rows and numbers of shared rows: a thousand rows for each table."""
    firsts = 1000 * np.arange(len(defaults))
    return firsts, firsts + 900, np.array([each.n or 0 for each in defaults], np.int64)


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """Keys of pieces by table, and what keys without a row of each table read."""
    tables = draw(
        st.lists(
            st.tuples(
                st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=3),
                st.sampled_from(DEFAULTS),
            ),
            max_size=4,
        )
    )
    return [pieces for pieces, _ in tables], [default for _, default in tables]


@given(data=st.data(), batch=batches(), number=st.sampled_from([np.int32, np.int64]))
def test_numbers_are_those_that_join_rows_makes(data: Any, batch: Any, number: Any) -> None:
    pieces, defaults = batch
    counts = np.array([len(keys) for of_table in pieces for keys in of_table], np.int64)
    keys = np.array([key for of_table in pieces for own in of_table for key in own], np.int64)
    num_pieces = np.array([len(of_table) for of_table in pieces], np.int64)
    order = np.array(data.draw(st.permutations(range(len(counts)))), np.int64)
    begins = np.zeros(len(counts), np.int64)
    begins[order] = np.cumsum(counts[order]) - counts[order]
    firsts, default_rows, shared = placing(defaults)
    ours, theirs = (
        [Index(name=f"{n}", max_rows=9, default=each) for n, each in enumerate(defaults)]
        for _ in range(2)
    )
    for insert in (True, False):
        out = np.full(len(keys), -1, number)
        to = np.zeros(len(pieces), np.int64)
        store = StoreNumbers([out], to, begins, firsts, default_rows, shared)
        none, outcomes = map_joined(
            ours, keys, counts, insert=insert, num_pieces=num_pieces, store=store
        )
        assert none is None
        rows, expected = map_joined(theirs, keys, counts, insert=insert, num_pieces=num_pieces)
        assert outcomes.tolist() == expected.tolist()
        of_pieces = (np.repeat(each, num_pieces)[order] for each in (firsts, default_rows, shared))
        piece_begins = (np.cumsum(counts) - counts)[order]
        joined = np.empty(len(keys), number)
        join_rows(rows, expected, (piece_begins, counts[order], *of_pieces), joined)
        assert out.tolist() == joined.tolist()


@pytest.mark.parametrize("threads", [1, 3])
def test_numbers_of_many_keys_go_to_several_stores(threads: int) -> None:
    with engine_threads(threads):
        keys = np.arange(90_000) % 50_000
        counts, zeros = np.array([40_000, 50_000]), np.zeros(2, np.int64)
        out: list[Any] = [np.empty(40_000, np.int32), np.empty(50_000, np.int64)]
        store = StoreNumbers(out, np.array([0, 1]), zeros, np.array([5, 2**40]), zeros, zeros)
        map_joined([Index(name="a"), Index(name="b")], keys, counts, insert=True, store=store)
    assert (out[0] == 5 + np.arange(40_000)).all()
    assert (out[1] == 2**40 + np.arange(50_000)).all()


def one(index: Index, out: Any, **changes: Any) -> Any:
    """Maps three keys of an index into a store."""
    zero = np.zeros(1, np.int64)
    given = {"stores": zero, "begins": zero, "first_rows": zero, "default_rows": zero}
    store = StoreNumbers(**{"out": [out], "num_shared": zero, **given, **changes})
    return map_joined([index], np.array([7, 8, 7]), np.array([3]), insert=True, store=store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begins": np.array([-1])}, "within the store's, 0 to 3, got 3 from -1 on"),
        ({"begins": np.array([1])}, "within the store's, 0 to 3, got 3 from 1 on"),
        ({"begins": np.array([0, 0])}, "begins must have one element for each piece, 1, got 2"),
        ({"stores": np.array([1])}, "stores must .* below the number of arrays of out, 1, got 1"),
        ({"stores": np.array([-1])}, "stores must be 0 or more and below .*, got -1"),
        ({"stores": np.array([0, 0])}, "stores must have one element for each table, 1, got 2"),
        ({"first_rows": np.array([0, 0])}, "first_rows must have one .* each table, 1, got 2"),
        ({"default_rows": np.zeros(0, int)}, "default_rows must have one .* each table, 1, got 0"),
        ({"num_shared": np.array([0, 0])}, "num_shared must have one .* each table, 1, got 2"),
        ({"first_rows": np.array([-1])}, "first_row of a store must be 0 to .*, got -1"),
        ({"first_rows": np.array([2**31])}, "first_row .* 0 to 2147483647, got 2147483648; pass"),
        ({"default_rows": np.array([2**31])}, "default_row .* 0 to .*, got 2147483648; pass int64"),
        ({"default_rows": np.array([-1])}, "default_row of a store must be 0 to .*, got -1"),
        ({"num_shared": np.array([2])}, "num_shared of a store must be .* share, 0, got 2"),
        (
            {"first_rows": np.array([2**31 - 1])},
            "row numbers must be at most 0 .*, got up to 1; pass int64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_key_gets_a_row(
    changes: dict[str, Any], message: str
) -> None:
    index = Index(name="a")
    with pytest.raises(ValueError, match=message):
        one(index, np.zeros(3, np.int32), **changes)
    assert len(index) == 0
    assert index.stats().outcomes[Outcome.INSERTED] == 0
    index.check_invariants()
    one(index, np.zeros(3, np.int32), first_rows=np.array([2**31 - 2]))
    assert len(index) == 2


@pytest.mark.parametrize(
    ("begins", "begin", "message"),
    [
        ([0, 2], 8, "index 'a': numbers of a store lie over numbers of a store of index 'b'; pass"),
        ([3, 12], 3, "index 'a': numbers of a store lie over its keys; pass arrays of their own"),
        ([5, 8], 0, "index 'a': numbers of a store lie over keys of index 'b'; pass arrays of"),
    ],
)
def test_numbers_that_lie_over_others_or_keys_are_refused(
    begins: list[int], begin: int, message: str
) -> None:
    indexes = [Index(name="a"), Index(name="b")]
    memory = np.arange(20)
    zeros = np.zeros(2, np.int64)
    store = StoreNumbers([memory], zeros, np.array(begins), zeros, zeros, zeros)
    keys = memory[begin : begin + 6]
    with pytest.raises(ValueError, match=message):
        map_joined(indexes, keys, np.array([3, 3]), insert=True, store=store)
    assert [len(index) for index in indexes] == [0, 0]
    assert memory.tolist() == list(range(20))
    apart = store._replace(begins=np.array([14, 17]))
    map_joined(indexes, keys, np.array([3, 3]), insert=True, store=apart)
    assert memory[14:].tolist() == [0, 1, 2, 0, 1, 2]


def test_arrays_that_cannot_be_written_are_refused() -> None:
    index = Index(name="a")
    fixed = np.zeros(3, np.int32)
    fixed.flags.writeable = False
    for out, error in [
        (np.zeros(3, np.float32), TypeError),
        (np.zeros(6, np.int32)[::2], ValueError),
        (fixed, ValueError),
        (np.zeros((3, 1), np.int32), ValueError),
    ]:
        with pytest.raises(error):
            one(index, out)
    assert len(index) == 0


def test_arrays_live_until_they_are_written() -> None:
    index, sizes = Index(name="a"), []

    def fresh(size: int) -> Any:
        made = np.empty(size, np.int32)
        weakref.finalize(made, lambda: sizes.append(len(index)))
        return made

    zero = np.zeros(1, np.int64)
    store = StoreNumbers(map(fresh, [3]), zero, zero, zero, zero, zero)  # type: ignore[arg-type]
    map_joined([index], np.array([7, 8, 7]), np.array([3]), insert=True, store=store)
    assert sizes == [2]


def test_a_call_that_raises_changes_nothing() -> None:
    index = Index(name="a", max_rows=1, on_full="raise")
    with pytest.raises(CapacityError):
        one(index, np.zeros(3, np.int32))
    assert len(index) == 0
