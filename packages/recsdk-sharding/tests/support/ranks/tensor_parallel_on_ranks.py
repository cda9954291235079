"""What the tests of tensor parallelism run on every rank; each function returns plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import plain
from on_ranks import own_batches
from plans import module_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import (
    Model,
    Setup,
    host_env,
    make_batch,
    new_model,
    optimizer_of,
    rows_of,
    shard,
    unwrapped,
    use_nodes_of,
)

from recsdk_core import RecsdkError
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashLoadPlanner,
    TensorParallelWrapper,
    get_default_hybrid_sharders,
    parallelize,
)
from recsdk_sharding._adapt.npu import check_npu_arguments
from recsdk_sharding.exchange import exchanges_of

BATCH = Shard(0)


def whole_mlp() -> dict[str, Any]:
    """Both layers of the dense part are cut."""
    return {
        "over.0": ColwiseParallel(input_layouts=BATCH),
        "over.2": RowwiseParallel(output_layouts=BATCH),
    }


def half_mlp() -> dict[str, Any]:
    """The first layer is cut; the last is data-parallel."""
    return {"over.0": ColwiseParallel(input_layouts=BATCH, output_layouts=BATCH)}


def chained() -> dict[str, Any]:
    """The layers hand a replicated tensor on to each other."""
    return {
        "over.0": ColwiseParallel(input_layouts=BATCH, output_layouts=Replicate()),
        "over.2": RowwiseParallel(input_layouts=Replicate(), output_layouts=BATCH),
    }


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": whole_mlp,
    "half": half_mlp,
    "chained": chained,
}


def mesh_of(shape: tuple[int, ...], device: str = "cpu") -> DeviceMesh:
    """A mesh over all ranks."""
    return init_device_mesh(device, shape, mesh_dim_names=("data", "tensor")[-len(shape) :])


def sparse_part(model: nn.Module, setup: Setup) -> tuple[list[Any], ShardingPlan]:
    """Sharders, and an explicit plan of the tables."""
    world_size = dist.get_world_size()
    use_nodes_of(world_size)
    sharders = get_default_hybrid_sharders(host_env=host_env())
    kinds = setup.plan or dict.fromkeys(("user", "genre", "other"), ("row_wise",))
    configs = model.ebc.embedding_bag_configs()
    plan = module_plan(configs, kinds, world_size, world_size, setup.device)
    return sharders, ShardingPlan({"ebc": plan})


def cut(
    setup: Setup, shape: tuple[int, ...], plan: str, seed: int | None = None
) -> DistributedModelParallel:
    """The tests' model, its dense part cut over a mesh; `seed`: other dense weights."""
    model = new_model(setup, "meta")
    if seed is not None:
        torch.manual_seed(seed)
        for module in model.over:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    model.over.to(torch.device(setup.device))
    mesh = mesh_of(shape, setup.device)
    return parallelize(model, mesh, PLANS[plan](), *sparse_part(model, setup))


def whole(value: Any) -> Any:
    """A tensor or DTensor as one array."""
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().cpu().numpy().copy()


def dense_of(model: nn.Module) -> dict[str, Any]:
    """The dense weights by name, whole."""
    return {
        name.rpartition("over.")[2]: whole(parameter)
        for name, parameter in model.named_parameters()
        if "over." in name
    }


def train(
    setup: Setup, shape: tuple[int, ...], plan: str, sizes: list[list[int]], how: str = "plain"
) -> dict[str, Any]:
    """Trains on this rank's batches; outputs, rows and dense weights."""
    model = cut(setup, shape, plan, seed=None if how != "seeded" else dist.get_rank())
    optimizer = optimizer_of(model, setup.dense_lr)
    batches = own_batches(sizes, setup.weighted, device=setup.device)
    if how == "pipeline":
        pipeline = TrainPipelineSparseDist(model, optimizer, model.device, execute_all_batches=True)
        iterator = iter(batches)
        outputs = [pipeline.progress(iterator) for _ in batches]
    else:
        outputs = list(plain(model, optimizer, batches))
    return {
        "outputs": [whole(out) for out in outputs],
        "rows": rows_of(unwrapped(model).ebc.tables()),
        "dense": dense_of(model),
        "kinds": kinds_of(model),
    }


def kinds_of(model: DistributedModelParallel) -> dict[str, str]:
    """The types of the dense parameters."""
    return {
        name: type(parameter).__name__
        for name, parameter in model.named_parameters()
        if "over." in name
    }


def accumulate(setup: Setup, shape: tuple[int, ...], sizes: list[list[int]]) -> dict[str, Any]:
    """Dense gradients of several backwards, added up, whole."""
    model = cut(setup, shape, "half")
    for batch in own_batches(sizes, setup.weighted):
        model(batch)[0].backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if "over." in n}


def thaw(setup: Setup, shape: tuple[int, ...], sizes: list[list[int]]) -> dict[str, Any]:
    """As `accumulate`, with a layer that is frozen when it is cut and in a first backward."""
    uncut = new_model(setup, "meta")
    uncut.over.to(torch.device(setup.device))
    uncut.over[0].requires_grad_(False)
    model = parallelize(uncut, mesh_of(shape), half_mlp(), *sparse_part(uncut, setup))
    batches = own_batches(sizes, setup.weighted)
    model(batches[0])[0].backward()
    layer = unwrapped(model).over[0]
    assert layer.weight.grad is None
    layer.requires_grad_(True)
    model.zero_grad()
    for batch in batches:
        model(batch)[0].backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if "over." in n}


def collectives(setup: Setup, shape: tuple[int, ...], sizes: list[list[int]]) -> set[str]:
    """What torch's process groups are asked for by `thaw`, and by making a tensor whole."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        thaw(setup, shape, sizes)
    names = {event.key for event in profiler.key_averages()}
    return {name for name in names if name.startswith("c10d::")}


class ShardedDensePart(DataParallelWrapper):
    """Puts the dense part under FSDP2, as docs/howto/cut_dense_layers.md does."""

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        fully_shard(dmp.module.over)


def shard_parameters(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """As `train`, with the dense part's parameters sharded."""
    model = new_model(setup, "meta")
    sharders, plan = sparse_part(model, setup)
    wrapper = ShardedDensePart()
    model = DistributedModelParallel(
        model, sharders=sharders, plan=plan, data_parallel_wrapper=wrapper
    )
    optimizer = optimizer_of(model, setup.dense_lr)
    outputs = list(plain(model, optimizer, own_batches(sizes, setup.weighted)))
    return {
        "outputs": [whole(out) for out in outputs],
        "rows": rows_of(unwrapped(model).ebc.tables()),
        "dense": dense_of(model),
        "kinds": kinds_of(model),
    }


def wrap_by_hand(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """As a user does who calls torch's and torchrec's functions."""
    model = new_model(setup, "meta")
    mesh = mesh_of((dist.get_world_size(),))
    parallelize_module(model, mesh, whole_mlp())
    sharders, plan = sparse_part(model, setup)
    parallel = DistributedModelParallel(
        model, plan=plan, sharders=sharders, data_parallel_wrapper=TensorParallelWrapper(mesh)
    )
    optimizer = optimizer_of(parallel, setup.dense_lr)
    list(plain(parallel, optimizer, own_batches(sizes, setup.weighted)))
    return dense_of(parallel)


def save_and_load(setup: Setup, shape: tuple[int, ...], sizes: list[list[int]]) -> dict[str, Any]:
    """The state of a trained model, loaded by another and by one that is not cut."""
    model = cut(setup, shape, "half")
    optimizer = optimizer_of(model, setup.dense_lr)
    list(plain(model, optimizer, own_batches(sizes, setup.weighted)))
    state = model.state_dict()
    kinds = {name: type(value).__name__ for name, value in state.items()}
    other = cut(setup, shape, "half", seed=1)
    result = other.load_state_dict(dict(state))
    uncut = shard(new_model(setup, "meta"), setup)
    whole_state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    uncut.load_state_dict(dict(whole_state))
    again = cut(setup, shape, "half", seed=2)
    again.load_state_dict(dict(uncut.state_dict()))
    return {
        "kinds": kinds,
        "missing": list(result.missing_keys) + list(result.unexpected_keys),
        "contents": [
            {"rows": rows_of(unwrapped(each).ebc.tables()), "dense": dense_of(each)}
            for each in (model, other, uncut, again)
        ],
    }


def load_misfit(setup: Setup) -> str:
    """What loading a tensor of another shape says."""
    model = cut(setup, (dist.get_world_size(),), "half")
    state = dict(model.state_dict())
    state["over.0.bias"] = torch.zeros(7)
    return error_of(lambda: model.load_state_dict(state))


def dcp_save(
    setup: Setup, shape: tuple[int, ...], sizes: list[list[int]], path: str
) -> dict[str, Any]:
    """Trains and saves by torch.distributed.checkpoint."""
    model = cut(setup, shape, "whole")
    optimizer = optimizer_of(model, setup.dense_lr)
    list(plain(model, optimizer, own_batches(sizes, setup.weighted)))
    dcp.save({"model": model}, checkpoint_id=path)
    return {"rows": rows_of(unwrapped(model).ebc.tables()), "dense": dense_of(model)}


def dcp_load(setup: Setup, shape: tuple[int, ...], path: str) -> dict[str, Any]:
    """Loads what any mesh has saved."""
    model = cut(setup, shape, "whole", seed=3)
    dcp.load({"model": model}, checkpoint_id=path, planner=HashLoadPlanner())
    return {"rows": rows_of(unwrapped(model).ebc.tables()), "dense": dense_of(model)}


def error_of(call: Callable[[], Any]) -> str:
    """What a call raises, as text."""
    try:
        call()
    except (ValueError, TypeError, RecsdkError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _built() -> Model:
    return new_model(Setup(), "meta")


def misuses() -> dict[str, str]:
    """What `parallelize` says of what cannot work; on 2 ranks."""
    mesh, found = mesh_of((2,)), {}
    model = _built()
    sparse = sparse_part(model, Setup())

    def call(model: Any = model, mesh: Any = mesh, plan: Any = None, sparse: Any = sparse) -> Any:
        return parallelize(model, mesh, whole_mlp() if plan is None else plan, *sparse)

    found["no_mesh"] = error_of(lambda: call(mesh="cpu"))
    found["three"] = error_of(
        lambda: call(mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))
    )
    found["unnamed"] = error_of(lambda: call(mesh=init_device_mesh("cpu", (1, 2))))
    found["partial"] = error_of(lambda: call(mesh=DeviceMesh("cpu", [dist.get_rank()])))
    found["no_plan"] = error_of(lambda: call(plan={}))
    found["no_style"] = error_of(lambda: call(plan={"over.0": "colwise"}))
    found["no_module"] = error_of(lambda: call(plan={"over.7": ColwiseParallel()}))
    found["table"] = error_of(lambda: call(plan={"ebc": ColwiseParallel()}))
    found["no_sparse_plan"] = error_of(lambda: call(sparse=(sparse[0], None)))
    on_meta = _built()
    on_meta.over.to(torch.device("meta"))
    found["meta"] = error_of(lambda: call(model=on_meta))
    twice = _built()
    parallelize_module(twice, mesh, whole_mlp())
    found["cut"] = error_of(lambda: call(model=twice))
    sharded = shard(_built(), Setup())
    arguments = {"sharders": sparse[0], "data_parallel_wrapper": TensorParallelWrapper(mesh)}
    found["npu"] = error_of(lambda: check_npu_arguments(arguments))
    found["wrapped"] = error_of(lambda: call(model=sharded))
    found["sharded"] = error_of(lambda: call(model=unwrapped(sharded)))
    return found


def mesh_over_gloo(device_type: str) -> str:
    """What is said of layers on a device whose mesh is over a group of gloo."""
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), device_type)
    return error_of(lambda: TensorParallelWrapper(mesh))


def unequal_batches(has_hash_tables: bool) -> list[str]:
    """What batches of other sizes raise, and that equal ones go on after a reset."""
    direct = Direct(has_hash_tables)
    mesh, (sharders, plan) = mesh_of((2,)), direct.sparse_part()
    model = parallelize(direct, mesh, whole_mlp(), sharders, plan)
    rank = dist.get_rank()

    def run(size: int) -> Any:
        return model(make_batch(0, size))[0].backward()

    found = [error_of(lambda: run(4)), error_of(lambda: run(2 + rank))]
    for exchange in exchanges_of(model):
        exchange.reset()
    return [*found, error_of(lambda: run(3))]


class Direct(nn.Module):
    """A model whose first dense layer takes vectors as they come from a table."""

    def __init__(self, has_hash_tables: bool) -> None:
        super().__init__()
        config, collection = (
            (HashEmbeddingBagConfig, HashEmbeddingBagCollection)
            if has_hash_tables
            else (EmbeddingBagConfig, EmbeddingBagCollection)
        )
        table = config(name="user", embedding_dim=8, num_embeddings=10, feature_names=["user"])
        self.ebc = collection([table], device=torch.device("meta"))
        _apply_optimizer_in_backward(torch.optim.SGD, self.ebc.parameters(), {"lr": 0.1})
        torch.manual_seed(0)
        self.over = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

    def sparse_part(self) -> tuple[list[Any], ShardingPlan]:
        sharders = get_default_hybrid_sharders(host_env=host_env())
        topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology)
        return sharders, planner.collective_plan(self, sharders, dist.GroupMember.WORLD)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = batch.sparse
        ids = KeyedJaggedTensor(given.keys(), given.values() % 10, lengths=given.lengths())
        out = self.over(self.ebc(ids).values())
        return out.square().mean(), out


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "first": lambda: {
        "over.0": ColwiseParallel(),
        "over.2": RowwiseParallel(output_layouts=BATCH),
    },
    "last": lambda: {
        "over.0": ColwiseParallel(input_layouts=BATCH),
        "over.2": RowwiseParallel(),
    },
    "between": lambda: {
        "over.0": ColwiseParallel(input_layouts=BATCH, output_layouts=BATCH),
        "over.2": RowwiseParallel(input_layouts=Replicate(), output_layouts=BATCH),
    },
}


def wrong_layouts(name: str) -> str:
    """What the first forward of a model says whose layers do not cut the batch."""
    model = _built()
    sparse = sparse_part(model, Setup())
    parallel = parallelize(model, mesh_of((2,)), LAYOUTS[name](), *sparse)
    batch = make_batch(dist.get_rank(), 4)
    return error_of(lambda: parallel(batch))
