"""torchrec's own collections refuse hash tables, by whatever way they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    fuse_embedding_optimizer,
)
from torchrec.modules.mc_adapter import McEmbeddingBagCollectionAdapter
from torchrec.modules.mc_modules import ManagedCollisionCollection

from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)

BASE: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 10}
CPU = torch.device("cpu")
HASH: dict[str, Any] = {
    "bags": lambda: HashEmbeddingBagCollection([HashEmbeddingBagConfig(**BASE)]),
    "bags of a torchrec config": lambda: HashEmbeddingBagCollection([EmbeddingBagConfig(**BASE)]),
    "sequences": lambda: HashEmbeddingCollection([HashEmbeddingConfig(**BASE)]),
}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", HASH)
def test_fusing_refuses_hash_tables_and_leaves_the_model(kind: str, depth: int) -> None:
    model = made = HASH[kind]()
    for _ in range(depth):
        model = nn.ModuleDict({"inner": model})
    with pytest.raises(ValueError, match="table 't': .* leave fuse_embedding_optimizer out"):
        fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, CPU)
    assert made in list(model.modules())


def test_a_fused_collection_of_hash_configs_is_refused() -> None:
    with pytest.raises(ValueError, match="FusedEmbeddingBagCollection has dense tables"):
        FusedEmbeddingBagCollection(
            tables=[HashEmbeddingBagConfig(**BASE)],
            optimizer_type=torch.optim.SGD,
            optimizer_kwargs={"lr": 0.1},
        )


BAG, SEQUENCE = HashEmbeddingBagConfig(**BASE), HashEmbeddingConfig(**BASE)
DENSE: dict[str, tuple[Any, str]] = {
    "bags": (lambda: EmbeddingBagCollection([BAG]), "HashEmbeddingBagCollection"),
    "bags on meta": (
        lambda: EmbeddingBagCollection(device=torch.device("meta"), tables=[BAG]),
        "HashEmbeddingBagCollection",
    ),
    "sequences": (lambda: EmbeddingCollection(tables=[SEQUENCE]), "HashEmbeddingCollection"),
    "one of two": (
        lambda: EmbeddingCollection([EmbeddingConfig(**BASE | {"name": "dense"}), SEQUENCE]),
        "HashEmbeddingCollection",
    ),
    "managed collisions": (lambda: ManagedCollisionCollection({}, [BAG]), "the raw ids"),
    "managed collisions of bags": (
        lambda: McEmbeddingBagCollectionAdapter([BAG], 100, 10, torch.device("cpu"), 2),
        "HashEmbeddingBagCollection",
    ),
}


@pytest.mark.parametrize("case", DENSE)
def test_a_dense_collection_of_hash_configs_is_refused(case: str) -> None:
    make, advice = DENSE[case]
    with pytest.raises(ValueError, match=f"table 't': a .* has dense tables, .*; .*{advice}"):
        make()


def test_torchrecs_own_tables_are_fused() -> None:
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection([EmbeddingBagConfig(**BASE)])})
    made = fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, CPU)
    assert type(made["ebc"]) is FusedEmbeddingBagCollection
