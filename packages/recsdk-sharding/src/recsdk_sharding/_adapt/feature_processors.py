"""Lets torchrec's feature processors stand before unsharded tables whatever the batch is.

Its module makes a new `KeyedJaggedTensor` of what the processors give, without what rules of
admission and eviction take beside each id, and as if all features had one batch size. It raises for
a batch without samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_sharding._batch.jagged_data import KeyedJaggedTensorWithData, with_data_of
from recsdk_sharding._modules.feature_processed import weights_made
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
        if not isinstance(self._embedding_bag_collection, HashEmbeddingBagCollection):
            return forward(self, features)
        if not torch.compiler.is_compiling() and _is_odd(features):
            return self._embedding_bag_collection(_weighted(self, features))
        if isinstance(features, KeyedJaggedTensorWithData):
            return forward(_KeepingData(self, features), features)
        return forward(self, features)

    return adapted


def _is_odd(features: Any) -> bool:
    """Whether it is a batch that torchrec's module does not take."""
    return isinstance(features, KeyedJaggedTensor) and bool(
        features.variable_stride_per_key() or features.stride() == 0
    )


def _weighted(module: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids with the weights that processors make."""
    made = weights_made(module._feature_processors, module._feature_names, features)
    sizes: dict[str, Any] = {}
    if features.variable_stride_per_key():
        sizes["stride_per_key_per_rank"] = features.stride_per_key_per_rank()
        sizes["inverse_indices"] = features.inverse_indices_or_none()
    plain = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=torch.cat(made),
        lengths=features.lengths(),
        **sizes,
    )
    has_data = isinstance(features, KeyedJaggedTensorWithData)
    return with_data_of(features, plain) if has_data else plain
