"""Plain torch modules over tables of raw keys, with the optimizer fused into the backward pass."""

from __future__ import annotations

from recsdk_core.nn.function import FeatureBags, TableBags, gather_features, pool_features
from recsdk_core.nn.modules import HashEmbedding, HashEmbeddingBag

__all__ = [
    "FeatureBags",
    "HashEmbedding",
    "HashEmbeddingBag",
    "TableBags",
    "gather_features",
    "pool_features",
]
