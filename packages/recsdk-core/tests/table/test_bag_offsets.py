"""Offsets of bags: from lengths, and of many pieces as of one, against sums of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_threads import engine_threads
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import join_offsets, lay_out_offsets

length_types = st.sampled_from([np.int64, np.int32])


def offsets_of(lengths: Any) -> Any:
    return np.append(0, np.cumsum(lengths)).astype(np.int64)


run = 16384
"""Bags that one thread writes before it takes others."""
features_of_sizes = st.lists(
    st.sampled_from([0, 1, 3, run - 1, run, run + 1, 2 * run + 5]), max_size=4
)


@given(features_of_sizes, length_types, st.integers(0, 2**32 - 1), st.sampled_from([1, 3]))
@example([], np.int64, 0, 1)
@example([2 * run + 5, 0, run], np.int32, 1, 3)
def test_offsets_are_sums_of_lengths(
    num_bags: list[int], dtype: type, seed: int, threads: int
) -> None:
    lengths = np.random.default_rng(seed).integers(0, 2**31, sum(num_bags)).astype(dtype)
    parts = np.split(lengths.astype(np.int64), np.cumsum(num_bags)[:-1]) if num_bags else []
    with engine_threads(threads):
        offsets = lay_out_offsets(lengths, num_bags)
    assert offsets.tolist() == [number for part in parts for number in offsets_of(part).tolist()]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, run, run + 3]), st.booleans()), max_size=4),
    length_types,
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3]),
)
@example([], np.int32, 0, 1)
@example([(run + 3, True), (0, False), (2, False), (run, True)], np.int32, 1, 3)
def test_joined_offsets_are_sums_of_all_lengths(
    pieces: list[tuple[int, bool]], dtype: type, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = [
        rng.integers(0, 3, n) if is_given else np.ones(n, np.int64) for n, is_given in pieces
    ]
    offsets = [
        offsets_of(own) if is_given else None
        for own, (_, is_given) in zip(lengths, pieces, strict=True)
    ]
    num_keys = np.array([own.sum() for own in lengths], np.int64)
    joined = np.full(sum(map(len, lengths)) + 1, -1, dtype)
    with engine_threads(threads):
        join_offsets(offsets, num_keys, joined)
    assert joined.tolist() == offsets_of(np.concatenate([[], *lengths])).tolist()


@pytest.mark.parametrize(
    ("lengths", "num_bags", "message"),
    [
        ([1, -1], [2], "lengths must be 0 or more and .* got 0 in all and -1 as the least"),
        ([2**63 - 1, 1], [2], "add up to less than 2\\^63"),
        ([2**63 - 1, 1, 2**63 - 1, 1], [4], "add up to less than 2\\^63"),
        ([1] * run + [-1, 1], [run + 2], "lengths must be 0 or more .*-1 as the least"),
        ([2**63 - 1] * 3 + [1] * run, [run + 3], "add up to less than 2\\^63"),
        ([1, 1], [1], "num_bags must be 0 or more and add up to 2 lengths, got 1 in all"),
        ([1, 1], [3], "num_bags must be 0 or more and add up to 2 lengths, got 3 in all"),
        ([1, 1], [3, -1], "got 2 in all and -1 as the least"),
    ],
)
def test_lengths_without_offsets_are_refused(
    lengths: list[int], num_bags: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out_offsets(np.array(lengths, np.int64), num_bags)


@pytest.mark.parametrize(
    ("offsets", "num_keys", "size", "message"),
    [
        ([[0, 2, 1, 3]], [3], 4, "offsets must not descend, got 1 after 2 at 2; pass them"),
        ([[0, 2**63 - 1, -2, 3]], [3], 4, "offsets must not descend, got -2 after 9223372036"),
        ([[1, 3]], [3], 2, "offsets must run from 0 to the number of their keys, 3, got 1 to 3"),
        ([[0, 2]], [3], 2, "offsets must run from 0 to the number of their keys, 3"),
        ([None], [-1], 1, "offsets must run from 0 to the number of their keys, -1"),
        ([None], [3], 3, "out must have room for 4 offsets, got 3"),
        ([], [], 0, "out must have room for 1 offset, got 0"),
        ([[]], [0], 1, "offsets must have shape"),
        ([None], [1, 1], 3, "num_keys must have one element for each item of offsets, 1, got 2"),
        ([[0, 2**31 - 1], [0, 1]], [2**31 - 1, 1], 3, "must be int64 for more than 2147483647"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(
    offsets: list[list[int] | None], num_keys: list[int], size: int, message: str
) -> None:
    given = [None if own is None else np.array(own, np.int64) for own in offsets]
    with pytest.raises(ValueError, match=message):
        join_offsets(given, np.array(num_keys, np.int64), np.empty(size, np.int32))


def test_int32_takes_as_many_keys_as_it_has_numbers() -> None:
    most = 2**31 - 1
    joined = np.empty(3, np.int32)
    join_offsets([np.array([0, most - 1]), np.array([0, 1])], np.array([most - 1, 1]), joined)
    assert joined.tolist() == [0, most - 1, most]


@pytest.mark.parametrize("num_keys", [2**36, 2**62])
def test_room_for_far_too_few_keys_is_refused_at_once(num_keys: int) -> None:
    with pytest.raises(ValueError, match=f"room for {num_keys + 1} offsets, got 3"):
        join_offsets([None], np.array([num_keys]), np.empty(3, np.int64))
