"""Rows of the page for users of torchrec: tables, batches, optimizers, habits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torchrec import DataType, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import recsdk_sharding
from claims import Page, holds
from one_rank import (
    IDS,
    Batch,
    bag_config,
    bags,
    batch,
    optimized,
    sequence_config,
    sequences,
    sharded,
)
from recsdk_core import Evict, init, optim

PAGE = Page(Path(__file__).parents[2] / "docs" / "coming_from" / "torchrec.md")
CONFIG = "EmbeddingBagConfig"
HABITS = "Habits"


def stock_bags(**changes: Any) -> EmbeddingBagCollection:
    fields = {"name": "user", "embedding_dim": 4, "num_embeddings": 9, "feature_names": ["user"]}
    return EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(**{**fields, **changes})])


def trained(module: Any, given: KeyedJaggedTensor | None = None) -> Any:
    """The module after one step."""
    output = module(batch() if given is None else given)
    values = output.values() if not isinstance(output, dict) else output["user"].values()
    values.sum().backward()
    return module


# Names


@holds("torchrec", "renamed", "EmbeddingBagConfig", "EmbeddingConfig")
@holds("torchrec", "renamed", "EmbeddingBagCollection", "EmbeddingCollection")
@holds("torchrec.modules", "renamed", "EmbeddingBagCollection", "EmbeddingCollection")
@pytest.mark.parametrize(
    "name",
    ["EmbeddingBagConfig", "EmbeddingConfig", "EmbeddingBagCollection", "EmbeddingCollection"],
)
def test_ours_are_torchrecs_with_hash_before_the_name(name: str) -> None:
    assert issubclass(getattr(recsdk_sharding, f"Hash{name}"), getattr(torchrec, name))
    assert f"`Hash{name}`" in PAGE.text("torchrec", name)


def test_collections_take_torchrecs_configs() -> None:
    fields = {"name": "user", "embedding_dim": 4, "num_embeddings": 100, "feature_names": ["user"]}
    for module in (
        bags(torchrec.EmbeddingBagConfig(**fields)),
        sequences(torchrec.EmbeddingConfig(**fields)),
    ):
        assert len(trained(optimized(module)).tables()["user"]) == 2


@holds("torchrec", "same", "EmbeddingBagCollectionInterface", "KeyedJaggedTensor", "KeyedTensor")
@holds("torchrec", "same", "JaggedTensor", "DataType", "PoolingType")
@holds("torchrec.modules", "same", "EmbeddingBagCollectionInterface")
@holds("torchrec.modules", "same", "EmbeddingCollectionInterface")
def test_collections_take_and_return_torchrecs_types() -> None:
    ebc, ec = optimized(bags()), optimized(sequences())
    assert isinstance(ebc, torchrec.modules.embedding_modules.EmbeddingBagCollectionInterface)
    assert isinstance(ec, torchrec.modules.embedding_modules.EmbeddingCollectionInterface)
    assert type(ebc(batch())) is torchrec.KeyedTensor
    assert type(ec(batch())["user"]) is torchrec.JaggedTensor
    config = bag_config(data_type=DataType.FP16, pooling=PoolingType.MEAN)
    assert bags(config).embedding_bag_configs() == [config]


@holds("torchrec", "same", "Pipelineable", "Multistreamable")
def test_batches_are_torchrecs() -> None:
    assert issubclass(Batch, torchrec.Multistreamable)
    assert issubclass(Batch, torchrec.Pipelineable)


# Configs


@holds(CONFIG, "differs", "num_embeddings")
def test_num_embeddings_bounds_no_id_and_no_number_of_rows() -> None:
    config = bag_config(num_embeddings=1)
    assert config.row_initializer() == init.Uniform(low=-1.0, high=1.0)
    assert len(trained(optimized(bags(config))).tables()["user"]) == 2
    limited = bags(bag_config(num_embeddings=1000, max_rows=1))
    assert limited.tables()["user"].max_rows == 1


@holds(CONFIG, "looser", "embedding_dim")
@pytest.mark.parametrize("width", [1, 3, 129])
def test_any_width(width: int) -> None:
    module = trained(optimized(bags(bag_config(embedding_dim=width))))
    assert module(batch()).values().shape == (3, width)


@holds(CONFIG, "stricter", "name")
@pytest.mark.parametrize("name", ["", "a.b", "keys"])
def test_names_that_a_module_cannot_have(name: str) -> None:
    with pytest.raises(PAGE.error(CONFIG, "name")):
        bag_config(name)


@holds(CONFIG, "stricter", "data_type")
@pytest.mark.parametrize("kind", DataType)
def test_types_of_rows(kind: DataType) -> None:
    if kind in (DataType.FP32, DataType.BF16, DataType.FP16):
        module = trained(optimized(bags(bag_config(data_type=kind))))
        assert module(batch()).values().dtype == torch.float32
    else:
        with pytest.raises(PAGE.error(CONFIG, "data_type"), match="FP32, BF16 or FP16"):
            bag_config(data_type=kind)


@holds(CONFIG, "stricter", "feature_names")
def test_features_of_a_table() -> None:
    with pytest.raises(PAGE.error(CONFIG, "feature_names"), match="more than once"):
        bag_config(feature_names=["user", "user"])
    assert bags(bag_config(feature_names=[])).embedding_bag_configs()[0].feature_names == ["user"]
    assert stock_bags(feature_names=[])(batch([1, 2, 3])).keys() == ["user"]


@holds(CONFIG, "same", "weight_init_max", "weight_init_min")
def test_ranges_of_initial_values() -> None:
    ours = bag_config(weight_init_min=-0.25, weight_init_max=0.5)
    assert ours.row_initializer() == init.Uniform(low=-0.25, high=0.5)
    [theirs] = stock_bags(num_embeddings=100).embedding_bag_configs()
    assert bag_config().get_weight_init_max() == theirs.get_weight_init_max() == 0.1
    with pytest.raises(PAGE.error(CONFIG, "weight_init_min")):
        bag_config(weight_init_min=1.0, weight_init_max=0.0)


@holds(CONFIG, "differs", "init_fn")
def test_init_fn_makes_rows_of_ids() -> None:
    shapes = []

    def noted(rows: torch.Tensor) -> None:
        shapes.append(tuple(rows.shape))
        rows.normal_()

    def rows_of(ids: list[int]) -> torch.Tensor:
        module = bags(bag_config(init_fn=noted)).requires_grad_(False)
        return module(batch(ids, [1] * len(ids))).values()

    assert torch.equal(rows_of([7, 8]), rows_of([8, 7]).flip(0))
    assert set(shapes) == {(1, 4)}
    assert len(shapes) >= 4
    assert bag_config(init_fn=nn.init.zeros_).row_initializer() == init.Constant(value=0.0)


@holds(CONFIG, "stricter", "pooling")
def test_pooling() -> None:
    for pooling, wanted in ((PoolingType.SUM, 2.0), (PoolingType.MEAN, 1.0)):
        config = bag_config(pooling=pooling, init_fn=nn.init.ones_)
        pooled = bags(config).requires_grad_(False)(batch()).values()
        assert pooled[:, 0].tolist() == [wanted, 0.0, 1.0]
    unpooled = bag_config(pooling=PoolingType.NONE)
    assert optimized(sequences(unpooled))(batch())["user"].values().shape == (3, 4)
    with pytest.raises(PAGE.error(CONFIG, "pooling"), match="SUM or MEAN"):
        bags(unpooled)


REFUSED_FIELDS = {
    "num_embeddings_post_pruning": 5,
    "need_pos": True,
    "input_dim": 3,
    "total_num_buckets": 2,
    "use_virtual_table": True,
    "enable_embedding_update": True,
    "stash_weights": True,
}


@holds(CONFIG, "refused", *REFUSED_FIELDS)
@pytest.mark.parametrize("field", REFUSED_FIELDS)
@pytest.mark.parametrize("make", [bag_config, sequence_config])
def test_fields_that_are_refused(field: str, make: Callable[..., Any]) -> None:
    with pytest.raises(PAGE.error(CONFIG, field), match=field):
        make(**{field: REFUSED_FIELDS[field]})


@holds(CONFIG, "stricter", "virtual_table_eviction_policy")
@pytest.mark.parametrize("make", [bag_config, sequence_config])
def test_policies_of_virtual_tables(make: Callable[..., Any]) -> None:
    name = "virtual_table_eviction_policy"
    for stays in (NoEvictionPolicy(), TimestampBasedEvictionPolicy(eviction_ttl_mins=0)):
        make(**{name: stays})
    made = make(**{name: TimestampBasedEvictionPolicy(eviction_ttl_mins=2)})
    assert made.eviction == Evict.lru(by="time").expiring(ttl=120)
    made = make(**{name: CountBasedEvictionPolicy(decay_rate=1.0)})
    assert made.eviction == Evict.lru().expiring(rare_ttl=1, rare_count=15)
    made = make(**{name: FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.5)})
    assert made.eviction == Evict.low_norm(below=0.5)
    for policy in (CountBasedEvictionPolicy(), FeatureScoreBasedEvictionPolicy(), object()):
        with pytest.raises(PAGE.error(CONFIG, name), match=f"{name} is a {type(policy).__name__}"):
            make(**{name: policy})


# Collections


@holds("EmbeddingBagCollection", "stricter", "tables")
@holds("EmbeddingCollection", "stricter", "tables")
def test_tables_of_a_collection() -> None:
    for made in (
        recsdk_sharding.HashEmbeddingBagCollection,
        recsdk_sharding.HashEmbeddingCollection,
    ):
        with pytest.raises(PAGE.error("EmbeddingBagCollection", "tables"), match="at least one"):
            made(tables=[])
    with pytest.raises(PAGE.error("EmbeddingCollection", "tables"), match="embedding_dim"):
        sequences(sequence_config(), sequence_config("item", embedding_dim=8))


@holds("EmbeddingBagCollection", "same", "is_weighted")
def test_weights_get_gradients() -> None:
    weights = torch.ones(3, requires_grad=True)
    module = optimized(bags(is_weighted=True))
    module(batch(weights=weights)).values().sum().backward()
    assert weights.grad is not None
    assert weights.grad.abs().sum() > 0


@holds("EmbeddingBagCollection", "looser", "device")
@holds("EmbeddingCollection", "looser", "device")
@pytest.mark.parametrize("make", [bags, sequences])
def test_devices_by_name(make: Callable[..., Any]) -> None:
    assert make(device="meta").device == torch.device("meta")
    assert make(device="cpu").device == torch.device("cpu")
    assert make().device == torch.device("cpu")
    with pytest.raises(ValueError, match="cpu, npu, cuda"):
        make(device="mtia")


@holds("EmbeddingCollection", "same", "need_indices")
def test_outputs_carry_ids() -> None:
    output = optimized(sequences(need_indices=True))(batch())["user"]
    assert output.weights().tolist() == [*IDS]


@holds("EmbeddingCollection", "refused", "use_gather_select", "use_gather_select_per_sharding")
@pytest.mark.parametrize("name", ["use_gather_select", "use_gather_select_per_sharding"])
def test_arguments_that_a_collection_has_not(name: str) -> None:
    with pytest.raises(PAGE.error("EmbeddingCollection", name), match=name):
        sequences(**{name: True})


# Batches


@holds("Batches", "looser", "ids outside of [0, num_embeddings)")
def test_any_pattern_is_an_id() -> None:
    ids = [-(2**63), 2**63 - 1, -1, 0]
    module = trained(optimized(bags()), batch(ids, [1] * 4))
    assert len(module.tables()["user"]) == 4
    with pytest.raises(RuntimeError, match="index_size|valid range"):
        stock_bags()(batch(ids, [1] * 4))


@holds("Batches", "same", "int32 ids")
def test_int32_ids() -> None:
    ids = KeyedJaggedTensor(
        ["user"], torch.tensor([-7], dtype=torch.int32), lengths=torch.tensor([1])
    )
    assert -7 in trained(optimized(bags()), ids).tables()["user"]


@holds("Batches", "same", "ids or lengths that are a column of a matrix")
def test_columns_of_a_matrix() -> None:
    ids, lengths = torch.tensor([[-7, 1], [5, 2]]), torch.tensor([[1, 3], [1, 4]])
    columns = KeyedJaggedTensor(["user"], ids[:, 0], lengths=lengths[:, 0])
    table = trained(optimized(bags()), columns).tables()["user"]
    assert [key in table for key in (-7, 5, 1, 2)] == [True, True, False, False]


@holds("Batches", "stricter", "ids of another dtype")
def test_ids_are_integers() -> None:
    ids = KeyedJaggedTensor(["user"], torch.tensor([1.0]), lengths=torch.tensor([1]))
    with pytest.raises(PAGE.error("Batches", "ids of another dtype"), match="int64"):
        optimized(bags())(ids)


@holds("Batches", "refused", "a feature that the batch lacks")
def test_a_missing_feature() -> None:
    with pytest.raises(PAGE.error("Batches", "a feature that the batch lacks"), match="user"):
        optimized(bags())(batch(names=["other"]))


@holds("Batches", "same", "features that no table has")
@holds("Batches", "same", "weights in the batch of an unweighted collection")
def test_what_no_table_asks_for_is_left_alone() -> None:
    more = batch([5, *IDS], [1, 0, 0, 2, 0, 1], ["other", "user"], weights=torch.full((4,), 3.0))
    alone = optimized(bags())(batch()).values()
    assert torch.equal(optimized(bags())(more).values(), alone)


@holds("Batches", "refused", "no weights in the batch of a weighted collection")
def test_a_weighted_collection_needs_weights() -> None:
    name = "no weights in the batch of a weighted collection"
    with pytest.raises(PAGE.error("Batches", name), match="no weights"):
        optimized(bags(is_weighted=True))(batch())


@holds("Batches", "same", "empty bags, empty batches")
def test_empty_is_normal() -> None:
    module = optimized(bags())
    assert module(batch()).values()[1].tolist() == [0.0] * 4
    assert module(batch([], [])).values().shape == (0, 4)


@holds("Batches", "stricter", "another batch size for each feature")
def test_another_batch_size_for_each_feature() -> None:
    configs = [bag_config(name) for name in "ab"]
    sizes = {"lengths": [1, 1, 1], "names": "ab", "stride_per_key_per_rank": [[1], [2]]}
    with pytest.raises(PAGE.error("Batches", "another batch size for each feature")):
        optimized(bags(*configs))(batch(**sizes))
    stock = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=9, feature_names=[name]
        )
        for name in "ab"
    ]
    with pytest.raises(RuntimeError, match="Sizes of tensors"):
        EmbeddingBagCollection(tables=stock)(batch([1, 2, 3], **sizes))
    inverse = (["a", "b"], torch.tensor([[0, 0], [0, 1]]))
    output = optimized(bags(*configs))(batch(**sizes, inverse_indices=inverse))
    assert output.values().shape == (2, 8)


@holds("Batches", "differs", "an id that was never trained, in evaluation")
def test_unseen_ids_read_zeros_in_evaluation() -> None:
    module = optimized(bags()).eval()
    assert module(batch()).values().abs().sum() == 0
    assert len(module.tables()["user"]) == 0
    assert stock_bags().eval()(batch([1, 2, 3])).values().abs().sum() > 0


# Optimizers

TORCHS = ("SGD", "Adagrad", "Adam", "AdamW", "RMSprop")
NOT_OF_TORCH = (
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "Muon"),
    *("NAdam", "RAdam", "Rprop", "SparseAdam"),
)


@holds("torch.optim", "same", *TORCHS)
@pytest.mark.parametrize("name", TORCHS)
def test_optimizers_of_torch(name: str) -> None:
    module = optimized(bags(bag_config(init_fn=nn.init.ones_)), getattr(torch.optim, name))
    before = module(batch([1], [1])).values().detach()
    trained(module, batch([1], [1]))
    weight = nn.Parameter(torch.ones(1, 4))
    weight.grad = torch.ones(1, 4)
    getattr(torch.optim, name)([weight], lr=0.1).step()
    after = module.eval()(batch([1], [1])).values()
    assert torch.equal(before, torch.ones(1, 4))
    assert torch.allclose(after, weight, rtol=1e-6)


@holds("torch.optim", "refused", *NOT_OF_TORCH)
@pytest.mark.parametrize("name", NOT_OF_TORCH)
def test_optimizers_of_torch_that_are_refused(name: str) -> None:
    module = bags()
    module.embedding_bags["user"].weight._optimizer_classes = [getattr(torch.optim, name)]
    module.embedding_bags["user"].weight._optimizer_kwargs = [{"lr": 0.1}]
    with pytest.raises(PAGE.error("torch.optim", name), match=name):
        module(batch())


TORCHRECS = ("SGD", "Adagrad", "Adam", "PartialRowWiseAdam", "LAMB", "RowWiseAdagrad")
OF_ENGINE = {"PartialRowWiseAdam": "PartialRowwiseAdam", "RowWiseAdagrad": "RowwiseAdagrad"}


@holds("torchrec.optim", "same", *TORCHRECS)
@pytest.mark.parametrize("name", TORCHRECS)
def test_optimizers_of_torchrec(world: None, name: str) -> None:
    kind = getattr(torchrec.optim, name)
    model = sharded(optimized(bags(device="meta"), kind))
    loss, _ = model(Batch(batch()))
    loss.backward()
    [table] = model.module.ebc.tables().values()
    assert type(table.optimizer) is getattr(optim, OF_ENGINE.get(name, name))
    if name != "RowWiseAdagrad":
        for module in (optimized(bags(), kind), optimized(stock_bags(), kind)):
            with pytest.raises(NotImplementedError):
                trained(module, batch([1, 2, 3]))


@holds("torchrec.optim", "refused", "LarsSGD", "PartialRowWiseLAMB")
@pytest.mark.parametrize("name", ["LarsSGD", "PartialRowWiseLAMB"])
def test_optimizers_of_torchrec_that_are_refused(name: str) -> None:
    with pytest.raises(PAGE.error("torchrec.optim", name), match=name):
        optimized(bags(), getattr(torchrec.optim, name))(batch())


@holds("torchrec.optim", "same", "FusedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper")
@holds("torchrec.optim", "same", "CombinedOptimizer", "OptimizerWrapper", "WarmupOptimizer")
@holds(HABITS, "same", "learning rate schedulers")
def test_learning_rates_reach_the_tables(world: None) -> None:
    model = sharded()
    fused = model.fused_optimizer
    assert isinstance(fused, KeyedOptimizer)
    assert len(fused.param_groups) == 1
    combined = CombinedOptimizer([OptimizerWrapper(fused)])
    warm_up = WarmupStage(WarmupPolicy.CONSTANT, max_iters=10, value=0.5)
    WarmupOptimizer(combined, [warm_up]).step()
    [table] = model.module.ebc.tables().values()
    assert table.learning_rate == pytest.approx(0.05)
    torch.optim.lr_scheduler.LambdaLR(fused, lambda _: 0.25)
    fused.zero_grad()
    assert table.learning_rate == pytest.approx(0.1 * 0.25) or table.learning_rate < 0.05


@holds("torchrec.optim", "no effect", "GradientClippingOptimizer")
@holds(HABITS, "no effect", "clip_grad_norm_")
def test_clipping_by_parameter_does_not_reach_tables(world: None) -> None:
    model = sharded(optimized(bags(bag_config(init_fn=nn.init.zeros_), device="meta")))
    loss = model.module.ebc(batch([1], [1])).values().sum() * 100
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    GradientClippingOptimizer(model.fused_optimizer, GradientClipping.NORM, 0.01).step()
    [table] = model.module.ebc.tables().values()
    assert table.lookup(torch.tensor([1])).tolist() == [[-10.0] * 4]
