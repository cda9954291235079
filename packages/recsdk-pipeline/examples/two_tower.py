"""Two towers on raw ids: of all items, which ten are most likely next?

    torchrun --standalone --nproc-per-node 2 two_tower.py --movielens FOLDER

or `python two_tower.py` for one rank; without --movielens on a synthetic log. One tower reads the
user's id and latest items, the other an item's id; the two features of items share a table.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
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
from torchrec.modules.embedding_configs import PoolingType

from recsdk_pipeline.data import IdBags, Share
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

WIDTH = 32
LATEST = 10
BATCH_SIZE = 1024  # over all ranks
TEMPERATURE = 0.1


class TwoTower(nn.Module):
    """Scores are products of unit vectors: one of the user's side, one of the item's."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.ebc = HashEmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                HashEmbeddingBagConfig(
                    name=name,
                    feature_names=features,
                    embedding_dim=WIDTH,
                    num_embeddings=100_000,
                    pooling=PoolingType.MEAN,
                )
                for name, features in (("user", ["user"]), ("item", ["latest", "item"]))
            ],
        )
        self.user_tower = _tower(2 * WIDTH)
        self.item_tower = _tower(WIDTH)
        self.loss = InBatchLoss(log)

    def forward(self, batch: IdBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return (loss, (users (B, D), items (B, D))); the loss is 0 in evaluation."""
        vectors = self.ebc(batch.ids).to_dict()
        users = self.user_tower(torch.cat([vectors["user"], vectors["latest"]], dim=1))
        items = self.item_tower(vectors["item"])
        users, items = nn.functional.normalize(users), nn.functional.normalize(items)
        if not self.training or not len(users):
            return users.sum() * 0 + items.sum() * 0, (users.detach(), items.detach())
        loss = self.loss(users @ items.T / TEMPERATURE, batch.ids["item"].values())
        return loss, (users.detach(), items.detach())


def _tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, WIDTH))


class Samples:
    """Every item of training with what its user took before it."""

    def __init__(self, log: Log) -> None:
        trained = log.trained()
        self._log = log
        self._trained = trained
        self._of_user = np.repeat(np.arange(len(trained)), [len(items) for items in trained])
        self._place = np.concatenate([np.arange(len(items)) for items in trained])
        self.count = len(self._place)

    def batch(self, numbers: Int64s) -> IdBatch:
        """The samples of these numbers."""
        pairs = [(self._of_user[number], self._place[number]) for number in numbers]
        latest = [self._trained[user][max(place - LATEST, 0) : place] for user, place in pairs]
        items = np.array([self._trained[user][place] for user, place in pairs], np.int64)
        users = self._log.users[self._of_user[numbers]]
        return _batch(users, latest, items)

    def batches(self, epoch: int, share: Share) -> Iterator[IdBatch]:
        """This rank's part of each step of an epoch."""
        for numbers in shuffled_batches(self.count, BATCH_SIZE, epoch, share):
            yield self.batch(numbers)


def _batch(users: Int64s, latest: list[Int64s], items: Int64s | None) -> IdBatch:
    single = IdBags.single
    empty = IdBags.of_lists([[]] * len(users))
    bags = {"user": single(users), "latest": IdBags.of_lists([list(bag) for bag in latest])}
    return IdBatch.of({**bags, "item": empty if items is None else single(items)})


def _catalogue_batch(items: Int64s) -> IdBatch:
    empty = IdBags.of_lists([[]] * len(items))
    return IdBatch.of({"user": empty, "latest": empty, "item": IdBags.single(items)})


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens 100K")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--users", type=int, default=2000, help="of the synthetic log")
    args = parser.parse_args()
    log = read_movielens_log(args.movielens) if args.movielens else synthetic_log(args.users)
    with joined() as host_env:
        torch.manual_seed(0)
        model = TwoTower(log)
        ddp_model, optimizer = spread(model, model.ebc, host_env, row_lr=0.1, dense_lr=0.002)
        pipeline = Pipeline(ddp_model, optimizer, CPU, return_loss=True)
        share = Share(rank=host_env.rank, world_size=host_env.world_size)
        samples, users = Samples(log), range(*share.bounds(0, len(log.users)))
        latest = [log.items[user][:-1][-LATEST:] for user in users]
        for epoch in range(args.epochs):
            ddp_model.train()
            steps = run(pipeline, samples.batches(epoch, share))
            loss = mean_over_ranks([loss.item() for _, loss in steps])
            ddp_model.eval()
            asked = [_batch(log.users[users], latest, None), _catalogue_batch(log.catalogue())]
            ((queries, _), _), ((_, candidates), _) = run(pipeline, iter(asked))
            reached = recall(log, queries @ candidates.T, users)
            if host_env.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, recall@10 {reached:.4f}", flush=True)
        popular = popularity_recall(log, users)
        if host_env.rank == 0:
            print(f"recall@10 of the most popular items: {popular:.4f}")


if __name__ == "__main__":
    main()
