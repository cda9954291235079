"""Combining equal keys and their gradients, against numpy and against an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import (
    Bags,
    CombineBlock,
    Table,
    combine_gradients,
    distinct_keys,
    init,
    optim,
)
from recsdk_core.testing import keys


@given(st.lists(st.one_of(st.integers(-2, 2), keys()), max_size=30))
def test_distinct_keys_are_in_the_order_of_first_sight(given_keys: list[int]) -> None:
    array = np.array(given_keys, np.int64)
    distinct, which = distinct_keys(array)
    assert distinct.tolist() == list(dict.fromkeys(given_keys))
    np.testing.assert_array_equal(distinct[which], array)


@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_keys_of_other_integers(dtype: Any) -> None:
    distinct, which = distinct_keys(np.array([7, 7, 5], dtype))
    assert distinct.tolist() == [7, 5]
    assert which.tolist() == [0, 0, 1]


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    pooling=st.sampled_from(["sum", "mean"]),
    is_weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_an_update_with_sums_is_one_with_all(
    lengths: list[int], pooling: str, is_weighted: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    count = sum(lengths)
    given_keys = random.integers(0, 4, count)
    offsets = np.cumsum([0, *lengths])
    weights = random.uniform(0.5, 2, count).astype(np.float32) if is_weighted else None
    grad = random.normal(size=(len(lengths), 5)).astype(np.float32)
    plain, combined = (
        Table(3, name="a", optimizer=optim.Adagrad(lr=1.0), initializer=init.Constant(value=1.0))
        for _ in range(2)
    )
    rows, outcomes = plain.map(given_keys, insert=True)
    plain.update_rows(Bags(rows, outcomes, offsets, weights, pooling), grad[:, 1:4].copy())

    distinct, which = distinct_keys(given_keys)
    packed = np.full(len(distinct) * 3 + 2, 9.0, np.float32)
    rows_U, outcomes_U = combined.map(distinct, insert=True)
    bags = Bags(which, outcomes_U[which], offsets, weights, pooling)
    block = CombineBlock(bags=bags, column=1, width=3, start=1, num_sums=len(distinct))
    combine_gradients([block], grad, packed)
    assert packed[0] == packed[-1] == 9.0
    combined.update_rows(Bags(rows_U, outcomes_U), packed[1:-1].reshape(-1, 3))
    np.testing.assert_allclose(combined.lookup(distinct), plain.lookup(distinct), rtol=1e-5)


def bags_of(rows: list[int], found: bool = True) -> Bags:
    return Bags(np.array(rows), np.full(len(rows), 0 if found else 3, np.uint8))


def block_of(bags: Any, column: int, start: int, num_sums: int) -> CombineBlock:
    return CombineBlock(bags=bags, column=column, width=3, start=start, num_sums=num_sums)


GRAD = np.ones((2, 3), np.float32)
BAD = [
    (block_of(1, 0, 0, 2), TypeError, "bags must be recsdk_core.Bags"),
    (block_of(bags_of([0, 1]), 1, 0, 2), ValueError, "3 columns from column 1 on"),
    (block_of(bags_of([0, 1]), 0, 1, 2), ValueError, "2 sums of width 3 from 1 on do not fit"),
    (block_of(bags_of([0, 1]), 0, -1, 2), ValueError, "from -1 on do not fit"),
    (block_of(bags_of([0, 1]), 0, 0, -1), ValueError, "-1 sums"),
    (block_of(bags_of([0, 1]), 0, 0, 2**62), ValueError, "do not fit"),
    (
        block_of(bags_of([0, 2]), 0, 0, 2),
        ValueError,
        "must be places among the sums, below 2, got 2",
    ),
    (block_of(bags_of([0, -1]), 0, 0, 2), ValueError, "row numbers must be .*, got -1"),
    (block_of(bags_of([0, 1, 1]), 0, 0, 2), ValueError, "grad must"),
]


@pytest.mark.parametrize(("block", "error", "message"), BAD)
def test_bad_blocks_change_nothing(block: Any, error: type[Exception], message: str) -> None:
    packed = np.full(6, 4.0, np.float32)
    good = block_of(bags_of([0, 1]), 0, 0, 2)
    with pytest.raises(error, match=message):
        combine_gradients([good, block], GRAD, packed)
    assert packed.tolist() == [4.0] * 6


def test_keys_without_a_row_are_left_out() -> None:
    packed = np.full(6, 4.0, np.float32)
    combine_gradients([block_of(bags_of([0, 1], found=False), 0, 0, 2)], GRAD, packed)
    assert packed.tolist() == [0.0] * 6
