"""Keeps what comes with ids where torchrec's feature processors stand before unsharded tables.

Its module makes a new `KeyedJaggedTensor` of what the processors give, without what rules of
admission and eviction take beside each id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recsdk_sharding._batch.jagged_data import KeyedJaggedTensorWithData, with_data_of
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection

__all__ = ["adapt_feature_processors"]


def adapt_feature_processors() -> None:
    """Makes torchrec's module hand hash tables what comes with the ids of its input."""
    kind = FeatureProcessedEmbeddingBagCollection
    kind.forward = _keeping_data(kind.forward)


class _KeepingData:
    """A module for one forward: its collection gets what came with the ids."""

    def __init__(self, module: Any, features: KeyedJaggedTensorWithData) -> None:
        self._module, self._features = module, features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _embedding_bag_collection(self, made: Any) -> Any:
        return self._module._embedding_bag_collection(with_data_of(self._features, made))


def _keeping_data(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(forward)
    def adapted(self: Any, features: Any) -> Any:
        has_data = isinstance(features, KeyedJaggedTensorWithData)
        if has_data and isinstance(self._embedding_bag_collection, HashEmbeddingBagCollection):
            return forward(_KeepingData(self, features), features)
        return forward(self, features)

    return adapted
