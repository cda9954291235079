"""Bags of many tables in one array of each kind, against the same bags piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import (
    Bags,
    JoinedBags,
    Outcome,
    Table,
    map_joined,
    optim,
    pool_joined,
    pool_tables,
    update_joined,
    update_tables,
)

DIMS = (1, 3, 4)


def tables(count: int) -> list[Table]:
    made = optim.Adagrad(lr=0.5)
    return [Table(DIMS[i % 3], name=f"table_{i}", optimizer=made) for i in range(count)]


@dataclass
class Case:
    """Pieces of tables, mapped."""

    num_pieces: list[int]
    lengths: list[list[int]]
    """Of the bags of each piece."""
    has_offsets: list[bool]
    is_mean: list[bool]
    keys: list[np.ndarray]
    """Of each piece."""

    @property
    def dims(self) -> list[int]:
        """Of each piece."""
        return [DIMS[t % 3] for t, count in enumerate(self.num_pieces) for _ in range(count)]

    def offsets(self) -> list[np.ndarray | None]:
        return [
            np.cumsum([0, *lengths]) if has else None
            for lengths, has in zip(self.lengths, self.has_offsets, strict=True)
        ]

    def starts(self, is_matrix: bool) -> tuple[list[int], tuple[int, ...]]:
        """Where each piece begins, with a gap before the first, and the shape of the result."""
        sizes = [
            dim if is_matrix else dim * len(lengths)
            for dim, lengths in zip(self.dims, self.lengths, strict=True)
        ]
        ends = np.cumsum([1, *sizes]).tolist()
        most = max((len(lengths) for lengths in self.lengths), default=0)
        return ends[:-1], (most, ends[-1]) if is_matrix else (ends[-1],)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_pieces = draw(st.lists(st.integers(0, 3), max_size=4))
    lengths, has_offsets = [], []
    for _ in range(sum(num_pieces)):
        has_offsets.append(draw(st.booleans()))
        length = st.integers(0, 3) if has_offsets[-1] else st.just(1)
        lengths.append(draw(st.lists(length, max_size=4)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    is_mean = [draw(st.booleans()) for _ in lengths]
    keys = [random.integers(0, 6, sum(of_piece)) for of_piece in lengths]
    return Case(num_pieces, lengths, has_offsets, is_mean, keys)


def mapped(case: Case, made: list[Table]) -> tuple[Any, Any]:
    """Rows and outcomes of all keys; half of the keys have no row."""
    owner = [t for t, count in enumerate(case.num_pieces) for _ in range(count)]
    counts = np.bincount(owner, list(map(len, case.keys)), len(made)).astype(np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *case.keys])
    for table in made:
        table.map(np.arange(3), insert=True)
    return map_joined(made, flat, counts, insert=False)


def joined(case: Case, rows: Any, outcomes: Any, starts: list[int]) -> JoinedBags:
    counts = np.array(list(map(len, case.keys)), np.int64)
    return JoinedBags(
        rows,
        outcomes,
        np.array(case.num_pieces, np.int64),
        counts,
        np.array(starts, np.int64),
        case.offsets(),
        np.array(case.is_mean, np.uint8),
    )


def apart(case: Case, rows: Any, outcomes: Any) -> list[Bags]:
    ends = np.cumsum(list(map(len, case.keys)))[:-1] if case.keys else []
    pieces = zip(
        np.split(rows, ends) if case.keys else [],
        np.split(outcomes, ends) if case.keys else [],
        case.offsets(),
        case.is_mean,
        strict=True,
    )
    return [
        Bags(*own, offsets, None, "mean" if is_mean else "sum") for *own, offsets, is_mean in pieces
    ]


def blocks(case: Case, bags: list[Bags], starts: list[int], array: np.ndarray) -> list[list[Any]]:
    """The blocks of each table in a result or gradient."""
    made = []
    for own, start, dim in zip(bags, starts, case.dims, strict=True):
        if array.ndim == 2:
            made.append((own, array, start))
        else:
            part = array[start : start + own.num_bags * dim].reshape(own.num_bags, dim)
            made.append((own, part, 0))
    ends = np.cumsum([0, *case.num_pieces])
    return [made[begin:end] for begin, end in pairwise(ends)]


@given(case=cases(), is_matrix=st.booleans())
def test_bags_are_pooled_and_trained_as_apart(case: Case, is_matrix: bool) -> None:
    both = tables(len(case.num_pieces)), tables(len(case.num_pieces))
    starts, shape = case.starts(is_matrix)
    rows, outcomes = mapped(case, both[0])
    mapped(case, both[1])
    bags, pieces = joined(case, rows, outcomes, starts), apart(case, rows, outcomes)
    assert bags.num_keys == len(rows)
    assert bags.num_bags == sum(map(len, case.lengths))
    expected = np.zeros(shape, np.float32)
    pool_tables(list(zip(both[1], blocks(case, pieces, starts, expected), strict=True)))
    assert pool_joined(both[0], bags, shape).tobytes() == expected.tobytes()
    gradient = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    update_joined(both[0], bags, gradient)
    update_tables(list(zip(both[1], blocks(case, pieces, starts, gradient), strict=True)))
    for ours, theirs in zip(*both, strict=True):
        assert ours.lookup(np.arange(3)).tobytes() == theirs.lookup(np.arange(3)).tobytes()
        assert ours.update_count == theirs.update_count == 1


@given(case=cases(), begin=st.integers(0, 9), end=st.integers(0, 30))
def test_pieces_that_begin_elsewhere_are_left_out(case: Case, begin: int, end: int) -> None:
    made = tables(len(case.num_pieces))
    starts, shape = case.starts(False)
    bags = joined(case, *mapped(case, made), starts)
    expected = pool_joined(made, bags, shape)
    for start, dim, lengths in zip(starts, case.dims, case.lengths, strict=True):
        if not begin <= start < end:
            expected[start : start + dim * len(lengths)] = 0
    assert pool_joined(made, bags, shape, range(begin, end)).tobytes() == expected.tobytes()


@given(case=cases())
def test_vectors_are_written_where_they_are_wanted(case: Case) -> None:
    made = tables(len(case.num_pieces))
    starts, shape = case.starts(False)
    bags = joined(case, *mapped(case, made), starts)
    out = np.full(shape, np.nan, np.float32)
    assert pool_joined(made, bags, shape, out=out) is out
    assert out.tobytes() == pool_joined(made, bags, shape).tobytes()


@pytest.mark.parametrize(
    ("shape", "out", "message"),
    [
        ((1, 3), np.zeros((1, 3), np.float32), "out must"),
        ((1, 3), np.zeros(3, np.float32), "out must be None where the result has rows and"),
        ((3,), np.zeros(4, np.float32), "out must have one element for each .* result, 3, got 4"),
        ((3,), np.broadcast_to(np.float32(0), 3), "out must be"),
    ],
)
def test_other_memory_is_refused(shape: tuple[int, ...], out: np.ndarray, message: str) -> None:
    bags = JoinedBags(**{**SOUND, "rows": ROWS - ROWS})
    made = tables(2)
    for table in made:
        table.map(np.arange(3), insert=True)
    with pytest.raises((ValueError, TypeError), match=message):
        pool_joined(made, bags, shape, out=out)


ROWS, OUTCOMES = np.array([0, 1, 0]), np.zeros(3, np.uint8)
SOUND: dict[str, Any] = {
    "rows": ROWS,
    "outcomes": OUTCOMES,
    "num_pieces": np.array([1, 1]),
    "num_keys": np.array([2, 1]),
    "starts": np.array([0, 2]),
}
BAD = [
    ({"outcomes": OUTCOMES[:2]}, "outcomes"),
    ({"num_pieces": np.array([1])}, "num_pieces must be 0 or more and add up"),
    ({"num_pieces": np.array([3, -1])}, "num_pieces must be 0 or more and add up"),
    ({"num_pieces": np.array([1, 2])}, "num_pieces must be 0 or more and add up"),
    ({"num_keys": np.array([2, 2])}, "num_keys must be 0 or more and add up"),
    ({"num_keys": np.array([1, 1])}, "num_keys must be 0 or more and add up"),
    ({"num_keys": np.array([4, -1])}, "num_keys must be 0 or more and add up"),
    ({"starts": np.array([0])}, "starts must have one element for each piece, 2, got 1"),
    ({"offsets": [None]}, "offsets must have one element for each piece, 2, got 1"),
    ({"offsets": [None, np.zeros(0, np.int64)]}, "for no bags pass"),
    ({"is_mean": np.zeros(1, np.uint8)}, "is_mean must have one element for each piece, 2, got 1"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_parts_that_do_not_fit_each_other_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        JoinedBags(**{**SOUND, **changed})


BAD_CALLS = [
    ({}, 1, (3,), "tables must be as many as the numbers in num_pieces of bags, 2, got 1"),
    ({}, 2, (2,), "do not lie within the array, which has 2 numbers; "),
    ({"starts": np.array([-1, 2])}, 2, (3,), "begin at -1 do not lie within"),
    ({"starts": np.array([0, 2**63 - 1])}, 2, (3,), "do not lie within the array"),
    ({}, 2, (1, 3), "2 vectors of 1 numbers that begin at 0 do not .* has 1 rows of 3 numbers; "),
    ({}, 2, (2, 2), "begin at 2 do not lie within"),
    ({"rows": np.array([0, 7, 0])}, 2, (3,), "row numbers must be .*, got 7"),
    (
        {"offsets": [None, np.array([0, 2])]},
        2,
        (3,),
        "offsets must run from 0 to the number of keys, .*, got 0 to 2",
    ),
]


@pytest.mark.parametrize(("changed", "count", "shape", "message"), BAD_CALLS)
def test_bags_that_do_not_fit_the_tables_change_nothing(
    changed: dict[str, Any], count: int, shape: tuple[int, ...], message: str
) -> None:
    made = [Table(1, name=f"{i}", optimizer=optim.SGD(lr=1.0)) for i in range(count)]
    for table in made:
        assert table.map(np.arange(2), insert=True)[1].tolist() == [Outcome.INSERTED] * 2
    before = [table.lookup(np.arange(2)).tolist() for table in made]
    bags = JoinedBags(**{**SOUND, **changed})
    with pytest.raises(ValueError, match=message):
        pool_joined(made, bags, shape)
    with pytest.raises(ValueError, match=message):
        update_joined(made, bags, np.ones(shape, np.float32))
    assert [table.lookup(np.arange(2)).tolist() for table in made] == before
    assert [table.update_count for table in made] == [0] * count


def test_sizes_of_the_result_are_not_negative() -> None:
    with pytest.raises(ValueError, match="shape must be at least 0"):
        pool_joined([], JoinedBags(ROWS[:0], OUTCOMES[:0], *[ROWS[:0]] * 3), (-1,))
