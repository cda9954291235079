"""Has torchrec's quantization for inference take hash tables along.

torchrec's `quantize_embeddings`, and with it `quantize_inference_model`, replaces modules of
torchrec's own types and skips all others: hash tables would silently stay in float32. Both call one
function of torch in the end. Importing the package has that function replace the unsharded
collections of hash tables too, and refuse what has no counterpart. `quantize_inference_model` makes
one module of torchrec's tables and the feature processors in front of them; with hash tables the
processors stay as they are, in front of frozen tables. `shard_quant_model` takes a list of sharders
that it has; those of frozen tables are put into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.quantization
from torchrec.inference.modules import DEFAULT_SHARDERS
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.quant.embedding_modules import (
    FeatureProcessedEmbeddingBagCollection as QuantFeatureProcessedEmbeddingBagCollection,
)

from recsdk_core.nn import HashEmbedding, HashEmbeddingBag
from recsdk_sharding._modules.quantized import (
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
)
from recsdk_sharding._modules.quantized_sharders import (
    QuantHashEmbeddingBagCollectionSharder,
    QuantHashEmbeddingCollectionSharder,
)
from recsdk_sharding._modules.sharded_tables import ShardedTables
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection

__all__ = ["adapt_quantization"]

_STOCK = (EmbeddingBagCollection, EmbeddingCollection)
_PLAIN = (HashEmbedding, HashEmbeddingBag)
_HASH = (HashEmbeddingBagCollection, HashEmbeddingCollection, ShardedTables, *_PLAIN)
_MADE_OF: dict[type, type] = {
    HashEmbeddingBagCollection: QuantHashEmbeddingBagCollection,
    HashEmbeddingCollection: QuantHashEmbeddingCollection,
}


def adapt_quantization() -> None:
    """Makes torch quantize hash tables where it quantizes torchrec's tables."""
    module: Any = torch.quantization
    module.quantize_dynamic = _taking_along(module.quantize_dynamic)
    processed: Any = QuantFeatureProcessedEmbeddingBagCollection
    processed.from_float = classmethod(_behind_processors(processed.from_float.__func__))
    DEFAULT_SHARDERS.extend(
        [QuantHashEmbeddingBagCollectionSharder(), QuantHashEmbeddingCollectionSharder()]
    )


def _taking_along(quantize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(quantize)
    def adapted(
        model: Any,
        qconfig_spec: Any = None,
        dtype: torch.dtype = torch.qint8,
        mapping: Any = None,
        inplace: bool = False,
    ) -> Any:
        config = _of_stock(qconfig_spec)
        if config is not None:
            found = _hash_types(model, mapping or {})
            if found:
                qconfig_spec = {**dict.fromkeys(found, config), **qconfig_spec}
                mapping = {**{kind: _MADE_OF[kind] for kind in found}, **(mapping or {})}
        return quantize(model, qconfig_spec, dtype, mapping, inplace)

    return adapted


def _behind_processors(from_float: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_float)
    def adapted(cls: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        tables: Any = module._embedding_bag_collection
        if not isinstance(tables, HashEmbeddingBagCollection):
            return from_float(cls, module, *args, **kwargs)
        tables.qconfig = module.qconfig
        try:
            frozen: Any = QuantHashEmbeddingBagCollection.from_float(tables)
        finally:
            del tables.qconfig
        return FeatureProcessedEmbeddingBagCollection(frozen, module._feature_processors).eval()

    return adapted


def _of_stock(qconfig_spec: Any) -> Any:
    """How torchrec's tables are to be quantized; None if they are not."""
    if not isinstance(qconfig_spec, Mapping):
        return None
    return next((qconfig_spec[kind] for kind in _STOCK if kind in qconfig_spec), None)


def _advice(module: Any) -> str:
    if isinstance(module, _PLAIN):
        return "freeze the model by recsdk_core.nn.freeze first, and quantize what that gives"
    return (
        "quantize the unsharded model, with HashEmbeddingBagCollection or HashEmbeddingCollection "
        "as a part of it, or serve frozen tables: `recsdk freeze`"
    )


def _hash_types(model: Any, mapping: Mapping[type, type]) -> set[type]:
    """The kinds of hash tables in a model; raises ValueError for one that cannot be quantized."""
    found: set[type] = set()
    for path, module in model.named_modules():
        if not isinstance(module, _HASH):
            continue
        kind = type(module)
        if (kind not in _MADE_OF and kind not in mapping) or not path:
            what = f"module {path!r}: a {kind.__name__}" if path else f"a bare {kind.__name__}"
            raise ValueError(
                f"{what} cannot be quantized, so its rows would stay as they are stored; "
                f"{_advice(module)}"
            )
        if kind in _MADE_OF:
            found.add(kind)
    return found
