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


def _keeping_data(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(forward)
    def adapted(self: Any, features: Any) -> Any:
        collection = self._embedding_bag_collection
        if not isinstance(collection, HashEmbeddingBagCollection) or not isinstance(
            features, KeyedJaggedTensorWithData
        ):
            return forward(self, features)
        hook = collection.register_forward_pre_hook(
            lambda _, given: (with_data_of(features, given[0]),)
        )
        try:
            return forward(self, features)
        finally:
            hook.remove()

    return adapted
