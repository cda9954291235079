"""Plans follow what is said of rows and traffic, and estimates what tables really take."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import planning_on_ranks
import pytest
import torch
from planning_on_ranks import FACTOR, PIECE
from rank_pool import RankPool
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from recsdk_sharding import HashEmbeddingBagConfig, HashParameterConstraints
from recsdk_sharding._adapt.arguments import check_planned
from recsdk_sharding.planning import HashPerfEstimator, HashStorageEstimator, planned_rows

CPU = {"world_size": 2, "compute_device": "cpu"}
MIB = 2**20

NUM_IDS = 160_000

FILLED: dict[str, tuple[str, type, dict[str, Any], dict[str, Any]]] = {
    "rows": ("row_wise", torch.optim.Adagrad, {"lr": 0.1}, {"embedding_dim": 12}),
    "whole": (
        "table_wise",
        torch.optim.Adam,
        {"lr": 0.1},
        {"embedding_dim": 7, "data_type": DataType.BF16},
    ),
    "columns": ("column_wise", RowWiseAdagrad, {"lr": 0.1}, {"embedding_dim": 16}),
    "copies": ("data_parallel", torch.optim.SGD, {"lr": 0.1}, {"embedding_dim": 4}),
}


def test_estimates_are_near_what_filled_tables_take(ranks: RankPool) -> None:
    configs = [
        HashEmbeddingBagConfig(name=name, num_embeddings=7, feature_names=[name], **fields)
        for name, (*_, fields) in FILLED.items()
    ]
    constraints = {
        name: HashParameterConstraints(
            sharding_types=[kind], min_partition=8, expected_rows=NUM_IDS // 2, growth=2
        )
        for name, (kind, *_) in FILLED.items()
    }
    optimizers = {name: (kind, given) for name, (_, kind, given, _) in FILLED.items()}
    found = ranks.run(2, planning_on_ranks.fill, configs, optimizers, constraints, NUM_IDS)
    for name in FILLED:
        for estimated, _, measured, _ in (of_rank[name] for of_rank in found):
            assert (estimated == 0) == (measured == 0)
            assert measured / FACTOR - PIECE <= estimated <= measured * FACTOR + PIECE, name
    assert sum(of_rank["whole"][0] > 0 for of_rank in found) == 1


def choose(
    ranks: RankPool, model: dict[str, Any], constraints: dict[str, Any], **options: Any
) -> dict[str, Any]:
    topology = options.pop("topology", CPU)
    rest = (
        options.get("how", "ours"),
        options.get("host_ids_per_ms", 5_000.0),
        options.get("batch_size", 512),
    )
    (found,) = ranks.run(1, planning_on_ranks.choose, model, topology, constraints, *rest)
    return found


def test_rows_that_are_not_there_cost_nothing(ranks: RankPool) -> None:
    huge = {"names": "a", "num_embeddings": 10**11}
    stock = choose(ranks, huge, {"a": ParameterConstraints()}, how="stock")
    assert "insufficient storage" in stock["error"]
    few = {"a": HashParameterConstraints(expected_rows=100_000, growth=1.5)}
    assert choose(ranks, huge, few)["types"] == {"a": "row_wise"}
    capped = {"names": "a", "num_embeddings": 10**11, "max_rows": 150_000}
    assert choose(ranks, capped, {})["types"] == {"a": "row_wise"}


def test_torchrecs_own_planner_takes_our_enumerator(ranks: RankPool) -> None:
    few = {"a": HashParameterConstraints(expected_rows=100_000, growth=1.5)}
    huge = {"names": "a", "num_embeddings": 10**11}
    ours, theirs = (choose(ranks, huge, few, how=how) for how in ("ours", "enumerator"))
    assert ours["types"] == theirs["types"]
    assert ours["ranks"] == theirs["ranks"]


def test_growth_takes_a_table_from_one_rank_to_all(ranks: RankPool) -> None:
    # A row of 64 columns with Adagrad takes 512 bytes and about 40 beside.
    topology = {**CPU, "ddr_cap": 100 * MIB}
    rows = HashParameterConstraints(expected_rows=100_000, sharding_types=["table_wise"])
    model = {"names": "a"}
    grown = replace(rows, growth=3.0)
    free = replace(grown, sharding_types=["table_wise", "row_wise"])
    chosen = [choose(ranks, model, {"a": c}, topology=topology) for c in (rows, grown, free)]
    assert chosen[0]["types"] == {"a": "table_wise"}
    assert "Unable to find a plan" in chosen[1]["error"]
    assert chosen[1]["text"] == "no plan found"
    assert chosen[2]["types"] == {"a": "row_wise"}


@pytest.mark.parametrize("heavy", ["a", "b", "c"])
def test_the_table_with_most_traffic_gets_a_rank_for_itself(ranks: RankPool, heavy: str) -> None:
    whole = HashParameterConstraints(sharding_types=["table_wise"], pooling_factors=[2.0])
    constraints = dict.fromkeys("abc", whole)
    constraints[heavy] = replace(whole, pooling_factors=[40.0])
    found = choose(ranks, {"names": "abc"}, constraints)["ranks"]
    light = [found[name] for name in "abc" if name != heavy]
    assert light[0] == light[1] != found[heavy]


def test_mapping_on_the_host_decides_where_it_is_slow(ranks: RankPool) -> None:
    # Replicas send less, but every rank maps the ids of all.
    topology = {**CPU, "intra_host_bw": 1e5, "inter_host_bw": 1e5}
    constraints = {
        "a": HashParameterConstraints(
            sharding_types=["row_wise", "data_parallel"], pooling_factors=[20.0]
        )
    }
    for host_ids_per_ms, expected in ((1e9, "data_parallel"), (100.0, "row_wise")):
        found = choose(
            ranks,
            {"names": "a"},
            constraints,
            topology=topology,
            host_ids_per_ms=host_ids_per_ms,
        )
        assert found["types"] == {"a": expected}


def test_even_tables_lie_whole_on_one_rank_each(ranks: RankPool) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    constraints = {name: HashParameterConstraints(expected_rows=100_000) for name in names}
    found = choose(ranks, {"names": names}, constraints)
    assert set(found["types"].values()) == {"table_wise"}
    on_first = [name for name in names if found["ranks"][name] == [0]]
    assert len(on_first) == len(names) // CPU["world_size"]


def test_a_table_that_is_most_of_the_work_is_cut(ranks: RankPool) -> None:
    constraints = {name: HashParameterConstraints(expected_rows=100_000) for name in "abc"}
    constraints["b"] = replace(constraints["b"], pooling_factors=[40.0])
    found = choose(ranks, {"names": "abc"}, constraints)
    assert found["types"]["b"] == "row_wise"


def test_shards_that_cost_nothing_are_no_reason(ranks: RankPool) -> None:
    found = [
        ranks.run(1, planning_on_ranks.times, {"names": "ab"}, CPU, shard_ms)[0]
        for shard_ms in (0.0, 0.5)
    ]
    for name, by_type in found[0].items():
        for kind, (total, num_shards) in by_type.items():
            other, _ = found[1][name][kind]
            assert other == pytest.approx(total + 0.5 * num_shards)


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("ours", "PlannerError", "Unable to find a plan"),
        ("stock", "PlannerError", "Unable to find a plan"),
        ("interrupted", "KeyboardInterrupt", "by the user"),
    ],
)
def test_all_ranks_learn_that_there_is_no_plan(
    ranks: RankPool, kind: str, name: str, text: str
) -> None:
    (own, of_own, again), (told, rank, too) = ranks.run(
        2, planning_on_ranks.plan_together, kind, 10**9
    )
    assert (of_own, rank, again, too) == (None, 0, True, True)
    assert text in own
    assert told == f"rank 0 failed: {name}: {own}"


def test_sequences_are_planned_too(ranks: RankPool) -> None:
    constraints = {"a": HashParameterConstraints(expected_rows=1000, pooling_factors=[50.0])}
    found = choose(ranks, {"names": "a", "is_sequence": True}, constraints)
    assert found["types"] == {"a": "row_wise"}


def test_a_single_bag_is_planned_by_its_table(ranks: RankPool) -> None:
    (found,) = ranks.run(1, planning_on_ranks.plan_a_single_bag)
    assert found["types"] == {"a": "table_wise"}
    # 10,000 rows of 64 weights and as many numbers of state, and 40 bytes beside.
    assert "10,000  5.2" in found["text"]


def test_weights_of_ids_travel_and_take_memory(ranks: RankPool) -> None:
    (without,), (weighted,) = (
        ranks.run(1, planning_on_ranks.estimate_weighted, given) for given in (False, True)
    )
    assert weighted[0] == pytest.approx(without[0] * (8 + 4) / 8)
    # Seven batches in flight of 512 samples from each of two ranks, of one id with a float32 each.
    assert weighted[1] - without[1] == 7 * 2 * 512 * 4


def test_torchrecs_own_tables_are_estimated_as_before(ranks: RankPool) -> None:
    ((ours, stock),) = ranks.run(1, planning_on_ranks.estimate_beside_stock)
    assert ours == stock
    assert len(ours) > 0


def test_a_plan_prints_as_tables(ranks: RankPool) -> None:
    constraints = {
        "a": HashParameterConstraints(
            sharding_types=["column_wise"], min_partition=32, expected_rows=12_345
        ),
        "b": HashParameterConstraints(sharding_types=["data_parallel"], expected_rows=7),
        "c": HashParameterConstraints(sharding_types=["row_wise"], expected_rows=2000, growth=3),
    }
    found = choose(ranks, {"names": "abc"}, constraints)
    assert found["plan"].splitlines() == [
        "module  table  type           kernel  columns  ranks",
        "ebc     a      column_wise    fused   32+32      0-1",
        "ebc     b      data_parallel  dense   all        0-1",
        "ebc     c      row_wise       fused   64         0-1",
    ]
    title, _, head, *lines = found["text"].splitlines()
    assert title == "2 ranks, cpu, batches of 512 on each; plans compared: 1"
    assert head.split() == ["module", "table", "type", "columns", "ranks", "rows", "host", "ms"]
    assert [line.split()[1:6] for line in lines[:3]] == [
        ["a", "column_wise", "32+32", "0-1", "12,345"],
        ["b", "data_parallel", "64", "0-1", "7"],
        ["c", "row_wise", "64", "0-1", "3,000"],
    ]
    assert lines[4].split() == ["rank", "host", "of", "ms"]
    assert [line.split()[0] for line in lines[5:]] == ["0", "1"]


def test_planned_rows_are_expected_ones_grown_up_to_max_rows() -> None:
    config = HashEmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=50)
    assert planned_rows(config, None) == 50
    assert planned_rows(config, ParameterConstraints()) == 50
    assert planned_rows(config, HashParameterConstraints(growth=1.5)) == 75
    assert planned_rows(config, HashParameterConstraints(expected_rows=0)) == 0
    limited = replace(config, max_rows=60)
    assert planned_rows(limited, HashParameterConstraints(growth=1.5)) == 60


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"expected_rows": -1}, ValueError, "expected_rows must be at least 0, got -1"),
        ({"expected_rows": 1.5}, TypeError, "expected_rows must be an int, got 1.5"),
        ({"expected_rows": True}, TypeError, "expected_rows must be an int, got True"),
        ({"growth": 0.9}, ValueError, "growth must be a finite number of at least 1, got 0.9"),
        ({"growth": "2"}, TypeError, "growth must be a number, got '2'"),
        ({"growth": True}, TypeError, "growth must be a number, got True"),
        ({"growth": float("inf")}, ValueError, "growth must be a finite number"),
    ],
)
def test_wrong_constraints_are_refused(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        HashParameterConstraints(**fields)


def test_constraints_that_do_not_fit_the_features_are_refused(ranks: RankPool) -> None:
    two = {"a": HashParameterConstraints(pooling_factors=[1.0, 2.0])}
    error = choose(ranks, {"names": "a"}, two)["error"]
    assert "table 'a': pooling_factors of its constraints has 2 values for 1 features" in error


@pytest.mark.parametrize("how", ["ours", "stock"])
def test_constraints_of_a_table_that_the_model_lacks_do_nothing(ranks: RankPool, how: str) -> None:
    row_wise = ParameterConstraints(sharding_types=["row_wise"])
    found = choose(ranks, {"names": "a"}, {"a": row_wise, "aa": row_wise}, how=how)
    assert found["types"] == {"a": "row_wise"}


@pytest.mark.parametrize("sharders", [[], [EmbeddingBagCollectionSharder()]])
def test_constraints_of_torchrecs_own_tables_are_taken(sharders: list[Any]) -> None:
    config = HashEmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=10)
    model = planning_on_ranks.Tables([config], {}, has_stock=True)
    given = {"a": ParameterConstraints(), "stock": ParameterConstraints()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_planned(model, sharders, given, "cpu")
    with pytest.warns(UserWarning, match=r"constraints name \['ebc'\], and the model has no such"):
        check_planned(model, sharders, given | {"ebc": ParameterConstraints()}, "cpu")


def test_constraints_are_told_apart_by_their_hash() -> None:
    # torchrec's planner keys stored plans by it.
    kinds = [{}, {"expected_rows": 5}, {"growth": 2.0}, {"min_partition": 8}]
    assert len({hash(HashParameterConstraints(**fields)) for fields in kinds}) == len(kinds)
    assert hash(HashParameterConstraints(growth=2)) == hash(HashParameterConstraints(growth=2))


def test_estimators_refuse_what_means_nothing() -> None:
    topology = Topology(world_size=1, compute_device="cpu")
    with pytest.raises(ValueError, match="batches_in_flight must be at least 1, got 0"):
        HashStorageEstimator(topology, {}, batches_in_flight=0)
    with pytest.raises(ValueError, match="host_ids_per_ms must be above 0, got 0"):
        HashPerfEstimator(topology, {}, host_ids_per_ms=0)
    with pytest.raises(ValueError, match="shard_ms must be at least 0, got -1"):
        HashPerfEstimator(topology, {}, shard_ms=-1)


@pytest.mark.parametrize(("rows", "growth"), [(10**7, 1e308), (10**400, 1.5)])
def test_more_rows_than_a_float_has_are_refused(rows: int, growth: float) -> None:
    with pytest.raises(ValueError, match="table 'user': expected_rows [*] growth is too large"):
        planned_rows(
            HashEmbeddingBagConfig(
                name="user", embedding_dim=4, num_embeddings=100, feature_names=["user"]
            ),
            HashParameterConstraints(expected_rows=rows, growth=growth),
        )
