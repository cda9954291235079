"""Collections take torchrec's configs: every field is honoured, or refused by its name.

The lists of fields are torchrec's own, so a field that a later torchrec adds fails here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    NoEvictionPolicy,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import init
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)
from recsdk_sharding._configs.configs import HONOURED_FIELDS

BASE: dict[str, Any] = {"name": "user", "embedding_dim": 4, "num_embeddings": 25}

HONOURED: dict[str, Any] = {
    "num_embeddings": 100,
    "embedding_dim": 6,
    "name": "other",
    "data_type": DataType.BF16,
    "feature_names": ["u", "v"],
    "weight_init_max": 3.0,
    "weight_init_min": -2.0,
    "init_fn": partial(torch.nn.init.normal_, std=2.0),
    "pooling": PoolingType.MEAN,
    "virtual_table_eviction_policy": NoEvictionPolicy(),
}
"""What each field that hash tables go by may be, other than its default."""

REFUSED: dict[str, Any] = {
    "num_embeddings_post_pruning": 10,
    "need_pos": True,
    "input_dim": 7,
    "total_num_buckets": 3,
    "use_virtual_table": True,
    "enable_embedding_update": True,
    "stash_weights": True,
}
"""What each field that means nothing to a hash table may be in torchrec."""

STOCK = {EmbeddingBagConfig: HashEmbeddingBagCollection, EmbeddingConfig: HashEmbeddingCollection}


def table_of(module: Any) -> Any:
    """The config of a collection's only table."""
    is_pooled = isinstance(module, HashEmbeddingBagCollection)
    (config,) = module.embedding_bag_configs() if is_pooled else module.embedding_configs()
    return config


@pytest.mark.parametrize("stock", STOCK)
def test_every_field_of_torchrecs_configs_is_listed(stock: type) -> None:
    names = {field.name for field in fields(stock)}
    assert names <= HONOURED.keys() | REFUSED.keys()
    assert not HONOURED.keys() & REFUSED.keys()
    assert HONOURED.keys() == HONOURED_FIELDS


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_means_nothing_is_refused_by_name(stock: type, name: str) -> None:
    config = stock(**BASE, **{name: REFUSED[name]})
    with pytest.raises(ValueError, match=f"table 'user': {name} is not supported by hash tables"):
        STOCK[stock](tables=[config])


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.parametrize("name", sorted(HONOURED))
def test_a_field_of_torchrecs_config_means_what_it_means_in_ours(stock: type, name: str) -> None:
    if name not in {field.name for field in fields(stock)}:
        return
    given = {**BASE, name: HONOURED[name]}
    made = table_of(STOCK[stock](tables=[stock(**given)]))
    ours = HashEmbeddingBagConfig if stock is EmbeddingBagConfig else HashEmbeddingConfig
    expected = ours(**{**given, "feature_names": given.get("feature_names", [given["name"]])})
    assert type(made) is ours
    assert made.row_initializer() == expected.row_initializer()
    without = {field.name for field in fields(ours)} - {"init_fn"}
    assert all(getattr(made, each) == getattr(expected, each) for each in without)


def test_ranges_of_torchrecs_config_are_those_of_new_rows() -> None:
    stock = EmbeddingBagConfig(**BASE)
    made = table_of(HashEmbeddingBagCollection(tables=[stock]))
    assert made.row_initializer() == init.Uniform(low=-0.2, high=0.2)
    both = EmbeddingBagConfig(**BASE, weight_init_min=-3.0, weight_init_max=5.0)
    made = table_of(HashEmbeddingBagCollection(tables=[both]))
    assert made.row_initializer() == init.Uniform(low=-3.0, high=5.0)


def test_a_config_of_torchrec_trains_as_ours_and_is_left_as_it_was() -> None:
    ids = torch.tensor([-7, 2**62, -7])
    batch = KeyedJaggedTensor(["user"], ids, lengths=torch.tensor([2, 0, 1]))
    results = []
    for kind in (EmbeddingBagConfig, HashEmbeddingBagConfig):
        given = kind(**BASE, pooling=PoolingType.MEAN)
        ebc = HashEmbeddingBagCollection(tables=[given])
        apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
        ebc(batch).values().square().sum().backward()
        results.append(ebc.eval()(batch).values())
        if kind is EmbeddingBagConfig:
            assert given.feature_names == []
    assert results[0].any()
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, HashEmbeddingBagConfig])
def test_a_table_without_pooling_is_one_of_sequences(kind: type) -> None:
    config = kind(**BASE, pooling=PoolingType.NONE, feature_names=["u"])
    ec = HashEmbeddingCollection(tables=[config])
    assert type(table_of(ec)) is HashEmbeddingConfig
    batch = KeyedJaggedTensor(["u"], torch.tensor([5, 6]), lengths=torch.tensor([2, 0]))
    assert ec.eval()(batch)["u"].values().shape == (2, 4)
    with pytest.raises(ValueError, match="set PoolingType.NONE, or use HashEmbeddingBagCollection"):
        HashEmbeddingCollection(tables=[kind(**BASE)])


def test_own_fields_of_a_config_with_pooling_none_are_kept() -> None:
    config = HashEmbeddingBagConfig(**BASE, pooling=PoolingType.NONE, seed=5, max_rows=9)
    made = table_of(HashEmbeddingCollection(tables=[config]))
    assert (made.seed, made.max_rows) == (5, 9)


@dataclass
class PlainSubclass(EmbeddingBagConfig):
    """As users' own configs, and upstream's."""


@dataclass
class AdmittingConfig(EmbeddingBagConfig):
    """A config with a field that no hash table knows."""

    admit_threshold: int = 0


def test_subclasses_are_taken_if_they_say_no_more() -> None:
    assert is_dataclass(PlainSubclass)
    assert type(table_of(HashEmbeddingBagCollection([PlainSubclass(**BASE)]))) is (
        HashEmbeddingBagConfig
    )
    with pytest.raises(TypeError, match=r"AdmittingConfig has fields \['admit_threshold'\]"):
        HashEmbeddingBagCollection([AdmittingConfig(**BASE)])


ARGUMENTS_LEFT_OUT = {"use_gather_select", "use_gather_select_per_sharding"}
"""Of torchrec's collections: which operator of fbgemm puts results in order."""


@pytest.mark.parametrize("ours", STOCK.values())
def test_arguments_of_torchrecs_collections_are_taken_or_refused_by_name(ours: Any) -> None:
    stock = next(each for each in ours.__mro__ if each.__module__.startswith("torchrec."))
    assert stock.__name__ == ours.__name__.removeprefix("Hash")
    taken = inspect.signature(ours.__init__).parameters
    missing = inspect.signature(stock.__init__).parameters.keys() - taken.keys()
    assert missing <= ARGUMENTS_LEFT_OUT
    kind = HashEmbeddingBagConfig if ours is HashEmbeddingBagCollection else HashEmbeddingConfig
    for name in missing:
        with pytest.raises(TypeError, match=name):
            ours([kind(**BASE)], **{name: True})
