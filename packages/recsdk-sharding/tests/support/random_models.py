"""Collections of any shape, plan and batches, trained sharded on ranks and on one process.

Shape letters: B samples, G bags of a feature, N keys, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from plans import Spec, module_plan
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import CommOp, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import EDGE_KEYS, host_env, rows_of, use_nodes_of

import recsdk_core
from recsdk_core import Admit, Default
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    get_default_hybrid_sharders,
)
from recsdk_sharding.placement.ranks import RankRule

OPTIMIZERS: dict[str, tuple[type, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3}),
}
NUM_EMBEDDINGS = 50


def initializer() -> recsdk_core.init.Uniform:
    """How the new rows of all tables get their values: torchrec's way."""
    width = 1 / math.sqrt(NUM_EMBEDDINGS)
    return recsdk_core.init.Uniform(low=-width, high=width)


@dataclass(frozen=True)
class TableSpec:
    """One table."""

    dim: int
    features: tuple[str, ...]
    is_mean: bool = False
    count: int = 1
    """At which of its occurrences an id gets a row; before it reads its initial row."""

    @property
    def rules(self) -> dict[str, Any]:
        """Further arguments of its config."""
        if self.count == 1:
            return {}
        return {"admission": Admit.count(self.count), "default": Default.initial_row()}


@dataclass(frozen=True)
class Case:
    """A collection, how it is sharded, and what it is trained with."""

    tables: tuple[TableSpec, ...]
    specs: tuple[Spec, ...]
    sizes: tuple[tuple[int, ...], ...]
    """Samples of each step and rank."""
    seed: int = 0
    local_size: int | None = None
    is_sequence: bool = False
    is_weighted: bool = False
    drops_duplicates: bool = False
    batches_vary: bool = False
    codec: str | None = None
    learns_weights: bool = False
    """Whether the weights of ids require a gradient."""
    optimizer: str = "adagrad"
    """One of OPTIMIZERS."""
    rank_rule: RankRule = "virtual_shard"
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        return len(self.sizes[0])

    @property
    def feature_names(self) -> list[str]:
        return sorted({name for table in self.tables for name in table.features})

    def plan(self) -> dict[str, Spec]:
        return {f"t{index}": spec for index, spec in enumerate(self.specs)}

    def replicated(self) -> list[str]:
        return [name for name, spec in self.plan().items() if spec[0] == "data_parallel"]


@dataclass(frozen=True)
class Bags:
    """One feature of one batch."""

    keys: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray
    bag_of_sample: np.ndarray


def has_one_key_each(case: Case, step: int, rank: int) -> bool:
    """Whether each bag of a rank's batch has one key: its lengths do not travel."""
    return bool(np.random.default_rng([case.seed, step, rank, 1]).random() < 0.3)


def bags_of(case: Case, step: int, rank: int) -> dict[str, Bags]:
    """The batch of a rank."""
    size = case.sizes[step][rank]
    rng = np.random.default_rng([case.seed, step, rank])
    found = {}
    for name in case.feature_names:
        num_bags = int(rng.integers(1, 4)) if case.batches_vary else size
        lengths = rng.integers(0, 4, num_bags)
        alone = rng.random()  # what one feature has, whatever others have
        if has_one_key_each(case, step, rank) or alone < 0.2:
            lengths[:] = 1
        elif alone > 0.9:
            lengths[:] = 0
        # gradients of means of weights that add up to almost 0 lose too much
        lowest = 0.5 if case.learns_weights or case.optimizer != "adagrad" else -1
        found[name] = filled(case, rng, lengths, size, lowest)
    return found


def filled(
    case: Case, rng: np.random.Generator, lengths: np.ndarray, size: int, lowest: float
) -> Bags:
    """Bags of these lengths for so many samples, with ids and with weights from `lowest` to 2."""
    keys = rng.choice(np.array(EDGE_KEYS[:5] + list(range(100, 110))), int(lengths.sum()))
    weights = rng.uniform(lowest, 2, len(keys)).astype(np.float32)
    bags = rng.integers(0, len(lengths), size) if case.batches_vary else np.arange(size)
    return Bags(keys, lengths, weights, bags)


def joined(parts: Sequence[dict[str, Bags]]) -> dict[str, Bags]:
    """The batches of all ranks as one."""
    whole = {}
    for name in parts[0]:
        bags = [part[name] for part in parts]
        firsts = np.cumsum([0, *(len(each.lengths) for each in bags)])
        samples = [each.bag_of_sample + first for each, first in zip(bags, firsts, strict=False)]
        whole[name] = Bags(
            np.concatenate([each.keys for each in bags]),
            np.concatenate([each.lengths for each in bags]),
            np.concatenate([each.weights for each in bags]),
            np.concatenate(samples),
        )
    return whole


def kjt_of(case: Case, bags: dict[str, Bags]) -> KeyedJaggedTensor:
    """A batch as torchrec has it."""
    values = list(bags.values())
    options: dict[str, Any] = {}
    if case.batches_vary:
        options["stride_per_key_per_rank"] = [[len(each.lengths)] for each in values]
        samples = np.stack([each.bag_of_sample for each in values])
        options["inverse_indices"] = (list(bags), torch.from_numpy(samples))
    weights = torch.from_numpy(np.concatenate([each.weights for each in values]))
    lengths = np.concatenate([each.lengths for each in values])
    if len(weights) % 2:  # one rank's are as wide as another's or not
        lengths = lengths.astype(np.int32)
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.from_numpy(np.concatenate([each.keys for each in values])),
        lengths=torch.from_numpy(lengths),
        weights=weights.requires_grad_(case.learns_weights) if case.is_weighted else None,
        **options,
    )


def weight_grads(case: Case, batch: KeyedJaggedTensor, world_size: int) -> dict[str, Any]:
    """The gradients of weights by feature, of the mean loss over ranks."""
    if not case.learns_weights:
        return {}
    grad = batch.weights().grad
    assert grad is not None
    parts = (grad / world_size).split(batch.length_per_key())
    return {name: part.numpy() for name, part in zip(batch.keys(), parts, strict=True)}


def new_module(case: Case, device: str) -> nn.Module:
    """The unsharded collection with its optimizer."""
    made: Any
    if case.is_sequence:
        configs = [
            HashEmbeddingConfig(
                name=f"t{index}",
                embedding_dim=table.dim,
                num_embeddings=NUM_EMBEDDINGS,
                feature_names=list(table.features),
                seed=index,
                **table.rules,
            )
            for index, table in enumerate(case.tables)
        ]
        made = HashEmbeddingCollection(configs, torch.device(device), need_indices=True)
    else:
        pooled = [
            HashEmbeddingBagConfig(
                name=f"t{index}",
                embedding_dim=table.dim,
                num_embeddings=NUM_EMBEDDINGS,
                feature_names=list(table.features),
                pooling=PoolingType.MEAN if table.is_mean else PoolingType.SUM,
                seed=index,
                **table.rules,
            )
            for index, table in enumerate(case.tables)
        ]
        made = HashEmbeddingBagCollection(
            pooled, is_weighted=case.is_weighted, device=torch.device(device)
        )
    optimizer, arguments = OPTIMIZERS[case.optimizer]
    _apply_optimizer_in_backward(optimizer, made.parameters(), dict(arguments))
    return made


def shard(module: nn.Module, case: Case) -> Any:
    """The sharded collection."""
    local_size = case.local_size or case.world_size
    use_nodes_of(local_size)
    configs = module.embedding_configs() if case.is_sequence else module.embedding_bag_configs()
    plan = module_plan(configs, case.plan(), case.world_size, local_size, case.device)
    sharders = get_default_hybrid_sharders(
        host_env(),
        case.rank_rule,
        qcomm_codecs_registry=codecs_of(case.codec),
        use_index_dedup=case.drops_duplicates,
    )
    model = DistributedModelParallel(
        nn.Sequential(module),
        device=torch.device(case.device),
        plan=ShardingPlan({"0": plan}),
        sharders=sharders,
    )
    return model.module[0]


def codecs_of(name: str | None) -> Any:
    """torchrec's codecs for all operations."""
    if name is None:
        return None
    kind = CommType[name]
    sizes = {"mx4_quantize_dim": 24, "mx4_quantize_dim_bwd": 64} if name == "MX4" else {}
    codecs = get_qcomm_codecs(QCommsConfig(kind, kind, **sizes))
    operations = (
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
    )
    return {operation.name: codecs for operation in operations}


def loss_of(outputs: Any, is_sequence: bool) -> torch.Tensor:
    """A loss in which every number counts."""
    if not is_sequence:
        return ((outputs.values() - 0.3) ** 2).sum()
    return sum(((jagged.values() - 0.3) ** 2).sum() for jagged in outputs.values())


def plain(outputs: Any, is_sequence: bool) -> dict[str, Any]:
    """Outputs as arrays."""
    if not is_sequence:
        values = outputs.values().detach().cpu().numpy()
        assert outputs.keys() == list(outputs.to_dict()) or not len(values)
        return {"keys": outputs.keys(), "values": values}
    return {
        name: {
            "values": jagged.values().detach().cpu().numpy(),
            "lengths": jagged.lengths().cpu().numpy(),
            "ids": jagged.weights().cpu().numpy(),
        }
        for name, jagged in outputs.items()
    }


def train_sharded(case: Case) -> dict[str, Any]:
    """Trains on this rank's batches."""
    module = shard(new_module(case, "meta"), case)
    outputs, grads = [], []
    for step in range(len(case.sizes)):
        batch = kjt_of(case, bags_of(case, step, dist.get_rank()))
        result = module(batch.to(torch.device(case.device))).wait()
        loss_of(result, case.is_sequence).backward()
        outputs.append(plain(result, case.is_sequence))
        grads.append(weight_grads(case, batch, case.world_size))
    return {
        "outputs": outputs,
        "rows": rows_of(module.tables()),
        "stats": module.stats(),
        "weight_grads": grads,
    }


def train_unsharded(case: Case) -> dict[str, Any]:
    """Trains the unsharded module on the joined batches."""
    module = new_module(case, "cpu")
    outputs, grads = [], []
    for step in range(len(case.sizes)):
        parts = [bags_of(case, step, rank) for rank in range(case.world_size)]
        batch = kjt_of(case, joined(parts))
        result = module(batch)
        (loss_of(result, case.is_sequence) / case.world_size).backward()
        outputs.append(plain(result, case.is_sequence))
        grads.append(weight_grads(case, batch, 1))
    return {"outputs": outputs, "rows": rows_of(module.tables()), "weight_grads": grads}
