"""Quantization refuses models with hash tables, by whatever way it is asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsdk_core import optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)

BASE: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 10}
HASH: dict[str, Any] = {
    "HashEmbeddingBagCollection": lambda: HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(**BASE)]
    ),
    "HashEmbeddingCollection": lambda: HashEmbeddingCollection([HashEmbeddingConfig(**BASE)]),
    "HashEmbeddingBag": lambda: HashEmbeddingBag(4, name="t", optimizer=optim.SGD(lr=0.1)),
}


def model_with(sparse: nn.Module) -> nn.Module:
    """A model of a sparse and a dense part."""
    return nn.ModuleDict({"sparse": sparse, "over": nn.Linear(4, 2)})


@pytest.mark.parametrize("kind", HASH)
def test_torchrecs_quantization_refuses_hash_tables(kind: str) -> None:
    model = model_with(HASH[kind]())
    said = f"module 'sparse': a {kind} cannot be quantized"
    with pytest.raises(ValueError, match=said):
        quantize_embeddings(model, torch.qint8, inplace=False)
    with pytest.raises(ValueError, match=said):
        quantize_inference_model(model)
    assert type(model["sparse"]).__name__ == kind


@pytest.mark.filterwarnings("ignore")
def test_dense_layers_beside_hash_tables_and_torchrecs_own_tables_are_quantized() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = model_with(HASH["HashEmbeddingBagCollection"]())
        made = torch.quantization.quantize_dynamic(beside, {nn.Linear})
        stock = model_with(EmbeddingBagCollection([EmbeddingBagConfig(**BASE)]))
        quantized = quantize_embeddings(stock, torch.qint8, inplace=False)
    assert ".quantized." in type(made["over"]).__module__
    assert isinstance(made["sparse"], HashEmbeddingBagCollection)
    assert ".quant." in type(quantized["sparse"]).__module__
