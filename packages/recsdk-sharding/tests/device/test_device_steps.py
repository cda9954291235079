"""A step on a device: a fixed number of operators for all tables of a width, and no wait.

A simulated device says nothing about speed; what it is handed can be counted.
"""

from __future__ import annotations

import os
from unittest import mock

import any_gradients
import device_steps
import numpy as np
import pytest
import torch
from device_type import on_npus_alone
from hypothesis import example, given
from hypothesis import strategies as st
from rank_pool import RankPool

from recsdk_core.outcome import BeginWith
from recsdk_sharding.device import kernels
from recsdk_sharding.device.kernels import (
    BagIndex,
    join_gradients,
    plan_rows,
    pool_rows,
    sum_gradients,
)

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE") == "full"
NUM_MODELS = 200 if IS_FULL else 12
MOST_TABLES = 200 if IS_FULL else 60
MOST_FORWARD, MOST_BACKWARD = 12, 20
MOST_PUT_TOGETHER = 4  # on several ranks, each way
MOST_CALLS_A_TABLE = 3
"""Of functions of Python, in the host work of a batch; a call takes as long as mapping ten ids."""
NUM_ROWS, DIM = 9, 2
SPARE = NUM_ROWS - 1


@on_npus_alone
@pytest.mark.parametrize("longest", [1, 4])
def test_a_step_is_as_many_operators_for_any_number_of_tables(npus: RankPool, longest: int) -> None:
    found = {}
    for number in (1, 2, 26, MOST_TABLES):
        (found[number],) = npus.run(1, device_steps.count_a_step, number, longest)
    for number, counts in found.items():
        assert counts["waits"] == 0, (number, counts)
        assert counts["bytes"] <= 8 * counts["ids"] + 4, (number, counts)
        assert counts["forward"] <= MOST_FORWARD
        assert counts["backward"] <= MOST_BACKWARD
    of_some = [(found[n]["forward"], found[n]["backward"]) for n in (2, 26, MOST_TABLES)]
    assert len(set(of_some)) == 1, of_some
    more = found[MOST_TABLES]["calls"] - found[2]["calls"]
    assert more <= MOST_CALLS_A_TABLE * (MOST_TABLES - 2)
    of_step = {found[n]["calls_of_step"] for n in (2, 26, MOST_TABLES)}
    assert len(of_step) == 1, of_step
    assert 0 not in of_step
    # One table has no neighbours, so nothing is put side by side.
    assert found[1]["backward"] in (of_some[0][1], of_some[0][1] - 1)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_of_a_batch_is_not_taken_for_another_size(npus: RankPool, seed: int) -> None:
    assert npus.run(1, device_steps.train_batches_of_other_sizes, seed) == [""]


@on_npus_alone
@pytest.mark.parametrize(
    ("sharding_type", "pooling", "longest"),
    [("row_wise", "SUM", 1), ("row_wise", "MEAN", 4), ("column_wise", "SUM", 4)],
)
def test_a_step_of_two_ranks_is_as_many_operators_for_any_number_of_tables(
    npus: RankPool, sharding_type: str, pooling: str, longest: int
) -> None:
    found = {}
    for number in (2, 26, MOST_TABLES):
        of_ranks = npus.run(2, device_steps.count_a_step, number, longest, sharding_type, pooling)
        for counts in of_ranks:
            assert counts["waits"] == 0, (number, counts)
            assert counts["forward"] <= MOST_FORWARD + MOST_PUT_TOGETHER, (number, counts)
            assert counts["backward"] <= MOST_BACKWARD + MOST_PUT_TOGETHER, (number, counts)
        if longest == 1:
            num_ids = sum(counts["ids"] for counts in of_ranks)
            assert sum(counts["bytes"] for counts in of_ranks) <= 8 * num_ids, of_ranks
        found[number] = of_ranks[0]
    both = {(counts["forward"], counts["backward"]) for counts in found.values()}
    assert len(both) == 1, found


@on_npus_alone
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bags_that_samples_share_go_to_the_device_without_a_wait(
    npus: RankPool, num_ranks: int
) -> None:
    for counts in npus.run(num_ranks, device_steps.count_a_step, 12, None):
        assert counts["waits"] == 0, counts


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("longest", [1, 4, None])
def test_a_step_of_bags_waits_for_nothing(
    npus: RankPool, longest: int | None, pooling: str
) -> None:
    assert npus.run(1, device_steps.waits_of_bags, longest, pooling) == [""]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_step_of_sequences_waits_for_nothing(
    npus: RankPool, num_ranks: int, is_shared: bool
) -> None:
    for found in npus.run(num_ranks, device_steps.waits_of_sequences, is_shared):
        assert (found["sharded"], found["alone"]) == ("", "")
        assert is_shared or (found["sharded as given"] and found["alone as given"])


@pytest.mark.parametrize("processor", ["positions of all", "positions of each"])
def test_processors_wait_for_nothing(npus: RankPool, processor: str) -> None:
    assert npus.run(1, device_steps.waits_of_processors, processor) == [""]


@pytest.mark.parametrize("begin_with", ["initial_row", "shared_row"])
@pytest.mark.parametrize("is_read", [False, True])
def test_steps_in_which_keys_come_and_go_wait_for_nothing(
    npus: RankPool, begin_with: BeginWith, is_read: bool
) -> None:
    (found,) = npus.run(1, device_steps.waits_where_keys_come_and_go, begin_with, is_read)
    assert found[2:] == [""] * 6  # before, what is kept of tables is made


@on_npus_alone
def test_tables_that_part_in_each_backward_wait_in_the_first_alone(npus: RankPool) -> None:
    (waits,) = npus.run(1, device_steps.count_waits_of_tables_that_part, 4)
    assert waits[0] > 0  # what is kept is made
    assert waits[1:] == [0, 0, 0]


def test_vectors_are_put_together_on_a_device_as_by_the_engine(npus: RankPool) -> None:
    for seed in range(4 * NUM_MODELS):
        (said,) = npus.run(1, device_steps.put_together, seed)
        assert said == "", f"seed {seed}"


def test_unlike_tables_of_a_store_train_as_on_the_cpu(npus: RankPool) -> None:
    for seed in range(NUM_MODELS):
        (said,) = npus.run(1, device_steps.train_unlike_tables, seed)
        assert said == "", f"seed {seed}"


def test_a_callers_kernel_pools_straight_to_its_place_or_declines(npus: RankPool) -> None:
    kinds: set[bool] = set()
    for seed in range(NUM_MODELS):
        ((said, did),) = npus.run(1, any_gradients.train_with_own_pooling, seed)
        assert said == "", f"seed {seed}"
        kinds.update(did)
    assert kinds == {True, False}


def test_tables_train_after_a_first_lookup_under_inference_mode(npus: RankPool) -> None:
    [found] = npus.run(1, device_steps.train_after_a_lookup, torch.inference_mode)
    [expected] = npus.run(1, device_steps.train_after_a_lookup, torch.no_grad)
    assert found == expected


def test_a_pickled_module_has_its_rows_once(npus: RankPool) -> None:
    ((size, rows),) = npus.run(1, device_steps.pickle_tables, 12)
    assert size < 4 * rows


def test_tables_of_one_width_share_a_store(npus: RankPool) -> None:
    (found,) = npus.run(1, device_steps.stores_of, 6)
    assert found == {"new": 2, "blocks": 2}


# ---- the kernels beside a plain model -----------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], bool]:
    """The rows of bags, and whether they are weighted."""
    one_each = draw(st.booleans())
    row = st.integers(0, SPARE)
    bag = st.lists(row, min_size=1, max_size=1) if one_each else st.lists(row, max_size=5)
    return draw(st.lists(bag, max_size=8)), draw(st.booleans())


def index_of(bags: list[list[int]], is_weighted: bool) -> BagIndex:
    lengths = [len(bag) for bag in bags]
    rows_N = torch.tensor([row for bag in bags for row in bag], dtype=torch.int32)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    is_one_each = all(length == 1 for length in lengths)
    return BagIndex(
        rows_N,
        None if is_one_each else offsets,
        torch.arange(1.0, len(rows_N) + 1) if is_weighted else None,
    )


@given(batches())
@example(([[]], False))
@example(([[SPARE, SPARE], []], True))
def test_pooling_is_a_sum(batch: tuple[list[list[int]], bool]) -> None:
    bags, is_weighted = batch
    store = torch.arange(1.0, NUM_ROWS * DIM + 1).view(NUM_ROWS, DIM)
    index = index_of(bags, is_weighted)
    weights = iter(range(1, 1000)) if is_weighted else iter([1] * 1000)
    expected = torch.zeros(len(bags), DIM)
    for number, bag in enumerate(bags):
        for row in bag:
            expected[number] += store[row] * next(weights)
    assert torch.equal(pool_rows(store, index), expected)


@pytest.mark.parametrize("sorting", [("cpu",), ()])
@given(batch=batches())
@example(batch=([[SPARE, 0, SPARE], [0]], True))
def test_gradients_are_summed_by_row(
    sorting: tuple[str, ...], batch: tuple[list[list[int]], bool]
) -> None:
    with mock.patch.object(kernels, "_SORTING_DEVICES", sorting):
        check_gradients(*batch)


def check_gradients(bags: list[list[int]], is_weighted: bool) -> None:
    index = index_of(bags, is_weighted)
    if len(index.rows_N) == 0:
        return
    grad_BD = torch.arange(1.0, len(bags) * DIM + 1).view(len(bags), DIM)
    plan = plan_rows(index, NUM_ROWS, SPARE)
    sums_LD = sum_gradients(grad_BD, plan, index.weights_N)
    weights = iter(range(1, 1000)) if is_weighted else iter([1] * 1000)
    expected: dict[int, torch.Tensor] = {}
    for number, bag in enumerate(bags):
        for row in bag:
            before = expected.get(row, torch.zeros(DIM))
            expected[row] = before + grad_BD[number] * next(weights)
    check_sums(plan.rows_L, sums_LD, expected)
    twice = join_gradients([plan.rows_L] * 2, [sums_LD] * 2, NUM_ROWS, SPARE)
    check_sums(*twice, {row: 2 * value for row, value in expected.items()})


def check_sums(
    rows_L: torch.Tensor, sums_LD: torch.Tensor, expected: dict[int, torch.Tensor]
) -> None:
    """The rows in ascending order, each once; behind them the spare row."""
    assert len(rows_L) <= NUM_ROWS
    rows = sorted(expected)
    assert rows_L[: len(rows)].tolist() == rows
    assert set(rows_L[len(rows) :].tolist()) <= {SPARE}
    found = torch.zeros(NUM_ROWS, DIM)
    for row, value in zip(rows_L.tolist(), sums_LD, strict=True):
        assert row == SPARE or not found[row].any()
        found[row] += value
    for row, value in enumerate(found):
        assert torch.equal(value, expected.get(row, torch.zeros(DIM)))
