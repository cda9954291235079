"""Tables are saved and loaded bit for bit; what is damaged or does not fit changes no table."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_support import sealed
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import BusyError, CapacityError, CheckpointError, Table, init, optim
from recsdk_core.checkpoint import compact, diff, open_checkpoint, reshard
from recsdk_core.checkpoint.model.loading import Loading, load_tables
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import chain_of
from recsdk_core.checkpoint.replacing import NewRows, replace_rows
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.testing.strategies import EDGE_KEYS, key_arrays

KEYS = np.array([*EDGE_KEYS, *range(100, 160)], dtype=np.int64)

OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.5),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1),
    "adam": optim.Adam(lr=0.1, bias_correction="row"),
}

Rows = dict[int, tuple[bytes, ...]]


def new_table(name: str = "user", **options: Any) -> Table:
    given: dict[str, Any] = {"dim": 3, "name": name, "optimizer": optim.Adagrad(lr=0.1), **options}
    return Table(**given)


def train(table: Table, keys: Any = KEYS, step: int = 1) -> None:
    """One update, different for every key and step."""
    table.find_or_insert(keys)
    grads = np.random.default_rng(step).normal(size=(len(keys), table.dim)).astype(np.float32)
    table.apply_gradients(keys, grads)


def trained(**options: Any) -> Table:
    table = new_table(**options)
    train(table)
    return table


def rows_of(table: Table) -> Rows:
    """Weights and state of every key, as bytes."""
    found: Rows = {}
    for batch in table.export():
        for index, key in enumerate(batch.keys.tolist()):
            state = tuple(batch.state[name][index].tobytes() for name in sorted(batch.state))
            found[key] = (batch.weights[index].tobytes(), *state)
    return found


def whole(table: Table) -> tuple[Rows, int, float]:
    return rows_of(table), table.update_count, table.learning_rate


def file_of(path: Path, rank: int = 0) -> Path:
    return path / open_checkpoint(path).manifest.tables[0].files[rank].path


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_saved_is_loaded(tmp_path: Path, optimizer: optim.Optimizer) -> None:
    table = trained(optimizer=optimizer)
    table.save(tmp_path / "one", step=5, user_state={"epoch": 2, "blob": b"x"})
    other = new_table(optimizer=optimizer)
    train(other, np.arange(500, 600), step=9)
    found = other.load(tmp_path / "one")
    assert (found.manifest.step, found.user_state()) == (5, {"epoch": 2, "blob": b"x"})
    assert whole(other) == whole(table)
    for one in (table, other):
        train(one, step=3)
    assert whole(other) == whole(table)


@pytest.mark.parametrize("how", ["changed", "cut", "gone", "no array", "nested"])
def test_a_damaged_user_state_is_found_before_a_row_changes(tmp_path: Path, how: str) -> None:
    table = trained()
    table.save(tmp_path / "one", user_state={"array": np.arange(5), "blob": b"x"})
    kept = next((tmp_path / "one").glob("*/user/00000.bin"))
    manifest = tmp_path / "one" / "manifest.json"
    value = json.loads(manifest.read_bytes())
    if how == "changed":
        kept.write_bytes(kept.read_bytes()[:-1] + b"\x7f")
    elif how == "cut":
        kept.write_bytes(kept.read_bytes()[:-1])
    elif how == "gone":
        kept.unlink()
    elif how == "no array":
        value["user_state"]["array"] = {"$file": 7}
        manifest.write_bytes(sealed(value))
    else:
        for _ in range(101):
            value["user_state"] = [value["user_state"]]
        manifest.write_bytes(sealed(value))
    other = new_table()
    train(other, np.arange(500, 600), step=9)
    before = whole(other)
    with pytest.raises(CheckpointError, match="user_state|00000.bin"):
        other.load(tmp_path / "one")
    assert whole(other) == before


def test_evaluation_changes_nothing_that_is_saved(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "before")
    before, counts = whole(table), table.stats().outcomes
    keys = np.concatenate([KEYS, KEYS + 10**6])
    table.lookup(keys)
    table.pool(keys, np.array([0, len(keys)]))
    assert whole(table) == before
    assert table.stats().outcomes != counts  # counted, and in no checkpoint
    table.save_delta(tmp_path / "delta")
    [entry] = open_checkpoint(tmp_path / "delta").manifest.tables
    assert (entry.num_rows, entry.num_erased) == (0, 0)
    table.save(tmp_path / "after")
    paths = [tmp_path / "before", tmp_path / "after"]
    entries = [open_checkpoint(path).manifest.tables[0] for path in paths]
    assert replace(entries[0], files=()) == replace(entries[1], files=())


def test_a_user_state_that_is_too_deep_saves_nothing(tmp_path: Path) -> None:
    table = trained()
    state: Any = None
    for _ in range(2000):
        state = [state]
    with pytest.raises(ValueError, match="nests lists and dicts deeper than 100"):
        table.save(tmp_path / "one", user_state=state)
    assert list(tmp_path.iterdir()) == []


def test_a_delta_after_a_load_without_state_is_refused(tmp_path: Path) -> None:
    table = trained(optimizer=optim.Adagrad(lr=0.1))
    table.save(tmp_path / "one")
    other = new_table(optimizer=optim.Adagrad(lr=0.1))
    other.load(tmp_path / "one", allow=["optimizer"])
    with pytest.raises(CheckpointError, match="save or load one in full first"):
        other.save_delta(tmp_path / "two")


def test_a_delta_may_follow_a_load_that_might_have_dropped_something(tmp_path: Path) -> None:
    trained(optimizer=optim.SGD(lr=0.5)).save(tmp_path / "one")
    other = new_table(optimizer=optim.SGD(lr=0.5))
    other.load(tmp_path / "one", allow=["optimizer", "eviction", "admission"])
    train(other)
    other.save_delta(tmp_path / "two")
    found = new_table(optimizer=optim.SGD(lr=0.5))
    found.load(tmp_path / "two")
    assert whole(found) == whole(other)


def test_state_that_catches_up_may_be_dropped(tmp_path: Path) -> None:
    optimizer = optim.SGD(lr=0.5, weight_decay=0.1, catch_up=True)
    table = trained(optimizer=optimizer)
    table.save(tmp_path / "one")
    other = new_table(optimizer=optim.SGD(lr=0.5))
    other.load(tmp_path / "one", allow=["optimizer"])
    keys = np.array(sorted(rows_of(table)))
    assert np.array_equal(other.lookup(keys), table.lookup(keys))


def test_what_cannot_be_tidied_after_an_overwrite_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = trained()
    table.save(tmp_path / "one")

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError("no tidying here")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fail)
        table.save(tmp_path / "one", overwrite=True)
    train(table)
    table.save_delta(tmp_path / "two")
    other = new_table()
    other.load(tmp_path / "two")
    assert whole(other) == whole(table)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_are_kept_as_they_are_stored(tmp_path: Path, dtype: Any) -> None:
    table = trained(dtype=dtype)
    table.save(tmp_path / "0")
    train(table, KEYS[:9], step=2)
    table.erase(KEYS[3:5])
    table.save_delta(tmp_path / "1")
    compact(tmp_path / "1", tmp_path / "2")
    assert open_checkpoint(tmp_path / "2").manifest.tables[0].fields[0].dtype == dtype
    for name in ("1", "2"):
        other = new_table(dtype=dtype)
        other.load(tmp_path / name)
        assert whole(other) == whole(table)
    with pytest.raises(CheckpointError, match=dtype):
        new_table().load(tmp_path / "0")
    other = new_table()
    with pytest.raises(CheckpointError, match="load it into a table with dtype"):
        other.load(tmp_path / "0", allow=["optimizer"])


@pytest.mark.parametrize("dim", [1, 4096, 4097, 5000, 8192, 70_000])
def test_wide_rows_are_saved_once_each(tmp_path: Path, dim: int) -> None:
    table = Table(dim, name="wide", optimizer=optim.SGD(lr=0.5))
    keys = np.arange(200 if dim < 10_000 else 40)  # more than two blocks of a file
    table.find_or_insert(keys)
    table.save(tmp_path / "one")
    changed = keys[3::9].copy()
    table.apply_gradients(changed, np.ones((len(changed), dim), np.float32))
    table.save_delta(tmp_path / "two")
    for place in ("one", "two"):
        other = Table(dim, name="wide", optimizer=optim.SGD(lr=0.5))
        other.load(tmp_path / place)
        assert len(other) == len(keys)
    assert np.array_equal(other.lookup(keys), table.lookup(keys))


def test_an_empty_table_is_saved_and_loaded(tmp_path: Path) -> None:
    new_table().save(tmp_path / "empty")
    table = trained()
    table.load(tmp_path / "empty")
    assert len(table) == 0
    assert table.update_count == 0


def test_the_learning_rate_in_use_is_kept(tmp_path: Path) -> None:
    table = trained()
    table.learning_rate = 0.025
    table.save(tmp_path / "one")
    other = new_table()
    other.load(tmp_path / "one")
    assert other.learning_rate == 0.025
    assert other.optimizer == table.optimizer


def test_deltas_hold_what_changed_and_what_left(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "0")
    held = [whole(table)]
    for number in range(1, 6):
        train(table, KEYS[number::7].copy(), step=number)
        table.erase(KEYS[number : number + 3])
        train(table, np.array([1000 + number]), step=number)
        table.save_delta(tmp_path / str(number))
        held.append(whole(table))
    sizes = [open_checkpoint(tmp_path / str(n)).manifest.tables[0].num_rows for n in range(6)]
    assert sizes[0] == len(KEYS)
    assert max(sizes[1:]) <= len(KEYS[1::7]) + 1
    assert open_checkpoint(tmp_path / "3").manifest.tables[0].num_erased > 0
    for number, expected in enumerate(held):
        other = new_table()
        other.load(tmp_path / str(number))
        assert whole(other) == expected


def test_deltas_follow_what_was_loaded(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "0")
    other = new_table()
    other.load(tmp_path / "0")
    train(other, KEYS[:2], step=2)
    other.save_delta(tmp_path / "1")
    assert open_checkpoint(tmp_path / "1").manifest.tables[0].num_rows == 2
    table.load([tmp_path / "0", tmp_path / "1"])
    assert whole(table) == whole(other)


def test_a_delta_needs_a_checkpoint_before_it(tmp_path: Path) -> None:
    table = trained()
    with pytest.raises(CheckpointError, match="save or load one in full first"):
        table.save_delta(tmp_path / "1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("gone", ["0", "1", "2"])
def test_a_delta_on_what_is_gone_is_refused(
    tmp_path: Path, gone: str, is_replaced: bool, is_async: bool
) -> None:
    table = trained()
    table.save(tmp_path / "0")
    for number in (1, 2):
        train(table, KEYS[number : number + 5], step=2)
        table.save_delta(tmp_path / str(number))
    train(table, KEYS[3:6], step=3)
    shutil.rmtree(tmp_path / gone)
    if is_replaced:
        trained().save(tmp_path / gone)
    names = sorted(tmp_path.iterdir())
    text = f"/3: the delta builds on .*/{gone}, .*save in full, or put"
    if is_async:
        handle = table.save_async(tmp_path / "3", delta=True)
        with pytest.raises(CheckpointError, match=text):
            handle.wait()
    else:
        with pytest.raises(CheckpointError, match=text):
            table.save_delta(tmp_path / "3")
    assert sorted(tmp_path.iterdir()) == names
    table.save(tmp_path / "full")
    train(table, KEYS[:2], step=4)
    table.save_delta(tmp_path / "4")
    other = new_table()
    other.load(tmp_path / "4")
    assert whole(other) == whole(table)


def test_a_chain_may_be_moved_while_it_grows(tmp_path: Path) -> None:
    table, other = trained(), new_table()
    table.save(tmp_path / "run/0")
    train(table, KEYS[:5], step=2)
    table.save_delta(tmp_path / "run/1")
    (tmp_path / "run").rename(tmp_path / "moved")
    train(table, KEYS[3:6], step=3)
    table.save_delta(tmp_path / "moved/2")  # beside those that it needs, as loading finds them
    other.load(tmp_path / "moved/2")
    assert whole(other) == whole(table)
    with pytest.raises(CheckpointError, match="run/0, which is gone"):
        table.save_delta(tmp_path / "elsewhere/3")
    for number in "01":  # taken away, but for what says which they are
        (tmp_path / "run" / number).mkdir(parents=True)
        manifest = f"{number}/manifest.json"
        shutil.copy(tmp_path / "moved" / manifest, tmp_path / "run" / manifest)
    train(table, KEYS[1:4], step=4)
    table.save_delta(tmp_path / "elsewhere/3")
    other.load([*(tmp_path / "moved" / number for number in "012"), tmp_path / "elsewhere/3"])
    assert whole(other) == whole(table)


def test_after_a_failed_save_changes_still_count(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "0")
    train(table, KEYS[:5], step=2)
    table.erase(KEYS[5:7])
    for attempt in (table.save, table.save_delta):
        with pytest.raises(CheckpointError, match=r"/0: "):
            attempt(tmp_path / "0")
        with pytest.raises(TypeError, match="user_state"):
            attempt(tmp_path / "x", user_state=object())
    table.save_delta(tmp_path / "1")
    entry = open_checkpoint(tmp_path / "1").manifest.tables[0]
    assert (entry.num_rows, entry.num_erased) == (5, 2)


def test_loading_what_does_not_fit_names_both_and_changes_nothing(tmp_path: Path) -> None:
    trained().save(tmp_path / "one")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dim": 4}, "saved with dim=3, it now has 4"),
        ({"optimizer": optim.Adam()}, r"saved with Adagrad\(.*\), it now has Adam\("),
        ({"optimizer": optim.SGD()}, "allow 'optimizer' to drop the saved state"),
        ({"seed": 3}, "saved with seed 0, it now has 3"),
        ({"initializer": init.Constant(value=1.0)}, "allow 'initializer'"),
        ({"name": "item"}, r"has no table 'item'; it has \['user'\]"),
    ]
    for options, text in cases:
        table = trained(**options)
        before = whole(table)
        with pytest.raises(CheckpointError, match=text):
            table.load(tmp_path / "one")
        assert whole(table) == before
    table = trained(max_rows=len(KEYS) + 5)
    small = new_table(max_rows=len(KEYS) - 1)
    with pytest.raises(CapacityError, match="raise max_rows"):
        small.load(tmp_path / "one")
    assert len(small) == 0
    with pytest.raises(ValueError, match="allow must be of"):
        table.load(tmp_path / "one", allow=["everything"])
    for wrong in ("optimizer", [3], None):
        with pytest.raises(TypeError, match="allow must be a list of"):
            table.load(tmp_path / "one", allow=wrong)


def test_what_is_allowed_to_differ(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "one")
    other = new_table("item", optimizer=optim.Adam(lr=0.3), seed=4)
    other.load(tmp_path / "one", name="user", allow=["optimizer", "seed"])
    assert {k: row[0] for k, row in rows_of(other).items()} == {
        k: row[0] for k, row in rows_of(table).items()
    }
    assert other.learning_rate == 0.3
    fresh = other.find_or_insert(np.array([77]))
    other.upsert(np.array([77]), fresh)
    with pytest.raises(CheckpointError, match="save or load one in full first"):
        other.save_delta(tmp_path / "two")


def test_loading_while_batches_are_in_flight_changes_nothing(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "one")
    train(table, step=2)
    before = whole(table)
    with table.lease(1):
        with pytest.raises(BusyError):
            table.load(tmp_path / "one")
    assert whole(table) == before


def test_of_several_tables_all_are_loaded_or_none(tmp_path: Path) -> None:
    tables = [trained(name=name) for name in ("a", "b")]
    shards = [Shard(table=table) for table in tables]
    save_tables(lambda: (shards, SaveOptions()), OneRank(), tmp_path / "one")
    for table in tables:
        train(table, step=2)
    before = [whole(table) for table in tables]
    with tables[1].lease(1), pytest.raises(BusyError, match="'b'"):
        load_tables(lambda: (shards, Loading()), OneRank(), tmp_path / "one")
    assert [whole(table) for table in tables] == before
    rows = NewRows(keys=KEYS, weights=np.ones((len(KEYS), 3), np.float32),
                   state={"sum": np.ones((len(KEYS), 3), np.float32)})  # fmt: skip
    with tables[1].lease(1), pytest.raises(BusyError, match="'b'"):
        replace_rows([(table, rows) for table in tables])
    assert [whole(table) for table in tables] == before
    replace_rows([(table, rows) for table in tables])
    assert [len(table) for table in tables] == [len(KEYS)] * 2
    with pytest.raises(CheckpointError, match="save or load one in full first"):
        tables[0].save_delta(tmp_path / "two")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_from_memory_are_as_those_of_an_upsert(dtype: Any) -> None:
    one, other = (new_table(dtype=dtype, optimizer=optim.SGD()) for _ in range(2))
    weights = np.random.default_rng(1).normal(size=(len(KEYS), 3)).astype(np.float32)
    weights[:6, 0] = [np.inf, -np.inf, np.nan, 1e-40, 3.4e38, 65519.0]
    one.upsert(KEYS, weights)
    replace_rows([(other, NewRows(keys=KEYS, weights=weights, update_count=3))])
    assert rows_of(other) == rows_of(one)
    assert other.update_count == 3


def test_threads_and_capacity_of_the_table_do_not_matter(tmp_path: Path) -> None:
    table = new_table(num_threads=1)
    train(table, np.arange(20_000) * 7)
    table.save(tmp_path / "one")
    room = {"max_rows": 20_000, "eviction_groups": 1}
    for options in ({"num_threads": 1}, {"num_threads": 3}, room):
        other = new_table(**options)
        other.load(tmp_path / "one")
        assert whole(other) == whole(table)
    other = new_table()
    other.reserve(100_000)
    other.load(tmp_path / "one")
    assert whole(other) == whole(table)


def test_batches_in_flight_are_not_saved(tmp_path: Path) -> None:
    table = trained()
    before = rows_of(table)
    with table.lease(1) as lease:
        table.map(np.array([900, 901]), insert=True, lease=lease)
        table.save(tmp_path / "one")
    other = new_table()
    other.load(tmp_path / "one")
    assert rows_of(other) == before


@given(st.lists(st.tuples(key_arrays(max_size=12), key_arrays(max_size=4)), max_size=4))
def test_any_chain_comes_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    table, paths = new_table(), [folder / "0"]
    table.save(paths[0])
    for number, (keys, erased) in enumerate(steps, 1):
        train(table, keys, step=number)
        table.erase(erased)
        paths.append(folder / str(number))
        table.save_delta(paths[-1])
    other = new_table()
    other.load(paths)
    assert rows_of(other) == rows_of(table)
    compact(paths, folder / "compact")
    reshard(paths, folder / "three", world_size=3, rule="modulo")
    for name in ("compact", "three"):
        other = new_table()
        other.load(folder / name)
        assert whole(other) == whole(table)
    ways = (paths, paths[-1], open_checkpoint(paths[-1]), chain_of(paths))
    found = diff(ways[len(steps) % len(ways)], folder / "three")
    assert [(table.is_equal, table.equal) for table in found] == [(True, len(table))]
    shutil.rmtree(folder)


def regions(size: int) -> list[int]:
    """Positions all over a file, dense where headers are."""
    return sorted({*range(min(size, 400)), *range(0, size, 37), *range(max(size - 100, 0), size)})


def test_every_region_of_a_file_of_rows_is_protected(tmp_path: Path) -> None:
    path = tmp_path / "one"
    trained().save(path)
    file = file_of(path)
    raw = file.read_bytes()
    table = trained()
    before = whole(table)

    def refused(content: bytes) -> None:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"rank_00000\.rows"):
            table.load(path)

    for position in regions(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << (position % 8)
        refused(bytes(changed))
    for length in regions(len(raw)):
        refused(raw[:length])
    refused(raw + b"\0")
    refused(raw[:100] + bytes(len(raw) - 100))
    assert whole(table) == before
    file.write_bytes(raw)
    table.load(path)


def test_files_of_other_ranks_tables_and_checkpoints_are_refused(tmp_path: Path) -> None:
    trained().save(tmp_path / "whole")
    reshard(tmp_path / "whole", tmp_path / "two", world_size=2)
    reshard(tmp_path / "whole", tmp_path / "same", world_size=2)
    files = [file_of(tmp_path / "two", rank=rank) for rank in range(2)]
    contents = [file.read_bytes() for file in files]
    pads = [bytes(max(0, len(contents[1 - r]) - len(contents[r]))) for r in range(2)]
    table = new_table()
    for swapped in (
        contents[::-1],
        [contents[1] + pads[1], contents[0] + pads[0]],
        [file_of(tmp_path / "same").read_bytes(), contents[1]],
    ):
        for file, content in zip(files, swapped, strict=True):
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match="rank_0000"):
            table.load(tmp_path / "two")
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"rank_00001\.rows: opening failed"):
        table.load(tmp_path / "two")
    files[1].mkdir()
    with pytest.raises(CheckpointError, match=r"rank_00001\.rows"):
        table.load(tmp_path / "two")
    assert len(table) == 0


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Larger files cannot be written, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    table = new_table(dim=64)
    train(table, np.arange(3000))
    table.save(tmp_path / "one")
    calls: list[Callable[[], Any]] = [
        lambda: table.save(tmp_path / "two"),
        lambda: table.save(tmp_path / "one", overwrite=True),
        lambda: table.save_async(tmp_path / "two").wait(400),
        lambda: compact(tmp_path / "one", tmp_path / "two"),
    ]
    for call in calls:
        file = r"'\S+/(one|two)/[0-9a-f]{32}/tables/0000/rank_00000\.rows'"  # as complete ones lie
        with files_up_to(100_000), pytest.raises(CheckpointError, match=file):
            call()
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
    new_table(dim=64).load(tmp_path / "one")


def test_a_delta_with_a_damaged_base_is_refused(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "0")
    train(table, KEYS[:3])
    table.save_delta(tmp_path / "1")
    shutil.rmtree(tmp_path / "0")
    trained().save(tmp_path / "0")  # the same rows, but another checkpoint
    with pytest.raises(CheckpointError, match="parent is missing"):
        new_table().load(tmp_path / "1")
    with pytest.raises(CheckpointError, match="foreign"):
        new_table().load([tmp_path / "0", tmp_path / "1"])


def test_an_asynchronous_save_holds_the_moment_of_its_call(tmp_path: Path) -> None:
    table = trained()
    expected = whole(table)
    handle = table.save_async(tmp_path / "one", step=8)
    for step in range(2, 12):
        train(table, step=step)
    position = handle.result(timeout=400)
    assert (handle.is_done, handle.progress) == (True, 1.0)
    assert handle.max_copied_bytes >= handle.copied_bytes >= 0
    other = new_table()
    found = other.load(tmp_path / "one")
    assert (found.hash, found.manifest.step) == (position.hash, 8)
    assert whole(other) == expected
    changed = table.save_async(tmp_path / "two", delta=True)
    changed.wait(timeout=400)
    other.load(tmp_path / "two")
    assert whole(other) == whole(table)


def test_training_readies_memory_for_saves(tmp_path: Path) -> None:
    table, keys = new_table(dim=32), np.arange(20_000) * 7
    table.find_or_insert(keys)
    assert table.stats().tracking_bytes == 0
    for step in range(4):
        train(table, keys, step)
    stats = table.stats()
    assert 2**18 <= stats.tracking_bytes <= stats.row_bytes / 8 + 2**18
    handle = table.save_async(tmp_path / "one")
    expected = whole(table)
    train(table, keys)
    handle.wait()
    other = new_table(dim=32)
    other.load(tmp_path / "one")
    assert whole(other) == expected


def test_an_asynchronous_save_holds_the_user_state_of_its_call(tmp_path: Path) -> None:
    table, gate = trained(), Gate()
    state = {"steps": [1], "array": np.zeros(3)}
    with pytest.raises(TypeError, match=r"user_state\['x'\] is of type object"):
        table.save_async(tmp_path / "one", user_state={"x": object()})
    handle = table.save_async(tmp_path / "one", user_state=state, progress=gate)
    state["steps"].append(2)
    state["array"] += 1
    gate.opened.set()
    handle.wait(400)
    found = open_checkpoint(tmp_path / "one").user_state()
    assert (found["steps"], found["array"].tolist()) == ([1], [0, 0, 0])


def test_decay_of_a_table_that_catches_up_is_no_value_for_another(tmp_path: Path) -> None:
    trained().save(tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    value = json.loads(path.read_text())
    value["tables"][0]["log_decay"] = -0.5
    path.write_bytes(sealed(value))
    table = trained()
    before = whole(table)
    with pytest.raises(
        CheckpointError, match="one: .*log_decay must be 0 without catch_up, got -0.5"
    ):
        table.load(tmp_path / "one")
    assert whole(table) == before


def test_saves_of_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "sync")
    table.save_async(tmp_path / "async").wait(400)
    one, other = (list(blocks_of(tmp_path / name)) for name in ("sync", "async"))
    assert one == other
    assert sum(len(keys) for _, keys, _ in one) == 8 * len(KEYS)


def blocks_of(path: Path) -> Iterator[tuple[str, bytes, dict[str, bytes]]]:
    """The blocks of a checkpoint's first file."""
    with open_checkpoint(path).rows_file(0, 0) as file:
        while (block := file.next_block()) is not None:
            fields = {name: values.tobytes() for name, values in block.fields.items()}
            yield block.kind, block.keys.tobytes(), fields


class Gate:
    """A progress function that waits, so that a save is under way for as long as a test needs."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, num_bytes: int) -> None:
        self.reached.set()
        assert self.opened.wait(400)


def test_steps_wait_beyond_max_copy_bytes_and_stats_say_so(tmp_path: Path) -> None:
    keys = np.arange(6000)  # more than is written before progress is told
    table, gate = new_table(dim=64), Gate()
    train(table, keys)
    expected = whole(table)
    handle = table.save_async(tmp_path / "one", max_copy_bytes=1000, progress=gate)
    assert gate.reached.wait(400)
    train(table, keys[-50:], step=2)  # more than the limit: goes on, as there are no other copies
    assert (table.stats().checkpoint_waits, handle.is_done) == (0, False)
    assert handle.copied_bytes > 1000
    waiting = threading.Thread(target=train, args=(table, keys[-100:-50], 3))
    waiting.start()
    while table.stats().checkpoint_waits == 0:
        time.sleep(0.001)
    assert waiting.is_alive()
    gate.opened.set()
    waiting.join()
    handle.wait(400)
    stats = table.stats()
    assert stats.checkpoint_waits == 1
    assert stats.checkpoint_wait_seconds > 0
    assert stats.checkpoint_copied_bytes == 0
    other = new_table(dim=64)
    other.load(tmp_path / "one")
    assert whole(other) == expected


def test_one_save_at_a_time_for_a_table(tmp_path: Path) -> None:
    table, gate = trained(), Gate()
    handle = table.save_async(tmp_path / "one", progress=gate)
    assert gate.reached.wait(400)
    calls: list[Callable[[], Any]] = [
        lambda: table.save(tmp_path / "two"),
        lambda: table.save_async(tmp_path / "two"),
        lambda: table.load(tmp_path / "two"),
    ]
    for call in calls:
        with pytest.raises(BusyError, match="wait for that first"):
            call()
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0)
    assert not handle.is_done
    assert handle.progress < 1
    gate.opened.set()
    handle.wait(400)
    table.save(tmp_path / "two")


def test_errors_of_an_asynchronous_save_are_raised_by_wait(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "one")
    train(table, KEYS[:4], step=2)
    handle = table.save_async(tmp_path / "one")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="already"):
            handle.wait(400)
    assert handle.is_done
    table.save_delta(tmp_path / "two")
    assert open_checkpoint(tmp_path / "two").manifest.tables[0].num_rows == 4


def run_program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


AT_EXIT = """
import sys, threading
import numpy as np
from recsdk_core import Table

table = Table(dim=3, name="user")
table.find_or_insert(np.arange(1000))
table.save(sys.argv[1] + "/one")
reached, never = threading.Event(), threading.Event()

def wait(num_bytes):
    reached.set()
    never.wait(0.2)

table.save_async(sys.argv[1] + "/two", progress=wait)
table.find_or_insert(np.arange(5))
reached.wait()
print("leaving")
"""


def test_a_save_is_given_up_in_good_order_when_the_interpreter_exits(tmp_path: Path) -> None:
    done = run_program(AT_EXIT, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names in (["one"], ["one", "two"])  # "two" if the save was quicker
    assert open_checkpoint(tmp_path / names[-1]).manifest.tables[0].num_rows == 1000


IN_A_CHILD = """
import os, sys, threading
import numpy as np
from recsdk_core import CheckpointError, Table

folder = sys.argv[1]
table = Table(dim=3, name="user")
table.find_or_insert(np.arange(500))
table.save(folder + "/base")
table.find_or_insert(np.arange(1000))
table.erase(np.arange(5))
reached, opened = threading.Event(), threading.Event()

def wait(num_bytes):
    reached.set()
    opened.wait()

handle = table.save_async(folder + "/one", delta=True, progress=wait)
reached.wait()
child = os.fork()
if child == 0:
    assert handle.is_done
    try:
        handle.wait()
    except CheckpointError as error:
        print(error, flush=True)
    table.find_or_insert(np.arange(2000, 2007))
    table.save_delta(folder + "/two")
    table.save_async(folder + "/three").wait()
    os._exit(0)
status = os.waitpid(child, 0)[1]
opened.set()
handle.wait()
sys.exit(status != 0)
"""


def test_a_child_of_fork_saves_beside_the_save_of_its_parent(tmp_path: Path) -> None:
    done = run_program(IN_A_CHILD, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "one: the save goes on in the process that this one was forked from" in done.stdout
    table = Table(dim=3, name="user")
    for name, more in (("one", 0), ("two", 7), ("three", 7)):
        table.load(tmp_path / name)
        keys = [*range(5, 1000), *range(2000, 2000 + more)]
        assert sorted(key for batch in table.export() for key in batch.keys.tolist()) == keys
