"""Rows of the page for users of Rec SDK Torch: classes, fields, arguments, habits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec import DataType, JaggedTensor, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv

import recsdk_pipeline
import recsdk_sharding
from claims import Page, holds
from one_rank import (
    CPU,
    META,
    Batch,
    Model,
    bag_config,
    bags,
    batch,
    host_env,
    optimized,
    plan_of,
    sequence_config,
    sequences,
    sharded,
    sharders,
)
from public_names import public_classes, public_names
from recsdk_core import Admit, CheckpointError, Default, Evict, init
from recsdk_core.outcome import Outcome
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import (
    AccumulateAdagrad,
    AccumulateAdam,
    AccumulateSGD,
    HashParameterConstraints,
    Saver,
    get_default_hybrid_sharders,
)
from recsdk_sharding.placement.ranks import RankMap

PAGE = Page(Path(__file__).parents[2] / "docs" / "coming_from" / "rec_sdk.md")
CLASSES, CONFIG = "Classes and functions", "HashEmbeddingBagConfig"
HABITS, TORCHREC = "Habits", "torchrec's classes, as it limits them"
pytestmark = pytest.mark.usefixtures("world")


def trained(module: Any, given: KeyedJaggedTensor | None = None) -> Any:
    """The module after one step."""
    output = module(batch() if given is None else given)
    values = output["user"].values() if isinstance(output, dict) else output.values()
    values.sum().backward()
    return module


def pipeline_of(model: Any = None, **options: Any) -> HybridTrainPipelineSparseDist[Any, Any]:
    made = model or sharded()
    return HybridTrainPipelineSparseDist(made, made.fused_optimizer, CPU, **options)


# Classes


@holds(CLASSES, "same", "HashEmbeddingBagConfig", "HashEmbeddingBagCollection")
@holds(CLASSES, "same", "get_default_hybrid_sharders", "HybridTrainPipelineSparseDist")
@holds(CLASSES, "renamed", "AccumulateAdagrad", "AccumulateAdam", "AccumulateSGD")
@holds(CLASSES, "looser", "Saver")
@pytest.mark.parametrize(
    "name",
    [
        *("HashEmbeddingBagConfig", "HashEmbeddingBagCollection", "get_default_hybrid_sharders"),
        *("AccumulateAdagrad", "AccumulateAdam", "AccumulateSGD", "Saver"),
        "HybridTrainPipelineSparseDist",
    ],
)
def test_where_names_are(name: str) -> None:
    package = "recsdk_pipeline" if name.startswith("Hybrid") else "recsdk_sharding"
    assert hasattr({"recsdk_pipeline": recsdk_pipeline}.get(package, recsdk_sharding), name)
    assert f"`{package}`" in PAGE.text(CLASSES, name)


# Fields of configs


@holds(CONFIG, "looser", "num_embeddings", "embedding_dim", "name", "data_type", "feature_names")
@holds(CONFIG, "looser", "weight_init_max", "weight_init_min")
def test_values_that_were_not_taken() -> None:
    config = bag_config(
        "user-table: 1",
        num_embeddings=2 * 10**9,
        embedding_dim=5,
        data_type=DataType.BF16,
        feature_names=["user id"],
        weight_init_min=-0.5,
        weight_init_max=0.25,
    )
    assert config.row_initializer() == init.Uniform(low=-0.5, high=0.25)
    module = optimized(bags(config, bag_config("item", feature_names=[])))
    pooled = module(batch([1, 2], [1, 1], ["user id", "item"]))
    assert pooled.keys() == ["user id", "item"]
    assert pooled.values().shape == (1, 9)
    one = optimized(bags(bag_config(num_embeddings=1)))
    assert len(trained(one).tables()["user"]) == 2
    with pytest.raises(PAGE.error(CONFIG, "name")):
        bag_config("a.b")
    with pytest.raises(PAGE.error(CONFIG, "data_type")):
        bag_config(data_type=DataType.INT8)


@holds(CONFIG, "same", "num_embeddings_post_pruning", "need_pos")
@pytest.mark.parametrize(
    ("field", "value"), [("num_embeddings_post_pruning", 5), ("need_pos", True)]
)
def test_fields_that_have_one_value(field: str, value: Any) -> None:
    with pytest.raises(PAGE.error(CONFIG, field), match=field):
        bag_config(**{field: value})


@holds(CONFIG, "differs", "init_fn")
def test_an_init_fn_that_seeds_torch() -> None:
    def weight_init(parameter: torch.Tensor) -> None:
        torch.manual_seed(parameter.shape[1])
        ramp = torch.linspace(0, 1, steps=parameter.shape[1])
        parameter.data.copy_(ramp.repeat(parameter.shape[0], 1))

    module = bags(bag_config(init_fn=weight_init)).requires_grad_(False)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="seeds torch"):
        pooled = module(batch([1, 2], [1, 1])).values()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(pooled, torch.linspace(0, 1, steps=4).repeat(2, 1))


@holds(CONFIG, "stricter", "pooling")
def test_pooling() -> None:
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        trained(optimized(bags(bag_config(pooling=pooling))))
    none = bag_config(pooling=PoolingType.NONE)
    with pytest.raises(PAGE.error(CONFIG, "pooling"), match="HashEmbeddingCollection"):
        bags(none)
    assert len(trained(optimized(sequences(none))).tables()["user"]) == 2


NOT_FIELDS = (*("weight_init_mean", "weight_init_stddev", "initializer_type", "is_incremental"),)


@holds("EmbCacheEmbeddingBagConfig", "refused", *NOT_FIELDS)
@pytest.mark.parametrize("field", NOT_FIELDS)
@pytest.mark.parametrize("make", [bag_config, sequence_config])
def test_fields_of_the_cache(field: str, make: Callable[..., Any]) -> None:
    with pytest.raises(PAGE.error("EmbCacheEmbeddingBagConfig", field), match=field):
        make(**{field: None})
    with_initializer = make(initializer=init.TruncatedNormal(mean=0.0, stddev=0.05))
    assert with_initializer.row_initializer() == init.TruncatedNormal(mean=0.0, stddev=0.05)


ADMISSION = ("AdmitAndEvictConfig", "AdmitAndEvictPolicyType", "ShowClickParams")
CACHED, SETTINGS = "EmbCacheEmbeddingBagConfig", "AdmitAndEvictConfig"


def timed(ids: list[int], times: list[int]) -> KeyedJaggedTensor:
    """A batch of one feature with timestamps."""
    return recsdk_sharding.KeyedJaggedTensorWithTimestamp(
        ["user"],
        torch.tensor(ids),
        torch.tensor(times),
        lengths=torch.ones(len(ids), dtype=torch.int64),
    )


@holds(CLASSES, "same", *ADMISSION)
@holds(CACHED, "looser", "admit_and_evict_config")
@pytest.mark.parametrize("make", [bag_config, sequence_config])
def test_settings_of_admission(make: Callable[..., Any]) -> None:
    config, policy = recsdk_sharding.AdmitAndEvictConfig, recsdk_sharding.AdmitAndEvictPolicyType
    with pytest.warns(
        UserWarning, match="admit_threshold, evict_threshold has no effect with NONE"
    ):
        off = config(admit_threshold=5, evict_threshold=9, policy_type=policy.NONE)
    assert make(admit_and_evict_config=off).admission is None
    asked = config(2, 0.5, evict_threshold=60, evict_step_interval=2)
    made = make(admit_and_evict_config=asked)
    assert made.admission == Admit.count(2)
    assert made.eviction == Evict.lru(by="time").expiring(ttl=60, every=2)
    assert made.default == Default.constant(0.5)
    with pytest.raises(PAGE.error(CACHED, "admit_and_evict_config"), match="asks for admission="):
        make(admit_and_evict_config=asked, admission=Admit.count(3))


@holds(SETTINGS, "same", "admit_threshold")
@holds(SETTINGS, "differs", "not_admitted_default_value")
def test_admission_by_count() -> None:
    asked = recsdk_sharding.AdmitAndEvictConfig(3, 0.5)
    module = optimized(bags(bag_config(admit_and_evict_config=asked)))
    trained(module, batch([7, 7], [1, 1]))
    assert len(module.tables()["user"]) == 0
    assert trained(module, batch([7], [1])).tables()["user"].explain(7).row is not None
    read = module(batch([8], [1])).values()
    assert read.tolist() == [[0.5] * 4]
    assert module.eval()(batch([9], [1])).values().tolist() == [[0.5] * 4]


@holds(SETTINGS, "differs", "evict_threshold")
@pytest.mark.parametrize("compat", [None, "upstream"])
def test_expiry_by_timestamps(compat: Any) -> None:
    config = recsdk_sharding.AdmitAndEvictConfig
    asked = config(2, evict_threshold=60, evict_step_interval=2, compat=compat)
    module = optimized(bags(bag_config(admit_and_evict_config=asked)), torch.optim.Adagrad)
    trained(module, timed([1, 1, 2, 2, 3, 3], [100, 40, 30, 30, 41, 41]))  # the largest counts
    trained(module, timed([3, 4, 4, 5], [40, 101, 1, 0]))  # step 2 looks; 3 stays, as it comes
    [table] = module.tables().values()
    held = [key in table for key in (1, 2, 3, 4, 5)]
    assert held == [True, False, True, True, False]
    trained(module, timed([9], [101]))
    trained(module, timed([9], [101]))  # 41 + 60 is not more than 60 ago
    assert (3 in table) == (compat == "upstream")
    trained(module, timed([2], [101]))
    assert 2 not in table  # its count began anew
    trained(module, timed([2, 5], [101, 102]))
    assert 2 in table
    assert 5 in table  # without a row its count stays
    found = torch.from_numpy(np.asarray(table.lookup(np.array([2]))))
    weight = nn.Parameter(rows_before(bags, key=2))
    weight.grad = torch.ones(1, 4)
    torch.optim.Adagrad([weight], lr=0.1).step()
    assert torch.allclose(found, weight, rtol=1e-5)  # its row and state too


@holds(SETTINGS, "stricter", "evict_step_interval")
def test_an_interval_of_nothing() -> None:
    with pytest.raises(PAGE.error(SETTINGS, "evict_step_interval"), match="evict_step_interval"):
        recsdk_sharding.AdmitAndEvictConfig(evict_threshold=60)
    configs = [
        bag_config(
            name,
            admit_and_evict_config=recsdk_sharding.AdmitAndEvictConfig(
                evict_threshold=60, evict_step_interval=interval
            ),
        )
        for name, interval in (("user", 1), ("item", 2))
    ]
    assert len(bags(*configs).tables()) == 2


PARAMS = "ShowClickParams"


class Clicked(Batch):
    """A batch with clicks of its samples."""

    def __init__(self, ids: KeyedJaggedTensor, click_labels: torch.Tensor) -> None:
        super().__init__(ids)
        self.click_labels = click_labels

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicked:
        return Clicked(self.ids.to(device, non_blocking), self.click_labels.to(device))


@holds(SETTINGS, "same", "policy_type")
@holds(SETTINGS, "stricter", "showclick_params")
@holds(PARAMS, "differs", "alpha", "beta", "admit_threshold")
@holds("HybridTrainPipelineSparseDist", "same", "batch.click_labels")
def test_admission_by_shows_and_clicks() -> None:
    config, policy = recsdk_sharding.AdmitAndEvictConfig, recsdk_sharding.AdmitAndEvictPolicyType
    params = recsdk_sharding.ShowClickParams(alpha=1.0, beta=3.0, admit_threshold=5.0)
    asked = config(showclick_params=params, policy_type=policy.POLICY_SHOWCLICK)
    configured = bag_config(admit_and_evict_config=asked)
    assert configured.admission == Admit.show_click(threshold=5.0, beta=3.0)
    model = sharded(optimized(bags(configured, device=META)))
    given = [(7, 8, 8, 9), (7, 8, 8, 9)]
    batches = [Clicked(batch(ids, [1] * 4), torch.tensor([1.0, 0, 0, 0])) for ids in given]
    pipeline, iterator = pipeline_of(model), iter(batches)
    pipeline.progress(iterator)
    pipeline.progress(iterator)
    [table] = model.module.ebc.tables().values()
    assert [key in table for key in (7, 8, 9)] == [True, False, False]  # 8, 4 and 2
    as_code = dataclasses.replace(asked, compat="upstream")
    made = bag_config(admit_and_evict_config=as_code)
    assert made.admission == Admit.show_click_of_step(threshold=5.0, beta=3.0)
    module = optimized(bags(made))
    for ids, labels in [([7, 8, 8], [1, 0, 0]), ([7, 8, 8, 9, 9], [0, 0, 0, 1, 0])]:
        clicks = torch.tensor(labels)
        trained(module, recsdk_sharding.with_clicks(batch(ids, [1] * len(ids)), clicks))
    [table] = module.tables().values()
    assert [key in table for key in (7, 8, 9)] == [False, False, True]  # 5 in all, 4 in all, 5
    assert table.stats().admission_records == 0
    nothing = config(policy_type=policy.POLICY_SHOWCLICK)
    assert bag_config(admit_and_evict_config=nothing).admission is None


@holds(PARAMS, "stricter", "evict_percentage")
@holds(PARAMS, "differs", "score_decay")
def test_a_part_of_the_ids_leaves() -> None:
    policy = recsdk_sharding.AdmitAndEvictPolicyType.POLICY_SHOWCLICK

    def asked(decay: float) -> Any:
        params = recsdk_sharding.ShowClickParams(evict_percentage=0.25, score_decay=decay)
        return recsdk_sharding.AdmitAndEvictConfig(
            evict_step_interval=2, showclick_params=params, policy_type=policy
        )

    with pytest.raises(PAGE.error(PARAMS, "evict_percentage"), match="set max_rows too"):
        bag_config(admit_and_evict_config=asked(0.5))
    as_code = dataclasses.replace(asked(0.5), compat="upstream")
    with pytest.raises(PAGE.error(PARAMS, "evict_percentage"), match="set max_rows too"):
        bag_config(admit_and_evict_config=as_code)
    with pytest.raises(
        PAGE.error(PARAMS, "score_decay"), match="ShowClickParams: score_decay must be above 0"
    ):
        bag_config(admit_and_evict_config=asked(0.0), max_rows=99)
    config = bag_config(admit_and_evict_config=asked(0.5), max_rows=99, eviction_groups=1)
    module = optimized(bags(config))
    trained(module, batch([1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 8], [11]))
    trained(module, batch([1, 2], [2]))  # of 8 ids 2 leave, of those worth least
    assert len(module.tables()["user"]) == 6
    assert {key for key in range(1, 9) if key not in module.tables()["user"]} < {3, 5, 6}
    one_group = {"max_rows": 99, "eviction_groups": 1}
    module = optimized(bags(bag_config(admit_and_evict_config=as_code, **one_group)))
    trained(module, batch([1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 8, 9], [12]))
    trained(module, batch([1, 2], [2]))  # floor(9 / 4) leave, the smaller ids, but 1 and 2 came
    [table] = module.tables().values()
    assert len(table) == 9
    trained(module, batch([1, 2], [2]))
    trained(module, batch([5], [1]))
    assert {key for key in range(1, 10) if key not in table} == {3}  # of 3 and 5
    assert table.explain(2).columns["score"] == 2.25  # 1, (1 + 2) / 2, (1.5 + 3) / 2
    assert table.explain(4).columns["score"] == 2.0  # stays, as no batch has it


OPTIONS = "DynamicEmbTableOptions"
NOT_OPTIONS = (
    *("training", "initializer_args", "eval_initializer_args", "init_capacity"),
    *("max_load_factor", "bucket_capacity", "global_hbm_for_values", "score_strategy", "caching"),
    *("external_storage", "safe_check_mode", "index_type"),
)


@holds(OPTIONS, "not here", *NOT_OPTIONS)
@pytest.mark.parametrize("field", NOT_OPTIONS)
def test_options_of_dynamic_tables(field: str) -> None:
    for kind in (recsdk_sharding.HashEmbeddingBagConfig, HashParameterConstraints):
        assert field not in {each.name for each in dataclasses.fields(kind)}


# Collections and pipelines


@holds("HashEmbeddingBagCollection", "same", "tables")
@holds("HashEmbeddingBagCollection", "looser", "is_weighted", "device")
def test_arguments_of_a_collection() -> None:
    theirs = torchrec.EmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=9, feature_names=["user"]
    )
    weighted = optimized(bags(theirs, is_weighted=True, device="cpu"))
    trained(weighted, batch(weights=torch.ones(3)))
    with pytest.raises(TypeError, match="is_weighted must be True or False, got 2"):
        bags(is_weighted=2)
    with pytest.raises(TypeError, match="need_indices must be True or False, got 2"):
        sequences(need_indices=2)
    assert len(trained(sharded().module.ebc).tables()["user"]) == 2


NOT_OF_COLLECTIONS = (
    *("world_size", "batch_size", "multi_hot_sizes", "need_accumulate_offset"),
    "embedding_optimizer_cls",
)


@holds("EmbCacheEmbeddingBagCollection", "refused", *NOT_OF_COLLECTIONS)
@pytest.mark.parametrize("name", NOT_OF_COLLECTIONS)
@pytest.mark.parametrize("make", [bags, sequences])
def test_arguments_of_cached_collections(name: str, make: Callable[..., Any]) -> None:
    with pytest.raises(PAGE.error("EmbCacheEmbeddingBagCollection", name), match=name):
        make(**{name: 1})


PIPELINE = "HybridTrainPipelineSparseDist"


@holds(PIPELINE, "same", "model", "optimizer", "return_loss", "pipe_n_batch", "progress")
@holds(PIPELINE, "same", "execute_all_batches", "apply_jit")
@holds(PIPELINE, "looser", "device")
def test_arguments_of_the_pipeline() -> None:
    given = inspect.signature(HybridTrainPipelineSparseDist.__init__).parameters
    assert given["pipe_n_batch"].default == 6
    assert not given["return_loss"].default
    batches = [Batch(batch()) for _ in range(2)]
    assert pipeline_of().progress(iter(batches)).shape == (3, 1)
    output, loss = pipeline_of(return_loss=True, pipe_n_batch=12).progress(iter(batches))
    assert (output.shape, loss.shape) == ((3, 1), ())
    for name, value in (("pipe_n_batch", 13), ("execute_all_batches", False), ("apply_jit", True)):
        with pytest.raises(PAGE.error(PIPELINE, name), match=name):
            pipeline_of(**{name: value})


NOT_OF_PIPELINES = (
    *("cpu_device", "npu_device", "evict_step_interval", "context_type", "pipeline_postproc"),
    *("custom_model_fwd", "custom_model_zero_grad", "custom_model_bwd"),
)


@holds("EmbCacheTrainPipelineSparseDist", "refused", *NOT_OF_PIPELINES)
@pytest.mark.parametrize("name", NOT_OF_PIPELINES)
def test_arguments_of_the_cache_pipeline(name: str) -> None:
    with pytest.raises(PAGE.error("EmbCacheTrainPipelineSparseDist", name), match=name):
        pipeline_of(**{name: None})


# Saver


@holds("Saver", "same", "rank")
@holds("Saver", "looser", "module", "path", "incremental")
def test_saving(tmp_path: Path) -> None:
    with pytest.raises(PAGE.error("Saver", "rank"), match="this process, 0, got 3"):
        Saver(rank=3)
    saver, module = Saver(rank=0), trained(optimized(bags()))
    path = tmp_path / "private_key"  # no word is forbidden
    saver.save(module, path)
    with pytest.raises(CheckpointError):
        saver.save(module, path)
    saver.save(trained(module, batch([11], [1])), tmp_path / "changes", incremental=True)
    other = sharded()
    saver.load(other, path)
    saver.load(other, tmp_path / "changes", incremental=True)
    assert len(other.module.ebc.tables()["user"]) == 3


@holds("Saver", "not here", "files written by its `Saver`")
@holds("What is not here", "not here", "safe_makedirs")
def test_no_reader_of_its_files() -> None:
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    names = {name.lower() for package in packages for name in public_names(package)}
    assert [name for name in names if "embcache" in name or "makedirs" in name] == []


# Optimizers

ACCUMULATING = {
    torch.optim.SGD: AccumulateSGD,
    torch.optim.Adagrad: AccumulateAdagrad,
    torch.optim.Adam: AccumulateAdam,
}


@holds("Optimizers", "same", "torch.optim.Adagrad", "torch.optim.Adam", "torch.optim.SGD")
@holds("Optimizers", "looser", "use_accumulate", "accumulate_step")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("make", [bags, sequences])
def test_two_backwards_make_one_update(kind: type, make: Callable[..., Any]) -> None:
    given = batch([1], [1])
    plain = optimized(make(), kind)
    accumulating = optimized(make(), ACCUMULATING[kind], use_accumulate=True, accumulate_step=2)
    for module in (trained(plain, given), trained(trained(accumulating, given), given)):
        [table] = module.tables().values()
        assert table.update_count == 1
        weight = nn.Parameter(rows_before(make))
        weight.grad = torch.full((1, 4), 1.0 if module is plain else 2.0)
        kind([weight], lr=0.1).step()
        found = torch.from_numpy(np.asarray(table.lookup(np.array([1]))))
        assert torch.allclose(found, weight, rtol=1e-5)


def rows_before(make: Callable[..., Any], key: int = 1) -> torch.Tensor:
    [table] = make().tables().values()
    return torch.from_numpy(np.asarray(table.find_or_insert(np.array([key]))))


@holds("Optimizers", "refused", "two optimizers on one table")
def test_a_table_has_one_optimizer() -> None:
    with pytest.raises(PAGE.error("Optimizers", "two optimizers on one table")):
        optimized(optimized(bags()), torch.optim.Adagrad)(batch())


# torchrec's classes


@holds(TORCHREC, "stricter", "ShardingEnv")
def test_the_host_group_is_its_own() -> None:
    world = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    with pytest.raises(PAGE.error(TORCHREC, "ShardingEnv"), match="a group of its own"):
        get_default_hybrid_sharders(host_env=world)


@holds(TORCHREC, "looser", "more than 8 ranks, more than one machine")
def test_any_number_of_ranks() -> None:
    keys = np.arange(1_000_000, dtype=np.int64)
    assert len(set(RankMap(65_536).owners(keys).tolist())) > 65_000
    topology = Topology(world_size=64, compute_device="cuda", local_world_size=8)
    assert len(topology.devices) == 64


@holds(TORCHREC, "looser", "ParameterConstraints.sharding_types")
@holds(TORCHREC, "looser", "data_parallel")
@holds(HABITS, "looser", "tables of one width in a collection")
def test_mixed_sharding_types() -> None:
    kinds = ["row_wise", "data_parallel", "data_parallel", "column_wise", "table_wise"]
    names = ["user", *"bcde"]
    configs = [bag_config(name, embedding_dim=4 + 4 * n) for n, name in enumerate(names)]
    constraints = {
        name: ParameterConstraints(sharding_types=[kind])
        for name, kind in zip(names, kinds, strict=True)
    }
    model = nn.ModuleDict({"ebc": optimized(bags(*configs, device=META))})
    plan = plan_of(model, constraints=constraints)
    made = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders())
    pooled = made.module["ebc"](batch(range(5), [1] * 5, names)).values()
    assert pooled.shape == (1, 4 + 8 + 12 + 16 + 20)


@holds(TORCHREC, "same", "arguments of `DistributedModelParallel` on npu")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_data_parallel", False),
        ("init_parameters", False),
        ("env", "world"),
        ("data_parallel_wrapper", DefaultDataParallelWrapper()),
        ("sharders", None),
    ],
)
def test_arguments_on_npu(name: str, value: Any) -> None:
    made = ShardingEnv.from_process_group(dist.GroupMember.WORLD) if value == "world" else value
    row = "arguments of `DistributedModelParallel` on npu"
    with pytest.raises(PAGE.error(TORCHREC, row), match=name):
        DistributedModelParallel(
            Model(bags(device=META)), device="npu", **{"sharders": sharders(), name: made}
        )


@holds(TORCHREC, "looser", "JaggedTensor", "KeyedJaggedTensor.from_jt_dict")
def test_batches_from_jagged_tensors() -> None:
    lengths, weights = torch.tensor([0, 3]), torch.ones(3)
    ids = JaggedTensor(torch.tensor([-1, 2, 3]), lengths=lengths, weights=weights)
    given = KeyedJaggedTensor.from_jt_dict({"user": ids})
    module = trained(optimized(bags(is_weighted=True)), given)
    assert len(module.tables()["user"]) == 3


TIMED = ("JaggedTensorWithTimestamp", "KeyedJaggedTensorWithTimestamp")


@holds(CLASSES, "same", *TIMED, "JaggedTensorWithCount", "KeyedJaggedTensorWithCount")
@pytest.mark.parametrize("make", [bag_config, sequence_config])
def test_batches_with_timestamps_and_counts(make: Callable[..., Any]) -> None:
    lengths, ids = torch.tensor([1, 2]), torch.tensor([7, 7, 8])
    config = make(eviction=Evict.lru(by="time").expiring(ttl=10, every=1), admission=Admit.count(2))
    module = optimized((bags if make is bag_config else sequences)(config))
    for times in ([5, 9, 6], [12, 13, 20]):
        jagged = recsdk_sharding.JaggedTensorWithTimestamp(
            ids, lengths=lengths, timestamps=torch.tensor(times)
        )
        given = recsdk_sharding.KeyedJaggedTensorWithTimestamp.from_jt_dict({"user": jagged})
        trained(module, given)
    [table] = module.tables().values()
    assert table.explain(7).columns["time"] == 13
    assert table.explain(8).columns["time"] == 20
    counted = recsdk_sharding.JaggedTensorWithCount(
        torch.tensor([9]), lengths=torch.tensor([1]), counts=torch.tensor([2])
    )
    module(recsdk_sharding.KeyedJaggedTensorWithCount.from_jt_dict({"user": counted}))
    assert 9 in table
    with pytest.raises(PAGE.error(CLASSES, "JaggedTensorWithTimestamp"), match="timestamps"):
        recsdk_sharding.JaggedTensorWithTimestamp(ids, lengths=lengths, timestamps=ids.float())


# Habits


@holds(HABITS, "looser", "ids of at least 0")
def test_negative_ids() -> None:
    module = trained(optimized(bags()), batch([-1, -(2**63)], [1, 1]))
    assert len(module.tables()["user"]) == 2


@holds(HABITS, "differs", "a device table that is full raises")
def test_a_full_table_refuses() -> None:
    module = optimized(bags(bag_config(max_rows=1)))
    pooled = module(batch([7, 8], [1, 1])).values()
    pooled.sum().backward()
    assert pooled[0].tolist() == [0.0] * 4
    assert module.tables()["user"].stats().outcomes[Outcome.REFUSED] == 1
    raising = optimized(bags(bag_config(max_rows=1, on_full="raise")))
    with pytest.raises(PAGE.error(HABITS, "a device table that is full raises")):
        raising(batch([7, 8], [1, 1]))


@holds(HABITS, "differs", "evaluation makes rows of unseen ids")
def test_evaluation_writes_nothing() -> None:
    module = optimized(bags()).eval()
    assert module(batch()).values().abs().sum() == 0
    assert len(module.tables()["user"]) == 0


@holds(HABITS, "differs", "the owner of an id is `id % world_size`")
def test_owners() -> None:
    keys = np.arange(64, dtype=np.int64)
    modulo = RankMap(4, "modulo").owners(keys)
    assert modulo.tolist() == (keys % 4).tolist()
    assert RankMap(4).owners(keys).tolist() != modulo.tolist()
    assert sharded(sharders=get_default_hybrid_sharders(host_env(), rank_rule="modulo")) is not None


@holds(HABITS, "stricter", "a table that is replicated by `DistributedDataParallel`")
def test_an_unsharded_collection_is_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.parallel.DistributedDataParallel(Model(optimized(bags())))
    monkeypatch.setattr("recsdk_sharding._modules.unsharded.active_data_parallel_size", lambda: 2)
    row = "a table that is replicated by `DistributedDataParallel`"
    with pytest.raises(PAGE.error(HABITS, row), match="2 ranks"):
        model(Batch(batch()))


@holds(HABITS, "differs", "a new row depends on the order of ids")
def test_new_rows_depend_on_nothing_else() -> None:
    first = optimized(bags())(batch([1, 2], [1, 1])).values()
    second = sharded().module.ebc(batch([9, 2, 1], [1, 1, 1])).values()
    assert torch.equal(first.flip(0), second[1:])


@holds(HABITS, "same", "training without a pipeline")
@holds(HABITS, "same", "evaluation with another iterator between two steps")
def test_evaluation_between_steps() -> None:
    torch.manual_seed(0)
    model = sharded()
    pipeline = pipeline_of(model)
    training = iter([Batch(batch((i, 5, 7))) for i in range(3)])
    pipeline.progress(training)
    model.eval()
    pipeline.progress(iter([Batch(batch((50, 51, 52)))]))
    model.train()
    pipeline.progress(training)
    pipeline.progress(training)
    torch.manual_seed(0)
    plain = sharded()
    for i in range(3):
        plain(Batch(batch((i, 5, 7))))[0].backward()
    ids = torch.arange(60)
    wanted, found = (m.module.ebc.tables()["user"].lookup(ids) for m in (plain, model))
    assert torch.equal(found, wanted)


@holds(HABITS, "same", "weights and pooling by torchrec's `PoolingType.MEAN`")
def test_means_divide_by_the_number_of_ids() -> None:
    config = bag_config(pooling=PoolingType.MEAN, init_fn=nn.init.ones_, max_rows=1)
    pooled = bags(config).requires_grad_(False)(batch([7, 8], [2])).values()
    assert pooled.tolist() == [[0.5] * 4]


# What is not here

OPERATORS = (
    *("hstu_dense_forward", "hstu_dense_backward", "hstu_dense_forward_fuxi"),
    *("hstu_dense_backward_fuxi", "relative_attn_bias_pos", "relative_attn_bias_time"),
    *("relative_attn_bias_backward", "disentangle_attention", "in_linear_silu"),
    *("norm_multiply_dropout", "concat_2d_jagged", "reverse_sequence", "gather_for_rank1"),
    "index_select_for_rank1_backward",
)
FOR_FBGEMM = (
    *("asynchronous_complete_cumsum", "dense_to_jagged", "jagged_to_padded_dense"),
    *("permute_1D_sparse_data", "permute2d_sparse_data"),
    "split_embedding_codegen_lookup_adagrad_function",
)
ABSENT = "What is not here"


@holds(ABSENT, "not here", *OPERATORS, *FOR_FBGEMM)
@pytest.mark.parametrize("name", [*OPERATORS, *FOR_FBGEMM])
def test_operators(name: str) -> None:
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    assert not any(name in public_names(package) for package in packages)
    for namespace in ("mxrec", "recsdk", "recsdk_core", "recsdk_sharding"):
        assert not hasattr(getattr(torch.ops, namespace), name)


WORDS_OF_WHAT_IS_ABSENT = ("expiry", "expire", "admission", "tier", "cache")


@holds(ABSENT, "not here", "rows in several tiers, with device memory as a cache")
def test_no_public_name_speaks_of_what_is_not_here() -> None:
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    names = {(p, name.lower()) for p in packages for name in public_classes(p)}
    said = {(p, n, w) for p, n in names for w in WORDS_OF_WHAT_IS_ABSENT if w in n}
    assert {each for each in said if each[::2] != ("recsdk_core", "admission")} == set()
