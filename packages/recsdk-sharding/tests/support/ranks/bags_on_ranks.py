"""What the tests of single bags run on every rank; each function returns plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from plans import Spec, module_plan
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan
from worlds import EDGE_KEYS, host_env, rows_of, use_nodes_of

from recsdk_core import Default, RecsdkError, optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import Saver, get_default_hybrid_sharders
from recsdk_sharding.exchange import exchanges_of

DIM = 6


class Model(nn.Module):
    """A bag under a layer; gives the loss and the bag's vectors."""

    def __init__(self, mode: Any, device: str = "cpu") -> None:
        """With a table that a device can have, or one that only the cpu can."""
        super().__init__()
        options: dict[str, Any] = {
            "optimizer": optim.FTRL(lr=0.1, clip_norm=0.5),
            "default": Default.constant(0.25),
        }
        if device != "cpu":
            options = {"optimizer": optim.Adagrad(lr=0.1, eps=1e-3), "max_rows": 2048}
        self.bag = HashEmbeddingBag(DIM, mode=mode, name="user", **options)

    def forward(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bag(*given)
        return (pooled - 0.3).square().sum(), pooled + 0


def given_of(step: int, rank: int, *, is_weighted: bool, is_square: bool) -> list[Any]:
    """Keys, offsets and weights of a rank's batch."""
    rng = np.random.default_rng([step, rank])
    count = (step + 2 * rank) % 4
    lengths = np.full(count, 3) if is_square else rng.integers(0, 4, count)
    keys = torch.from_numpy(rng.choice(np.array(EDGE_KEYS), int(lengths.sum())))
    weights = torch.from_numpy(rng.uniform(0.5, 2, len(keys)).astype(np.float32))
    if is_square:
        keys, weights = keys.view(count, 3), weights.view(count, 3)
    offsets = None if is_square else torch.from_numpy(np.cumsum(lengths) - lengths)
    return [keys, offsets, weights.requires_grad_() if is_weighted else None]


class _Config:
    name, embedding_dim, num_embeddings = "user", DIM, 1_000_000


def spread(model: Model, spec: Spec | None, device: str = "cpu") -> DistributedModelParallel:
    """The sharded model, by the planner's plan without a spec."""
    world_size = dist.get_world_size()
    use_nodes_of(world_size)
    sharders = get_default_hybrid_sharders(host_env())
    if spec is None:
        topology = Topology(world_size=world_size, compute_device=device)
        planner = EmbeddingShardingPlanner(topology=topology)
        plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    else:
        whole = module_plan([_Config], {"user": spec}, world_size, world_size, device)
        plan = ShardingPlan({"bag": whole})
    return DistributedModelParallel(
        model, device=torch.device(device), plan=plan, sharders=sharders
    )


def train(
    mode: str, spec: Spec | None, options: dict[str, bool], device: str = "cpu"
) -> dict[str, Any]:
    """Trains on this rank's batches, after one step of all ranks' unsharded."""
    model = Model(mode, device)
    _train_joined(model, 0, options)
    sharded = spread(model, spec, device)
    outputs, grads = [], []
    for step in range(1, 4):
        given = given_of(step, dist.get_rank(), **options)
        moved = (None if part is None else part.to(torch.device(device)) for part in given)
        loss, pooled = sharded(*moved)
        loss.backward()
        outputs.append(pooled.detach().cpu().numpy())
        grads.append(None if given[2] is None else given[2].grad.numpy())
    return {
        "outputs": outputs,
        "grads": grads,
        "rows": rows_of(sharded.module.bag.collection.tables()),
        "names": sorted(sharded.state_dict()),
        "exchanges": len(exchanges_of(sharded)),
    }


def _train_joined(model: Model, step: int, options: dict[str, bool]) -> list[Any]:
    """One step on all ranks' batches; the vectors and the gradients of weights, by rank."""
    world_size = dist.get_world_size()
    found = []
    given = [given_of(step, rank, **options) for rank in range(world_size)]
    keys = torch.cat([keys.flatten() for keys, _, _ in given])
    firsts = np.cumsum([0, *(keys.numel() for keys, _, _ in given)])
    offsets = [
        first + (torch.arange(len(keys)) * 3 if part is None else part)
        for (keys, part, _), first in zip(given, firsts, strict=False)
    ]
    weights = None
    if options["is_weighted"]:
        weights = torch.cat([weights.flatten() for _, _, weights in given])
    loss, pooled = model(keys, torch.cat(offsets), weights)
    (loss / world_size).backward()
    for part, (_, _, own) in zip(pooled.split([len(o) for o in offsets]), given, strict=True):
        grad = None if own is None else world_size * own.grad.numpy()
        found.append((part.detach().numpy(), grad))
    return found


def train_unsharded(mode: str, options: dict[str, bool], device: str = "cpu") -> dict[str, Any]:
    """The same on one process and the cpu, for the calling rank."""
    model = Model(mode, device)
    steps = [_train_joined(model, step, options)[dist.get_rank()] for step in range(4)][1:]
    return {
        "outputs": [pooled for pooled, _ in steps],
        "grads": [grad for _, grad in steps],
        "rows": rows_of({"user": model.bag.table}),
    }


def save_and_load(folder: str) -> dict[str, Any]:
    """Rows saved, and those that a new model has loaded."""
    options = {"is_weighted": False, "is_square": False}
    models = [spread(Model("sum"), ("row_wise",)) for _ in range(2)]
    models[0](*given_of(3, dist.get_rank(), **options))[0].backward()
    Saver().save(models[0], folder)
    Saver().load(models[1], folder)
    return {
        name: rows_of(model.module.bag.collection.tables())
        for name, model in zip(("saved", "loaded"), models, strict=True)
    }


KEYS = [4, 5, 6]
BAD_OFFSETS: dict[str, tuple[list[int], Any]] = {
    "with two dimensions of keys": ([3, 1], [0]),
    "none": ([3], None),
    "do not begin at 0": ([3], [1, 2]),
    "descend": ([3], [0, 2, 1]),
    "go too far": ([3], [0, 4]),
    "are negative": ([3], [0, -1]),
    "are floats": ([3], [0.0, 1.5]),
    "have two dimensions": ([3], [[0, 1]]),
}
"""Shapes of the keys, and offsets that do not fit them."""


def _error_of(call: Any) -> str:
    try:
        call()
    except (ValueError, TypeError, RecsdkError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misuse(name: str) -> list[str]:
    """What each rank raises when one is given bad offsets, and what the unsharded module does.

    Then the shape of what the model gives for good ones.
    """
    model = spread(Model("sum"), ("row_wise",))
    shape, offsets = BAD_OFFSETS[name]
    bad = torch.tensor(KEYS).view(shape), None if offsets is None else torch.tensor(offsets)
    good = torch.tensor(KEYS), torch.tensor([0, 1])
    found = [_error_of(lambda: model(*(bad if dist.get_rank() == 0 else good)))]
    found.append(_error_of(lambda: Model("sum")(*bad)))
    exchanges_of(model)[0].reset()
    return [*found, str(tuple(model(*good)[1].shape))]


class Two(nn.Module):
    """Two bags, looked up in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"optimizer": optim.SGD(lr=0.1)}
        self.one = HashEmbeddingBag(DIM, name="one", **options)
        self.other = HashEmbeddingBag(DIM, name="other", **options)

    def forward(self, order: list[str]) -> list[torch.Tensor]:
        return [getattr(self, name)(torch.tensor([KEYS])) + 0 for name in order]


def mix_up() -> str:
    """What ranks raise that look up two bags in another order."""
    world_size = dist.get_world_size()
    use_nodes_of(world_size)
    sharders = get_default_hybrid_sharders(host_env())
    topology = Topology(world_size=world_size, compute_device="cpu")
    model = Two()
    planner = EmbeddingShardingPlanner(topology=topology)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    sharded(["one", "other"])
    order = ["one", "other"][:: 1 if dist.get_rank() == 0 else -1]
    text = _error_of(lambda: sharded(order))
    exchanges_of(sharded)[0].reset()
    return text
