"""Saver saves and loads every sharding type and collection, and moves rows between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saver_on_ranks
from comparing import assert_identical
from plans import Spec
from random_models import Case, TableSpec
from rank_pool import RankPool
from worlds import whole_rows

from recsdk_core.checkpoint import compact, open_checkpoint
from recsdk_core.checkpoint.tabular import import_table
from recsdk_core.serving import freeze, open_tables
from sampling import IS_FULL, sampled

TABLES = (TableSpec(6, ("a", "b")), TableSpec(6, ("b",)), TableSpec(6, ("c",)))
Specs = tuple[Spec, ...]

ONE: dict[str, Specs] = {
    "table_wise": (("table_wise", 0),) * 3,
    "column_wise": (("column_wise", [(2, 0), (4, 0)]), ("table_wise", 0), ("row_wise",)),
}
TWO: dict[str, Specs] = {
    "row_wise": (("row_wise",),) * 3,
    "table_wise_on_one_rank": (("table_wise", 1),) * 3,
    "column_wise": (
        ("column_wise", [(2, 1), (4, 0)]),
        ("table_column_wise", [(6, 0)]),
        ("column_wise", [(2, 0), (3, 1), (1, 0)]),
    ),
    "data_parallel": (("data_parallel",), ("row_wise",), ("table_wise", 1)),
}
FOUR: dict[str, Specs] = {
    "grid_shard": (
        ("grid_shard", [(1, 1), (5, 0)]),
        ("table_row_wise", 1),
        ("grid_shard", [(6, 0)]),
    ),
    "mixed": (("table_row_wise", 0), ("data_parallel",), ("column_wise", [(5, 3), (1, 2)])),
}
WORLDS = {1: ONE, 2: TWO, 4: FOUR}
LAYOUTS = [(world, name) for world, plans in WORLDS.items() for name in plans]


def case_of(layout: tuple[int, str], **options: Any) -> Case:
    """Three steps; the plan is the layout's."""
    world_size, name = layout
    sizes = tuple((n,) * world_size for n in (3, 2, 4))
    local_size = 2 if world_size == 4 else None
    return Case(TABLES, WORLDS[world_size][name], sizes, local_size=local_size, **options)


def save(ranks: RankPool, case: Case, folder: Path) -> list[Any]:
    """Saves after each step; the rows of whole tables at each."""
    found = ranks.run(case.world_size, saver_on_ranks.save_case, case, str(folder))
    return [whole_rows(step, case.replicated()) for step in zip(*found, strict=True)]


def load(ranks: RankPool, case: Case, folder: Path, incremental: bool) -> list[Any]:
    found = ranks.run(case.world_size, saver_on_ranks.load_case, case, str(folder), incremental)
    return [whole_rows(step, case.replicated()) for step in zip(*found, strict=True)]


@pytest.mark.parametrize("layout", sampled(LAYOUTS, 4), ids=str)
def test_a_chain_loads_into_the_same_layout(
    ranks: RankPool, tmp_path: Path, layout: tuple[int, str]
) -> None:
    case = case_of(layout)
    saved = save(ranks, case, tmp_path)
    assert_identical(load(ranks, case, tmp_path, incremental=True), saved)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_chain_loads_into_another_layout(ranks: RankPool, tmp_path: Path, number: int) -> None:
    saved = save(ranks, case_of(LAYOUTS[number]), tmp_path)
    for step in (1, 3) if IS_FULL else (1 + 2 * (number % 2),):
        reader = case_of(LAYOUTS[(number + step) % len(LAYOUTS)])
        assert_identical(load(ranks, reader, tmp_path, incremental=False), saved)


@pytest.mark.parametrize("layout", [(2, "column_wise"), (4, "grid_shard"), (4, "mixed")], ids=str)
def test_tables_that_ranks_have_cut_are_served_whole(
    ranks: RankPool, tmp_path: Path, layout: tuple[int, str]
) -> None:
    """Frozen at the end of the chain, or at its beginning and followed."""
    saved = save(ranks, case_of(layout), tmp_path / "chain")
    last = len(saved) - 1
    for link in (0, last):
        freeze(tmp_path / "chain" / str(link), tmp_path / f"frozen_{link}")
    ended, live = (open_tables(tmp_path / f"frozen_{link}") for link in (last, 0))
    assert set(ended) == set(saved[-1])
    for name, rows in saved[-1].items():
        live[name].follow(tmp_path / "chain", interval_seconds=0.005)
        while live[name].stats().sequence != last:
            assert live[name].stats().problem is None
        live[name].stop_following()
        for table in (ended[name], live[name]):
            assert len(table) == len(rows)
            wanted = np.stack([weights for weights, _ in rows.values()])
            np.testing.assert_array_equal(table.lookup(np.array(list(rows))), wanted)


def test_sequence_collections(ranks: RankPool, tmp_path: Path) -> None:
    saved = save(ranks, case_of((1, "column_wise"), is_sequence=True), tmp_path)
    for name, incremental in (("data_parallel", True), ("table_wise_on_one_rank", False)):
        reader = case_of((2, name), is_sequence=True)
        if incremental:
            for result in ranks.run(2, saver_on_ranks.load_case, reader, str(tmp_path), True):
                assert "if its tables have other column ranges, load" in result[-1]
        assert_identical(load(ranks, reader, tmp_path, incremental=False), saved)


def test_tables_have_as_many_files_as_shards(ranks: RankPool, tmp_path: Path) -> None:
    saved = save(ranks, case_of((4, "grid_shard")), tmp_path)
    tables = {t.name: len(t.files) for t in open_checkpoint(tmp_path / "0").manifest.tables}
    assert tables == {"t0.columns_0_1": 2, "t0.columns_1_6": 2, "t1": 2, "t2": 2}
    compact([tmp_path / "0", tmp_path / "1", tmp_path / "2"], tmp_path / "whole")
    found = {t.name: len(t.files) for t in open_checkpoint(tmp_path / "whole").manifest.tables}
    assert found == tables
    (tmp_path / "one").mkdir()
    (tmp_path / "whole").rename(tmp_path / "one" / "0")
    reader = replace(case_of((2, "row_wise")), sizes=((2, 2),))
    assert_identical(load(ranks, reader, tmp_path / "one", incremental=False), saved[-1:])


def test_imported_rows_load_into_any_columns(ranks: RankPool, tmp_path: Path) -> None:
    keys = np.array([5, -7, 2**62, 11])
    weights = np.arange(24, dtype=np.float32).reshape(4, 6)
    import_table(tmp_path / "0", "t0", keys, weights)
    layouts: list[Specs] = [(("row_wise",),), (("column_wise", [(2, 1), (4, 0)]),)]
    for name in ("adagrad", "adam"):
        cases = [Case(TABLES[:1], specs, ((2, 2),), optimizer=name) for specs in layouts]
        whole, cut = (load(ranks, case, tmp_path, incremental=False)[0] for case in cases)
        assert_identical(cut, whole)
        for key, row in zip(keys.tolist(), weights, strict=True):
            assert np.array_equal(cut["t0"][key][0], row)
