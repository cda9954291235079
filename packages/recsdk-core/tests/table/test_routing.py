"""Cutting a batch by the shards of its keys, and reading it, against plain lists."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from engine_threads import engine_threads
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import count_keys, cut_bags, read_bags
from recsdk_core.testing import keys
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, virtual_shards

Features = list[list[list[int]]]
BAGS = st.lists(st.lists(st.one_of(st.integers(-3, 3), keys()), max_size=4), max_size=6)


def owner_of(key: int, num_shards: int, rule: str) -> int:
    if rule == "modulo":
        return (key % 2**64) % num_shards
    count = 8 if rule == "groups" else NUM_VIRTUAL_SHARDS
    group = int(virtual_shards(np.array([key]))[0]) * count // NUM_VIRTUAL_SHARDS
    return group * num_shards // count


def packed(lengths: list[int], longest: int) -> list[int]:
    """The words that lengths are sent as."""
    size = next(size for size in (1, 2, 4, 8) if longest < 256**size)
    found = np.array(lengths, f"<u{size}").tobytes()
    return [size, *np.frombuffer(found + bytes(-len(found) % 8), "<i8").tolist()]


def split(features: Features, num_shards: int, rule: str, is_sequence: bool) -> list[Any]:
    """Of each shard: words, places, the bags of each feature that have keys, and all lengths."""
    found = []
    longest = max((len(bag) for bags in features for bag in bags), default=0)
    for shard in range(num_shards):
        counts, lengths, sent, places, filled = [], [], [], [], []
        place = 0
        for bags in features:
            of_bags = []
            for bag in bags:
                mine = [key for key in bag if owner_of(key, num_shards, rule) == shard]
                own = (place + i for i, key in enumerate(bag) if key in mine)
                places += list(own)
                place += len(bag)
                of_bags.append(len(mine))
                sent += mine
            filled.append([i for i, count in enumerate(of_bags) if count])
            counts.append(sum(of_bags) if is_sequence else len(bags))
            lengths += of_bags
        head = counts if is_sequence else counts + packed(lengths, longest)
        found.append((head + sent, places, filled, lengths))
    return found


@given(
    features=st.lists(BAGS, max_size=4),
    num_shards=st.sampled_from([1, 2, 3, 4, 7, 16, 17, 40]),
    rule=st.sampled_from(["virtual_shard", "groups", "modulo"]),
    is_sequence=st.booleans(),
    times=st.sampled_from([1, 40]),
)
@example(
    features=[[], [[]], [[5, 5], [], [6]]], num_shards=2, rule="modulo", is_sequence=False, times=1
)
@example(features=[[[3]] * 9, [[4], [5]]], num_shards=3, rule="modulo", is_sequence=False, times=1)
@example(features=[[[3] * 255], []], num_shards=2, rule="modulo", is_sequence=False, times=1)
@example(features=[[[3] * 256, [1]], [[]]], num_shards=2, rule="modulo", is_sequence=False, times=1)
@example(features=[[[3] * 65_536, [2]]], num_shards=2, rule="modulo", is_sequence=False, times=1)
@example(
    features=[[[3] * 131_073, [2] * 7]], num_shards=2, rule="modulo", is_sequence=False, times=1
)
def test_a_batch_is_cut_as_lists_are(
    features: Features, num_shards: int, rule: str, is_sequence: bool, times: int
) -> None:
    features = [[bag * times for bag in bags] for bags in features]  # bags of many ids, too
    if is_sequence:
        features = [[[key] for bag in bags for key in bag] for bags in features]
    array = np.array([key for bags in features for bag in bags for key in bag], np.int64)
    lengths = np.array([len(bag) for bags in features for bag in bags], np.int64)
    cut = partial(
        cut_bags,
        array,
        None if is_sequence else lengths,
        [len(bags) for bags in features],
        num_shards,
        rule="modulo" if rule == "modulo" else "virtual_shard",
        num_virtual_shards=8 if rule == "groups" else NUM_VIRTUAL_SHARDS,
    )
    found = cut(wants_places=True)
    expected = split(features, num_shards, rule, is_sequence)
    assert found.places is not None
    assert found.words.tolist() == [word for words, *_ in expected for word in words]
    assert found.num_words == [len(words) for words, *_ in expected]
    assert found.places.tolist() == [place for _, places, *_ in expected for place in places]
    assert found.num_keys == [len(places) for _, places, *_ in expected]
    assert found.filled.dtype == np.int32
    assert found.filled.tolist() == [bag for *_, f, _ in expected for bags in f for bag in bags]
    num_filled = [len(bags) for *_, filled, _ in expected for bags in filled]
    assert found.num_filled.tolist() == num_filled
    check_arrivals(found, expected, len(features), is_sequence)
    firsts = np.cumsum([0, *map(len, features)])[:-1]
    room = np.full(len(array) + 3, -1, np.int32)
    in_batch = cut(counts_in_batch=True, filled=room)
    shifts = np.repeat(np.tile(firsts, num_shards), num_filled)
    assert in_batch.filled.tolist() == (found.filled + shifts).tolist()
    assert room[len(in_batch.filled) :].tolist() == [-1] * (len(room) - len(in_batch.filled))
    np.testing.assert_array_equal(in_batch.words, found.words)


def check_arrivals(found: Any, expected: list[Any], num_features: int, is_sequence: bool) -> None:
    """All shards' words read at once, as if each came from a process, and sent twice."""
    ends = np.cumsum([0, *found.num_words])
    of_shards = [found.words[begin:end] for begin, end in pairwise(ends)]
    twice = np.concatenate([words for words in of_shards for _ in range(2)])
    num_words = [2 * len(words) for words in of_shards]
    arrived = read_bags(
        twice, num_words, [num_features] * 2, every_key_is_a_bag=[is_sequence] * len(of_shards)
    )
    num_keys = arrived.num_keys.reshape(len(of_shards), 2, num_features)
    num_filled = arrived.num_filled.reshape(num_keys.shape)
    first_keys = arrived.first_keys.reshape(num_keys.shape)
    end, all_offsets = 0, iter(arrived.offsets)
    for shard, (words, places, filled, all_lengths) in enumerate(expected):
        lengths = [n for n in all_lengths if n]
        for batch in range(2):
            end += len(words)
            counts = num_keys[shard, batch]
            assert sum(counts) == len(places)
            assert num_filled[shard, batch].tolist() == list(map(len, filled))
            assert first_keys[shard, batch].tolist() == (end - counts[::-1].cumsum())[::-1].tolist()
            offsets = next(all_offsets)
            if offsets is None:
                assert num_filled[shard, batch].tolist() == counts.tolist()
                assert set(lengths) <= {1}
                continue
            parts = np.split(offsets, np.cumsum([len(bags) + 1 for bags in filled]))
            assert [length for part in parts for length in np.diff(part).tolist()] == lengths
            assert [int(part[-1]) for part in parts[:-1]] == counts.tolist()
            assert all(part[0] == 0 for part in parts[:-1])


def test_threads_give_equal_results() -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(0, 4, 60_000)
    array = random.integers(-(2**63), 2**63 - 1, int(lengths.sum()))
    num_bags = [20_000, 0, 39_999, 1]
    results = []
    for threads in (1, 2, 5):
        with engine_threads(threads):
            results.append(cut_bags(array, lengths, num_bags, 5, wants_places=True))
    for other in results[1:]:
        for name in ("words", "places", "filled", "num_filled"):
            np.testing.assert_array_equal(getattr(other, name), getattr(results[0], name))
    np.testing.assert_array_equal(np.sort(results[0].places), np.arange(len(array)))


def test_results_are_of_the_keys_framework() -> None:
    torch = pytest.importorskip("torch")
    found = cut_bags(torch.tensor([4, 9]), torch.tensor([2, 0]), [2], 1)
    assert found.words.tolist() == [2, 1, 2, 4, 9]
    assert isinstance(found.words, torch.Tensor)
    assert found.places is None
    (offsets,) = read_bags(found.words, [5], [1], every_key_is_a_bag=[False]).offsets
    assert offsets is not None
    assert offsets.tolist() == [0, 2]
    with pytest.raises(ValueError, match="num_words must be 0 or more and add up to the words, "):
        read_bags(found.words, [6], [1], every_key_is_a_bag=[False])
    with pytest.raises(ValueError, match="num_words must be those of all routes"):
        read_bags(found.words, [5], [], every_key_is_a_bag=[False])
    with pytest.raises(ValueError, match="must have one element for each of num_words, 1, got 0"):
        read_bags(found.words, [5], [1], every_key_is_a_bag=[])


@pytest.mark.parametrize("filled", [np.empty(1, np.int32), np.empty(9, np.int64)])
def test_room_for_the_bags_that_have_keys_is_refused(filled: Any) -> None:
    with pytest.raises(
        ValueError,
        match="filled must be int32, with room for 2, got int(32 .* 1|64 .* 9)",
    ):
        cut_bags(np.array([1, 2]), None, [2], 1, filled=filled)


@pytest.mark.parametrize(
    ("lengths", "num_bags", "num_shards", "rule", "message"),
    [
        ([1, 1], [2], 0, "modulo", "num_shards must be 1 to 65536, got 0"),
        ([1, 1], [2], 65537, "modulo", "num_shards must be 1 to 65536, got 65537"),
        (
            [1, 1],
            [3],
            2,
            "modulo",
            "num_bags must be 0 or more and add up to 2 bags, got 3 in all and 3 as",
        ),
        ([1, 1], [1], 2, "modulo", "num_bags must be 0 or more and add up to 2 bags, got 1 in"),
        ([1, 2], [2], 2, "modulo", "lengths must be 0 or more and add up to 2 keys, got 3 in"),
        ([3, -1], [2], 2, "modulo", "add up to 2 keys, got 2 in all and -1 as the least"),
        ([2**62, 2**62], [2], 2, "modulo", "add up to 2 keys, got 9000000000000000000 in all and"),
        (None, [1], 2, "modulo", "num_bags must be 0 or more and add up to 2 bags, got 1 in"),
        ([1, 1], [2], 2, "hash", "rule must be"),
    ],
)
def test_what_does_not_fit_is_refused(
    lengths: Any, num_bags: list[int], num_shards: int, rule: str, message: str
) -> None:
    given_lengths = None if lengths is None else np.array(lengths, np.int64)
    with pytest.raises(ValueError, match=message):
        cut_bags(np.array([1, 2]), given_lengths, num_bags, num_shards, rule=rule)


@pytest.mark.parametrize("count", [0, 3, 2**17])
def test_virtual_shards_are_a_power_of_two(count: int) -> None:
    with pytest.raises(ValueError, match=f"a power of two up to 65536, got {count}"):
        cut_bags(np.array([1]), None, [1], 2, num_virtual_shards=count)


@pytest.mark.parametrize(
    ("words", "num_features", "message"),
    [
        ([], 1, "the numbers of bags are not all there"),
        ([1], -1, "the numbers of bags are not all there"),
        ([-1], 1, "-1 bags do not fit"),
        ([2, 1], 1, "2 bags do not fit"),
        ([2**62, 2**62, 1], 2, "bags do not fit"),
        ([9, 1, 0], 1, "9 bags do not fit"),
        ([2, 8, 1], 1, "2 bags do not fit"),
        ([0], 1, "the size of lengths is not there"),
        ([1, 0, 2], 1, "a length takes 1, 2, 4 or 8 bytes, not 0"),
        ([1, 3, 2], 1, "a length takes 1, 2, 4 or 8 bytes, not 3"),
        ([1, 1, 2, 5], 1, "the keys are not all there"),
        ([1, 8, -2, 5], 1, "keys does not fit"),
        ([2, 8, 2**62, 2**62, 5], 1, "keys does not fit"),
    ],
)
def test_words_that_do_not_fit_are_refused(
    words: list[int], num_features: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_bags(
            np.array(words, np.int64), [len(words)], [num_features], every_key_is_a_bag=[False]
        )


length_types = st.sampled_from([np.int64, np.int32])


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 1, 1, 2, 300]), max_size=5), max_size=5), length_types
)
@example([[1, 1], [], [1]], np.int64)
@example([[2, 0], [1]], np.int32)
@example([], np.int32)
def test_keys_are_counted_as_lists_are(features: list[list[int]], dtype: type) -> None:
    lengths = np.array([length for bags in features for length in bags], dtype)
    counts = count_keys(lengths, list(map(len, features)), int(lengths.sum()))
    assert counts == ([sum(bags) for bags in features], [set(bags) <= {1} for bags in features])


@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5999), st.sampled_from([0, 2, 2**31 - 1])), max_size=2),
    length_types,
)
@example([64], [(63, 0)], np.int32)
@example([1400, 1400], [(1399, 2), (1400, 0)], np.int64)
def test_a_length_is_counted_wherever_it_is(
    sizes: list[int], others: list[tuple[int, int]], dtype: type
) -> None:
    lengths = np.ones(sum(sizes), dtype)
    for place, length in others:
        lengths[place % max(1, len(lengths)) : place % max(1, len(lengths)) + 1] = length
    parts = np.split(lengths, np.cumsum(sizes)[:-1])
    sums = [int(part.sum(dtype=np.int64)) for part in parts]
    found = count_keys(lengths, sizes, sum(sums))
    assert found == (sums, [bool((part == 1).all()) for part in parts])


def test_negative_lengths_are_refused_also_as_large_numbers() -> None:
    with pytest.raises(ValueError, match="-1 as the least"):
        count_keys(np.array([-1], np.int32), [1], 2**32 - 1)
    with pytest.raises(ValueError, match="-5 as the least"):
        count_keys(np.array([5, -5, 2], np.int32), [3], 2)
    with pytest.raises(ValueError, match="-1 as the least"):
        count_keys(np.array([-1]), [1], -1)


def test_threads_count_alike() -> None:
    lengths = np.ones(300_000, np.int64)
    lengths[250_000] = 3
    for threads in (1, 2, 5):
        with engine_threads(threads):
            found = count_keys(lengths, [200_000, 0, 100_000], 300_002)
        assert found == ([200_000, 0, 100_002], [True, True, False])


@pytest.mark.parametrize(
    ("lengths", "num_bags", "message"),
    [
        (
            [1, 2],
            [2],
            "lengths must be 0 or more and add up to 2 keys, got 3 in all and 1 as the least",
        ),
        ([3, -1], [1, 1], "add up to 2 keys, got 2 in all and -1 as the least"),
        ([2**62] * 4, [4], "add up to 2 keys"),
        ([2**63 - 1] * 2 + [4], [3], "add up to 2 keys"),
        ([1, 1], [1], "num_bags must be 0 or more and add up to 2 lengths, got 1 in all"),
        ([1, 1], [3], "num_bags must be 0 or more and add up to 2 lengths, got 3 in all"),
        ([1, 1], [2, -1], "got 1 in all and -1 as the least"),
        ([1, 1], [2**63 - 1, 2], "num_bags must be 0 or more"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    lengths: list[int], num_bags: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        count_keys(np.array(lengths, np.int64), num_bags, 2)
