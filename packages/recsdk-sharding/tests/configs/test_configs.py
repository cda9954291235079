"""What a table's config accepts, and what it says of the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

from recsdk_core import init
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingBagConfig,
)


def config(**changes: Any) -> HashEmbeddingBagConfig:
    fields = {"name": "user", "embedding_dim": 4, "num_embeddings": 100, "feature_names": ["u"]}
    return HashEmbeddingBagConfig(**{**fields, **changes})


def test_it_is_torchrecs_config_with_torchrecs_defaults() -> None:
    stock = EmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=100)
    ours = HashEmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=100)
    assert isinstance(ours, EmbeddingBagConfig)
    for name, value in vars(stock).items():
        if name != "init_fn":
            assert getattr(ours, name) == value
    assert ours.row_initializer() == init.Uniform(low=-0.1, high=0.1)
    assert (ours.seed, ours.max_rows) == (0, None)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"name": ""}, ValueError, "name of a table must be a string that is not empty"),
        ({"name": 7}, ValueError, "name of a table must be a string"),
        ({"name": "a.b"}, ValueError, "without a dot"),
        ({"name": "keys"}, ValueError, "method of torch.nn.ModuleDict"),
        ({"feature_names": "u"}, TypeError, "feature_names must be a list of strings"),
        ({"feature_names": {"u", "v"}}, TypeError, "feature_names must be a list of strings"),
        ({"feature_names": None}, TypeError, "feature_names must be a list of strings"),
        ({"weight_init_max": "x"}, TypeError, "weight_init_max must be a number, got 'x'"),
        ({"weight_init_max": float("inf")}, ValueError, "weight_init_max must be a finite number"),
        ({"feature_names": ["u", ""]}, TypeError, "feature_names must be a list of strings"),
        ({"feature_names": ["u", "v", "u"]}, ValueError, r"feature_names names \['u'\] more than"),
        ({"num_embeddings": 0}, ValueError, "num_embeddings must be at least 1, got 0"),
        ({"num_embeddings": 1.5}, TypeError, "num_embeddings must be an int, got 1.5"),
        ({"num_embeddings": True}, TypeError, "num_embeddings must be an int"),
        ({"embedding_dim": 0}, ValueError, "embedding_dim must be at least 1"),
        ({"embedding_dim": "8"}, TypeError, "embedding_dim must be an int"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": 2**64}, ValueError, r"seed must be below 2\*\*64"),
        ({"max_rows": -1}, ValueError, "max_rows must be at least 0"),
        ({"max_rows": 2.0}, TypeError, "max_rows must be an int"),
        ({"weight_init_min": 2.0}, ValueError, "weight_init_min must be at most"),
        ({"weight_init_max": float("nan")}, ValueError, "weight_init_max must be a finite number"),
        ({"data_type": DataType.INT8}, ValueError, "data_type must be DataType.FP32, BF16 or FP16"),
        ({"pooling": "sum"}, ValueError, "pooling must be PoolingType.SUM, MEAN or NONE"),
        ({"use_virtual_table": True}, ValueError, "use_virtual_table is not supported"),
        ({"need_pos": True}, ValueError, "need_pos is not supported"),
        ({"total_num_buckets": 3}, ValueError, "total_num_buckets is not supported"),
        ({"initializer": torch.nn.init.zeros_}, TypeError, "initializer must be one of recsdk"),
        ({"init_fn": 3}, TypeError, "init_fn must be callable, got 3"),
        ({"default": 0.5}, TypeError, "default must be a Default, as Default.con"),
        ({"default": None}, TypeError, "default must be a Default, as Default.con"),
        ({"default": "zeros"}, TypeError, "default must be a Default, as Default.con"),
    ],
)
def test_what_is_wrong_is_named(changes: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        config(**changes)


@pytest.mark.parametrize(
    ("tables", "error", "text"),
    [
        ([], ValueError, "at least one table, got none"),
        ([config(), config()], ValueError, r"names must differ, got \['user'\]"),
        (
            config(),
            TypeError,
            r"must be a list of configs, got HashEmbeddingBagConfig; pass tables",
        ),
        ("user", TypeError, "must be a list of configs, got str"),
        (
            [EmbeddingConfig(name="user", embedding_dim=4, num_embeddings=9)],
            TypeError,
            "tables must be HashEmbeddingBagConfig, or torchrec's EmbeddingBagConfig, got",
        ),
        (
            [config(pooling=PoolingType.NONE)],
            ValueError,
            "'user' has PoolingType.NONE.*pass its config to HashEmbeddingCollection",
        ),
    ],
)
def test_tables_that_do_not_go_together(tables: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        HashEmbeddingBagCollection(tables=tables)


@pytest.mark.parametrize("device", ["xpu", torch.device("xla", 1), "mps"])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="hash tables can be on cpu, npu, cuda; got device"):
        HashEmbeddingBagCollection(tables=[config()], device=device)


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        (["cpu"], TypeError, r"device must be a torch.device or a string, got \['cpu'\]"),
        (0, TypeError, "device must be a torch.device or a string, got 0"),
        ("cpu2", ValueError, "HashEmbeddingBagCollection: torch has no device 'cpu2'"),
    ],
)
def test_what_is_no_device_is_refused(device: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        HashEmbeddingBagCollection(tables=[config()], device=device)


def test_any_number_of_names_and_ranges_that_are_right() -> None:
    assert config(max_rows=0, seed=2**64 - 1).seed == 2**64 - 1
    chosen = config(weight_init_min=-3.0, weight_init_max=5.0).row_initializer()
    assert chosen == init.Uniform(low=-3.0, high=5.0)
    normal = init.Normal(stddev=0.5)
    assert config(initializer=normal, init_fn=torch.nn.init.zeros_).row_initializer() == normal
    assert config(init_fn=partial(torch.nn.init.normal_, std=2.0)).row_initializer() == (
        init.Normal(mean=0.0, stddev=2.0)
    )


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_rows_on_a_device_are_sharded_in_every_way(device: str) -> None:
    sharder = object.__new__(HashEmbeddingBagCollectionSharder)  # needs no process group
    assert sharder.sharding_types(device) == sharder.sharding_types("cpu")
    assert {"row_wise", "data_parallel"} < set(sharder.sharding_types(device))
