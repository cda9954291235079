"""The page for users of dynamicemb: each row of its tables is held by a test."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torchrec import DataType, PoolingType
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import recsdk_sharding
from claims import Page, assert_all_are_held, holds
from one_rank import (
    bag_config,
    bags,
    batch,
    optimized,
    plan_of,
    sequences,
    sharded,
    sharders,
    world_of_one,
)
from public_names import public_names
from recsdk_core import (
    Admit,
    CapacityError,
    Default,
    Evict,
    LeaveCause,
    Outcome,
    Table,
    init,
    nn,
    optim,
)
from recsdk_core.cli import main as recsdk
from recsdk_sharding import KeyedJaggedTensorWithData, RowOptimizer, Saver

HERE = Path(__file__)
PAGE = Page(HERE.parents[2] / "docs" / "coming_from" / "dynamicemb.md")
NAMES, OPTIONS = "What becomes of each name", "DynamicEmbTableOptions"
WORDS = {"renamed", "differs", "looser", "not here"}


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def test_every_row_is_held_by_a_test() -> None:
    assert_all_are_held(PAGE, [HERE])


def test_rows_say_it_in_the_words_that_the_page_explains() -> None:
    assert {claim.here for claim in PAGE.claims} == WORDS


def test_no_name_of_theirs_is_a_name_of_ours() -> None:
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    ours = {name for package in packages for name in public_names(package)}
    assert {claim.name for claim in PAGE.claims if claim.table == NAMES} & ours == set()


def table_of(module: Any) -> Any:
    [table] = module.tables().values()
    return table


def run(arguments: list[str]) -> str:
    """What the command `recsdk` prints."""
    done = CliRunner().invoke(recsdk, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def trained(module: Any, ids: Any = None) -> Any:
    output = module(batch() if ids is None else ids)
    values = output["user"].values() if isinstance(output, dict) else output.values()
    values.sum().backward()
    return module


def one_bag(ids: list[int], **data: Any) -> Any:
    given = torch.tensor(ids)
    return KeyedJaggedTensorWithData(["user"], given, lengths=torch.tensor([len(ids)]), **data)


# Planning and sharding


@holds(NAMES, "renamed", "DynamicEmbParameterConstraints", "DynamicEmbeddingShardingPlanner")
def test_constraints_and_planners(world: None) -> None:
    constraints = {"user": recsdk_sharding.HashParameterConstraints(expected_rows=70)}
    for planner in (EmbeddingShardingPlanner, recsdk_sharding.HashEmbeddingShardingPlanner):
        assert f"`{planner.__name__}`" in PAGE.text(NAMES, "DynamicEmbeddingShardingPlanner")
        model = torch.nn.ModuleDict({"ebc": bags(device="meta")})
        plan = plan_of(optimized(model), planner=planner, constraints=constraints)
        assert set(plan.plan) == {"ebc"}


@holds(NAMES, "renamed", "dist_type=roundrobin", "dist_type=hash_roundrobin")
@holds(NAMES, "not here", "dist_type=continuous")
def test_rules_of_ranks(world: None) -> None:
    rules = inspect.signature(recsdk_sharding.get_default_hybrid_sharders).parameters["rank_rule"]
    assert rules.default == "virtual_shard"
    for rule in ("modulo", "virtual_shard"):
        assert f'"{rule}"' in PAGE.text(NAMES, "dist_type=roundrobin")
        assert sharders(rank_rule=rule)
    with pytest.raises(ValueError, match="continuous"):
        sharders(rank_rule="continuous")


@holds(NAMES, "renamed", "DynamicEmbeddingCollectionSharder")
def test_one_list_of_sharders_serves_all(world: None) -> None:
    kinds = {each.module_type for each in sharders()}
    assert kinds >= {
        recsdk_sharding.HashEmbeddingBagCollection,
        recsdk_sharding.HashEmbeddingCollection,
    }
    assert any(kind.__module__.startswith("torchrec.") for kind in kinds)


@holds(NAMES, "renamed", "BatchedDynamicEmbeddingTablesV2")
def test_modules() -> None:
    for made in (bags(), sequences()):
        assert type(made).__name__ in PAGE.text(NAMES, "BatchedDynamicEmbeddingTablesV2")
        assert len(table_of(trained(optimized(made)))) == 2
    assert nn.HashEmbedding(4, name="user")(torch.tensor([1])).shape == (1, 4)


@holds(NAMES, "differs", "get_sharded_table_capacity", "get_table_value_bytes")
def test_a_command_says_how_large_tables_are() -> None:
    told = run(["plan", "--help"])
    assert "Prints the memory of each" in told


# Optimizers, pooling, first values


@holds(NAMES, "differs", "fused_params", "EmbOptimType")
@holds(NAMES, "renamed", "DynamicEmbOptimType.FTRL")
def test_optimizers() -> None:
    for kind, name in ((torch.optim.Adam, "Adam"), (torch.optim.Adagrad, "Adagrad")):
        assert type(table_of(trained(optimized(bags(), kind))).optimizer).__name__ == name
    module = bags()
    settings = optim.FTRL(lr=0.1)
    apply_optimizer_in_backward(RowOptimizer, module.parameters(), {"settings": settings})
    assert table_of(trained(module)).optimizer == settings


@holds(NAMES, "renamed", "DynamicEmbPoolingMode")
@holds(NAMES, "looser", "weights of a SUM")
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_pooling_with_weights(pooling: PoolingType) -> None:
    config = bag_config(pooling=pooling, init_fn=torch.nn.init.ones_)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    module = optimized(bags(config, is_weighted=True))
    pooled = module(batch(weights=weights)).values()
    pooled.sum().backward()
    assert pooled[0, 0] == (3.0 if pooling is PoolingType.SUM else 1.0)
    assert weights.grad is not None


@holds(NAMES, "renamed", "DynamicEmbInitializerMode", "DynamicEmbInitializerArgs")
@holds(NAMES, "not here", "DynamicEmbInitializerMode.DEBUG")
@holds(OPTIONS, "renamed", "initializer_args")
@pytest.mark.parametrize(
    "first",
    [
        init.Normal(mean=0.0, stddev=0.5),
        init.TruncatedNormal(mean=0.0, stddev=0.5),
        init.Uniform(low=-0.5, high=0.5),
        init.Constant(value=0.5),
    ],
)
def test_first_values(first: Any) -> None:
    kind = type(first).__name__
    for table, name in ((NAMES, "DynamicEmbInitializerMode"), (OPTIONS, "initializer_args")):
        assert kind in PAGE.text(table, name)
    config = bag_config(initializer=first)
    assert config.row_initializer() == first
    assert table_of(trained(optimized(bags(config)))).lookup(torch.tensor([-7])).any()
    debug = bag_config(init_fn=lambda rows: rows.data.fill_(9.0))
    untrained = bags(debug).requires_grad_(False)
    assert untrained(batch([5], [1])).values().tolist() == [[9.0] * 4]


@holds(OPTIONS, "renamed", "embedding_dtype")
@pytest.mark.parametrize("kind", [DataType.FP32, DataType.BF16, DataType.FP16])
def test_types_of_rows(kind: DataType) -> None:
    assert kind.name in PAGE.text(OPTIONS, "embedding_dtype")
    assert len(table_of(trained(optimized(bags(bag_config(data_type=kind)))))) == 2


@holds(OPTIONS, "looser", "dim")
@pytest.mark.parametrize("dim", [1, 3, 200])
def test_widths(dim: int) -> None:
    assert optimized(bags(bag_config(embedding_dim=dim)))(batch()).values().shape == (3, dim)


@holds(OPTIONS, "differs", "index_type")
def test_ids_of_64_bits() -> None:
    table = Table(dim=2)
    table.find_or_insert(np.array([2**64 - 1], np.uint64))
    assert -1 in table


# Limits, eviction, admission


@holds(OPTIONS, "renamed", "max_capacity")
@holds(OPTIONS, "differs", "score_strategy=NO_EVICTION", "safe_check_mode")
@holds(NAMES, "differs", "DynamicEmbCheckMode")
def test_a_full_table_refuses() -> None:
    free, full = bags(), bags(bag_config(max_rows=1))
    ids = batch([1, 2, 3], [1, 1, 1])
    assert len(table_of(trained(optimized(free), ids))) == 3
    assert len(table_of(trained(optimized(full), ids))) == 1
    assert table_of(full).stats().outcomes[Outcome.REFUSED] == 2
    with pytest.raises(CapacityError):
        bags(bag_config(max_rows=1, on_full="raise")).requires_grad_(False)(ids)


@holds(OPTIONS, "not here", "init_capacity", "max_load_factor", "bucket_capacity")
@holds(OPTIONS, "not here", "caching", "external_storage")
@pytest.mark.parametrize(
    "option",
    ["init_capacity", "max_load_factor", "bucket_capacity", "caching", "external_storage"],
)
def test_options_that_no_config_has(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        bag_config(**{option: 1})


@holds(NAMES, "renamed", "DynamicEmbEvictStrategy", "DynamicEmbScoreStrategy")
@holds(OPTIONS, "renamed", "score_strategy=STEP", "score_strategy=TIMESTAMP")
@holds(OPTIONS, "looser", "score_strategy=LFU")
@holds(OPTIONS, "renamed", "score_strategy=CUSTOMIZED")
@holds(OPTIONS, "not here", "two scores, or a function of scores")
@pytest.mark.parametrize(
    ("rule", "first"),
    [
        (Evict.lru(), {}),
        (Evict.lru(by="time"), {"times": np.array([5, 6])}),
        (Evict.lfu(half_life=10), {}),
        (Evict.score(), {"scores": np.array([1.0, 2.0], np.float32)}),
        (Evict.lfu(half_life=10).expiring(ttl=99), {}),
    ],
)
def test_rules_of_eviction(rule: Evict, first: dict[str, Any]) -> None:
    assert bag_config(max_rows=9, eviction=rule).eviction == rule
    table = Table(dim=2, max_rows=2, eviction_groups=1, eviction=rule)
    table.find_or_insert(np.array([1, 2]), **first)
    second = {name: values[:1] + 9 for name, values in first.items()}
    table.find_or_insert(np.array([3]), **second)
    assert len(table) == 2
    assert 3 in table


@holds(NAMES, "differs", "set_score", "get_score")
def test_scores_come_with_ids() -> None:
    module = optimized(bags(bag_config(max_rows=9, eviction=Evict.score())))
    trained(module, one_bag([1, 2], scores=torch.tensor([1.0, 3.0])))
    table = table_of(module)
    assert table.explain(2).columns["score"] == 3.0
    assert table.evict(where="score < 2") == 1
    assert len(table) == 1


@holds(NAMES, "renamed", "AdmissionStrategy", "Counter", "MultiTableAdmitter")
@holds(OPTIONS, "renamed", "admit_strategy", "admission_counter")
def test_admission() -> None:
    module = optimized(bags(bag_config(admission=Admit.count(2, max_records=1000))))
    assert len(table_of(trained(module, one_bag([1, 2])))) == 0
    assert len(table_of(trained(module, one_bag([2])))) == 1
    rarely = optimized(bags(bag_config(admission=Admit.probability(1e-9))))
    assert len(table_of(trained(rarely))) == 0


@holds(OPTIONS, "differs", "what a key reads that is not admitted", "eval_initializer_args")
def test_what_is_read_without_a_row() -> None:
    def reads(default: Default | None, *, is_training: bool) -> Any:
        more = {} if default is None else {"default": default}
        config = bag_config(init_fn=torch.nn.init.ones_, admission=Admit.count(9), **more)
        module = bags(config).requires_grad_(False).train(is_training)
        return module(batch([5], [1])).values()[0, 0].item()

    assert reads(None, is_training=True) == 0.0
    assert reads(Default.initial_row(), is_training=True) == 1.0
    assert reads(None, is_training=False) == 0.0
    assert reads(Default.constant(7.0), is_training=False) == 7.0


@holds(OPTIONS, "differs", "training")
def test_evaluation_inserts_nothing() -> None:
    module = optimized(bags())
    module.eval()(batch())
    assert len(table_of(module)) == 0
    assert len(table_of(trained(module.train()))) == 2


@holds(NAMES, "renamed", "pop_evicted_keys", "pop_erased_keys")
@holds(OPTIONS, "renamed", "evicted_item_mode")
def test_what_left_can_be_read() -> None:
    table = Table(dim=2, max_rows=2, eviction_groups=1, eviction=Evict.lru())
    with table.leavers() as leavers:
        for key in (1, 2, 3):
            table.find_or_insert(np.array([key]))
        table.erase(np.array([2]))
        left = leavers.read()
    assert left.keys.tolist() == [1, 2]
    assert [LeaveCause(each) for each in left.causes] == [LeaveCause.EVICTED, LeaveCause.ERASED]


# Devices, checkpoints


@holds(OPTIONS, "differs", "global_hbm_for_values", "local_hbm_for_values", "device_id")
def test_a_device_has_room_for_the_rows_of_the_config(world: None) -> None:
    module = bags(bag_config(num_embeddings=123), device="meta")
    [sharder] = [each for each in sharders() if each.module_type is type(module)]
    planned = sharder.shardable_parameters(module)["user"]
    assert tuple(planned.shape) == (123, 4)
    assert "`num_embeddings`" in PAGE.text(OPTIONS, "global_hbm_for_values")


@holds(NAMES, "renamed", "DynamicEmbDump", "DynamicEmbLoad")
@holds(NAMES, "renamed", "incremental_dump", "replay_increment")
def test_saving(world: None, tmp_path: Path) -> None:
    def made() -> Any:
        return sharded(optimized(bags(device="meta"), torch.optim.Adagrad))

    model, other = made(), made()
    trained(model.module.ebc)
    Saver().save(model, str(tmp_path / "all"))
    trained(model.module.ebc, batch([5], [1]))
    Saver().save(model, str(tmp_path / "more"), incremental=True)
    Saver().load(other, str(tmp_path / "all"))
    assert len(table_of(other.module.ebc)) == 2
    Saver().load(other, str(tmp_path / "more"), incremental=True)
    assert len(table_of(other.module.ebc)) == 3
    for given in (model, other):
        trained(given.module.ebc)
    keys = torch.tensor([-7, 2**62, 5])
    assert torch.equal(*(table_of(each.module.ebc).lookup(keys) for each in (model, other)))


@holds(NAMES, "not here", "files that DynamicEmbDump wrote")
def test_exported_arrays_are_imported(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", keys=np.array([5, -6]), emb=np.ones((2, 4), np.float32))
    target = tmp_path / "imported"
    arguments = [str(tmp_path / "rows.npz"), str(target), "--name", "user"]
    run(["ckpt", "import", *arguments, "--weights", "emb", "--keys", "keys"])
    assert "user" in run(["ckpt", "inspect", str(target)])
