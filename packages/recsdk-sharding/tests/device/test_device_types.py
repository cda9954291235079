"""Every sharding type on a device trains as unsharded on the cpu, within float order.

The simulated NPU, asynchronously, over hccl. How many random examples run is the Hypothesis
profile's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import on_ranks
import pytest
import random_models
import reference
import repeats_on_ranks
import single_bags
from comparing import assert_identical, assert_rows_close, assert_trained_as
from device_type import DEVICE_TYPE, IS_CUDA
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from loops import STOCK_PIPELINES
from plans import MIXED_SEQUENCES, NODES_OF_TWO, ONE, PLANS, TWO, same
from random_cases import TABLES, assert_same, cases
from random_models import Case, TableSpec
from rank_pool import RankPool, cuda_devices
from setups import ADAGRAD, CASES_OF_TYPES, SETUPS, SIZES, WEIGHTED, on_npu, with_room

from sampling import IS_FULL, crossed, sampled

CHOSEN = CASES_OF_TYPES if IS_CUDA else sampled(CASES_OF_TYPES, 7)  # the cpu trains all of them
MOST_RANKS = len(cuda_devices()) if IS_CUDA else 5


@pytest.mark.parametrize(
    ("world_size", "local_size", "name", "setup"),
    CHOSEN,
    ids=[f"{c[2]}-{c[0]}-{c[3].optimizer.__name__}" for c in CHOSEN],
)
def test_training_equals_the_unsharded_module(
    npus: RankPool, world_size: int, local_size: int | None, name: str, setup: Any
) -> None:
    plan = (NODES_OF_TWO if local_size else PLANS[world_size])[name]
    setup = with_room(replace(setup, plan=plan, local_size=local_size))
    sizes = [row[:world_size] for row in SIZES]
    results = npus.run(world_size, on_ranks.train, on_npu(setup), sizes)
    assert_trained_as(reference.train_unsharded(setup, sizes), results, setup)


def test_columns_of_one_rank_train_with_a_number_a_row(ranks: RankPool, npus: RankPool) -> None:
    setup = with_room(replace(SETUPS["rowwise_adagrad"], plan=ONE["column_wise"]))
    sizes = [row[:1] for row in SIZES]
    (found,) = npus.run(1, on_ranks.train, on_npu(setup), sizes)
    (expected,) = ranks.run(1, on_ranks.train, setup, sizes)
    assert_rows_close(found["rows"], expected["rows"])


COLUMNS_ON_ONE_RANK = Case(
    (TableSpec(3, ("a", "b")), TableSpec(2, ("a", "c"))),
    (("table_column_wise", [(1, 1), (1, 0), (1, 0)]), ("grid_shard", [(2, 0)])),
    ((2, 2), (4, 2)),
    is_weighted=True,
    learns_weights=True,
)


SEQUENCES: dict[str, Any] = {
    "table_wise": same("table_wise", 1),
    "column_wise": same("column_wise", [(3, 1), (4, 0), (1, 1)]),
    "data_parallel": same("data_parallel"),
    "mixed": MIXED_SEQUENCES,
}
PIPED = {
    **{name: replace(WEIGHTED, plan=plan) for name, plan in TWO.items()},
    **{
        f"sequences, {name}": replace(ADAGRAD, plan=plan, is_sequence=True)
        for name, plan in SEQUENCES.items()
    },
    **{
        f"processors, {name}": replace(ADAGRAD, plan=TWO[name], processor="attention")
        for name in ("column_wise", "mixed", "mixed_more")
    },
}
RUNS = [
    (how, name)
    for how in STOCK_PIPELINES
    for name, setup in PIPED.items()
    if setup.processor is None or "SemiSync" not in how  # refused: test_weights.py
]


# Half of what the profile has: each is two trainings.
@settings(max_examples=settings().max_examples // 2)
@given(run=st.sampled_from(RUNS))
def test_torchrec_pipelines_give_the_same_bits(npus: RankPool, run: tuple[str, str]) -> None:
    how, name = run
    setup, sizes = on_npu(with_room(PIPED[name])), [row[:2] for row in SIZES]
    expected = npus.known(2, on_ranks.train, setup, sizes, STOCK_PIPELINES[how])
    assert_identical(npus.run(2, on_ranks.train, setup, sizes, how), expected)


BAGS = [
    *single_bags.CASES,
    ("column_wise", "mean", True, False),
    ("table_column_wise", "sum", True, False),
    ("table_row_wise", "mean", False, False),
    ("grid_shard", "mean", True, True),
]


@pytest.mark.parametrize(("spec", "mode", "is_weighted", "is_square"), BAGS)
def test_a_single_bag_trains_as_unsharded(
    npus: RankPool, spec: str, mode: str, is_weighted: bool, is_square: bool
) -> None:
    options = {"is_weighted": is_weighted, "is_square": is_square}
    single_bags.assert_trains(npus, spec, mode, options, DEVICE_TYPE)


# Without shrinking: after a failure the ranks are started anew, which takes seconds.
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(case=cases(MOST_RANKS))
@example(COLUMNS_ON_ONE_RANK)
def test_any_collection_trains_as_dictionaries_of_rows(npus: RankPool, case: Case) -> None:
    assume(case.world_size <= MOST_RANKS)
    results = npus.run(
        case.world_size, random_models.train_sharded, replace(case, device=DEVICE_TYPE)
    )
    assert_same(case, results)


SHARED: dict[str, dict[str, Any]] = {
    "samples that share bags": {"batches_vary": True},
    "samples that share weighted bags": {"batches_vary": True, "is_weighted": True},
    "weights that learn": {"batches_vary": True, "is_weighted": True, "learns_weights": True},
    "sequences that share bags": {"batches_vary": True, "is_sequence": True},
    "duplicates dropped": {"drops_duplicates": True, "is_sequence": True},
    "shared and dropped": {"batches_vary": True, "drops_duplicates": True, "is_sequence": True},
}


@pytest.mark.parametrize(
    ("device", "is_sharded", "name"),
    crossed([DEVICE_TYPE, "cpu"], [True, False], SHARED, size=6),
)
def test_what_samples_share_gets_the_same_bits_every_time(
    ranks: RankPool, npus: RankPool, name: str, is_sharded: bool, device: str
) -> None:
    pool = npus if device == DEVICE_TYPE else ranks
    specs = (("column_wise", [(3, 1), (5, 0)]), ("row_wise",), ("table_wise", 1))
    case = Case(TABLES, specs, ((70, 50),) * 3, device=device, **SHARED[name])
    first, *others = (
        pool.run(2, repeats_on_ranks.train, case, is_sharded) for _ in range(3 if IS_FULL else 2)
    )
    for other in others:
        assert_identical(other, first)
