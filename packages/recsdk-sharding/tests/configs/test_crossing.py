"""Every setting of hash collections with every other and every way to save, two at a time."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_args

import crossing_on_ranks
import pytest
from crossing_on_ranks import COLLECTION, CONFIG, OPTIMIZER, SWITCHES, is_legal
from rank_pool import RankPool
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from covering import covering
from recsdk_core.init import Initializer
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    Saver,
)
from recsdk_sharding._configs.configs import DTYPES, HONOURED_FIELDS, NonFinite
from sampling import sampled

CHOICES = {
    name: list(values) for name, values in {**CONFIG, **COLLECTION, **OPTIMIZER}.items()
} | SWITCHES
ON_NPUS = {"device": ["npu"], "data_type": ["FP32"]}
ROWS = {
    "cpu": covering({**CHOICES, "device": ["cpu"]}, is_legal),
    "npu": covering({**CHOICES, **ON_NPUS}, is_legal),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_on_the_cpu_goes_on_as_the_original(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    rows = chosen("cpu", world_size)
    assert ranks.run(world_size, crossing_on_ranks.run, rows, str(tmp_path)) == [len(rows)] * (
        world_size
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_on_a_device_goes_on_as_the_original(
    npus: RankPool, tmp_path: Path, world_size: int
) -> None:
    rows = chosen("npu", world_size)
    assert npus.run(world_size, crossing_on_ranks.run, rows, str(tmp_path)) == [len(rows)] * (
        world_size
    )


def chosen(device: str, world_size: int) -> list[dict[str, str]]:
    rows = [row for row in ROWS[device] if row["ranks"] == str(world_size)]
    return sampled(rows, 4)


def test_every_setting_is_crossed() -> None:
    refused = {field.name for field in fields(EmbeddingBagConfig)} - HONOURED_FIELDS
    for kind, others in ((HashEmbeddingBagConfig, set()), (HashEmbeddingConfig, {"pooling"})):
        honoured = [field for field in fields(kind) if field.name not in refused]
        assert {field.name for field in honoured} == set(CONFIG) - others
        for field in honoured:
            assert set(map(repr, CONFIG[field.name].values())) - {repr(field.default)}, field.name
    arguments = {
        name
        for kind in (HashEmbeddingBagCollection, HashEmbeddingCollection)
        for name in inspect.signature(kind).parameters
    }
    assert arguments == set(COLLECTION) | {"tables"}
    assert set(CONFIG["on_nonfinite"].values()) == set(get_args(NonFinite))
    assert set(CONFIG["data_type"].values()) == set(DTYPES)
    assert isinstance(CONFIG["initializer"]["normal"], get_args(Initializer))


def test_every_way_to_save_is_crossed() -> None:
    assert {name for name in vars(Saver) if not name.startswith("_")} == {"save", "load"}
