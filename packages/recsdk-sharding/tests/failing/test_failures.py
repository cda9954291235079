"""Whatever goes wrong on one rank, or runs out there, ends the same step on all ranks."""

from __future__ import annotations

import numpy as np
import on_ranks
import pytest
from rank_pool import RankPool

MESSAGES = {
    "float ids": ("TypeError", "ids must be a 1-d tensor of int64"),
    "missing feature": ("ValueError", "the batch lacks the features ['shared']"),
    "lengths": ("ValueError", "add up to"),
    "not a batch": ("TypeError", "features must be a KeyedJaggedTensor, got NoneType"),
    "late": ("RuntimeError", "no lease today"),
}


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("kind", on_ranks.BAD_INPUTS)
def test_a_bad_batch_raises_on_all_ranks_in_that_step(
    ranks: RankPool, kind: str, depth: int
) -> None:
    bad_rank = 1
    results = ranks.run(2, on_ranks.fail_once, kind, bad_rank, depth)
    first = 0 if kind == "late" else 2  # "late" is broken from the start
    name, text = MESSAGES[kind]
    for rank, result in enumerate(results):
        assert result["errors"][:first] == [None] * first
        error = result["errors"][first]
        if rank == bad_rank:
            assert error[0] == name
        else:
            assert (error[0], error[2]) == ("PeerError", bad_rank)
            assert f"rank {bad_rank} failed" in error[1]
        assert text in error[1]
        later = result["errors"][first + 1 :]
        assert [e[0] for e in later] == ["PeerError"] * len(later)
        assert "call meet()" not in error[1]
        assert all("go_on(model)" in e[1] for e in later)
        assert result["seconds"] < 5
        assert result["states"] == ["failed"]
        assert len(result["outputs"]) == 1  # after reset() training goes on


def test_a_state_can_be_loaded_while_the_error_is_held(ranks: RankPool) -> None:
    results = ranks.run(2, on_ranks.restore_after_a_failure, 1)
    assert [result["error"] for result in results] == ["PeerError", "MemoryError"]
    for result in results:
        np.testing.assert_equal(result["after"], result["before"])


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_replicas_that_came_apart_are_not_trained(
    ranks: RankPool, sharding: str, is_bounded: bool
) -> None:
    results = ranks.run(2, on_ranks.fail_to_map, sharding, is_bounded, 1)
    for result in results:
        failed, next_one, *later = result["errors"]
        assert "no lease today" in failed
        if sharding == "data_parallel":
            assert "are no longer alike" in next_one
            assert "load a checkpoint on all ranks" in next_one
        else:
            assert next_one == "None"
        assert later == ["None", "None"]
    if sharding == "data_parallel":
        np.testing.assert_equal(results[0]["rows"], results[1]["rows"])


@pytest.mark.parametrize(
    ("sharding", "how"),
    [
        ("data_parallel", "plain"),
        ("data_parallel", "TrainPipelineSparseDist"),
        ("data_parallel", "TrainPipelineSemiSync"),
        ("mixed", "plain"),  # other groups have mapped the batch when the replicas' raises
    ],
)
def test_replicas_with_other_values_are_not_trained(
    ranks: RankPool, sharding: str, how: str
) -> None:
    results = ranks.run(2, on_ranks.change_rows_on_one_rank, sharding, how, 1)
    for alike, changed, loaded, unsaid, loaded_again in results:
        assert [alike, loaded, unsaid, loaded_again] == ["None"] * 4
        assert "had other values on other ranks at step" in changed
        assert "load a checkpoint on all ranks" in changed


@pytest.mark.parametrize("numbers", [[2, 4], [4, 2], [0, 3], [3, 3]])
def test_ranks_with_fewer_batches_end_all(ranks: RankPool, numbers: list[int]) -> None:
    results = ranks.run(2, on_ranks.run_out, numbers, 1)
    for rank, result in enumerate(results):
        for num_trained, ended, state in result["rounds"]:
            assert num_trained == min(numbers)
            assert (ended is not None) == (numbers[rank] > min(numbers))
            assert state == ("open" if len(set(numbers)) == 1 else "ended")
        assert set(result["counts"].values()) == {2 * min(numbers)}


def test_a_rank_that_evaluates_while_another_trains(ranks: RankPool) -> None:
    for name, text in ranks.run(2, on_ranks.disagree):
        assert name == "RecsdkError"
        assert "the ranks disagree" in text
