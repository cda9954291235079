"""`max_rows` divides over groups of keys, so what finds no room depends on no order or rank.

`testing.Room` says the same in plain Python. Shape letter: N keys.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsdk_core import CapacityError, Index, Outcome, Table
from recsdk_core.testing import Room

KEYS = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 30_000)


def refused_by(index: Index, keys: NDArray[np.int64]) -> set[int]:
    _, outcomes = index.map(keys, insert=True)
    index.check_invariants()
    refused: set[int] = set(keys[outcomes == Outcome.REFUSED].tolist())
    return refused


@pytest.mark.parametrize(
    ("max_rows", "groups"),
    [
        *((0, 1), (1, 1), (1023, 1), (1024, 64), (10_000, 64), (300_000, 64)),
        *((4096 * 128 - 1, 64), (4096 * 128, 128), (10**7, 2048), (10**12, 65_536)),
    ],
)
def test_the_number_of_groups_follows_from_max_rows(max_rows: int, groups: int) -> None:
    index, room = Index(max_rows=max_rows), Room(max_rows)
    assert (index.eviction_groups, room.num_groups) == (groups, groups)
    quotas = [room.quota(group) for group in range(groups)]
    assert sum(quotas) == max_rows
    assert max(quotas) - min(quotas) <= 1


@given(
    seed=st.integers(0, 2**32),
    room=st.sampled_from([(7, 1), (50, 16), (1500, None), (3000, 1), (5000, 1024)]),
    num_threads=st.sampled_from([1, 2, 5]),
)
def test_refusals_are_the_models_in_any_order(
    seed: int, room: tuple[int, int | None], num_threads: int
) -> None:
    random = np.random.default_rng(seed)
    model = Room(*room)
    indexes = [
        Index(max_rows=room[0], eviction_groups=room[1], num_threads=num_threads) for _ in "12"
    ]
    held: set[int] = set()
    for size in random.integers(1, 2 * room[0], 4):
        keys = random.choice(KEYS[: 3 * room[0]], size)
        expected = model.refused(set(keys.tolist()) - held, held)
        assert refused_by(indexes[0], keys) == expected
        assert refused_by(indexes[1], random.permutation(keys)) == expected
        held |= set(keys.tolist()) - expected
        leaving = random.choice(np.array(sorted(held)), len(held) // 5)
        for index in indexes:
            index.erase(leaving)
        held -= set(leaving.tolist())
    assert len(indexes[0]) == len(indexes[1]) == len(held)


def test_many_keys_on_many_threads_find_the_same_room() -> None:
    config: dict[str, Any] = {"max_rows": 400_000, "eviction_groups": 256}
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 500_000)
    halves = (keys[: len(keys) // 2], keys)
    alone = Index(num_threads=1, **config)
    expected = [refused_by(alone, part) for part in halves]
    assert not expected[0]
    assert 100_000 <= len(expected[1]) < 110_000  # some groups have a little room left
    for num_threads in (2, 5):
        index = Index(num_threads=num_threads, **config)
        assert [refused_by(index, part) for part in halves] == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_with_whole_groups_decide_as_one_table(num_ranks: int) -> None:
    max_rows, num_groups = 3000, 64
    whole = Index(max_rows=max_rows)
    assert whole.eviction_groups == num_groups
    room = Room(max_rows)
    borders = [num_groups * rank // num_ranks for rank in range(num_ranks + 1)]
    ranks = [
        Index(max_rows=max_rows, owned_groups=(borders[r], borders[r + 1]))
        for r in range(num_ranks)
    ]
    owners = np.searchsorted(borders, [room.group(key) for key in KEYS.tolist()], "right") - 1
    for step in range(3):
        part = slice(step * 2500, (step + 1) * 2500)
        keys = KEYS[part]
        found = [refused_by(rank, keys[owners[part] == r]) for r, rank in enumerate(ranks)]
        assert set().union(*found) == refused_by(whole, keys)
    assert sum(map(len, ranks)) == len(whole) > 0.8 * max_rows


def test_keys_of_other_groups_find_no_room() -> None:
    index = Index(max_rows=64_000, owned_groups=(0, 16))
    refused = refused_by(index, KEYS[:2000])
    room = Room(64_000)
    assert refused == {key for key in KEYS[:2000].tolist() if room.group(key) >= 16}


def test_an_error_names_the_group_and_changes_nothing() -> None:
    table = Table(2, name="user", max_rows=1024, on_full="raise")
    table.find_or_insert(KEYS[:40])
    with pytest.raises(CapacityError, match=r"is full: in group \d+ of its 64 groups ") as error:
        table.find_or_insert(KEYS[:1000])
    [said] = re.findall(r"group (\d+) of .* keys (\d+) of 16 rows are used", str(error.value))
    (group, used), room = map(int, said), Room(1024)
    assert used == sum(room.group(key) == group for key in KEYS[:40].tolist())
    assert len(table) == 40
    table.check_invariants()


def test_keys_that_do_not_fit_are_not_taken_in() -> None:
    index = Index(max_rows=1024)
    with pytest.raises(
        CapacityError, match=r": \d+ of .* too many for group \d+ of 64, which has 16 "
    ):
        index.assign(KEYS[:1000])
    assert len(index) == 0
    Index(max_rows=1024, eviction_groups=1).assign(KEYS[:1000])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eviction_groups": 4}, "eviction_groups divides max_rows"),
        ({"owned_groups": (0, 1)}, "owned_groups divides max_rows"),
        ({"max_rows": 9, "eviction_groups": 3}, "power of two up to max_rows, 9, got 3"),
        ({"max_rows": 9, "eviction_groups": 16}, "power of two up to max_rows, 9, got 16"),
        ({"max_rows": 9, "eviction_groups": 0}, "eviction_groups must be at least 1"),
        ({"max_rows": 9, "owned_groups": (0, 2)}, r"owned_groups\[1\]"),
        ({"max_rows": 9, "owned_groups": (1, 0)}, "owned_groups must be"),
    ],
)
def test_groups_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table(2, **arguments)


@pytest.mark.parametrize("owned_groups", [(0,), (0, 1, 2), 5, "x", (0.5, 1)])
def test_owned_groups_that_are_no_pair(owned_groups: Any) -> None:
    with pytest.raises(TypeError, match="Table: owned_groups"):
        Table(2, max_rows=9, owned_groups=owned_groups)
