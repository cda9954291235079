"""Rows of the page for users of torchrec: habits, and what is not here."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torchrec.distributed.embedding import set_ec_index_dedup
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.fx import Tracer
from torchrec.inference.modules import (
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    fuse_embedding_optimizer,
)

import recsdk_sharding
from claims import Page, holds
from one_rank import (
    CPU,
    IDS,
    META,
    Batch,
    Model,
    bag_config,
    bags,
    batch,
    optimized,
    sequences,
    sharded,
    sharders,
)
from public_names import public_classes
from recsdk_core.outcome import Outcome
from recsdk_sharding import export_rows, import_rows
from warm_scripts import start_ranks, statuses_of

SECONDS_TO_END = 600

PAGE = Page(Path(__file__).parents[2] / "docs" / "coming_from" / "torchrec.md")
HABITS, ABSENT = "Habits", "What is not here"


def stock_bags(device: torch.device = CPU) -> EmbeddingBagCollection:
    config = torchrec.EmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=9, feature_names=["user"]
    )
    return EmbeddingBagCollection(tables=[config], device=device)


def trained(module: Any) -> Any:
    """The module after one step."""
    module(batch()).values().sum().backward()
    return module


@holds(HABITS, "differs", "ebc.embedding_bags[name].weight[row]", "counting `parameter.numel()`")
@holds(HABITS, "differs", "parameter.grad")
def test_parameters_are_handles() -> None:
    module = trained(optimized(bags()))
    weight = module.embedding_bags["user"].weight
    assert weight.shape == (0, 4)
    assert weight.grad is None
    [table] = module.tables().values()
    table.upsert(torch.tensor([5]), torch.ones(1, 4))
    assert table.lookup(torch.tensor([5])).tolist() == [[1.0] * 4]
    assert sum(len(rows.keys) for rows in table.export()) == len(table) == 3
    assert table.stats().row_bytes > 0


@holds(HABITS, "refused", "torch.nn.init.kaiming_normal_(parameter)")
@holds(HABITS, "no effect", "reset_parameters")
def test_initial_rows_come_from_the_config() -> None:
    module = optimized(bags(bag_config(init_fn=nn.init.ones_)))
    [parameter] = module.parameters()
    error = PAGE.error(HABITS, "torch.nn.init.kaiming_normal_(parameter)")
    with pytest.raises(error, match="init_fn or initializer"):
        nn.init.kaiming_normal_(parameter)
    module.reset_parameters()
    assert module(batch([1], [1])).values().tolist() == [[1.0] * 4]
    module.reset_parameters()
    [table] = module.tables().values()
    assert len(table) == 0 or table.lookup(torch.tensor([1])).tolist() == [[1.0] * 4]


@holds(HABITS, "refused", "training without `apply_optimizer_in_backward`")
def test_training_needs_an_optimizer() -> None:
    name = "training without `apply_optimizer_in_backward`"
    with pytest.raises(PAGE.error(HABITS, name), match="apply_optimizer_in_backward"):
        bags()(batch())
    assert bags().requires_grad_(False)(batch()).values().shape == (3, 4)


@holds(HABITS, "refused", "two optimizers on one table")
def test_a_table_has_one_optimizer() -> None:
    with pytest.raises(PAGE.error(HABITS, "two optimizers on one table"), match="more than once"):
        optimized(optimized(bags()), torch.optim.Adagrad)(batch())


@holds(HABITS, "refused", "a second `backward` through one forward")
def test_each_forward_takes_one_backward() -> None:
    loss = optimized(bags())(batch()).values().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PAGE.error(HABITS, "a second `backward` through one forward")):
        loss.backward()


@holds(HABITS, "refused", "load_state_dict")
@holds(HABITS, "differs", "load_state_dict(..., strict=False)")
def test_state_of_torchrecs_tables_comes_in_by_import_rows() -> None:
    state, module = stock_bags().state_dict(), optimized(bags())
    with pytest.raises(PAGE.error(HABITS, "load_state_dict"), match="import_rows"):
        module.load_state_dict(state)
    found = module.load_state_dict(state, strict=False)
    assert found.unexpected_keys == ["embedding_bags.user.weight"]
    assert len(module.tables()["user"]) == 0
    ids = {"user": torch.arange(9) - 4}
    import_rows(module, state, ids)
    assert torch.equal(export_rows(module, ids)["user.weight"], *state.values())


@holds(HABITS, "differs", "state_dict")
def test_state_is_by_table_and_rank(world: None) -> None:
    state = sharded().state_dict()
    part = "ebc.embedding_bags.user.rank_0."
    assert {f"{part}keys", f"{part}weight"} <= set(state)
    assert not any(name.endswith("embedding_bags.user.weight") for name in state)
    again = sharded()
    again.load_state_dict(state)


@holds(HABITS, "same", "learning rates in a checkpoint of `fused_optimizer`")
def test_learning_rates_are_saved_on_demand(world: None) -> None:
    fused = sharded().fused_optimizer
    assert "param_groups" not in fused.state_dict()
    fused.save_param_groups(True)
    assert fused.state_dict()["param_groups"][0]["lr"] == 0.1


@holds(HABITS, "same", "copy.deepcopy", "pickle")
def test_copies_have_the_rows() -> None:
    module = trained(optimized(bags())).eval()
    wanted = module(batch()).values()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(batch()).values(), wanted)


@holds(HABITS, "same", "copies and pickles of a sharded model")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_sharded_models_have_no_copies(world: None, copied: Any) -> None:
    theirs = DistributedModelParallel(Model(stock_bags(META)), device=CPU)
    for model in (theirs, sharded()):
        with pytest.raises((TypeError, AttributeError), match=r"pickle '.*ProcessGroup|local"):
            copied(model)
    model = sharded()
    other = sharded()
    trained(model.module.ebc)
    other.load_state_dict(model.state_dict())
    [table] = other.module.ebc.tables().values()
    assert len(table) == len(set(IDS))


@holds(HABITS, "no effect", "module.half()", ".to(torch.bfloat16)")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_modules_are_not_those_of_rows(dtype: torch.dtype) -> None:
    module = optimized(bags())
    wanted = module(batch()).values()
    assert torch.equal(module.to(dtype)(batch()).values(), wanted)
    assert wanted.dtype == torch.float32


@holds(HABITS, "same", "torch.autocast")
def test_results_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds = {
            made(batch([1, 2, 3])).values().dtype for made in (optimized(bags()), stock_bags())
        }
    assert kinds == {torch.float32}


@holds(HABITS, "refused", "torch.amp.GradScaler")
def test_scaled_losses_are_refused() -> None:
    module = optimized(bags())
    loss = torch.amp.GradScaler("cpu", init_scale=1024.0).scale(module(batch()).values().sum())
    with pytest.raises(PAGE.error(HABITS, "torch.amp.GradScaler"), match="GradScaler"):
        loss.backward()
    assert module.tables()["user"].update_count == 0


@holds(
    HABITS, "same", "an optimizer that is applied after `state_dict()`, `tables()` or an evaluation"
)
def test_an_optimizer_may_come_after_a_look() -> None:
    module = bags()
    module.eval()(batch())
    module.state_dict()
    assert module.tables()["user"].update_count == 0
    late = trained(optimized(module.train(), torch.optim.Adagrad))
    early = trained(optimized(bags(), torch.optim.Adagrad))
    assert torch.equal(late.eval()(batch()).values(), early.eval()(batch()).values())


FAILING = """
import sys, torch
import torch.distributed as dist
from recsdk_sharding import PeerError, failing_together

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    with failing_together():
        if rank == 1:
            raise KeyError("no such user")
        dist.all_reduce(torch.ones(1))
except PeerError as error:
    print(f"rank {rank}: rank {error.rank} failed: {error.message}", flush=True)
except KeyError:
    print(f"rank {rank}: its own", flush=True)
"""


@holds(HABITS, "looser", "an exception on one rank, the others wait")
def test_one_rank_fails(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    output = tmp_path / "printed"
    statuses_of(start_ranks(2, [str(script)], output, {}, num_templates=1), SECONDS_TO_END)
    printed = output.read_text(errors="replace")
    assert "rank 1: its own" in printed
    assert re.search("rank 0: rank 1 failed: .*no such user", printed), printed


@holds(HABITS, "stricter", "an unsharded collection in `DistributedDataParallel`")
def test_an_unsharded_collection_is_for_one_rank(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.parallel.DistributedDataParallel(Model(optimized(bags())))
    assert model(Batch(batch()))[1].shape == (3, 1)
    monkeypatch.setattr("recsdk_sharding._modules.unsharded.active_data_parallel_size", lambda: 2)
    with pytest.raises(
        PAGE.error(HABITS, "an unsharded collection in `DistributedDataParallel`"),
        match="DistributedDataParallel over 2 ranks",
    ):
        model(Batch(batch()))


@holds(HABITS, "same", "torchrec.fx.Tracer")
def test_tracing() -> None:
    tracer = Tracer(leaf_modules=["HashEmbeddingBagCollection"])
    nodes = tracer.trace(Model(optimized(bags()))).nodes
    assert any(node.op == "call_module" and node.target == "ebc" for node in nodes)


@holds(HABITS, "not here", "torch.jit.script", "torch.export")
def test_a_collection_cannot_be_compiled_away() -> None:
    with pytest.raises(Exception, match="supported"):
        torch.jit.script(bags())
    with pytest.raises(Exception, match="torch.export or a compiler traces"):
        torch.export.export(optimized(bags()).eval(), (batch(),))


@holds(HABITS, "same", "quantize_embeddings", "quantize_inference_model", "shard_quant_model")
def test_quantization_takes_tables_along(world: None) -> None:
    ebc = optimized(bags())
    ebc(batch())
    model = nn.ModuleDict({"sparse": ebc})
    made = quantize_embeddings(model, torch.float32, inplace=False)
    other = quantize_inference_model(copy.deepcopy(model), quantization_dtype=torch.float32)
    sharded_too, plan = shard_quant_model(other, compute_device="cpu", sharding_device="cpu")
    assert list(plan.plan["sparse"]) == ["user"]
    kinds = (
        recsdk_sharding.QuantHashEmbeddingBagCollection,
        recsdk_sharding.ShardedQuantHashEmbeddingBagCollection,
    )
    for each, kind in zip((made, sharded_too), kinds, strict=True):
        assert type(each["sparse"]) is kind
        assert torch.equal(each["sparse"](batch()).values(), ebc.eval()(batch()).values())
    with pytest.raises(PAGE.error(HABITS, "quantize_embeddings"), match="cannot be quantized"):
        quantize_embeddings(ebc, torch.qint8, inplace=False)


@holds(HABITS, "refused", "fuse_embedding_optimizer")
def test_fusing_is_refused() -> None:
    model = nn.ModuleDict({"ebc": bags()})
    with pytest.raises(PAGE.error(HABITS, "fuse_embedding_optimizer"), match="leave fuse_embed"):
        fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    assert type(model["ebc"]) is recsdk_sharding.HashEmbeddingBagCollection


@pytest.mark.filterwarnings("ignore:Please set use_index_dedup:DeprecationWarning")
@holds(HABITS, "same", "set_ec_index_dedup")
def test_index_dedup(world: None) -> None:
    plain = sharded(optimized(sequences(device=META)), wrap=nn.Sequential)
    try:
        set_ec_index_dedup(True)
        by_flag = sharded(optimized(sequences(device=META)), wrap=nn.Sequential)
    finally:
        set_ec_index_dedup(False)
    given = sharders(use_index_dedup=True)
    by_argument = sharded(optimized(sequences(device=META)), wrap=nn.Sequential, sharders=given)
    drops = [
        sharding._drops_duplicates
        for model in (plain, by_flag, by_argument)
        for sharding in model.module[0]._shardings()
    ]
    assert drops == [False, True, True]


@holds(HABITS, "not here", "DistributedModelParallel.reshard")
@holds(ABSENT, "not here", "live resharding")
def test_plans_are_changed_by_saving_and_loading(world: None) -> None:
    model = sharded()
    plan = EmbeddingModuleShardingPlan(model.plan.plan["ebc"])
    with pytest.raises(NotImplementedError, match="save, and load under another plan"):
        model.module.ebc.update_shards(plan, None, None)


@holds(HABITS, "differs", "a table that is full")
def test_full_tables_refuse() -> None:
    module = optimized(bags(bag_config(max_rows=1)))
    pooled = module(batch([7, 8], [1, 1])).values()
    assert pooled[0].tolist() == [0.0] * 4
    pooled.sum().backward()
    [table] = module.tables().values()
    assert table.stats().outcomes[Outcome.REFUSED] == 1
    raising = optimized(bags(bag_config(max_rows=1, on_full="raise")))
    with pytest.raises(PAGE.error(HABITS, "a table that is full")):
        raising(batch([7, 8], [1, 1]))
    assert len(raising.tables()["user"]) == 0


WORDS_OF_WHAT_IS_ABSENT = (
    *("expiry", "expire", "admission", "tier", "cache", "uvm", "ssd"),
    *("inference", "freeze", "tracker", "dmpcollection"),
)


@holds(ABSENT, "not here", "eviction below a threshold")
@holds(ABSENT, "not here", "rows in several tiers (UVM, caching, SSD, DRAM)")
@holds(ABSENT, "not here", "serving by `torchrec.inference`", "tracking of changed rows")
@holds(ABSENT, "not here", "two-dimensional parallelism (`DMPCollection`)")
def test_no_public_name_speaks_of_what_is_not_here() -> None:
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    names = {(p, name.lower()) for p in packages for name in public_classes(p)}
    said = {(p, n, w) for p, n in names for w in WORDS_OF_WHAT_IS_ABSENT if w in n}
    assert {each for each in said if each[::2] != ("recsdk_core", "admission")} == set()
