"""A sequence model on raw ids: after these items in this order, which ten are most likely next?

    torchrun --standalone --nproc-per-node 2 next_item.py --movielens FOLDER

or `python next_item.py` for one rank; without --movielens on a synthetic log. A recurrent network
reads one vector per item of the sequence and is trained to tell the next one from the others of the
batch; vectors of what was read and of what is scored come from one table.

Source of the model: Hidasi et al., "Session-based recommendations with recurrent neural networks",
ICLR 2016.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from interactions import (
    IdBatch,
    InBatchLoss,
    Int64s,
    Log,
    popularity_recall,
    read_movielens_log,
    recall,
    shuffled_batches,
    synthetic_log,
)
from running import CPU, Pipeline, joined, mean_over_ranks, run, spread
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from recsdk_pipeline.data import IdBags, Share
from recsdk_sharding import HashEmbeddingCollection, HashEmbeddingConfig

WIDTH = 32
LONGEST = 30
BATCH_SIZE = 64  # sequences, over all ranks


class NextItem(nn.Module):
    """Scores are products of what was read so far and of an item's vector."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        table = HashEmbeddingConfig(
            name="item",
            feature_names=["read", "scored"],
            embedding_dim=WIDTH,
            num_embeddings=100_000,
            init_fn=partial(nn.init.normal_, std=0.1),
        )
        self.ec = HashEmbeddingCollection(device=torch.device("meta"), tables=[table])
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.loss = InBatchLoss(log)

    def forward(self, batch: IdBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return (loss, (last states (B, D), vectors of scored items (N, D))).

        The loss is 0 in evaluation. A sequence without items has a state of zeros.
        """
        vectors = self.ec(batch.ids)
        read, scored = vectors["read"], vectors["scored"].values()
        lengths = read.lengths()
        if not int(lengths.sum()):
            states = torch.zeros(len(lengths), WIDTH)
            return self._nothing(scored), (states, scored.detach())
        sequences = read.values().split(lengths.tolist())
        outputs, _ = self.gru(pad_sequence(list(sequences), batch_first=True))
        last = outputs[torch.arange(len(lengths)), (lengths - 1).clamp(min=0)]
        last = (last * lengths.ne(0)[:, None]).detach()
        if not self.training:
            return self._nothing(scored), (last, scored.detach())
        within = torch.arange(outputs.shape[1]) < lengths[:, None]
        loss = self.loss(outputs[within] @ scored.T, batch.ids["scored"].values())
        return loss, (last, scored.detach())

    def _nothing(self, scored: torch.Tensor) -> torch.Tensor:
        """A loss of 0 that gives every parameter a gradient, as DDP wants it."""
        unused = sum((p.sum() for p in self.gru.parameters()), torch.zeros(()))
        return 0 * (scored.sum() + unused)


def _batch(read: list[Int64s], scored: list[Int64s]) -> IdBatch:
    bags = {"read": read, "scored": scored}
    return IdBatch.of({name: IdBags.of_lists([list(b) for b in bags[name]]) for name in bags})


def _batches(log: Log, epoch: int, share: Share) -> Iterator[IdBatch]:
    """A random stretch of each user's items: each is read, and its next one scored."""
    rng = np.random.default_rng(epoch)
    trained = log.trained()
    starts = [rng.integers(max(len(items) - LONGEST, 1)) for items in trained]
    parts = [
        items[start : start + LONGEST + 1] for items, start in zip(trained, starts, strict=True)
    ]
    for users in shuffled_batches(len(parts), BATCH_SIZE, epoch, share):
        yield _batch([parts[user][:-1] for user in users], [parts[user][1:] for user in users])


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens 100K")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--users", type=int, default=2000, help="of the synthetic log")
    args = parser.parse_args()
    log = read_movielens_log(args.movielens) if args.movielens else synthetic_log(args.users)
    with joined() as host_env:
        torch.manual_seed(0)
        model = NextItem(log)
        ddp_model, optimizer = spread(model, model.ec, host_env, row_lr=0.1, dense_lr=0.005)
        pipeline = Pipeline(ddp_model, optimizer, CPU, return_loss=True)
        share = Share(rank=host_env.rank, world_size=host_env.world_size)
        users = range(*share.bounds(0, len(log.users)))
        last_read = [log.items[user][:-1][-LONGEST:] for user in users]
        none: Int64s = np.empty(0, np.int64)
        items = log.catalogue()
        for epoch in range(args.epochs):
            ddp_model.train()
            steps = run(pipeline, _batches(log, epoch, share))
            loss = mean_over_ranks([loss.item() for _, loss in steps])
            if (epoch + 1) % 5 and epoch + 1 < args.epochs:
                continue
            ddp_model.eval()
            asked = [_batch(last_read, [none] * len(users)), _batch([none], [items])]
            ((states, _), _), ((_, candidates), _) = run(pipeline, iter(asked))
            reached = recall(log, states @ candidates.T, users)
            if host_env.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, recall@10 {reached:.4f}", flush=True)
        popular = popularity_recall(log, users)
        if host_env.rank == 0:
            print(f"recall@10 of the most popular items: {popular:.4f}")


if __name__ == "__main__":
    main()
