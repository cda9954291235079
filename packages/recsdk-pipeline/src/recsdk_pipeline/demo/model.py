"""The demo's DLRM.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", arXiv:1906.00091; its dense parts are torchrec's.

Shapes: B examples, F features, D row width, C dense columns.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data.batch import ClickBatch
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

ROW_WIDTH = 16
PLANNED_ROWS = 100_000
DENSE_LAYERS = (64,)
OVER_LAYERS = (64,)


class HashedIds(nn.Module):
    """One vector per feature and example: the mean of the rows of its ids."""

    def __init__(self, features: tuple[str, ...], *, seed: int) -> None:
        super().__init__()
        self._num_features = len(features)
        self.ebc = HashEmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                HashEmbeddingBagConfig(
                    name=feature,
                    feature_names=[feature],
                    embedding_dim=ROW_WIDTH,
                    num_embeddings=PLANNED_ROWS,
                    pooling=PoolingType.MEAN,
                    seed=seed,
                )
                for feature in features
            ],
        )

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return (B, F, D)."""
        pooled: torch.Tensor = self.ebc(sparse).values()
        return pooled.view(len(pooled), self._num_features, ROW_WIDTH)


class ConstantIds(nn.Module):
    """What is left of `HashedIds` if every id is the same one: a vector per feature."""

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(len(features), ROW_WIDTH).uniform_(-0.05, 0.05))

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return (B, F, D): zeros for empty bags."""
        has_ids = sparse.lengths().view(len(self.rows), -1).t().ne(0)
        vectors: torch.Tensor = has_ids.unsqueeze(2) * self.rows
        return vectors


class Dlrm(nn.Module):
    """Pairwise products of the features' vectors and the dense input's, under an MLP."""

    def __init__(self, vectors: nn.Module, *, num_features: int, num_dense: int) -> None:
        super().__init__()
        self.vectors = vectors
        self.dense = DenseArch(num_dense, [*DENSE_LAYERS, ROW_WIDTH])
        self.interaction = InteractionArch(num_features)
        num_pairs = num_features * (num_features + 1) // 2
        self.over = OverArch(ROW_WIDTH + num_pairs, [*OVER_LAYERS, 1])

    def forward(self, batch: ClickBatch) -> torch.Tensor:
        """Return the logits (B,)."""
        dense = self.dense(batch.dense)
        logits: torch.Tensor = self.over(self.interaction(dense, self.vectors(batch.sparse)))
        return logits.squeeze(1)


class ClickModels(nn.Module):
    """One or more models of the same clicks, trained side by side."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(
        self, batch: ClickBatch
    ) -> tuple[torch.Tensor, tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Return (losses, (probabilities by model, labels)); a loss is the mean over B."""
        losses, probabilities = [], {}
        for name, model in self.models.items():
            logits = model(batch)
            losses.append(_mean_loss(logits, batch.labels))
            probabilities[name] = torch.sigmoid(logits.detach())
        return torch.stack(losses), (probabilities, batch.labels)


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return total / max(len(labels), 1)  # a rank's part of a step may be empty
