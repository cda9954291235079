"""Packing and unpacking vectors, against numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st

from recsdk_core import (
    VectorParts,
    VectorStretches,
    lay_out_vectors,
    pack_vectors,
    unpack_vectors,
)


def given(blocks: list[Any]) -> tuple[list[Any], VectorParts]:
    """Matrices and parts for [(matrix, column, width, [(start, rows), ...]), ...]."""
    parts = [part for block in blocks for part in block[3]]
    rows = [np.asarray(part[1]) for part in parts]
    counts = [len(of_part) for of_part in rows]
    return [block[0] for block in blocks], VectorParts(
        matrices=np.arange(len(blocks)),
        columns=np.array([block[1] for block in blocks], np.int64),
        widths=np.array([block[2] for block in blocks], np.int64),
        num_parts=np.array([len(block[3]) for block in blocks], np.int64),
        starts=np.array([part[0] for part in parts], np.int64),
        begins=np.cumsum([0, *counts])[:-1],
        counts=np.array(counts, np.int64),
        rows=np.concatenate([np.zeros(0, np.int32), *rows]),
    )


def unpack(packed: Any, blocks: list[Any]) -> None:
    matrices, parts = given(blocks)
    unpack_vectors(packed, parts, matrices)


def pack(blocks: list[Any], packed: Any, divisor: float = 1.0) -> None:
    matrices, parts = given(blocks)
    pack_vectors(matrices, parts, packed, divisor)


ROW_TYPES = st.sampled_from([np.int32, np.int64])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, list[Any], np.ndarray]:
    """A matrix, disjoint blocks of its columns, and room for their parts."""
    num_rows = draw(st.integers(0, 5))
    widths = draw(st.lists(st.integers(0, 4), max_size=3))
    shape = num_rows, sum(widths) + 1
    matrix = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape) + 1
    made, start, column, number = [], 0, 0, draw(ROW_TYPES)
    for width in widths:
        parts = []
        for _ in range(draw(st.integers(0, 3))):
            rows = np.array(draw(st.permutations(range(num_rows))), number)
            if draw(st.booleans()):
                rows = np.sort(rows)[draw(st.integers(0, num_rows)) :]
            parts.append((start, rows))
            start += width * len(rows)
        made.append((matrix, column, width, parts))
        column += width
    return matrix, made, np.arange(start, dtype=np.float32) * 8 + 4


@given_by(blocks())
def test_unpack_adds_up_what_pack_copied(case: Any) -> None:
    matrix, made, packed = case
    expected = matrix.copy()
    for block in made:
        _, column, width, parts = block
        expected[:, column : column + width] = 0
        for start, rows in parts:
            vectors = packed[start : start + width * len(rows)].reshape(len(rows), width)
            expected[rows, column : column + width] += vectors
    unpack(packed, made)
    np.testing.assert_array_equal(matrix, expected)


@given_by(blocks(), st.sampled_from([1.0, 3.0]))
def test_pack_copies_and_divides(case: Any, divisor: float) -> None:
    matrix, made, packed = case
    expected = packed.copy()
    for block in made:
        _, column, width, parts = block
        for start, rows in parts:
            vectors = matrix[rows, column : column + width] / np.float32(divisor)
            expected[start : start + vectors.size] = vectors.ravel()
    pack(made, packed, divisor)
    np.testing.assert_array_equal(packed, expected)


MATRIX = np.zeros((2, 3), np.float32)
ALL = np.array([0, 1])
BAD_BLOCKS = [
    ((MATRIX, 1, 3, []), ValueError, "3 columns from column 1 on"),
    ((MATRIX, 0, -1, []), ValueError, "widths must be 0 or more, got -1"),
    ((MATRIX.astype(np.float64), 0, 3, []), TypeError, "must be float32"),
    ((MATRIX, 0, 3, [(1, ALL)]), ValueError, "2 vectors of width 3 from 1 on does not fit into 6"),
    ((MATRIX, 0, 3, [(-1, ALL)]), ValueError, "from -1 on"),
    ((MATRIX, 0, 3, [(0, np.array([2]))]), ValueError, "row 2 of a block of 2 rows"),
    ((MATRIX, 0, 3, [(0, np.array([-1]))]), ValueError, "row -1 of a block of 2 rows"),
    ((MATRIX, 0, 3, [(0, np.array([0.5]))]), TypeError, "rows must be int32"),
    ((MATRIX, 0, 3, [(0, np.array([2**32]))]), ValueError, r"rows must be below 2\*\*31"),
]
BAD_PARTS = [
    ({"matrices": [1]}, "matrices must be 0 or more and below the number of .*, 1, got 1"),
    ({"matrices": [-1]}, "matrices must be 0 or more and below the number of .*, 1, got -1"),
    ({"num_parts": [2]}, "add up to the parts"),
    ({"num_parts": [0]}, "add up to the parts"),
    ({"num_parts": [-1]}, "num_parts must be 0 or more and add up to the parts, .*-1 as the least"),
    ({"begins": [-1]}, "each part must lie within rows, 0 to 1, got 1 from -1 on"),
    ({"counts": [2]}, "each part must lie within rows, 0 to 1, got 2 from 0 on"),
    ({"counts": [-1]}, "each part must lie within rows, 0 to 1, got -1 from 0 on"),
    ({"columns": []}, "columns must have one element for each block of matrices, 1, got 0"),
    ({"widths": [1, 1]}, "widths must have one element for each block of matrices, 1, got 2"),
    ({"num_parts": [1, 0]}, "num_parts must have one element .* block of matrices, 1, got 2"),
    ({"begins": [0, 0]}, "begins must have one element for each part of starts, 1, got 2"),
    ({"counts": [1, 0]}, "counts must have one element for each part of starts, 1, got 2"),
]


@pytest.mark.parametrize(("block", "error", "message"), BAD_BLOCKS)
def test_bad_blocks_change_nothing(block: Any, error: type[Exception], message: str) -> None:
    packed = np.ones(6, np.float32)
    good = (np.full((1, 1), 5, np.float32), 0, 1, [(0, ALL[:1])])
    with pytest.raises(error, match=message):
        unpack(packed, [good, block])
    with pytest.raises(error, match=message):
        pack([good, block], packed)
    assert packed.tolist() == [1.0] * 6
    assert good[0].tolist() == [[5.0]]


@pytest.mark.parametrize(("changed", "message"), BAD_PARTS)
def test_bad_parts_change_nothing(changed: dict[str, list[int]], message: str) -> None:
    packed, matrix = np.ones(1, np.float32), np.full((1, 1), 5, np.float32)
    matrices, parts = given([(matrix, 0, 1, [(0, ALL[:1])])])
    bad = parts._replace(**{name: np.array(numbers, np.int64) for name, numbers in changed.items()})
    with pytest.raises(ValueError, match=message):
        unpack_vectors(packed, bad, matrices)
    with pytest.raises(ValueError, match=message):
        pack_vectors(matrices, bad, packed)
    assert (packed.tolist(), matrix.tolist()) == ([1.0], [[5.0]])


@pytest.mark.parametrize("packed", [np.zeros(4), np.zeros((2, 2), np.float32), None, [1.0]])
def test_bad_packed(packed: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        unpack(packed, [])
    with pytest.raises((TypeError, ValueError)):
        pack([], packed)


def test_targets_that_do_not_tell_their_strides() -> None:
    packed = (ctypes.c_float * 4)()
    pack([(np.ones((2, 2), np.float32), 0, 2, [(0, ALL)])], packed)
    assert list(packed) == [1.0] * 4


def test_read_only_targets() -> None:
    fixed = np.zeros((1, 2), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="out is written to"):
        unpack(np.zeros(2, np.float32), [(fixed, 0, 2, [(0, ALL[:1])])])
    with pytest.raises(ValueError, match="packed is written to"):
        pack([], fixed[0])


@given_by(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    stretches=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 7))),
    num_processes=st.integers(4, 6),
    multiple=st.integers(1, 5),
)
def test_stretches_are_laid_out_as_lists_are(
    counts: list[int], stretches: list[Any], num_processes: int, multiple: int
) -> None:
    stretches = sorted((process, width, which % len(counts)) for process, width, which in stretches)
    floats: list[int] = []  # each is the stretch that it belongs to, or -1
    used, padded = [], []
    for process in range(num_processes):
        before = len(floats)
        for number, (of, width, which) in enumerate(stretches):
            floats += [number] * (width * counts[which] if of == process else 0)
        used.append(len(floats) - before)
        floats += [-1] * (-used[-1] % multiple)
        padded.append(len(floats) - before)
    columns = np.ascontiguousarray(np.array(stretches, np.int64).reshape(-1, 3).T)
    given = VectorStretches(counts=columns[2], widths=columns[1], processes=columns[0])
    starts, found_used, found_padded = lay_out_vectors(
        np.array(counts), given, num_processes, multiple
    )
    assert (found_used, found_padded) == (used, padded)
    for number, (_, width, which) in enumerate(stretches):
        if width * counts[which]:
            assert starts[number] == floats.index(number)


@pytest.mark.parametrize(
    ("counts", "widths", "processes", "multiple", "message"),
    [
        ([3], [1], [0], 1, "a count is not there"),
        ([-1], [1], [0], 1, "a count is not there"),
        ([1], [1], [0], 1, "no number may be negative"),
        ([0], [-1], [0], 1, "no number may be negative"),
        ([0], [1], [2], 1, "their processes must ascend, and be there"),
        ([0, 0], [1, 1], [1, 0], 1, "their processes must ascend, and be there"),
        ([0, 0], [1], [0], 1, "each must have a count, a width, a process"),
        ([0], [1], [0], 0, "multiple must be at least 1"),
        ([2], [8], [0], 1, "more than 2[*][*]63 floats"),
        ([2, 2], [1, 1], [0, 0], 1, "more than 2[*][*]63 floats"),
        ([2, 2], [1, 1], [0, 1], 1, "more than 2[*][*]63 floats"),
        ([2, 0], [1, 1], [0, 0], 2**62 + 1, "more than 2[*][*]63 floats"),
    ],
)
def test_stretches_that_do_not_fit_are_refused(
    counts: list[int], widths: list[int], processes: list[int], multiple: int, message: str
) -> None:
    given = VectorStretches(np.array(counts), np.array(widths), np.array(processes))
    with pytest.raises(ValueError, match=message):
        lay_out_vectors(np.array([3, -2, 2**62]), given, 2, multiple)


@pytest.mark.parametrize("count", [-1, 65_537, 2**63 - 1])
def test_numbers_of_processes_that_there_are_not_are_refused(count: int) -> None:
    given = VectorStretches(*np.zeros((3, 1), np.int64))
    with pytest.raises(ValueError, match="processes"):
        lay_out_vectors(np.array([1]), given, count, 1)
