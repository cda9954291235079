"""Sharded for inference, frozen tables give what they give unsharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from default_types import of_type
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardMetadata,
)
from torchrec.inference.modules import quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import Default, optim
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingBagCollectionSharder,
    ShardedQuantHashEmbeddingBagCollection,
    ShardedQuantHashEmbeddingCollection,
)

KEYS = np.array([-7, 0, 3, 2**62, -(2**63), 2**63 - 1, 17, 18, 19])
IDS = st.lists(st.sampled_from([*KEYS.tolist(), 404]), max_size=8)
TYPES = st.sampled_from(["table_wise", "row_wise", "column_wise"])
DEFAULTS = st.sampled_from(["float32", "float64", "bfloat16", "meta"])
"""What torch makes tensors of, or where, that nobody gives a type or a device."""
FEATURES = ["item", "user", "friend"]


def uniform(weight: torch.Tensor) -> None:
    nn.init.uniform_(weight, -1, 1)


def trained(module: Any) -> Any:
    for table in module.tables().values():
        table.set_optimizer(optim.SGD(lr=0.1))
        table.find_or_insert(KEYS)
    return module.eval()


def bags(is_weighted: bool = False) -> Any:
    """Two tables, of two widths and poolings, one of which has two features."""
    users = HashEmbeddingBagConfig(
        name="users", embedding_dim=8, num_embeddings=9, feature_names=["user", "friend"],
        init_fn=uniform,
    )  # fmt: skip
    films = HashEmbeddingBagConfig(
        name="films", embedding_dim=20, num_embeddings=9, feature_names=["item"],
        pooling=PoolingType.MEAN, init_fn=uniform, default=Default.shared_rows(8),
    )  # fmt: skip
    return trained(HashEmbeddingBagCollection([users, films], is_weighted=is_weighted))


def sequences() -> Any:
    config = HashEmbeddingConfig(
        name="films", embedding_dim=4, num_embeddings=9, feature_names=FEATURES, init_fn=uniform
    )
    return trained(HashEmbeddingCollection([config], need_indices=True))


def quantized(module: nn.Module, dtype: torch.dtype = torch.qint8) -> Any:
    # torchrec asks for two levels.
    nested = nn.ModuleDict({"model": nn.ModuleDict({"all": module})})
    return quantize_inference_model(nested, quantization_dtype=dtype)["model"]


def sharded(model: Any, world_size: int, types: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=4)
        for name, kind in types.items()
    }
    made, plan = shard_quant_model(
        model,
        world_size=world_size,
        compute_device="cpu",
        sharding_device="cpu",
        constraints=constraints,
    )
    [planned] = plan.plan.values()
    assert {name: planned[name].sharding_type for name in planned} == types
    return made, dict(planned)


def batch_of(data: st.DataObject, is_weighted: bool) -> KeyedJaggedTensor:
    """Bags, by another number of bags for each feature or not."""
    varies = data.draw(st.booleans(), "varies")
    counts = [data.draw(st.integers(1, 3)) for _ in FEATURES] if varies else [data.draw(
        st.integers(0, 4))] * len(FEATURES)  # fmt: skip
    drawn = [[data.draw(IDS) for _ in range(count)] for count in counts]
    values = torch.tensor([i for each in drawn for bag in each for i in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for each in drawn for bag in each], dtype=torch.int64)
    weights = torch.arange(len(values)) % 5 / 4 if is_weighted else None
    if not varies:
        return KeyedJaggedTensor(FEATURES, values, weights, lengths)
    samples = [[data.draw(st.integers(0, count - 1)) for _ in range(4)] for count in counts]
    return KeyedJaggedTensor(
        FEATURES,
        values,
        weights,
        lengths,
        stride_per_key_per_rank=[[count] for count in counts],
        inverse_indices=(FEATURES, torch.tensor(samples)),
    )


@settings(max_examples=40)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.qint8, torch.quint4x2]),
    world_size=st.integers(1, 4),
    users=TYPES,
    films=TYPES,
    is_weighted=st.booleans(),
    default=DEFAULTS,
)
def test_sharded_bags_are_those_of_the_unsharded_module(
    data: st.DataObject,
    dtype: torch.dtype,
    world_size: int,
    users: str,
    films: str,
    is_weighted: bool,
    default: str,
) -> None:
    model = quantized(bags(is_weighted), dtype)
    batch = batch_of(data, is_weighted)
    wanted = model["all"](batch)
    with of_type(default):
        assert torch.equal(model["all"](batch).values(), wanted.values())
    made, plan = sharded(model, world_size, {"users": users, "films": films})
    assert type(made["all"]) is ShardedQuantHashEmbeddingBagCollection
    for name, kind in (("users", users), ("films", films)):
        wanted_ranks = {"table_wise": [1], "row_wise": [world_size], "column_wise": [2, 5]}
        assert len(plan[name].ranks) in wanted_ranks[kind]
    with of_type(default):
        got = made["all"](batch)
    assert got.keys() == wanted.keys()
    assert got.length_per_key() == wanted.length_per_key()
    torch.testing.assert_close(got.values(), wanted.values(), rtol=1e-5, atol=1e-6)
    if "row_wise" not in (users, films):
        assert torch.equal(got.values(), wanted.values())
    assert made.state_dict() == {}


@settings(max_examples=30)
@given(data=st.data(), world_size=st.integers(1, 4), kind=TYPES, default=DEFAULTS)
def test_sharded_sequences_are_those_of_the_unsharded_module_to_the_bit(
    data: st.DataObject, world_size: int, kind: str, default: str
) -> None:
    model = quantized(sequences())
    batch = batch_of(data, False)
    wanted = model["all"](batch)
    made, _ = sharded(model, world_size, {"films": kind})
    assert type(made["all"]) is ShardedQuantHashEmbeddingCollection
    with of_type(default):
        got = made["all"](batch)
    assert list(got) == list(wanted)
    for name, each in wanted.items():
        assert torch.equal(got[name].values(), each.values())
        assert torch.equal(got[name].lengths(), each.lengths())
        assert torch.equal(got[name].weights(), each.weights())


def test_ranks_read_the_keys_of_their_virtual_shards() -> None:
    made, plan = sharded(quantized(bags()), 3, {"users": "row_wise", "films": "table_wise"})
    module = made["all"]
    ids = torch.from_numpy(np.concatenate([KEYS, KEYS, KEYS]))
    batch = KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones(27, dtype=torch.int64))
    context = module.create_context()
    shares = module.input_dist(context, batch)
    [owner] = plan["films"].ranks
    assert [len(of_rank) for of_rank in shares] == [3 if r == owner else 2 for r in range(3)]
    of_user = [of_rank[0].keys_N.tolist() for of_rank in shares]
    assert sorted(key for keys in of_user for key in keys) == sorted(KEYS.tolist())
    assert sum(len(keys) > 0 for keys in of_user) > 1
    values = module.output_dist(context, module.compute(context, shares)).values()
    assert torch.equal(values, made["all"](batch).values())


def test_processors_stay_in_front_of_sharded_tables() -> None:
    weigh = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, 4))
    for weights in weigh.parameters():
        nn.init.uniform_(weights)
    processed = FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), weigh).eval()
    model = quantized(processed)
    ids = torch.tensor([-7, 404, 2**62, 3, 0, -7, 3])
    batch = KeyedJaggedTensor(FEATURES, ids, lengths=torch.tensor([2, 0, 1, 3, 0, 1]))
    wanted = model["all"](batch).values().clone()
    made, _ = sharded(model, 2, {"users": "row_wise", "films": "row_wise"})
    inner = made["all"]._embedding_bag_collection
    assert type(inner) is ShardedQuantHashEmbeddingBagCollection
    torch.testing.assert_close(made["all"](batch).values(), wanted, rtol=1e-5, atol=1e-6)


def test_ranks_read_the_tables_of_the_unsharded_module() -> None:
    """So a delta that one of them takes is served by both."""
    model = quantized(bags())
    tables = model["all"].serving_tables()
    made, _ = sharded(model, 2, {"users": "row_wise", "films": "table_wise"})
    assert made["all"].serving_tables() == tables
    assert made["all"].unsharded_module_type is QuantHashEmbeddingBagCollection


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    module = quantized(bags())["all"]
    sharder = QuantHashEmbeddingBagCollectionSharder()
    local = ShardingEnv.from_local(2, 0)
    one = ParameterSharding(sharding_type="table_wise", compute_kernel="quant", ranks=[0])
    plan = {"users": one, "films": one}
    assert sharder.sharding_types("cuda") == []
    with pytest.raises(ValueError, match="the plan lacks table 'films'"):
        sharder.shard(module, {"users": one}, local)
    with pytest.raises(ValueError, match="got device cuda"):
        sharder.shard(module, plan, local, torch.device("cuda"))
    for kind, ranks in (("grid_shard", [0, 1]), ("table_wise", [0, 1]), ("row_wise", [])):
        other = ParameterSharding(sharding_type=kind, compute_kernel="quant", ranks=ranks)
        with pytest.raises(ValueError, match=f"'films' is planned as {kind}"):
            sharder.shard(module, {"users": one, "films": other}, local)
    for ranks in ([0, 2], [1, 1]):
        other = ParameterSharding(sharding_type="row_wise", compute_kernel="quant", ranks=ranks)
        with pytest.raises(ValueError, match=f"on ranks .{ranks[0]}, {ranks[1]}. of 2"):
            sharder.shard(module, {"users": one, "films": other}, local)
    for ends in ([20], [10, 20], [10, 10], [10, 30]):
        starts = [0, *ends[:-1]]
        shards = [
            ShardMetadata(
                shard_offsets=[0, start], shard_sizes=[9, end - start], placement="rank:0/cpu"
            )
            for start, end in zip(starts, ends, strict=False)
        ]
        other = ParameterSharding(
            sharding_type="column_wise",
            compute_kernel="quant",
            ranks=[0, 1, 1] if ends == [10, 20] else [0, 1],
            sharding_spec=EnumerableShardingSpec(shards),
        )
        with pytest.raises(ValueError, match="'films' of width 20 is planned by columns"):
            sharder.shard(module, {"users": one, "films": other}, local)
    with pytest.raises(ValueError, match="within a process"):
        sharder.shard(module, plan, {"cpu": local})
    half = QuantHashEmbeddingBagCollectionSharder(shardable_params=["users"])
    with pytest.raises(ValueError, match="only .'users'. of the tables"):
        half.shardable_parameters(module)
