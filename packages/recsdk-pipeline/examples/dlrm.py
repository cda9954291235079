"""torchrec's DLRM on raw ids: who likes which film?

    torchrun --standalone --nproc-per-node 2 dlrm.py --movielens FOLDER

or `python dlrm.py` for one rank; without --movielens on a synthetic click stream. The only change
to the stock model is the collection of tables that it is given.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import torch
from running import CPU, Pipeline, joined, mean_over_ranks, run, spread
from torch import nn
from torchmetrics.classification import BinaryAUROC
from torchrec.models.dlrm import DLRM

from recsdk_pipeline.data import ClickBatch, ClickData, Share, SyntheticClicks, read_movielens
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

WIDTH = 16
BATCH_SIZE = 512  # over all ranks


class ClickModel(nn.Module):
    """DLRM with its loss, as pipelines want it."""

    def __init__(self, data: ClickData) -> None:
        super().__init__()
        tables = [
            HashEmbeddingBagConfig(
                name=name, feature_names=[name], embedding_dim=WIDTH, num_embeddings=100_000
            )
            for name in data.features
        ]
        self.dlrm = DLRM(
            HashEmbeddingBagCollection(device=torch.device("meta"), tables=tables),
            dense_in_features=data.num_dense,
            dense_arch_layer_sizes=[64, WIDTH],
            over_arch_layer_sizes=[64, 1],
        )

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return (loss, (probabilities (B,), labels (B,)))."""
        logits = self.dlrm(batch.dense, batch.sparse).squeeze(1)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, reduction="sum"
        )
        loss = total / max(len(batch), 1)  # a rank's part of the last step may be empty
        return loss, (torch.sigmoid(logits.detach()), batch.labels)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--movielens", type=Path, help="folder of MovieLens 100K")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, help="fewer examples than there are")
    args = parser.parse_args()
    data: ClickData
    if args.movielens:
        data = read_movielens(args.movielens, most=args.examples)
    else:
        data = SyntheticClicks(num_train=args.examples or 200_000, num_held_out=20_000)
    with joined() as host_env:
        torch.manual_seed(0)
        model = ClickModel(data)
        tables = model.dlrm.sparse_arch.embedding_bag_collection
        ddp_model, optimizer = spread(model, tables, host_env, row_lr=0.05, dense_lr=0.001)
        pipeline = Pipeline(ddp_model, optimizer, CPU, return_loss=True)
        share = Share(rank=host_env.rank, world_size=host_env.world_size)
        for epoch in range(args.epochs):
            ddp_model.train()
            steps = run(pipeline, data.train(epoch=epoch, batch_size=BATCH_SIZE, share=share))
            loss = mean_over_ranks([loss.item() for _, loss in steps])
            ddp_model.eval()
            auc = BinaryAUROC()  # gathers from all ranks
            for (scores, labels), _ in run(pipeline, data.held_out(batch_size=4096, share=share)):
                auc.update(scores, labels.int())
            held_out = float(auc.compute())
            if host_env.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, held-out AUC {held_out:.4f}", flush=True)


if __name__ == "__main__":
    main()
