"""Deltas of rows in device memory: what was updated, came or left since the save before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import device_saves
import pytest
from rank_pool import RankPool
from test_pipelines import assert_identical
from test_training import SETUPS
from worlds import Setup, merged, new_model, rows_of

from recsdk_core.checkpoint import open_checkpoint
from recsdk_sharding import Saver


def on_npu(name: str) -> Setup:
    setup = SETUPS[name]
    return replace(setup, device="npu", options={"num_rows": 400, **setup.options})


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


def test_a_delta_needs_a_save_before_it(npus: RankPool, tmp_path: Path) -> None:
    for texts in npus.run(2, device_saves.refuse, on_npu("adagrad"), str(tmp_path)):
        assert len(texts) == 2
        assert all("save or load one in full first" in text for text in texts)
