"""Refuses to quantize models with hash tables for inference.

torchrec's `quantize_embeddings`, and with it `quantize_inference_model`, replaces modules of
torchrec's own types and skips all others: hash tables would silently stay in float32. Both call one
function of torch in the end. Importing the package makes that function look for hash tables first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.quantization
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding._modules.sharded_common import ShardedTables
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection

__all__ = ["adapt_quantization"]

_STOCK = (EmbeddingBagCollection, EmbeddingCollection)
_HASH = (HashEmbeddingBagCollection, HashEmbeddingCollection, HashEmbeddingBag, ShardedTables)


def adapt_quantization() -> None:
    """Makes torch refuse to quantize tables of models that have hash tables."""
    module: Any = torch.quantization
    module.quantize_dynamic = _checking(module.quantize_dynamic)


def _checking(quantize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(quantize)
    def adapted(model: Any, qconfig_spec: Any = None, *args: Any, **kwargs: Any) -> Any:
        if any(kind in (qconfig_spec or ()) for kind in _STOCK):
            _check(model)
        return quantize(model, qconfig_spec, *args, **kwargs)

    return adapted


def _check(model: Any) -> None:
    """Raises ValueError if the model has hash tables."""
    for path, module in model.named_modules():
        if isinstance(module, _HASH):
            raise ValueError(
                f"module {path!r}: a {type(module).__name__} cannot be quantized, so its rows "
                "would stay as they are stored; quantize the rest of the model by itself, or store "
                "rows in 16 bits with data_type=DataType.FP16"
            )
