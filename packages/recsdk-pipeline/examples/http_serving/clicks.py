"""The demo's clicks, and torchrec's DLRM for them, which trainer and server build alike."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.models.dlrm import DLRM

from recsdk_pipeline.data import SyntheticClicks
from recsdk_sharding import HashEmbeddingBagConfig

WIDTH = 16
FEATURES, NUM_DENSE = SyntheticClicks.features, SyntheticClicks.num_dense
TABLES = [
    HashEmbeddingBagConfig(name=name, feature_names=[name], embedding_dim=WIDTH, num_embeddings=100)
    for name in FEATURES
]
"""Engine-owned tables grow as ids come; `num_embeddings` only sets how large initial values are."""


def make_model(tables: torch.nn.Module) -> DLRM:
    """The model over a collection of `TABLES`, one that learns or one that is frozen."""
    return DLRM(
        tables,
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[64, WIDTH],
        over_arch_layer_sizes=[64, 1],
    )


def layers_of(model: DLRM) -> dict[str, Any]:
    """Its dense layers as numpy arrays, to save beside its rows."""
    state = model.state_dict()
    return {name: state[name].numpy().copy() for name in state if name in dense_names(model)}


def dense_names(model: DLRM) -> set[str]:
    """Their names in its `state_dict`."""
    return {name for name, _ in model.named_parameters() if not name.startswith("sparse_arch.")}


def with_layers(tables: torch.nn.Module, layers: dict[str, Any]) -> DLRM:
    """A model in evaluation mode, of tables and the layers that were saved with them."""
    model = make_model(tables)
    missing = dense_names(model) ^ layers.keys()
    if missing:
        raise ValueError(f"the checkpoint's layers are not the model's: {sorted(missing)}")
    arrays = {name: torch.from_numpy(layer) for name, layer in layers.items()}
    model.load_state_dict(arrays, strict=False)  # tables are no part of it
    return model.eval()
