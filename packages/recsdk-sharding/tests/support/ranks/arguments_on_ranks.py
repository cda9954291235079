"""What tests of arguments, settings and plans made by hand run on ranks; gives plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import embedding, shard, sharding_plan
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import CommOp, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_tower import EmbeddingTower
from worlds import Setup, host_env, make_batch, new_model, use_nodes_of

from recsdk_core import optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import (
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingCollectionSharder,
    get_default_hybrid_sharders,
)

SHARDERS = {"bag": HashEmbeddingBagCollectionSharder, "sequence": HashEmbeddingCollectionSharder}


def error_of(call: Callable[[], Any]) -> str:
    """The type and text of what a call raises; "" if it raises nothing."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _plan_of(module: nn.Module, make: Any = None) -> dict[str, ParameterSharding]:
    """A plan made by hand, by default row-wise, as torchrec's functions make it."""
    use_nodes_of(dist.get_world_size())
    every = sharding_plan.apply_to_all(module, make or sharding_plan.row_wise())
    made: dict[str, ParameterSharding] = sharding_plan.construct_module_sharding_plan(
        module, every, device_type="cpu"
    )
    return made


def shard_under_two_names(is_in_another: bool) -> str:
    """What is said of a collection under two names, in one module or in two; "" if it trains."""
    model = new_model(Setup(torch.optim.SGD, {"lr": 0.1}), "meta")
    if is_in_another:
        model.over.first = model.ebc
    else:
        model.same = model.ebc
    sharders = get_default_hybrid_sharders(host_env())

    def train() -> None:
        sharded = DistributedModelParallel(model, device=torch.device("cpu"), sharders=sharders)
        batch = make_batch(1, 3).sparse
        found = [sharded.module.ebc(batch).values()]
        if is_in_another:
            found.append(sharded.module.over.first(batch).values())
        sum(each.sum() for each in found).backward()

    return error_of(train)


def shard_with(
    changes: Sequence[Mapping[str, Any]], options: Mapping[str, Any], kind: str
) -> list[str]:
    """The errors of sharding the setup's tables by a plan with these fields changed."""
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharder, is_sequence = SHARDERS[kind](host_env()), kind == "sequence"
    errors = []
    for change in changes:
        ebc = new_model(Setup(options=dict(options), is_sequence=is_sequence), "meta").ebc
        plan = {name: replace(each, **change) for name, each in _plan_of(ebc).items()}
        errors.append(error_of(lambda ebc=ebc, plan=plan: sharder.shard(ebc, plan, env)))
    return errors


def plan_with(given: Sequence[Any], options: Mapping[str, Any]) -> list[str]:
    """The errors of torchrec's planner, with each of these as the constraints of table "user"."""
    use_nodes_of(dist.get_world_size())

    def plan(constraints: Any) -> None:
        model = new_model(Setup(options=dict(options)), "meta")
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=2, compute_device="cpu"),
            constraints=constraints if isinstance(constraints, list) else {"user": constraints},
        )
        planner.plan(model, get_default_hybrid_sharders(host_env()))

    return [error_of(partial(plan, constraints)) for constraints in given]


def with_options(given: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The errors of making the sharders with these further arguments."""
    env = host_env()
    return [
        [error_of(lambda k=kind, g=each: k(env, **g)) for kind in SHARDERS.values()]
        for each in given
    ]


def train_by_hand(name: str, arguments: Sequence[Any], kind: str) -> dict[str, Any]:
    """One step by a plan of torchrec's functions; the kernels that it names, and the loss."""
    setup = Setup(is_sequence=kind == "sequence")
    model = new_model(setup, "meta")
    plan = _plan_of(model.ebc, getattr(sharding_plan, name)(*arguments))
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=get_default_hybrid_sharders(host_env()),
    )
    losses = []
    for _ in range(2):
        loss, _ = sharded(make_batch(3 + dist.get_rank(), 4))
        loss.backward()
        losses.append(float(loss))
    return {"kernels": {each.compute_kernel for each in plan.values()}, "losses": losses}


def plan_a_bag_by_hand() -> list[str]:
    """The kernel of a single bag's plan, and what the sharder that torchrec finds says."""
    bag = HashEmbeddingBag(4, name="a", optimizer=optim.Adagrad(lr=0.1))
    plan = _plan_of(bag)
    found = sharding_plan.get_module_to_default_sharders()[HashEmbeddingBag]
    return [plan["a"].compute_kernel, error_of(lambda: found.shard(bag, plan, None))]


class _Over(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(26, 1)


def shard_by_functions() -> dict[str, Any]:
    """What torchrec's `shard` and `shard_modules` make of a model, with our sharders and without.

    The types that they make, or their errors.
    """
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    sharders = get_default_hybrid_sharders(host_env())
    use_nodes_of(dist.get_world_size())
    by_hand = ShardingPlan({"ebc": _plan_of(new_model(Setup(), "meta").ebc)})
    calls: dict[str, Callable[[nn.Module], nn.Module]] = {
        "shard": lambda m: shard.shard(m.ebc, sharding_plan.row_wise(), env, sharder=sharders[0]),
        "shard alone": lambda m: shard.shard(m.ebc, sharding_plan.row_wise(), env),
        "modules": lambda m: shard.shard_modules(m, env, plan=by_hand, sharders=sharders).ebc,
        "modules alone": lambda m: shard.shard_modules(m, env).ebc,
        "modules, empty plan": lambda m: (
            shard.shard_modules(m, env, plan=ShardingPlan({}), sharders=sharders).ebc
        ),
    }

    def made(call: Callable[[nn.Module], nn.Module]) -> str:
        try:
            return type(call(new_model(Setup(), "meta"))).__name__
        except ValueError as error:
            return str(error)

    return {name: made(call) for name, call in calls.items()}


def refuse_arguments() -> dict[str, str]:
    """The errors of DistributedModelParallel for arguments that cannot be right."""
    env = host_env()
    sharders = get_default_hybrid_sharders(env)
    model = new_model(Setup(), "meta")
    plan = ShardingPlan({"ebc": _plan_of(model.ebc)})
    good: dict[str, Any] = {
        "module": model,
        "device": torch.device("cpu"),
        "plan": plan,
        "sharders": sharders,
    }
    tower = nn.Sequential(EmbeddingTower(new_model(Setup(), "cpu").ebc, _Over()))
    with_towers = [EmbeddingTowerSharder(), *sharders]
    fp8 = get_qcomm_codecs(QCommsConfig(CommType.FP8, fp8_quantize_dim=16))
    with_fp8 = get_default_hybrid_sharders(
        env, qcomm_codecs_registry={CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: fp8}
    )
    partial_plan = {name: plan.plan["ebc"][name] for name in ("user", "genre")}
    wrong_kind = dict.fromkeys(plan.plan["ebc"], "row_wise")
    cases: dict[str, dict[str, Any]] = {
        "list as module": {"module": [model]},
        "str as device": {"device": "cpu"},
        "str as plan": {"plan": "row_wise"},
        "dict as plan": {"plan": plan.plan},
        "empty plan": {"plan": ShardingPlan({})},
        "plan of another model": {"plan": ShardingPlan({"other.ebc": plan.plan["ebc"]})},
        "plan without a table": {"plan": ShardingPlan({"ebc": partial_plan})},
        "plan of strings": {"plan": ShardingPlan({"ebc": wrong_kind})},
        "list in a plan": {"plan": ShardingPlan({"ebc": list(plan.plan["ebc"])})},
        "a sharder alone": {"sharders": sharders[0]},
        "tower": {"module": tower, "sharders": with_towers, "plan": None},
        "tower with a plan": {"module": tower, "sharders": with_towers},
        "codec of cuda alone": {"sharders": with_fp8},
    }
    found = {}
    for name, case in cases.items():
        found[name] = error_of(lambda case=case: DistributedModelParallel(**{**good, **case}))
    assert not error_of(lambda: DistributedModelParallel(**good))
    return found


def sent_of_repeated_ids(how: str) -> Any:
    """What a rank sends of a sequence of equal ids, with duplicates dropped in this way."""
    embedding.set_ec_index_dedup(how == "set_ec_index_dedup")
    try:
        model = new_model(Setup(is_sequence=True), "meta")
        plan = ShardingPlan({"ebc": _plan_of(model.ebc)})
        sharders = get_default_hybrid_sharders(host_env(), use_index_dedup=how == "argument")
        sharded = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=sharders
        )
    finally:
        embedding.set_ec_index_dedup(False)
    batch = make_batch(1, 6)
    batch.sparse.values()[:] = 2**62
    sharded(batch)[0].backward()
    (stats,) = sharded.module.ebc.stats().values()
    return asdict(stats)
