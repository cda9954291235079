"""The host exchange by itself: order, agreement, failure, end, restart."""

from __future__ import annotations

import jobs
import on_ranks
import pytest
from rank_pool import RankPool
from worlds import Setup


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_jobs_run_in_submission_order_and_move_what_each_rank_sends(
    ranks: RankPool, world_size: int
) -> None:
    for results in ranks.run(world_size, jobs.run_many, 20):
        assert results == [[(rank, n) for rank in range(world_size)] for n in range(20)]


@pytest.mark.parametrize("stage", ["prepare", "finish"])
def test_a_failure_names_the_rank_its_text_and_the_step(ranks: RankPool, stage: str) -> None:
    results = ranks.run(4, jobs.fail_at, stage, 2)
    for rank, (first, failed, queued, state, after) in enumerate(results):
        assert first == "ok"
        if rank == 2:
            assert failed == ("ValueError", f"{stage} is not well", None, None)
        else:
            text = f"ValueError: {stage} is not well"
            assert failed == ("PeerError", f"rank 2 failed in step 1: {text}", 2, 1)
        assert queued[0] == "PeerError"
        assert queued[2] == 2
        assert state == "failed"
        assert after == "ok"


def test_very_long_texts_are_cut(ranks: RankPool) -> None:
    results = ranks.run(2, jobs.fail_with_text, "x" * 100_000)
    assert 1000 < len(results[1][1]) < 5000


def test_texts_of_any_script_arrive(ranks: RankPool) -> None:
    results = ranks.run(2, jobs.fail_with_text, "id \u4e2d\u6587 is bad")
    assert "id \u4e2d\u6587 is bad" in results[1][1]


def test_texts_that_are_no_unicode_arrive_escaped(ranks: RankPool) -> None:
    results = ranks.run(2, jobs.fail_with_text, "file \udcff is bad")
    assert "file \\udcff is bad" in results[1][1]


@pytest.mark.parametrize("is_announced", [False, True])
def test_an_error_without_a_text_is_named_by_its_type(ranks: RankPool, is_announced: bool) -> None:
    results = ranks.run(2, jobs.fail_without_text, is_announced)
    assert results[0] == "failed"
    assert results[1].endswith("rank 0 failed in step 0: Mute")


def test_the_end_of_data_reaches_every_rank_in_one_exchange(ranks: RankPool) -> None:
    for rank, (error, queued, state, after) in enumerate(ranks.run(4, jobs.end_on, 3)):
        if rank != 3:
            assert error == ("EndOfData", "ranks [3] have no further batch", None, None)
            assert queued[0] == "EndOfData"
        assert state == "ended"
        assert after == "ok"


def test_all_ranks_may_end_together_and_more_than_once(ranks: RankPool) -> None:
    assert ranks.run(2, jobs.end_together) == [["ended", "ended", "open"]] * 2


def test_a_failure_outside_of_jobs_can_be_announced(ranks: RankPool) -> None:
    results = ranks.run(2, jobs.announce_failure)
    assert results[0] == "failed"
    assert results[1][0] == "PeerError"
    assert "OSError: the disk is gone" in results[1][1]


def test_different_modules_are_noticed(ranks: RankPool) -> None:
    for name, text, _, _ in ranks.run(2, jobs.disagree_on_tags):
        assert name == "RecsdkError"
        assert "the ranks disagree" in text


@pytest.mark.parametrize("waiting_in", [0, 1])
def test_ranks_go_on_wherever_another_waits(ranks: RankPool, waiting_in: int) -> None:
    for rank, (waited, *after) in enumerate(
        ranks.run(3, jobs.go_on_with_two_exchanges, waiting_in)
    ):
        assert rank == 0 or "the ranks disagree" in waited
        assert after == ["ok", "ok"]


@pytest.mark.parametrize("num_exchanges", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_go_on_where_one_is_interrupted_as_it_does(
    ranks: RankPool, num_ranks: int, num_exchanges: int
) -> None:
    for said in ranks.run(num_ranks, jobs.go_on_interrupted, num_exchanges):
        assert said == []


def test_reset_waits_for_pending_jobs(ranks: RankPool) -> None:
    for text in ranks.run(2, jobs.reset_too_early):
        assert "2 jobs are pending" in text


def test_shutdown_drops_queued_jobs_and_a_later_job_runs(ranks: RankPool) -> None:
    assert ranks.run(2, jobs.shut_down) == [["CancelledError", "ok"]] * 2


@pytest.mark.parametrize("held", [[], [1], [2], [1, 2]])
@pytest.mark.parametrize("how", ["fail", "end"])
def test_modules_made_while_a_job_fails_or_ends_go_on(
    ranks: RankPool, how: str, held: list[int]
) -> None:
    of_first = {"fail": ["ValueError", "PeerError", "PeerError"], "end": []}[how]
    of_others = [{"fail": "PeerError", "end": "EndOfData"}[how]] * 3
    for world_size in range(max([1, *held]) + 1, 4):
        results = ranks.run(world_size, jobs.reopen, how, held)
        for rank, (outcomes, state, after) in enumerate(results):
            assert outcomes == (of_others if rank else of_first)
            assert (state, after) == ("open", ["ok", "ok"])


def test_modules_look_no_further_ahead_than_a_pipeline_of_theirs(ranks: RankPool) -> None:
    found = ranks.run(2, jobs.make_modules_after_a_pipeline_that_one_rank_still_has)
    assert found == [[True, "ok", "ok"], [False, "ok", "ok"]]


def test_a_rank_that_goes_on_with_modules_from_before_is_told_from_others(
    ranks: RankPool,
) -> None:
    for first, (name, text, *_) in ranks.run(2, jobs.make_modules_that_one_rank_does_not_make):
        assert first == "ok"
        assert name == "RecsdkError"
        assert "[2, 1] sharded modules" in text


@pytest.mark.parametrize("is_sequence", [False, True])
def test_an_exchange_counts_the_modules_that_are_made(ranks: RankPool, is_sequence: bool) -> None:
    setup = Setup(is_sequence=is_sequence)
    assert ranks.run(2, on_ranks.modules_that_a_model_adds, setup) == [1, 1]


def test_one_rank_may_make_sharders_to_plan_with(ranks: RankPool) -> None:
    assert ranks.run(2, jobs.make_sharders_on_one_rank_that_plans) == [("ok", True)] * 2


def test_modules_made_while_the_group_breaks_are_refused(ranks: RankPool) -> None:
    for before, state, after in ranks.run(2, jobs.reopen_broken):
        assert before[0] == after[0] == "PeerError"
        assert "a rank may have died" in after[1]
        assert state == "failed"


def test_one_exchange_for_each_group(ranks: RankPool) -> None:
    assert ranks.run(2, jobs.look_up_exchanges) == [[True, False, True]] * 2


def test_a_dead_group_is_an_error_that_stays(ranks: RankPool) -> None:
    for error, state, reset in ranks.run(2, jobs.break_group):
        assert error[0] == "PeerError"
        assert error[2] is None
        assert "a rank may have died" in error[1]
        assert state == "failed"
        assert "restart the ranks" in reset
