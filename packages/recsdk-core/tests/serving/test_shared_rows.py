"""Rows that missing keys share, frozen and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import CheckpointError, Default, Outcome, Table, init, optim
from recsdk_core.checkpoint import reshard
from recsdk_core.serving import ServingTable, freeze, freeze_tables

DTYPES = ["float32", "bfloat16", "float16", "int8", "int4"]
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200)


def trained(n: int = 6) -> Table:
    """Has rows of the first hundred keys; the others have trained shared ones."""
    table = Table(
        dim=5,
        name="user",
        optimizer=optim.Adagrad(lr=0.3),
        initializer=init.Normal(stddev=0.5),
        default=Default.shared_rows(n),
    )
    table.find_or_insert(KEYS[:100])
    grads = np.random.default_rng(1).normal(size=(200, 5)).astype(np.float32)
    table.apply_gradients(KEYS, grads)
    return table


def stored(values: np.ndarray, folder: Path, dtype: Any) -> np.ndarray:
    """Rows as a table of a dtype has them."""
    plain = Table(dim=5, name="plain")
    plain.upsert(np.arange(len(values)), values)
    freeze_tables([plain], folder, dtype=dtype)
    found: np.ndarray = ServingTable(folder).lookup(np.arange(len(values)))
    return found


@pytest.mark.parametrize("num_shards", [1, 3, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_missing_keys_read_what_they_read_in_training(
    tmp_path: Path, dtype: Any, num_shards: int
) -> None:
    table = trained()
    freeze_tables([table], tmp_path / "frozen", dtype=dtype, num_shards=num_shards)
    served = ServingTable(tmp_path / "frozen")
    served.verify()
    assert (served.num_shared, len(served)) == (6, 100)
    values, outcomes = served.lookup(KEYS, return_outcomes=True)
    np.testing.assert_array_equal(values, stored(table.lookup(KEYS), tmp_path / "plain", dtype))
    assert outcomes.tolist() == [Outcome.FOUND] * 100 + [Outcome.MISSING] * 100
    offsets = np.array([0, 90, 90, 150, 200])
    if dtype == "float32":
        pooled = served.pool(KEYS, offsets, pooling="mean")
        np.testing.assert_array_equal(pooled, table.pool(KEYS, offsets, pooling="mean"))


def test_a_key_that_stands_for_a_shared_row_is_missing_still(tmp_path: Path) -> None:
    table = trained()
    freeze_tables([table], tmp_path / "frozen")
    shared = table.shared_rows()
    served = ServingTable(tmp_path / "frozen")
    values, outcomes = served.lookup(shared.keys, return_outcomes=True)
    np.testing.assert_array_equal(values, shared.weights)
    assert (outcomes == Outcome.MISSING).all()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_is_frozen_with_them(tmp_path: Path, world_size: int) -> None:
    table = trained(8)
    table.save(tmp_path / "full")
    reshard(tmp_path / "full", tmp_path / "cut", world_size=world_size)
    manifest = freeze(tmp_path / "cut", tmp_path / "frozen")
    assert [each.name for each in manifest.tables] == ["user"]
    served = ServingTable(tmp_path / "frozen")
    np.testing.assert_array_equal(served.lookup(KEYS), table.lookup(KEYS))


def test_part_of_the_shards_has_their_part(tmp_path: Path) -> None:
    table = trained(2)
    freeze_tables([table], tmp_path / "frozen", num_shards=5)
    for shard in range(5):
        part = ServingTable(tmp_path / "frozen", shards=[shard])
        here = []
        for key in KEYS.tolist():
            try:
                here.append(part.lookup(np.array([key]))[0])
            except ValueError:
                continue
            np.testing.assert_array_equal(here[-1], table.lookup(np.array([key]))[0])
        assert here


def test_damage_is_found(tmp_path: Path) -> None:
    freeze_tables([trained()], tmp_path / "frozen")
    [path] = (tmp_path / "frozen").glob("*/tables/*/*.frozen")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    served = ServingTable(tmp_path / "frozen")
    with pytest.raises(CheckpointError, match="shared rows"):
        served.verify()


def test_a_delta_brings_them(tmp_path: Path) -> None:
    table, chain = trained(), tmp_path / "chain"
    table.save(chain / "a")
    freeze(chain / "a", tmp_path / "frozen")
    served = ServingTable(tmp_path / "frozen")
    table.apply_gradients(KEYS, np.ones((200, 5), np.float32))
    table.save_delta(chain / "b")
    served.follow(chain, interval_seconds=0.005)
    while served.stats().sequence == 0:
        assert served.stats().problem is None
    served.stop_following()
    np.testing.assert_array_equal(served.lookup(KEYS), table.lookup(KEYS))
