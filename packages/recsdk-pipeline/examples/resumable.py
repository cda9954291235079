"""A job that goes on where it was when a rank dies, or when it is started with other ranks.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restart may hang, see docs/howto/operate.md
torchrun --standalone --nproc-per-node 2 --max-restarts 3 resumable.py FOLDER

DIE_AT_STEP=25 kills a rank there, the first time. The run ends with the same loss as one that was
never stopped: the checkpoint has rows, layers and both optimizers, and batch n is a function of n.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from running import CPU, Pipeline, joined, mean_over_ranks, spread
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data import ClickBatch, Share
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

STEPS, SAVE_EVERY, BATCH_SIZE = 40, 10, 128  # a batch is of all ranks


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        user = HashEmbeddingBagConfig(1000, 8, name="user")
        self.tables = HashEmbeddingBagCollection([user], device=torch.device("meta"))
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.tables(batch.sparse).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def batch_of(step: int, share: Share) -> ClickBatch:
    """This rank's part of a step's batch."""
    random = torch.Generator().manual_seed(step)
    users = torch.randint(0, 500, (BATCH_SIZE,), generator=random) * 7919**4 - 2**61
    users = users[slice(*share.bounds(0, BATCH_SIZE))]
    ids = KeyedJaggedTensor(["user"], users, lengths=torch.ones_like(users))
    return ClickBatch(torch.empty(len(users), 0), ids, (users % 2).float())


def main() -> None:
    folder = Path(sys.argv[1])
    with joined() as host_env:
        torch.manual_seed(0)
        model = ClickModel()
        ddp_model, optimizer = spread(model, model.tables, host_env, row_lr=0.1, dense_lr=0.01)
        state = {"model": ddp_model, "optimizer": optimizer}
        # The last whole checkpoint, of which torch writes `.metadata` last.
        start = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
        if start:
            optimizer.init_state()  # Adam makes its state in the first step, else
            dcp.load(state, checkpoint_id=folder / str(start))
        pipeline = Pipeline(ddp_model, optimizer, CPU, return_loss=True)
        share = Share(rank=host_env.rank, world_size=host_env.world_size)
        batches = (batch_of(step, share) for step in range(start, STEPS))
        for step in range(start + 1, STEPS + 1):
            _, loss = pipeline.progress(batches)
            if step % SAVE_EVERY == 0:
                dcp.save(state, checkpoint_id=folder / str(step))
            if os.environ.get("DIE_AT_STEP") == str(step) and not start and share.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        mean = mean_over_ranks([loss.item()])
        if share.rank == 0:
            print(f"from step {start} to {STEPS}: loss {mean:.12f}")


if __name__ == "__main__":
    main()
