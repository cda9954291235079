"""A table whose column ranges are tables of a checkpoint is frozen, and followed, as one table."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from column_ranges import ALL, DIM, Pair
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import CheckpointError, Default, Evict, Table, optim
from recsdk_core.checkpoint import compact, reshard
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.cli import main
from recsdk_core.serving import ServingTable, freeze

KEYS = st.lists(st.sampled_from(ALL.tolist()), unique=True)
DTYPES = ["float32", "bfloat16", "float16", "int8", "int4"]


def served(path: Path) -> tuple[bytes, bytes, int]:
    table = ServingTable(path)
    table.verify()
    assert (table.name, table.dim) == ("items", DIM)
    values, outcomes = table.lookup(ALL, return_outcomes=True)
    return values.tobytes(), outcomes.tobytes(), len(table)


@settings(max_examples=25)
@given(
    links=st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=4),
    ends=st.sampled_from([(2, 3, DIM), (1, DIM), tuple(range(1, DIM + 1))]),
    dtype=st.sampled_from(DTYPES),
    default=st.sampled_from([Default.constant(-0.5), Default.shared_rows(8)]),
    num_shards=st.sampled_from([1, 3]),
    world_size=st.sampled_from([None, 3]),
)
def test_it_is_served_as_the_whole_table(
    tmp_path_factory: pytest.TempPathFactory,
    links: list[tuple[list[int], list[int]]],
    ends: tuple[int, ...],
    dtype: Any,
    default: Default,
    num_shards: int,
    world_size: int | None,
) -> None:
    """Frozen at its end, or at its beginning and followed from there."""
    pair = Pair(tmp_path_factory.mktemp("pair"), ends, default=default)
    options: dict[str, Any] = {"dtype": dtype, "num_shards": num_shards}
    for number, (trained, erased) in enumerate([(ALL[::2], ()), *links]):
        pair.train(trained, erased)
        pair.save(str(number), is_delta=number > 0)
    freeze(pair.folder / "cut" / "0", pair.folder / "first", **options)
    live = [ServingTable(pair.folder / "first"), ServingTable(pair.folder / "first", shards=[0])]
    for table in live:
        table.follow(pair.folder / "cut", interval_seconds=0.001)
    last = pair.folder / "cut" / str(len(links))
    if world_size is not None:
        reshard(last, pair.folder / "again", world_size=world_size)
        last = pair.folder / "again"
    freeze(pair.folder / "whole" / str(len(links)), pair.folder / "expected", **options)
    freeze(last, pair.folder / "found", **options)
    expected = served(pair.folder / "expected")
    assert served(pair.folder / "found") == expected
    while any(table.stats().sequence != len(links) for table in live):
        assert all(table.stats().problem is None for table in live)
    values, outcomes = live[0].lookup(ALL, return_outcomes=True)
    assert (values.tobytes(), outcomes.tobytes(), len(live[0])) == expected
    part = ServingTable(pair.folder / "expected", shards=[0])
    assert len(live[1]) == len(part)
    for table in live:
        table.stop_following()


def test_rows_are_left_out_of_all_ranges(tmp_path: Path) -> None:
    pair = Pair(tmp_path, max_rows=1_000, eviction=Evict.lfu())
    pair.train(ALL)
    pair.train(ALL[::3])
    pair.save("a")
    cut = tmp_path / "cut" / "a"
    with pytest.raises(ValueError, match=r"which has items, got one for 'items\.columns_0_2'"):
        compact(cut, tmp_path / "some", keep={"items.columns_0_2": "count > 1"})
    freeze(tmp_path / "whole" / "a", tmp_path / "expected", where="count > 1")
    expected = served(tmp_path / "expected")
    assert 0 < expected[2] < len(ALL)
    freeze(cut, tmp_path / "found", where={"items": "count > 1"}, dtype={"items": "float32"})
    assert served(tmp_path / "found") == expected
    compact(cut, tmp_path / "some", keep="count > 1")
    freeze(tmp_path / "some", tmp_path / "compacted")
    assert served(tmp_path / "compacted") == expected
    said = ["--where", "count > 1", "--table", "items", "--max-rows", str(expected[2])]
    done = CliRunner().invoke(main, ["freeze", str(cut), str(tmp_path / "command"), *said])
    assert (done.exit_code, done.output[:6]) == (0, "items:"), done.output
    assert served(tmp_path / "command") == expected


def test_ranges_that_are_not_all_columns_are_tables_of_their_own(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.train(ALL)
    pair.ranges, pair.columns = pair.ranges[::2], pair.columns[::2]
    pair.save("a")
    manifest = freeze(tmp_path / "cut" / "a", tmp_path / "frozen")
    assert [each.name for each in manifest.tables] == ["items.columns_0_2", "items.columns_3_7"]


def test_tables_that_are_named_as_ranges_are_tables_of_their_own(tmp_path: Path) -> None:
    """What is a range the save says, and no name."""
    pair = Pair(tmp_path)
    names = [f"a.columns_{2 * n}_{2 * n + 2}" for n in range(2)]
    tables = [Table(2, name=name, seed=n) for n, name in enumerate(names)]
    shards = [Shard(table=table) for table in tables]
    links = [ALL[:3], ALL[3:9]]
    for number, keys in enumerate(links):
        tables[number].find_or_insert(keys)
        options = SaveOptions(is_delta=number > 0)
        save_tables(lambda options=options: (shards, options), OneRank(), tmp_path / str(number))
        if number == 0:
            freeze(tmp_path / "0", tmp_path / "live")
    freeze(tmp_path / "1", tmp_path / "frozen")
    for keys, table in zip(links, tables, strict=True):
        live = ServingTable(tmp_path / "live", table=table.name)
        live.follow(tmp_path, interval_seconds=0.001)
        while live.stats().sequence != 1:
            assert live.stats().problem is None
        live.stop_following()
        for found in (live, ServingTable(tmp_path / "frozen", table=table.name)):
            assert len(found) == len(keys)
            np.testing.assert_array_equal(found.lookup(ALL), table.lookup(ALL))
    pair.train(ALL)
    parts = [Shard(table=pair.ranges[0], columns=(0, 2))]
    named = [Shard(table=Table(2, name="items.columns_0_2"))]
    refuse(parts + named, tmp_path, "items.columns_0_2")


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_table_that_is_named_as_rows_that_are_shared_is_refused(
    tmp_path: Path, is_cut: bool
) -> None:
    pair = Pair(tmp_path, default=Default.shared_rows(3), optimizer=optim.SGD(lr=0.3))
    shards = [Shard(table=pair.whole)]
    if is_cut:
        ends = [(columns.start, columns.stop) for columns in pair.columns]
        pairs = zip(pair.ranges, ends, strict=True)
        shards = [Shard(table=table, columns=columns) for table, columns in pairs]
    config: dict[str, Any] = {
        "optimizer": pair.whole.optimizer,
        "initializer": pair.whole.initializer,
    }
    for alike in ({}, config):
        named = Shard(table=Table(DIM, name="items.shared", **alike))
        refuse([*shards, named], tmp_path, "items.shared")


def refuse(shards: list[Shard], folder: Path, name: str) -> None:
    said = re.escape(f"two tables would be named {name!r} in the checkpoint")
    with pytest.raises(CheckpointError, match=said):
        save_tables(lambda: (shards, SaveOptions()), OneRank(), folder / "both")
    assert not (folder / "both").exists()


@pytest.mark.parametrize("number", [0, 2])
def test_a_key_that_some_ranges_lack_is_named(tmp_path: Path, number: int) -> None:
    """The whole freeze is refused, and a server that follows goes on with what it has."""
    pair = Pair(tmp_path)
    pair.train(ALL)
    pair.save("a")
    freeze(tmp_path / "cut" / "a", tmp_path / "served")
    live = ServingTable(tmp_path / "served")
    before = live.lookup(ALL)
    pair.ranges[number].find_or_insert(np.array([777]))
    pair.save("b", is_delta=True)
    said = "table 'items': only some ranges of its columns have a row of key 777"
    with pytest.raises(CheckpointError, match=said):
        freeze(tmp_path / "cut" / "b", tmp_path / "frozen")
    assert not (tmp_path / "frozen").exists()
    assert {each for each in os.listdir(tmp_path) if "." in each} <= {".served.recsdk-lock"}
    live.follow(tmp_path / "cut", interval_seconds=0.001)
    while live.stats().problem is None:
        assert live.stats().sequence == 0
    live.stop_following()
    assert f"b: {said}; freeze the end of the chain" in str(live.stats().problem)
    np.testing.assert_array_equal(live.lookup(ALL), before)
