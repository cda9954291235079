"""What sharding promises beside the numbers of training."""

from __future__ import annotations

import numpy as np
import on_ranks
import pytest
import torch
from comparing import assert_identical
from rank_pool import RankPool
from worlds import Setup, make_batch, merged, new_model, rows_of

from recsdk_sharding._modules.sharding_types import POOLED_TYPES

SIZES = [[12, 8, 7, 9], [5, 5, 5, 5]]


def run_insert_only(ranks: RankPool, world_size: int, rank_rule: str) -> dict:
    """Rows of the same global batches at any world size: they are cut for four ranks."""
    sizes = [[sum(row[r::world_size]) for r in range(world_size)] for row in SIZES]
    setup = Setup(rank_rule=rank_rule)
    return merged(ranks.run(world_size, on_ranks.insert_only, setup, sizes))


@pytest.mark.parametrize("rank_rule", ["virtual_shard", "modulo"])
def test_initial_rows_are_the_same_at_any_world_size(ranks: RankPool, rank_rule: str) -> None:
    worlds = [run_insert_only(ranks, size, rank_rule) for size in (1, 2, 4)]
    reference = new_model(Setup(), "cpu").ebc.tables()
    for rows in worlds:
        for name, by_key in rows.items():
            keys = np.array(list(by_key), dtype=np.int64)
            expected = reference[name].find_or_insert(keys)
            assert np.array_equal(np.stack([w for w, _ in by_key.values()]), expected)


def test_every_table_and_every_dense_parameter_is_trained(ranks: RankPool) -> None:
    results = ranks.run(2, on_ranks.initial_and_trained, Setup(), [[12, 12]])
    for result in results:
        (rows, dense), (new_rows, new_dense) = result["before"], result["after"]
        for name, by_key in rows.items():
            assert by_key
            for key, (weight, _) in by_key.items():
                assert not np.array_equal(weight, new_rows[name][key][0]), (name, key)
        for name, value in dense.items():
            assert not np.array_equal(value, new_dense[name]), name


def test_empty_bags_are_zeros_and_means_divide_by_the_number_of_keys(ranks: RankPool) -> None:
    results = ranks.run(2, on_ranks.pool_by_hand, None)
    rows = merged([r["rows"] for r in results])
    genre = {key: weight for key, (weight, _) in rows["genre"].items()}
    for pooled in (r["pooled"] for r in results):
        assert not pooled["ad"].any()
        assert not pooled["user"][0].any()
        assert not pooled["genre"][0].any()
        assert not pooled["shared@genre"][1].any()
        np.testing.assert_array_equal(pooled["genre"][1], (genre[5] + genre[8]) / 2)
        np.testing.assert_array_equal(pooled["shared@genre"][0], (genre[5] + genre[6]) / 2)
        other = {key: weight for key, (weight, _) in rows["other"].items()}
        np.testing.assert_array_equal(pooled["shared@other"][0], other[5] + other[6])


def test_weighted_means_divide_by_the_weights_and_zero_gives_zeros(ranks: RankPool) -> None:
    weights = [1.0, -1.0, 2.0, 3.0, 0.5, 1.5]
    results = ranks.run(2, on_ranks.pool_by_hand, weights)
    rows = merged([r["rows"] for r in results])
    genre = {key: weight for key, (weight, _) in rows["genre"].items()}
    for pooled in (r["pooled"] for r in results):
        assert not pooled["shared@genre"][0].any()
        expected = (0.5 * genre[5] + 1.5 * genre[8]) / 2
        np.testing.assert_allclose(pooled["genre"][1], expected, rtol=1e-6)


def test_learning_rate_schedulers_reach_the_tables(ranks: RankPool) -> None:
    for rates in ranks.run(2, on_ranks.schedule, 4):
        assert rates == [[0.4 * 0.5**step] * 3 for step in range(4)]


def test_a_free_planner_and_stock_modules_beside(ranks: RankPool) -> None:
    for result in ranks.run(2, on_ranks.plan_freely):
        assert set(result["plan"]["ebc"]) == {"user", "genre", "other"}
        assert set(result["plan"]["ebc"].values()) <= set(POOLED_TYPES)
        assert result["plan"]["stock"] == {"s": "row_wise"}
        assert (result["changed"] != 0).all()


def test_a_plan_that_does_not_fit_is_refused(ranks: RankPool) -> None:
    for kind, kernel in ranks.run(2, on_ranks.refuse_plans):
        assert "table 'user': the plan says shape_wise, but these tables are sharded by" in kind
        assert "table 'user': the plan says compute_kernel 'quant'" in kernel
        assert "hash tables are sharded table_wise with 'fused'" in kernel


def test_host_environments_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    for messages in ranks.run(2, on_ranks.refuse_host_environments):
        expected = [
            "host_env must be a torchrec ShardingEnv, got NoneType; pass ShardingEnv",
            "host_env has no process group",
            "host_env must be on a group of its own",
            "host_env must have the rank and size of its group, ",
            "host_env must have the rank and size of its group, ",
        ]
        for text, start in zip(messages, expected, strict=True):
            assert text.startswith(start)


def test_an_unsharded_module_is_refused_in_data_parallel(ranks: RankPool) -> None:
    for text in ranks.run(2, on_ranks.train_unsharded_in_ddp):
        assert "in DistributedDataParallel over 2 ranks would train other rows" in text
    assert ranks.run(1, on_ranks.train_unsharded_in_ddp) == ["trained [3, 3, 3]"]


def test_a_kept_loss_does_not_keep_what_its_backward_needed(ranks: RankPool) -> None:
    few, many = (ranks.run(2, on_ranks.keep_losses, steps) for steps in (1, 5))
    assert few == many


def test_a_model_without_references_is_freed(ranks: RankPool) -> None:
    for is_gone in ranks.run(2, on_ranks.forget_model):
        assert all(is_gone)


def test_max_rows_is_of_the_whole_table(ranks: RankPool) -> None:
    for world_size in (1, 2, 4):
        counts = ranks.run(world_size, on_ranks.fill_up, 10)
        for name in counts[0]:
            assert sum(count[name] for count in counts) <= 10


def test_a_full_table_that_raises_ends_the_step_on_all_ranks(
    ranks: RankPool, npus: RankPool
) -> None:
    for pool, device in ((ranks, "cpu"), (npus, "npu")):
        results = pool.run(2, on_ranks.overfill, device)
        last = [result["errors"][-1] for result in results]
        assert {name for name, _, _ in last} <= {"CapacityError", "PeerError"}
        full = [rank for rank, (name, _, _) in enumerate(last) if name == "CapacityError"]
        assert full
        for name, message, rank in last:
            assert "is full" in message
            assert "raise max_rows" in message
            assert name == "CapacityError" or rank == full[0]
        for result in results:
            assert result["errors"][:-1] == [None] * (len(result["errors"]) - 1)
            assert result["refused"] == 0
            for name, (_, num_updates) in result["before"].items():
                assert result["after"][name][1] == num_updates


def test_columns_are_in_table_order_as_in_the_unsharded_module(ranks: RankPool) -> None:
    (result,) = ranks.run(1, on_ranks.pool_by_hand, None)
    model = new_model(Setup(), "cpu")
    assert list(result["pooled"]) == model.ebc(make_batch(1, 2).sparse).keys()


def test_sharding_leaves_the_callers_arguments_alone(ranks: RankPool) -> None:
    setup = Setup(torch.optim.Adagrad, {"lr": 0.1})
    ranks.run(1, on_ranks.insert_only, setup, [[2]])
    assert setup.arguments == {"lr": 0.1}
    assert_identical(
        rows_of(new_model(setup, "cpu").ebc.tables()), {"user": {}, "genre": {}, "other": {}}
    )
