"""Rows in columns, in each form that bags have: joined, put in order and cut, they are as lists."""

from __future__ import annotations

import os
import signal
import tracemalloc
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import Shuffle
from recsdk_pipeline.data import ClickBatch, memory
from recsdk_pipeline.data.packed import Packed, Placing, joined_stretches
from recsdk_pipeline.data.rows import Bags, Rows, joined

Lists = list[list[int]]
SHARED = Bags(np.arange(10, 16), np.array([0, 2, 2, 3, 6]))
SHARED_SINGLE = Bags(np.arange(20, 25))
seeds = st.none() | st.integers(0, 99)


def shuffle_of(seed: int | None, num_rows: int) -> Shuffle | None:
    return None if seed is None else Shuffle(num_rows, seed)


def lists_of(bags: Bags, num_rows: int) -> Lists:
    ends = np.cumsum(bags.lengths(num_rows), dtype=np.int64)
    return [each.tolist() for each in np.split(bags.plain().values, ends)[:num_rows]]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    num = draw(st.integers(0, 6))

    def numbers(most: int, size: int = num) -> Any:
        drawn = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
        return np.array(drawn, np.int64)

    ends = np.concatenate([[0], np.cumsum(numbers(3))])
    there = draw(st.none() | st.just(numbers(1) > 0))
    more = {"weights": numbers(9).astype(np.float32), "timestamps": numbers(9)}
    bags = {
        "single": Bags(numbers(9), **more),
        "some": Bags(numbers(9), is_there=there, **more),
        "any": Bags(numbers(9, int(ends[-1])), ends),
        "shared": Bags(SHARED.values, SHARED.offsets, at=numbers(3)),
        "shared_single": Bags(SHARED_SINGLE.values, at=numbers(4).astype(np.int32)),
        "shared_by_some": Bags(numbers(9, 5), at=numbers(4)),
    }
    labels = np.arange(num, dtype=np.float32).reshape(-1, 1)
    return Rows(labels, numbers(9, 2 * num).astype(np.float32).reshape(num, 2), bags)


def as_lists(each: Rows) -> list[Any]:
    """Of each row: the bags, then what stands beside them."""
    found = [lists_of(bags, len(each)) for bags in each.bags.values()]
    beside = [each.labels.tolist(), each.dense.tolist()]
    for name in ("single", "some"):
        bags = each.bags[name]
        for values in (bags.weights, bags.timestamps):
            places = Bags(values, is_there=bags.is_there)  # type: ignore[arg-type]
            beside.append(lists_of(places, len(each)))
    return list(zip(*found, *beside, strict=True))


@given(st.lists(rows(), min_size=1, max_size=3), st.data())
@settings(max_examples=2 * settings().max_examples)
def test_joined_rows_are_those_of_their_parts_in_the_order_given(
    parts: list[Rows], data: st.DataObject
) -> None:
    expected = [row for part in parts for row in as_lists(part)]
    order = shuffle_of(data.draw(seeds), len(expected))
    if order is not None:
        expected = [expected[n] for n in order.order()]
    with mock.patch("recsdk_pipeline.data.rows._ITEMS_AT_ONCE", data.draw(st.integers(1, 9))):
        found = joined(parts, order)
    assert as_lists(found) == expected
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(expected))] * 2)))
    part = found.part(start, stop)
    assert as_lists(part) == expected[start:stop]
    batch = part.batch()
    bags = [row[n] for n in range(len(found.bags)) for row in expected[start:stop]]
    assert batch.sparse.lengths().tolist() == [len(bag) for bag in bags]
    assert batch.sparse.values().tolist() == [key for bag in bags for key in bag]
    again = found.take(np.arange(len(expected))[::-1])
    assert as_lists(again) == expected[::-1]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_bags_are_put_in_order_in_about_twice_their_memory(num_parts: int) -> None:
    num, mean = 20_000, 100
    generator = np.random.default_rng(0)
    tracemalloc.start()
    try:
        parts = []
        for _ in range(num_parts):
            ends = np.concatenate([[0], np.cumsum(generator.integers(0, 2 * mean, num))])
            bags = {"any": Bags(generator.integers(0, 2**62, ends[-1]), ends)}
            parts.append(Rows(np.zeros((num, 1), np.float32), np.zeros((num, 0), np.float32), bags))
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        joined(parts, Shuffle(num * num_parts, 0))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before > num_parts * num * mean * 7
    assert most < 2.3 * before


@st.composite
def single_rows(draw: st.DrawFn) -> Rows:
    """Rows of one id of each feature."""
    num = draw(st.integers(0, 9))
    ids = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2 * num, max_size=2 * num))
    bags = {name: Bags(np.array(ids[n::2], np.int64)) for n, name in enumerate(("a", "b"))}
    numbers = draw(st.lists(st.integers(0, 99), min_size=5 * num, max_size=5 * num))
    matrix = np.array(numbers, np.float32).reshape(num, 5)
    return Rows(matrix[:, :2], matrix[:, 2:], bags)


def stretches(parts: list[Rows], order: Shuffle | None, ends: list[int]) -> Any:
    placing = Placing(parts, order, ends)
    with mock.patch("recsdk_pipeline.data.packed._BYTES_AT_ONCE", 16):
        calls = placing.calls()
    for call in reversed(calls):
        call()
    return placing.found()


def rows_in(batches: list[ClickBatch]) -> list[Any]:
    found: list[Any] = []
    for each in batches:
        assert each.sparse.lengths().tolist() == [1] * (2 * len(each))
        ids = each.sparse.values().reshape(2, len(each)).T.tolist()
        found += zip(ids, each.dense.tolist(), each.labels.tolist(), strict=True)
    return found


@given(st.lists(single_rows(), min_size=1, max_size=4), seeds, st.data())
@settings(max_examples=2 * settings().max_examples)
def test_stretches_of_single_ids_are_those_rows_in_the_order_given(
    parts: list[Rows], seed: int | None, data: st.DataObject
) -> None:
    expected = rows_in([part.batch() for part in parts])
    order = shuffle_of(seed, len(expected))
    if order is not None:
        expected = [expected[n] for n in order.order()]
    ends = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=2, max_size=6)))
    if order is not None:
        ends = [*ends, len(expected)]  # what is read is read to its end
    found = stretches(parts, order, ends)
    assert [len(each) for each in found] == [stop - start for start, stop in pairwise(ends)]
    assert all(isinstance(each, Packed) for each in found)
    expected = expected[ends[0] : ends[-1]]
    assert rows_in([each.batch() for each in found]) == expected
    assert rows_in([joined_stretches(found).batch()]) == expected
    assert rows_in([joined_stretches([part.rows() for part in found]).batch()]) == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9)), max_size=40))
@settings(max_examples=2 * settings().max_examples)
def test_memory_is_lent_again_only_when_no_view_is_left(calls: list[Any]) -> None:
    held: list[tuple[Any, int]] = []
    for number, (is_new, size, which) in enumerate(calls):
        if is_new or not held:
            array = memory.empty((9000 * size, 2), np.int64)
            array[...] = number
            held.append((array[len(array) // 2 :, 1:], number))  # a view alone keeps it
        else:
            del held[which % len(held)]
        assert all((array == value).all() for array, value in held)
    array = None
    held.clear()
    lent = memory.empty((9000, 2), np.int64)
    place = lent.ctypes.data
    del lent
    assert memory.empty((9000, 2), np.int64).ctypes.data == place


def test_memory_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = memory._Free()
    monkeypatch.setattr(memory, "_MOST_KEPT", 10)
    for size in (2, 2, 3, 3):
        kept.put(bytearray(size))
    assert len(kept.take(2)) == 2  # used later than those of 3
    kept.put(bytearray(2))
    kept.put(bytearray(4))
    assert kept.take(3) is None
    assert kept.take(4) is not None
    kept.put(bytearray(11))
    assert kept.take(11) is None
    assert [kept.take(2) is not None for _ in range(3)] == [True, True, False]


def test_a_forked_process_does_not_wait_for_memory_that_its_parent_was_taking() -> None:
    with memory._FREE._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            memory.empty((1 << 20,), np.uint8)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
