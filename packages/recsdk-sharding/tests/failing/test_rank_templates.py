"""Ranks that were forked are as ranks that were started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import failing_ranks
import pytest
import rank_pool
import torch
from rank_pool import RankPool

import rank_templates
from rank_templates import RankError, start_rank


def test_ranks_have_their_own_random_numbers(ranks: RankPool) -> None:
    assert len(set(ranks.run(5, torch.initial_seed))) == 5


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="PYTHONHASHSEED gives all one order")
def test_sets_of_strings_have_not_the_same_order_in_all_ranks(ranks: RankPool) -> None:
    assert len(set(ranks.run(5, hash, "a string"))) == 2


def test_ranks_have_the_environment_of_their_pool(ranks: RankPool, npus: RankPool) -> None:
    name = "RECSDK_SIM_NPU_ASYNC"
    assert ranks.run(2, os.getenv, name) == [os.environ.get(name)] * 2
    if not os.environ.get("RECSDK_TEST_NPU_HARDWARE"):
        assert npus.run(2, os.getenv, name) == ["1"] * 2


def test_what_an_interrupted_call_returns_is_not_that_of_the_next() -> None:
    def interrupt(*_: object) -> None:
        raise TimeoutError

    pool = RankPool(1)
    pool.run(1, os.getpid)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError):
            pool.run(1, time.sleep, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert pool.run(1, abs, -7) == [7]
    pool.close()


@pytest.mark.parametrize(
    ("named", "expected"), [(None, ["0", "1", "2"]), ("3,GPU-7", ["3", "GPU-7"]), ("", [])]
)
def test_ranks_on_cuda_have_a_device_each(
    monkeypatch: pytest.MonkeyPatch, named: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(rank_pool, "IS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    if not expected:  # else all tests would be skipped
        with pytest.raises(RankError, match="no device for a rank; CUDA_VISIBLE_DEVICES is ''"):
            rank_pool.npu_pool(5)
        return
    pool = rank_pool.npu_pool(5)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in pool._environments] == expected
    with pytest.raises(pytest.skip.Exception, match=f"needs 4 ranks; there are {len(expected)}"):
        pool.run(4, os.getpid)


def test_ranks_end_with_their_pool_and_after_an_error() -> None:
    pool = RankPool(2)
    first = pool.run(2, os.getpid)
    with pytest.raises(RankError, match="(?s)rank 1: .*invalid literal"):
        pool.run(2, int, "not a number")
    second = pool.run(2, os.getpid)
    pool.close()
    assert set(first).isdisjoint(second)
    while any(Path("/proc", str(pid)).exists() for pid in first + second):
        time.sleep(0.01)


def test_a_rank_that_dies_is_said_to_have() -> None:
    pool = RankPool(1)
    with pytest.raises(RankError, match="rank 0: the process died"):
        pool.run(1, os._exit, 3)
    assert pool.run(1, abs, -1) == [1]
    pool.close()


def test_a_pool_ends_though_a_rank_has_left_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_templates, "SECONDS_TO_END", 0.1)
    pool = RankPool(1)
    pool.run(1, os.fork)
    pool.close()


def test_a_template_that_died_is_said_to_have_and_is_replaced() -> None:
    asked = failing_ranks.tell_template, 0, {}, ()
    first = start_rank(*asked)
    template = first.pipe.recv()
    first.end()
    os.kill(template, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 was not started: its template died .* code -9"):
        start_rank(*asked)
    second = start_rank(*asked)
    assert second.pipe.recv() != template
    second.end()


def test_why_a_rank_stopped_serving_is_printed() -> None:
    rank = start_rank(failing_ranks.fail_at_once, 0, {}, ())
    with open(rank.pipe.fileno(), "rb", closefd=False) as printed:
        assert b"ValueError: rank 0 cannot serve" in printed.read()
    rank.end()
