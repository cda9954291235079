"""Columns in a random order, and interleaved, are what numpy makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recsdk_core import Shuffle, interleave

KINDS = (np.int64, np.int32, np.float32, np.uint8)


def cut(array: np.ndarray, ends: list[int]) -> list[np.ndarray]:
    return [each.copy() for each in np.split(array, sorted(min(end, len(array)) for end in ends))]


@given(
    st.integers(0, 6000),
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20)), max_size=5),
    st.lists(st.integers(0, 6000), max_size=4),
    st.lists(st.integers(0, 6000), max_size=4),
    st.floats(0, 1),
)
@example(5000, 1, [(np.int64, 0), (np.float32, 13), (np.uint8, 1)], [5, 2000], [4096], 0.0)
@settings(deadline=None, max_examples=50)
def test_columns_come_in_the_order_of_the_shuffle(
    num_rows: int,
    seed: int,
    kinds: list[Any],
    part_ends: list[int],
    stretch_ends: list[int],
    share: float,
) -> None:
    shuffle = Shuffle(num_rows, seed)
    order, skip = shuffle.order(), int(share * num_rows)
    assert len(shuffle) == num_rows
    assert np.sort(order).tolist() == list(range(num_rows))
    generator = np.random.default_rng(seed)
    columns, expected = [], []
    for kind, width in kinds:
        shape = (num_rows, width) if width else (num_rows,)
        whole = generator.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8)
        whole = whole.view(kind)[..., 0]
        stretches = cut(np.zeros((num_rows - skip, *shape[1:]), kind), stretch_ends)
        columns.append((cut(whole, part_ends), stretches))
        expected.append(whole[order[skip:]])
    shuffle.write(columns, skip)
    for (_, stretches), rows in zip(columns, expected, strict=True):
        assert np.concatenate(stretches).tobytes() == rows.tobytes()


@pytest.mark.parametrize(
    ("columns", "skip", "kind", "text"),
    [
        (
            [([np.zeros(2, np.int64)], [np.zeros(3, np.int64)])],
            0,
            ValueError,
            "rows of all parts must be those that were shuffled, 3, got 2",
        ),
        (
            [([np.zeros(3, np.int64)], [np.zeros(3, np.int64)])],
            1,
            ValueError,
            "skip and the rows of all stretches must be .* 3, got 1 and 3",
        ),
        (
            [([np.zeros(3, np.int64)], [np.zeros(3, np.int64)])],
            2**63 - 1,
            ValueError,
            "skip and the rows of all stretches must be .* 3, got 9223372036854775807 and 3",
        ),
        (
            [([np.zeros(3, np.int64)], [np.zeros(3, np.int32)])],
            0,
            ValueError,
            r"one dtype and width, got .* of int64, shape \(3,\) and .* of int32, shape \(3,\)",
        ),
        (
            [([np.zeros((3, 2), np.int64)], [np.zeros((3, 1), np.int64)])],
            0,
            ValueError,
            r"one dtype and width, got .*\(3, 2\) and .*\(3, 1\)",
        ),
        ([([np.zeros(3)], [np.zeros(3)])], 0, TypeError, "int64, int32, float32 or uint8"),
        ([([np.zeros((3, 1, 1), np.int64)], [])], 0, ValueError, "columns"),
        ([([np.zeros(6, np.int64)[::2]], [np.zeros(3, np.int64)])], 0, ValueError, "contiguous"),
        ([([np.zeros(3, np.int64)],)], 0, ValueError, "a column"),
        (
            [
                ([np.zeros(3, np.int64)], [np.zeros(3, np.int64)]),
                ([np.zeros(1, np.int64), np.zeros(2, np.int64)], [np.zeros(3, np.int64)]),
            ],
            0,
            ValueError,
            "must have as many rows as the first column's, ",
        ),
    ],
)
def test_columns_that_do_not_fit(
    columns: list[Any], skip: int, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        Shuffle(3, 0).write(columns, skip)


def test_read_only_stretches_are_refused() -> None:
    stretch = np.zeros(3, np.int64)
    stretch.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        Shuffle(3, 0).write([([np.zeros(3, np.int64)], [stretch])])


@pytest.mark.parametrize(("num_rows", "seed"), [(-1, 0), (2**32, 0), (1, -1), (1, 2**64)])
def test_shuffles_of_what_there_is_not(num_rows: int, seed: int) -> None:
    with pytest.raises(ValueError, match="Shuffle: (num_rows|seed) must be at"):
        Shuffle(num_rows, seed)


@given(
    st.integers(1, 15),
    st.integers(0, 200),
    st.none() | st.sampled_from([np.nan, np.inf, -np.inf]),
    st.integers(0),
)
@settings(deadline=None, max_examples=50)
def test_interleaved_columns_are_a_matrix(
    width: int, num_rows: int, odd: float | None, where: int
) -> None:
    expected = np.arange(num_rows * width, dtype=np.float32).reshape(num_rows, width)
    if odd is not None and expected.size:
        expected.reshape(-1)[where % expected.size] = odd
    matrix = np.zeros_like(expected)
    is_finite = interleave([np.ascontiguousarray(each) for each in expected.T], matrix)
    assert is_finite == np.isfinite(expected).all()
    assert matrix.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("columns", "matrix", "kind", "text"),
    [
        ([], np.zeros((3, 0), np.float32), ValueError, "no columns"),
        ([np.zeros(3, np.float32)], np.zeros((3, 2), np.float32), ValueError, r"\(3, 1\)"),
        ([np.zeros(3)], np.zeros((3, 1), np.float32), TypeError, "float32"),
        (
            [np.zeros(3, np.float32), np.zeros(2, np.float32)],
            np.zeros((3, 2), np.float32),
            ValueError,
            "columns must all have the length of the first, ",
        ),
    ],
)
def test_columns_of_no_matrix(
    columns: list[Any], matrix: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        interleave(columns, matrix)


def test_columns_that_a_generator_makes_are_held() -> None:
    matrix = np.zeros((50_000, 3), np.float32)
    assert interleave((np.full(50_000, n, np.float32) for n in range(3)), matrix)  # type: ignore[arg-type]
    assert (matrix == np.arange(3)).all()
    out = np.zeros(50_000, np.int64)
    parts = (np.full(25_000, n) for n in range(2))
    Shuffle(50_000, 1).write([(parts, [out])])  # type: ignore[list-item]
    assert np.bincount(out).tolist() == [25_000, 25_000]
