"""What the tests of weights run on every rank; each function returns plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from on_ranks import own_batches
from plans import module_plan
from processors import processed
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from worlds import (
    Setup,
    host_env,
    new_model,
    optimizer_of,
    shard,
    unwrapped,
    use_nodes_of,
)

from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    get_default_hybrid_sharders,
)
from recsdk_sharding.exchange import PeerError

NUM_IDS = 20
DIM = 4
NUM_STEPS = 3


def gradients(setup: Setup, learning: tuple[int, ...]) -> Any:
    """The gradient of this rank's weights, if it is among those that want one."""
    model = shard(new_model(setup, "meta"), setup)
    (batch,) = own_batches([[5, 4, 3]], weighted=True)
    weights = batch.sparse.weights().requires_grad_(dist.get_rank() in learning)
    model(batch)[0].backward()
    return None if weights.grad is None else weights.grad.numpy()


def gradients_of_frozen_tables(setup: Setup) -> dict[str, Any]:
    """The gradient of this rank's weights, with tables that train and with frozen ones."""
    found = {}
    for name in ("frozen", "trained"):
        model = shard(new_model(setup, "meta"), setup)
        (batch,) = own_batches([[5, 4, 3]], weighted=True)
        weights = batch.sparse.weights().requires_grad_()
        if name == "frozen":
            unwrapped(model).ebc.requires_grad_(False)
        unwrapped(model).ebc(batch.sparse).values().square().sum().backward()
        found[name] = weights.grad.numpy()
    return found


def collection(pooling: PoolingType, device: str = "meta") -> HashEmbeddingBagCollection:
    """One table of two features."""
    config = HashEmbeddingBagConfig(
        name="t",
        embedding_dim=DIM,
        num_embeddings=NUM_IDS,
        feature_names=["a", "b"],
        pooling=pooling,
    )
    made = HashEmbeddingBagCollection([config], is_weighted=True, device=torch.device(device))
    _apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.5})
    return made


class Pooling(nn.Module):
    """A model that gives a collection's vectors, as the tensor that DistributedDataParallel needs
    to find its parameters' gradients by."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.ebc = collection

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(sparse).values()


def spread(module: nn.Module, kind: str = "row_wise") -> DistributedModelParallel:
    """A model of the sharded module alone."""
    world_size = dist.get_world_size()
    use_nodes_of(world_size)
    spec = (kind, 0) if kind == "table_wise" else (kind,)
    inner = getattr(module, "_embedding_bag_collection", module)
    plan = module_plan(inner.embedding_bag_configs(), {"t": spec}, world_size, world_size)
    return DistributedModelParallel(
        Pooling(module),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=get_default_hybrid_sharders(host_env()),
    )


def refuse_semi_sync(setup: Setup) -> str:
    """What torchrec's semi-synchronous pipeline says of processors with parameters."""
    model = shard(new_model(setup, "meta"), setup)
    pipeline = TrainPipelineSemiSync(model, optimizer_of(model, 0.1), model.device)
    try:
        pipeline.progress(iter(own_batches([[3, 3]], weighted=False)))
    except ValueError as error:
        return str(error)
    return "no error"


def mean_of_nothing() -> dict[str, Any]:
    """A mean over weights that add up to 0, and its gradient."""
    model = spread(collection(PoolingType.MEAN))
    weights = torch.tensor([1.0, -1.0, 0.0]).requires_grad_()
    sparse = KeyedJaggedTensor(["a", "b"], torch.tensor([3, 4, 5]), weights, torch.tensor([2, 1]))
    pooled = model(sparse)
    pooled.square().sum().backward()
    return {"pooled": pooled.detach().numpy(), "grad": weights.grad.numpy()}


class Rewriting(FeatureProcessor):
    """Gives what it was made to give."""

    def __init__(self, **made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        given = {"values": features.values(), "lengths": features.lengths(), **self.made}
        return JaggedTensor(**given)


def refusals() -> list[str]:
    """The messages for processors that do what they may not."""
    messages = []
    for made in (
        {"values": torch.tensor([1, 2]), "weights": torch.ones(2)},
        {},
        {"weights": torch.ones(3)},
    ):
        processors = {"a": Rewriting(**made), "b": Rewriting(**made)}
        model = spread(processed(collection(PoolingType.SUM), processors))
        sparse = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([2, 2]))
        try:
            model(sparse)
        except ValueError as error:
            messages.append(str(error))
    return messages


class Failing(FeatureProcessor):
    """Raises while it is told to."""

    fails = False

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        if self.fails:
            raise ArithmeticError("no weights today")
        return JaggedTensor(
            values=features.values(),
            lengths=features.lengths(),
            weights=torch.ones(len(features.values())),
        )


def fail_in_a_processor(bad_rank: int) -> dict[str, Any]:
    """What each rank raises when one's processor does, and what it trains afterwards."""
    processor = Failing()
    model = spread(processed(collection(PoolingType.SUM), {"a": processor, "b": processor}))
    sparse = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([2, 2]))
    model(sparse).sum().backward()
    processor.fails = dist.get_rank() == bad_rank
    try:
        model(sparse)
        text, rank, step = "no error", None, None
    except (ArithmeticError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
        rank, step = getattr(error, "rank", None), getattr(error, "step", None)
    processor.fails = False
    model(sparse).sum().backward()
    counts = {table.update_count for table in collection_of_model(model).tables().values()}
    return {"text": text, "rank": rank, "step": step, "counts": counts}


def variable_batches(is_dictionary: bool) -> dict[str, Any]:
    """The result of a batch whose features have fewer bags than samples, and of the whole one.

    `is_dictionary`: with a processor for each feature.
    """
    found = {}
    sample = torch.tensor([0, 1, 1, 0])
    bags = [[7, 8, 9], [3]]
    expanded = [bags[i] for i in sample.tolist()]
    for name in ("varying", "expanded"):
        processor: Any = PositionWeightedModuleCollection({"a": 3, "b": 3})
        if is_dictionary:
            processor = {feature: PositionWeightedModule(3) for feature in "ab"}
        model = spread(processed(collection(PoolingType.MEAN), processor))
        for _, parameter in model.module.ebc._feature_processors.named_parameters():
            parameter.data.copy_(torch.arange(1.0, 4))
        options: dict[str, Any] = {}
        first = bags if name == "varying" else expanded
        if name == "varying":
            samples = torch.stack([sample, torch.arange(4)])
            options = {"inverse_indices": (["a", "b"], samples)}
            options["stride_per_key_per_rank"] = [[2], [4]]
        ids = [*first, [1], [], [2, 2], []]
        sparse = KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor([key for bag in ids for key in bag]),
            lengths=torch.tensor([len(bag) for bag in ids]),
            **options,
        )
        model(sparse).sum().backward()
        found[name] = model(sparse).detach().numpy()
    return found


def beside_torchrec() -> dict[str, Any]:
    """The same training of our tables and of torchrec's, both behind position weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = np.random.default_rng(0).normal(size=(NUM_IDS, DIM)).astype(np.float32)
    stock_table = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=NUM_IDS, feature_names=["a", "b"]
    )
    stock = EmbeddingBagCollection([stock_table], is_weighted=True, device=torch.device("meta"))
    _apply_optimizer_in_backward(torch.optim.SGD, stock.parameters(), {"lr": 0.5})
    found: dict[str, Any] = {}
    for prefix, inner in (("", collection(PoolingType.SUM)), ("stock ", stock)):
        positions = PositionWeightedModuleCollection({"a": 3, "b": 3})
        model = spread(processed(inner, positions), "table_wise")
        tables = collection_of_model(model)
        if prefix:
            for value in model.state_dict().values():
                for part in getattr(value, "local_shards", list)():
                    part.tensor.copy_(torch.from_numpy(start))
        elif tables.tables():
            tables.tables()["t"].upsert(np.arange(NUM_IDS), start)
        dense = [p for n, p in model.named_parameters() if "position" in n]
        optimizer = torch.optim.SGD(dense, lr=0.1)
        outputs = {}
        for step in range(NUM_STEPS):
            rng = np.random.default_rng([step, rank])
            lengths = torch.from_numpy(rng.integers(0, 4, 8))
            ids = torch.from_numpy(rng.integers(0, NUM_IDS, int(lengths.sum())))
            out = model(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            outputs[f"{step} {rank}"] = out.detach().numpy()
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, outputs)
        found[f"{prefix}outputs"] = {k: v for part in every for k, v in part.items()}
        found[f"{prefix}weights"] = {
            str(i): parameter.detach().numpy().copy() for i, parameter in enumerate(dense)
        }
        found[f"{prefix}rows"] = _rows(model, tables, is_stock=bool(prefix))
    return found


def collection_of_model(model: DistributedModelParallel) -> Any:
    """The sharded collection behind the processors."""
    return model.module.ebc._embedding_bag_collection


def _rows(model: DistributedModelParallel, tables: Any, *, is_stock: bool) -> dict[int, Any]:
    """The rows of all ranks by id."""
    own: dict[int, Any] = {}
    if is_stock:
        for value in model.state_dict().values():
            for part in getattr(value, "local_shards", list)():
                own.update(enumerate(part.tensor.numpy().copy()))
    else:
        for table in tables.tables().values():
            for batch in table.export():
                own.update(zip(batch.keys.tolist(), batch.weights, strict=True))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {key: row for part in every for key, row in part.items()}
