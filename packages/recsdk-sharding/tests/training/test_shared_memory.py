"""Results through memory that the ranks of a host share, beside the same through process groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import on_ranks
import pytest
import sharing_on_ranks
from comparing import assert_identical
from plans import TWO
from rank_pool import RankPool
from setups import ADAM, SETUPS, SIZES, WEIGHTED, sizes_for
from worlds import Setup

from sampling import crossed, sampled


@pytest.fixture(scope="module")
def apart() -> Iterator[RankPool]:
    """Ranks that do not share memory."""
    pool = RankPool(4, environments=[{"RECSDK_SHARED_MEMORY": "0"}] * 4)
    yield pool
    pool.close()


def test_ranks_of_one_host_share_memory_without_a_name(ranks: RankPool) -> None:
    for world_size in (2, 4):
        for is_shared, files in ranks.run(world_size, sharing_on_ranks.kind_of_memory):
            assert is_shared
            assert set(files) == {"/memfd:recsdk_exchange (deleted)"}


def test_a_rank_that_is_alone_shares_none(ranks: RankPool) -> None:
    [(is_shared, _)] = ranks.run(1, sharing_on_ranks.kind_of_memory)
    assert not is_shared


def test_all_ranks_share_or_none() -> None:
    pool = RankPool(3, environments=[{}, {"RECSDK_SHARED_MEMORY": "0"}, {}])
    try:
        assert pool.run(3, sharing_on_ranks.kind_of_memory) == [(False, [])] * 3
    finally:
        pool.close()


@pytest.mark.parametrize(("name", "world_size"), crossed(SETUPS, (2, 4), size=3))
def test_the_bits_are_those_of_the_process_group(
    ranks: RankPool, apart: RankPool, name: str, world_size: int
) -> None:
    call = on_ranks.train, SETUPS[name], sizes_for(world_size)
    assert_identical(ranks.known(world_size, *call), apart.run(world_size, *call))


@pytest.mark.parametrize("name", sampled(TWO, 6))
def test_the_bits_of_each_sharding_type(ranks: RankPool, apart: RankPool, name: str) -> None:
    call = on_ranks.train, replace(WEIGHTED, plan=TWO[name]), [row[:2] for row in SIZES]
    assert_identical(ranks.known(2, *call), apart.run(2, *call))


def test_the_bits_of_sequences(ranks: RankPool, apart: RankPool) -> None:
    call = on_ranks.train, replace(ADAM, is_sequence=True), sizes_for(3)
    assert_identical(ranks.run(3, *call), apart.run(3, *call))


@pytest.mark.parametrize(("world_size", "seed"), crossed((2, 3), range(4), size=4))
def test_nothing_is_overwritten_that_somebody_needs(
    ranks: RankPool, world_size: int, seed: int
) -> None:
    for rooms, messages in ranks.run(world_size, sharing_on_ranks.exchange_at_random, seed, 400):
        assert messages > 3 * rooms


def test_rooms_are_used_again_whether_a_step_trains_or_not(ranks: RankPool) -> None:
    sizes = [[20 + step % 3, 20] for step in range(24)]
    ways = (["train", "evaluate", "neither", "train"] * 6)[: len(sizes)]
    for rooms in ranks.run(2, sharing_on_ranks.rooms_of_training, sizes, ways):
        assert rooms[-1] <= rooms[len(rooms) // 2] <= 6


def test_rooms_that_are_too_small_go_back_to_the_system(ranks: RankPool) -> None:
    for held, free, is_again in ranks.run(2, sharing_on_ranks.outgrow, 100_000):
        assert held == 100_000
        assert free < 3 * 1024
        assert is_again


def test_ranks_that_disagree_are_told(ranks: RankPool) -> None:
    found = ranks.run(2, sharing_on_ranks.forget_to_answer)
    assert all("the ranks disagree on the results to exchange" in text for text in found)
    assert all("rank 0 answers to results of message 1" in text for text in found)
    ranks.renew()


def test_a_fork_that_ends_frees_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, sharing_on_ranks.drop_in_a_fork) == [True, True]


def test_another_setting_is_refused_on_all_ranks() -> None:
    pool = RankPool(2, environments=[{}, {"RECSDK_SHARED_MEMORY": "yes"}])
    try:
        with pytest.raises(AssertionError, match="must be 0 or 1, got 'yes'") as raised:
            pool.run(2, on_ranks.train, Setup(), SIZES[:1])
        assert "rank 1 failed: RECSDK_SHARED_MEMORY must be 0 or 1" in str(raised.value)
    finally:
        pool.close()
