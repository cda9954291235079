"""Deltas of rows in device memory: what was updated, came or left since the save before."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import dcp_on_ranks
import device_saves
import numpy as np
import pytest
import torch
from comparing import assert_identical
from device_type import DEVICE_TYPE
from failing import Failing
from rank_pool import RankPool
from setups import SETUPS
from worlds import Setup, merged, new_model, rows_of

from recsdk_core import optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_sharding import HashEmbeddingBagConfig, RowOptimizer, Saver
from recsdk_sharding.device.table import DeviceTable
from recsdk_sharding.placement.layout import Shard


def on_npu(name: str) -> Setup:
    setup = SETUPS[name]
    return replace(setup, device=DEVICE_TYPE, options={"num_rows": 400, **setup.options})


def whole(results: list[list[Any]]) -> list[Any]:
    return [merged(list(of_ranks)) for of_ranks in zip(*results, strict=True)]


def bits(row: Any) -> Any:
    return None if row is None else (row[0].tobytes(), row[1]["sum"].tobytes())


@pytest.mark.parametrize(("name", "writers", "readers"), [("adagrad", 1, 2), ("adam", 2, 1)])
def test_a_chain_holds_what_the_tables_held(
    npus: RankPool, tmp_path: Path, name: str, writers: int, readers: int
) -> None:
    setup, folder = on_npu(name), str(tmp_path)
    held = whole(npus.run(writers, device_saves.save_a_chain, setup, folder))
    for incremental in (False, True):
        found = npus.run(readers, device_saves.load_a_chain, setup, folder, incremental)
        assert_identical(whole(found), held)
    on_cpu = new_model(setup, "cpu")
    Saver().load(on_cpu, f"{folder}/{device_saves.NUM_LINKS - 1}")
    assert_identical(rows_of(on_cpu.ebc.tables()), held[-1])
    going_on = npus.run(
        readers, device_saves.go_on_from_a_load, setup, folder, str(tmp_path / "follow")
    )
    have, saved = whole(going_on)
    assert_identical(saved, have)


def test_a_delta_has_no_more_than_what_changed(npus: RankPool, tmp_path: Path) -> None:
    held = whole(npus.run(1, device_saves.save_a_chain, on_npu("adagrad"), str(tmp_path)))
    for number in range(1, device_saves.NUM_LINKS):
        for table in open_checkpoint(tmp_path / str(number)).manifest.tables:
            before, after = held[number - 1][table.name], held[number][table.name]
            changed = {key for key in after if bits(before.get(key)) != bits(after[key])}
            [file] = table.files
            assert len(changed) <= file.num_rows < len(after)
            assert 0 <= file.num_erased - len(set(before) - set(after)) <= 2  # came and gone


def test_a_save_tells_what_it_writes(npus: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "one"
    told = npus.run(npus.at_most(2), device_saves.bytes_told, on_npu("adagrad"), str(path))
    saved = open_checkpoint(path)
    saved.verify()
    files = [file for table in saved.manifest.tables for file in table.files]
    assert sum(told) == sum(file.num_bytes for file in files) > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_a_chain_catch_up_as_those_that_were_saved(
    npus: RankPool, tmp_path: Path, world_size: int
) -> None:
    optimizer = optim.Adagrad(
        lr=0.1, weight_decay=0.2, weight_decay_mode="decoupled", catch_up=True
    )
    setup = Setup(
        RowOptimizer, {"settings": optimizer}, device=DEVICE_TYPE, options={"num_rows": 400}
    )
    for went_on, loaded in npus.run(
        world_size, device_saves.catch_up_after_a_delta, setup, str(tmp_path)
    ):
        assert_identical(loaded, went_on)
        assert {count for _, count in went_on[1].values()} == {4}
        assert all(log_decay < 0 for log_decay, _ in went_on[1].values())


def test_more_keys_may_have_left_than_a_table_takes(npus: RankPool, tmp_path: Path) -> None:
    setup = on_npu("adagrad")
    have, saved = whole(
        npus.run(1, device_saves.save_after_much_came_and_went, setup, str(tmp_path))
    )
    assert_identical(saved, have)


def test_a_delta_needs_a_save_before_it(npus: RankPool, tmp_path: Path) -> None:
    for texts in npus.run(npus.at_most(2), device_saves.refuse, on_npu("adagrad"), str(tmp_path)):
        assert len(texts) == 2
        assert all("save or load one in full first" in text for text in texts)


@pytest.mark.parametrize("is_async", [False, True])
def test_resumed_training_equals_training_never_stopped(
    npus: RankPool, tmp_path: Path, is_async: bool
) -> None:
    two = npus.at_most(2)
    setup, path, sizes = on_npu("adam"), str(tmp_path / "state"), [[3, 1][:two], [2, 2][:two]]
    went_on = npus.run(two, dcp_on_ranks.save, setup, sizes, path, is_async)
    resumed = npus.run(two, dcp_on_ranks.load, setup, sizes, path)
    for one, other in zip(went_on, resumed, strict=True):
        assert_identical(other["loaded"], one["saved"])
        assert_identical(other["end"], one["end"])
        for out, expected in zip(other["outputs"], one["outputs"], strict=True):
            assert np.array_equal(out, expected)


def test_a_device_that_fails_leaves_no_key_with_another_row() -> None:
    config = HashEmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=10)
    table = DeviceTable(config, torch.zeros(11, 4), optim.Adagrad(), Shard.whole(4))
    hosts = [table.empty_host_table() for _ in range(2)]
    keys = np.arange(5)
    for value, host in enumerate(hosts, start=1):
        host.upsert(keys + value, np.full((5, 4), value, np.float32))
    for number in range(100):
        table.take_rows_of(hosts[0])
        assert (table.lookup(keys + 1) == 1).all()
        with Failing(range(number, 1000)) as failing:
            with contextlib.suppress(torch.OutOfMemoryError):
                table.take_rows_of(hosts[1])
        if not failing.num_failed:
            break
        assert len(table) == 0
        assert not table.lookup(np.arange(10)).any()
    assert number > 5
    assert (table.lookup(keys + 2) == 2).all()
