"""Feature processors: what makes the weights of ids.

Shape letters: B bags, N ids of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

LONGEST = 8


class Attention(FeatureProcessor):
    """Weighs each id by the softmax, over its bag, of a parameter of its position."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.empty(LONGEST, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.score.copy_(torch.linspace(-1, 1, LONGEST))

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        _, position_N = places(features.lengths(), len(features.values()))
        # A product, since the gradient of looking positions up is added atomically on Ascend.
        is_at_NP = position_N[:, None] == torch.arange(LONGEST, device=position_N.device)
        score_N = (is_at_NP.to(self.score.dtype) @ self.score).exp()
        is_in_BN = in_bags(features.lengths())
        total_N = (is_in_BN @ score_N) @ is_in_BN
        return JaggedTensor(
            values=features.values(), lengths=features.lengths(), weights=score_N / total_N
        )


class Counting(FeatureProcessor):
    """Has no parameter: weighs each id by one over its position."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        _, position_N = places(features.lengths(), len(features.values()))
        return JaggedTensor(
            values=features.values(), lengths=features.lengths(), weights=1 / (1 + position_N)
        )


class Backwards(FeatureProcessorsCollection):
    """Scales the weights of all features, and gives the features in another order."""

    def __init__(self, inner: FeatureProcessorsCollection, device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((1,), 0.5, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(0.5)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        made = self.inner(features)
        order = list(reversed(range(len(made.keys()))))
        values = made.values().split(made.length_per_key())
        weights = (made.weights() * self.scale).split(made.length_per_key())
        lengths = made.lengths().split(made.stride_per_key())
        return KeyedJaggedTensor(
            keys=[made.keys()[i] for i in order],
            values=torch.cat([values[i] for i in order]),
            weights=torch.cat([weights[i] for i in order]),
            lengths=torch.cat([lengths[i] for i in order]),
        )


def in_bags(lengths_B: torch.Tensor) -> torch.Tensor:
    """1 where a bag has an id, else 0, float32 (B, N).

    A product with it adds up bags, forward and backward, without atomic operations.
    """
    bag_N = torch.repeat_interleave(lengths_B)
    bag_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    return (bag_B1 == bag_N).to(torch.float32)


def places(lengths: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bag of each id, and its position there."""
    bag_N = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return bag_N, torch.arange(num_ids, device=lengths.device) - starts[bag_N]


def _positions(names: Sequence[str], device: torch.device) -> PositionWeightedModuleCollection:
    return PositionWeightedModuleCollection(dict.fromkeys(names, LONGEST), device)


PROCESSORS: dict[str, Any] = {
    "positions of all": _positions,
    "positions of each": lambda names, device: {
        name: PositionWeightedModule(LONGEST, device) for name in names
    },
    "attention": lambda names, device: {name: Attention(device) for name in names},
    "without parameters": lambda names, device: {name: Counting() for name in names},
    "in another order": lambda names, device: Backwards(_positions(names, device), device),
}
"""Makes processors of features (names, device)."""


def processed(collection: nn.Module, processors: Any) -> FeatureProcessedEmbeddingBagCollection:
    """A collection with processors in front of it."""
    return FeatureProcessedEmbeddingBagCollection(collection, processors)
