"""Rows in columns, in each form that bags have: joined, put in order and cut, they are as lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_pipeline.data.rows import Bags, Rows, joined

Lists = list[list[int]]
SHARED = Bags(np.arange(10, 16), np.array([0, 2, 2, 3, 6]))
SHARED_SINGLE = Bags(np.arange(20, 25))


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
@settings(deadline=None, max_examples=50)
def test_joined_rows_are_those_of_their_parts_in_the_order_given(
    parts: list[Rows], data: st.DataObject
) -> None:
    expected = [row for part in parts for row in as_lists(part)]
    order = data.draw(st.none() | st.permutations(range(len(expected))))
    if order is not None:
        expected = [expected[n] for n in order]
    found = joined(parts, None if order is None else np.array(order, np.int64))
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
