"""The rule that says which rank owns a key is fixed for ever, complete and fair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Admit, Default, optim
from recsdk_core.checkpoint import Sharding
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.testing import key_arrays
from recsdk_sharding import HashEmbeddingBagConfig
from recsdk_sharding.device.host_index import limit_of
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.ranks import (
    NUM_VIRTUAL_SHARDS,
    RankMap,
    RankRule,
    mix64,
    ranks_of_tensor,
    virtual_shards,
)
from recsdk_sharding.planning.planned_tables import PlannedTable

MASK = 2**64 - 1
RULE: RankRule = "virtual_shard"


def mixed(word: int) -> int:
    """SplitMix64's step, in Python's integers."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_golden_values() -> None:
    # The first outputs of SplitMix64 seeded with 0 are those of 0 and of its increment.
    words = np.array([0, 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert mix64(words).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    keys = np.array([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    assert virtual_shards(keys).tolist() == [52655, 23745, 11296, 40615, 62427, 4512]


@given(key_arrays())
def test_owners_are_the_documented_function(keys: np.ndarray) -> None:
    keys = np.asarray(keys).astype(np.int64)
    for size in (1, 2, 3, 7):
        by_shard = [mixed(k & MASK) % 65536 * size // 65536 for k in keys.tolist()]
        assert RankMap(size).owners(keys).tolist() == by_shard
        by_rest = [(k & MASK) % size for k in keys.tolist()]
        assert RankMap(size, "modulo").owners(keys).tolist() == by_rest


@given(st.integers(1, NUM_VIRTUAL_SHARDS))
def test_every_rank_owns_an_equal_run_of_virtual_shards(size: int) -> None:
    owners = np.arange(NUM_VIRTUAL_SHARDS) * size // NUM_VIRTUAL_SHARDS
    counts = np.bincount(owners, minlength=size)
    assert len(counts) == size
    assert counts.max() - counts.min() <= 1


@given(data=st.data(), sizes=st.tuples(*[st.integers(1, NUM_VIRTUAL_SHARDS)] * 2))
def test_ranks_of_two_maps_may_share_keys_where_they_own_a_shard_together(
    data: st.DataObject, sizes: tuple[int, int]
) -> None:
    middle = data.draw(st.integers(0, NUM_VIRTUAL_SHARDS - 1))
    shards = np.arange(NUM_VIRTUAL_SHARDS)
    owners = [shards * size // NUM_VIRTUAL_SHARDS for size in sizes]
    rank = int(owners[0][middle])
    near = int(owners[1][middle])
    for other in range(max(near - 2, 0), min(near + 3, sizes[1])):
        is_shared = bool(((owners[0] == rank) & (owners[1] == other)).any())
        assert RankMap(sizes[0]).may_share_keys(rank, RankMap(sizes[1]), other) == is_shared


@pytest.mark.parametrize("sizes", [(256, 257), (257, 256), (2, 65535), (300, 7), (65536, 3)])
def test_no_rank_of_another_world_is_left_out(sizes: tuple[int, int]) -> None:
    """A rank's run may begin at a shard in the midst of which, in numbers, another's ends."""
    shards = np.arange(NUM_VIRTUAL_SHARDS)
    owners = [shards * size // NUM_VIRTUAL_SHARDS for size in sizes]
    maps = [RankMap(size) for size in sizes]
    pairs = set(zip(*(o.tolist() for o in owners), strict=True))
    assert all(maps[0].may_share_keys(one, maps[1], other) for one, other in pairs)


@given(st.integers(0, 16), st.integers(1, 9), st.integers(0, 16), st.integers(1, 9), st.data())
def test_ranks_own_whole_groups(
    bits: int, size: int, other_bits: int, other_size: int, data: st.DataObject
) -> None:
    groups, others = 1 << bits, 1 << other_bits
    if size > groups or other_size > others:
        with pytest.raises(ValueError, match="world_size must be 1 to"):
            RankMap.of_groups(max(size, other_size), "virtual_shard", min(groups, others))
        return
    keys = np.random.default_rng(size).integers(-(2**63), 2**63 - 1, 2000)
    one, two = (RankMap.of_groups(*of) for of in ((size, RULE, groups), (other_size, RULE, others)))
    owners, group_of = one.owners(keys), virtual_shards(keys) * groups // NUM_VIRTUAL_SHARDS
    assert all(len(set(owners[group_of == g])) <= 1 for g in range(min(groups, 64)))
    for rank in range(size):
        first, last = one.owned_groups(rank, groups)
        assert (owners == rank).tolist() == ((first <= group_of) & (group_of < last)).tolist()
        owner = Owner(rank, size, Sharding(num_virtual_shards=one.num_virtual_shards))
        assert owner.owns(keys).tolist() == (owners == rank).tolist()
        mask = owner.mask()
        assert mask is None or mask[virtual_shards(keys)].astype(bool).tolist() == (
            (owners == rank).tolist()
        )
    rank, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, other_size - 1))
    if bool(((owners == rank) & (two.owners(keys) == other)).any()):
        assert one.may_share_keys(rank, two, other)
        sharding = Sharding(num_virtual_shards=two.num_virtual_shards)
        owner = Owner(rank, size, Sharding(num_virtual_shards=one.num_virtual_shards))
        assert owner.may_share_keys(Owner(other, other_size, sharding))
    assert ranks_of_tensor(one.to_tensor()) == one


@given(st.tuples(*[st.integers(1, 40)] * 2), st.data())
def test_ranks_by_modulo_may_share_keys_where_a_key_is_of_both(
    sizes: tuple[int, int], data: st.DataObject
) -> None:
    rank, other = (data.draw(st.integers(0, size - 1)) for size in sizes)
    keys = np.arange(sizes[0] * sizes[1])
    is_shared = bool(((keys % sizes[0] == rank) & (keys % sizes[1] == other)).any())
    one, two = (RankMap(size, "modulo") for size in sizes)
    assert one.may_share_keys(rank, two, other) == is_shared
    assert one.may_share_keys(rank, RankMap(sizes[1]), other)


@pytest.mark.parametrize("stride", [1, 8, 1024, 2**32, 2**48])
def test_keys_with_a_stride_are_spread_evenly(stride: int) -> None:
    keys = np.arange(20_000, dtype=np.int64) * stride
    counts = np.bincount(RankMap(4).owners(keys), minlength=4)
    assert abs(counts - 5000).max() < 6 * (20_000 * 0.25 * 0.75) ** 0.5


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be 1 to 65536, got 0"):
        RankMap(0)
    with pytest.raises(ValueError, match="rank_rule must be one of"):
        RankMap(2, "round_robin")


COUNTED = {"admission": Admit.count(2, max_records=1024)}


@pytest.mark.parametrize(
    ("rules", "world_size"),
    [
        ({}, 24),
        (COUNTED, 1),
        (COUNTED, 3),
        (COUNTED, 24),
        ({"default": Default.shared_rows(32)}, 24),
        ({"default": Default.shared_rows(4), **COUNTED}, 3),
    ],
)
def test_devices_have_room_for_as_many_ids_as_were_planned(
    rules: dict[str, Any], world_size: int
) -> None:
    """Also where ranks own whole groups, of which some have one more."""
    config = HashEmbeddingBagConfig(
        name="t", embedding_dim=1, num_embeddings=100_000, feature_names=["t"], **rules
    )
    ranks = RankMap.of_groups(world_size, RULE, config.num_cuts)
    ids_of_ranks = np.bincount(ranks.owners(np.arange(100_000) * 7919), minlength=world_size)
    budgets = [limit_of(config, Shard(ranks, rank, (0, 1))) for rank in range(world_size)]
    assert (ids_of_ranks <= budgets).all()
    planned = PlannedTable(
        "t",
        100_000,
        None,
        "float32",
        optim.SGD(),
        num_features=1,
        num_groups=config.num_groups,
        num_shared=config.default.n or 0,
    )
    assert max(budgets) <= planned.rows_on_device(world_size)
