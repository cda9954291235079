"""Packing and unpacking vectors, against numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import pack_vectors, unpack_vectors


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, list[Any], np.ndarray]:
    """A matrix, disjoint blocks of its columns, and room for their parts."""
    num_rows = draw(st.integers(0, 5))
    widths = draw(st.lists(st.integers(0, 4), max_size=3))
    shape = num_rows, sum(widths) + 1
    matrix = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape) + 1
    made, start, column = [], 0, 0
    for width in widths:
        parts = []
        for _ in range(draw(st.integers(0, 3))):
            rows = None
            if draw(st.booleans()):
                rows = np.array(sorted(draw(st.sets(st.integers(0, 4)))), np.int64)
                rows = rows[rows < num_rows]
            parts.append((start, rows))
            start += width * (num_rows if rows is None else len(rows))
        made.append((matrix, column, width, parts))
        column += width
    return matrix, made, np.arange(start, dtype=np.float32) * 8 + 4


def rows_of(block: Any, rows: np.ndarray | None) -> np.ndarray:
    return np.arange(len(block[0])) if rows is None else rows


@given(blocks())
def test_unpack_adds_up_what_pack_copied(case: Any) -> None:
    matrix, made, packed = case
    expected = matrix.copy()
    for block in made:
        _, column, width, parts = block
        expected[:, column : column + width] = 0
        for start, rows in parts:
            chosen = rows_of(block, rows)
            vectors = packed[start : start + width * len(chosen)].reshape(len(chosen), width)
            expected[chosen, column : column + width] += vectors
    unpack_vectors(packed, made)
    np.testing.assert_array_equal(matrix, expected)


@given(blocks(), st.sampled_from([1.0, 3.0]))
def test_pack_copies_and_divides(case: Any, divisor: float) -> None:
    matrix, made, packed = case
    expected = packed.copy()
    for block in made:
        _, column, width, parts = block
        for start, rows in parts:
            vectors = matrix[rows_of(block, rows), column : column + width] / np.float32(divisor)
            expected[start : start + vectors.size] = vectors.ravel()
    pack_vectors(made, packed, divisor)
    np.testing.assert_array_equal(packed, expected)


MATRIX = np.zeros((2, 3), np.float32)
BAD_BLOCKS = [
    ((MATRIX, 0, 3), ValueError, r"must be a block \(matrix, column, width, parts\), got 3"),
    ((MATRIX, 1, 3, []), ValueError, "3 columns from column 1 on"),
    ((MATRIX, 0, -1, []), ValueError, "width must not be negative, got -1"),
    ((MATRIX, 0, 2**63, []), ValueError, "width must be an int below"),
    ((MATRIX.astype(np.float64), 0, 3, []), TypeError, "must be float32"),
    ((MATRIX, 0, 3, [(0,)]), ValueError, r"must be a part \(start, rows or None\), got 1"),
    ((MATRIX, 0, 3, [(1, None)]), ValueError, "2 vectors of width 3 from 1 on does not fit into 6"),
    ((MATRIX, 0, 3, [(-1, None)]), ValueError, "from -1 on"),
    ((MATRIX, 0, 3, [(0, np.array([2]))]), ValueError, "row 2 of a block of 2 rows"),
    ((MATRIX, 0, 3, [(0, np.array([-1]))]), ValueError, "row -1 of a block of 2 rows"),
    ((MATRIX, 0, 3, [(0, np.array([0.5]))]), TypeError, "rows must be int64"),
]


@pytest.mark.parametrize(("block", "error", "message"), BAD_BLOCKS)
def test_bad_blocks_change_nothing(block: Any, error: type[Exception], message: str) -> None:
    packed = np.ones(6, np.float32)
    good = (np.full((1, 1), 5, np.float32), 0, 1, [(0, None)])
    with pytest.raises(error, match=message):
        unpack_vectors(packed, [good, block])
    with pytest.raises(error, match=message):
        pack_vectors([good, block], packed)
    assert packed.tolist() == [1.0] * 6
    assert good[0].tolist() == [[5.0]]


@pytest.mark.parametrize("packed", [np.zeros(4), np.zeros((2, 2), np.float32), None, [1.0]])
def test_bad_packed(packed: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        unpack_vectors(packed, [])
    with pytest.raises((TypeError, ValueError)):
        pack_vectors([], packed)


def test_targets_that_do_not_tell_their_strides() -> None:
    packed = (ctypes.c_float * 4)()
    pack_vectors([(np.ones((2, 2), np.float32), 0, 2, [(0, None)])], packed)
    assert list(packed) == [1.0] * 4


def test_read_only_targets() -> None:
    fixed = np.zeros((1, 2), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="out is written to"):
        unpack_vectors(np.zeros(2, np.float32), [(fixed, 0, 2, [(0, None)])])
    with pytest.raises(ValueError, match="packed is written to"):
        pack_vectors([], fixed[0])
