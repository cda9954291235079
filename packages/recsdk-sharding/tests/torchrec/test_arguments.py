"""Arguments to torchrec that are wrong for models with hash tables are said so where given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import arguments_on_ranks
import pytest
from rank_pool import RankPool
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    KernelConfig,
    ParameterConstraints,
    Topology,
    TopologyFactory,
    TrainerConfig,
)

from recsdk_sharding import HashEmbeddingEnumerator, HashParameterConstraints
from recsdk_sharding._adapt.npu import compute_device_of

BY_HAND: list[tuple[str, list[Any], str]] = [
    ("row_wise", [], "fused"),
    ("table_wise", [0], "fused"),
    ("column_wise", [[0]], "fused"),
    ("data_parallel", [], "dense"),
]


@pytest.mark.parametrize("kind", ["bag", "sequence"])
@pytest.mark.parametrize(("name", "arguments", "kernel"), BY_HAND)
def test_plans_made_by_hand(
    ranks: RankPool, name: str, arguments: list[Any], kernel: str, kind: str
) -> None:
    for found in ranks.run(2, arguments_on_ranks.train_by_hand, name, arguments, kind):
        assert found["kernels"] == {kernel}
        assert found["losses"][1] < found["losses"][0]


def test_plans_of_nodes_made_by_hand(ranks: RankPool) -> None:
    for name, arguments in (("table_row_wise", [0]), ("grid_shard", [[0]])):
        for found in ranks.run(2, arguments_on_ranks.train_by_hand, name, arguments, "bag"):
            assert found["kernels"] == {"fused"}
            assert found["losses"][1] < found["losses"][0]


def test_a_single_bag_is_planned_by_hand(ranks: RankPool) -> None:
    ((kernel, error),) = ranks.run(1, arguments_on_ranks.plan_a_bag_by_hand)
    assert kernel == "fused"
    assert "sharded over a host group: pass one of recsdk_sharding.get_default_hybrid" in error


DMP = "DistributedModelParallel: "
COLLECTION = "HashEmbeddingBagCollection: its plan "
TOWER = "ValueError: module '0': EmbeddingTowerSharder would shard the HashEmbeddingBagCollection"
REFUSED = {
    "list as module": f"TypeError: {DMP}module must be a torch.nn.Module, got list",
    "str as device": f"TypeError: {DMP}device must be a torch.device, got 'cpu'; pass torch.device",
    "str as plan": f"TypeError: {DMP}plan must be a torchrec ShardingPlan, got 'row_wise'",
    "dict as plan": f"TypeError: {DMP}plan must be a torchrec ShardingPlan, got dict",
    "empty plan": f"ValueError: {DMP}the plan has no entry for 'ebc'",
    "plan of another model": f"ValueError: {DMP}the plan has no entry for 'ebc'",
    "plan without a table": f"ValueError: {COLLECTION}is for tables ['genre', 'user'], but it has",
    "plan of strings": "TypeError: table 'user': the plan must have a torchrec ParameterSharding",
    "list in a plan": f"TypeError: {COLLECTION}must be a dict of ParameterSharding by table, got",
    "a sharder alone": f"TypeError: {DMP}sharders must be a list, got HashEmbeddingBagCollection",
    "tower": TOWER,
    "tower with a plan": TOWER,
    "codec of cuda alone": "ValueError: qcomm_codecs_registry: the forward codec of POOLED_EMBED",
}


def test_arguments_that_cannot_be_right_are_refused(ranks: RankPool) -> None:
    (found,) = ranks.run(1, arguments_on_ranks.refuse_arguments)
    assert found.keys() == REFUSED.keys()
    for name, error in found.items():
        assert error.startswith(REFUSED[name]), f"{name}: {error}"


def test_index_dedup_is_that_of_the_argument_or_of_torchrecs_function(ranks: RankPool) -> None:
    every, dropped, by_function = (
        ranks.run(2, arguments_on_ranks.sent_of_repeated_ids, how)
        for how in ("", "argument", "set_ec_index_dedup")
    )
    assert by_function == dropped != every


@pytest.mark.parametrize("device", ["npu", "cpu", "cuda"])
def test_a_topology_of_the_factory_is_as_one_made_by_itself(device: str) -> None:
    made = TopologyFactory.create_topology(
        TrainerConfig(world_size=2), kernel_config=KernelConfig(compute_device=device)
    )
    expected = Topology(world_size=2, compute_device=device)
    assert compute_device_of(made) == device
    assert made.compute_device == expected.compute_device
    assert [each.storage for each in made.devices] == [each.storage for each in expected.devices]


def test_the_factory_refuses_what_it_refused() -> None:
    with pytest.raises(ValueError, match="compute_device must be one of"):
        KernelConfig(compute_device="xpu").validate()


@pytest.mark.parametrize("kind", [EmbeddingEnumerator, HashEmbeddingEnumerator])
def test_the_group_of_npus_is_the_one_that_is_planned(kind: Any) -> None:
    given = {
        "a": HashParameterConstraints(device_group="npu", expected_rows=7),
        "b": ParameterConstraints(device_group="cpu"),
    }
    topology = Topology(world_size=2, compute_device="npu")
    made = kind(topology, batch_size=8, constraints=given)
    planned_as = made._compute_device
    assert made._constraints == {**given, "a": replace(given["a"], device_group=planned_as)}
    assert given["a"].device_group == "npu"


def test_a_collection_has_one_name_in_a_module(ranks: RankPool) -> None:
    [said] = ranks.run(1, arguments_on_ranks.shard_under_two_names, False)
    assert "['ebc', 'same'] are one module, and torchrec shards it under the first" in said
    assert ranks.run(1, arguments_on_ranks.shard_under_two_names, True) == [""]


@pytest.mark.parametrize("world_size", [1, 2])
def test_functions_of_torchrec_that_shard(ranks: RankPool, world_size: int) -> None:
    sharded = "ShardedHashEmbeddingBagCollection"
    for found in ranks.run(world_size, arguments_on_ranks.shard_by_functions):
        assert found["shard"] == found["modules"] == sharded
        assert "is sharded over a host group: pass one of" in found["shard alone"]
        assert "shard_modules: the plan has no entry for 'ebc'" in found["modules, empty plan"]
        if world_size == 1:
            assert found["modules alone"] == "HashEmbeddingBagCollection"
        else:
            assert (
                "sharders has none for it, so that each rank would train" in found["modules alone"]
            )
