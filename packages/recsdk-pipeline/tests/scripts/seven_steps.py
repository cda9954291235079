"""Trains a small model on raw ids, in the seven steps of the documentation.

torchrun --standalone --nproc-per-node 2 seven_steps.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    get_default_hybrid_sharders,
)

BATCH_SIZE = 64
NUM_BATCHES = 50
WIDTH = 8
LEARNING_RATE = 0.1
EPS = 1e-8


# Step 1: a batch that pipelines can move, and a data set of batches.
@dataclass
class Batch(Pipelineable):
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            ids=self.ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        return Batch(ids=self.ids.pin_memory(), labels=self.labels.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.ids.record_stream(stream)
        self.labels.record_stream(stream)


class Clicks(IterableDataset):
    """Users click on items of their own parity; ids are arbitrary 64-bit numbers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self._rank)
        for _ in range(NUM_BATCHES):
            numbers = torch.randint(1, 100, (2, BATCH_SIZE), generator=generator)
            labels = (numbers[0] % 2 == numbers[1] % 2).float()
            ids = numbers * -0x61C8864680B583EB  # of either sign
            lengths = torch.ones(2 * BATCH_SIZE, dtype=torch.int64)
            yield Batch(KeyedJaggedTensor(["user", "item"], ids.flatten(), lengths=lengths), labels)


# Step 3: a model whose forward returns (loss, output).
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = HashEmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                HashEmbeddingBagConfig(
                    name=f"{feature}_table",
                    embedding_dim=WIDTH,
                    num_embeddings=1000,
                    feature_names=[feature],
                )
                for feature in ("user", "item")
            ],
        )
        self.over = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.over(self.ebc(batch.ids).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def main() -> None:
    # Step 2: the device, the process groups.
    device = torch.device("cpu")
    dist.init_process_group(backend="gloo")
    host_gp = dist.new_group(backend="gloo")
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    host_env = ShardingEnv(world_size=world_size, rank=rank, pg=host_gp)

    torch.manual_seed(0)
    model = Model()

    # Step 4: the optimizer of the rows, run in backward.
    kwargs = {"lr": LEARNING_RATE, "eps": EPS}
    apply_optimizer_in_backward(
        torch.optim.Adagrad, model.ebc.parameters(), optimizer_kwargs=kwargs
    )

    # Step 5: spread the tables over the ranks.
    sharders = get_default_hybrid_sharders(host_env=host_env)
    constraints = {
        name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
        for name in ("user_table", "item_table")
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device.type),
        constraints=constraints,
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    ddp_model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)

    # Step 6: one optimizer for rows and dense layers.
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(ddp_model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=LEARNING_RATE, eps=EPS),
    )
    optimizer = CombinedOptimizer([ddp_model.fused_optimizer, dense_optimizer])

    # Step 7: train.
    pipeline = HybridTrainPipelineSparseDist(
        ddp_model, optimizer, device, execute_all_batches=True, return_loss=True
    )
    for epoch in range(3):
        iterator = iter(DataLoader(Clicks(rank), batch_size=None, num_workers=1))
        losses = []
        while True:
            try:
                _, loss = pipeline.progress(iterator)
            except StopIteration:
                break
            losses.append(loss.item())
        mean_loss = sum(losses) / len(losses)
        print(f"rank {rank} epoch {epoch}: {len(losses)} batches, loss {mean_loss:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
