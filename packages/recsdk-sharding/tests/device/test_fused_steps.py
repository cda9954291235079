"""Whole steps on Triton's kernels: interpreted, on the memory of simulated NPUs."""

from __future__ import annotations

import os
from dataclasses import replace

import any_gradients
import device_steps
import numpy as np
import on_npus
import on_ranks
import operator_failures
import pytest
import random_models
from comparing import TOLERANCE, assert_identical, assert_rows_close
from device_type import on_npus_alone
from fused_on_npus import OTHERWISE, train_otherwise_on_one_rank, with_fused
from hypothesis import Phase, given, settings
from random_cases import assert_same, cases
from random_models import Case
from rank_pool import RankPool
from setups import SETUPS, on_npu, sizes_for, with_room

from optimizer_cases import PLAIN

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = on_npus_alone  # on cuda all tests run on the kernels

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE") == "full"
NUM_MODELS = 200 if IS_FULL else 12
MOST_FORWARD, MOST_BACKWARD = {1: 6, 4: 8}, 3
"""Torch's operators and launches of kernels, forward by the keys of the longest bag; with torch's
operators alone it is 12 and 20."""


@pytest.mark.parametrize("longest", [1, 4])
def test_a_step_is_few_launches_for_any_number_of_tables(npus: RankPool, longest: int) -> None:
    for number in (1, 26):
        ((counts, launched),) = npus.run(1, with_fused, device_steps.count_a_step, number, longest)
        pooled = len(launched) - 1 - launched[::-1].index("_pool")
        assert launched[pooled - 1 : pooled + 1] == ["_find_runs", "_pool"]
        assert launched[-1] == "_update"
        assert counts["waits"] == 0
        assert counts["forward"] + 2 <= MOST_FORWARD[longest]
        assert counts["backward"] + len(launched[pooled + 1 :]) <= MOST_BACKWARD


@pytest.mark.parametrize("name", SETUPS)
def test_training_is_that_of_torchs_operators(npus: RankPool, name: str) -> None:
    setup, sizes = on_npu(with_room(SETUPS[name])), sizes_for(1)
    ((found, launched),) = npus.run(1, with_fused, on_ranks.train, setup, sizes)
    assert set(launched) >= {"_find_runs", "_pool", "_update"}
    (expected,) = npus.run(1, on_ranks.train, setup, sizes)
    assert_rows_close(found["rows"], expected["rows"])
    for out, other in zip(found["outputs"], expected["outputs"], strict=True):
        np.testing.assert_allclose(out, other, **TOLERANCE)
    ((again, _),) = npus.run(1, with_fused, on_ranks.train, setup, sizes)
    assert_identical(again["rows"], found["rows"])


def test_unlike_tables_of_a_store_train_as_on_the_cpu(npus: RankPool) -> None:
    kinds: set[str] = set()
    for seed in range(NUM_MODELS):
        ((said, launched),) = npus.run(1, with_fused, device_steps.train_unlike_tables, seed)
        assert said == "", f"seed {seed}"
        kinds |= set(launched)
    assert kinds == {"_find_runs", "_pool", "_sum_all", "_sum_pieces", "_update"}


# Without shrinking: after a failure the rank is started anew, which takes seconds.
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(case=cases(most_ranks=1))
def test_any_collection_trains_as_dictionaries_of_rows(npus: RankPool, case: Case) -> None:
    on_device = replace(case, device="npu")
    ((result, launched),) = npus.run(1, with_fused, random_models.train_sharded, on_device)
    assert_same(case, [result])
    assert set(launched) <= {"_find_runs", "_pool", "_sum_pieces", "_update"}
    has_bags = any(map(any, case.sizes)) and not case.is_sequence
    assert "_pool" in launched or not has_bags


def test_an_update_is_done_or_not_whichever_operator_fails(npus: RankPool) -> None:
    cases = {name: PLAIN[name] for name in ("sgd", "rowwise adagrad", "adam")}
    ((found, launched),) = npus.run(1, with_fused, operator_failures.fail_updates, cases)
    assert launched.count("_update") > len(cases)
    assert all(counts["before"] >= 1 for counts in found.values())


def test_gradients_may_lie_in_memory_in_any_way(npus: RankPool) -> None:
    for seed in (1012, 1072, *range(NUM_MODELS)):  # means of gradients whose rows overlap
        ((said, _),) = npus.run(1, with_fused, any_gradients.train, seed)
        assert said == "", f"seed {seed}"


def test_a_callers_kernel_is_not_passed_over(npus: RankPool) -> None:
    setup, sizes = on_npu(with_room(SETUPS["adagrad"])), sizes_for(1)
    ((result, launched),) = npus.run(1, with_fused, on_npus.use_registered_kernels, setup, sizes)
    assert launched == []
    assert all(result["calls"].values())


@pytest.mark.parametrize(
    ("sharding", "what"),
    [*(("data_parallel", what) for what in OTHERWISE), ("table_wise", "torch")],
)
def test_replicas_that_are_updated_otherwise_are_not_trained(
    npus: RankPool, sharding: str, what: str
) -> None:
    comes_apart = sharding == "data_parallel" and what != "no pooling"
    for alike, otherwise, again in npus.run(2, train_otherwise_on_one_rank, sharding, what, 1):
        assert [alike, again] == ["trained"] * 2
        if comes_apart:
            assert "on devices were updated otherwise" in otherwise
            assert "RECSDK_DEVICE_KERNELS=torch on all ranks" in otherwise
        else:
            assert otherwise == "trained"
