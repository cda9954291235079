"""Frozen tables answer as the table of the checkpoint does, and refuse what is not whole."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import CapacityError, CheckpointError, Default, Evict, Outcome, Table, init, optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.checkpoint._fields import canonical_json
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.cli import main
from recsdk_core.serving import (
    FrozenManifest,
    ServingTable,
    freeze,
    freeze_tables,
    open_frozen,
    pool_serving,
)
from recsdk_core.virtual_shards import virtual_shards

INT64 = st.one_of(st.integers(-20, 20), st.sampled_from([2**63 - 1, -(2**63)]))
KEYS = st.lists(INT64, max_size=60).map(lambda keys: np.array(keys, dtype=np.int64))
LARGE = np.arange(3000) * 977 - 5


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys that are trained and keys that are erased before each checkpoint of a chain."""
    return draw(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=4))


def save_chain(table: Table, folder: Path, links: list[tuple[np.ndarray, np.ndarray]]) -> Path:
    """Saves a snapshot and deltas; returns the last."""
    rng = np.random.default_rng(3)
    for index, (trained, erased) in enumerate(links):
        table.find_or_insert(trained)
        grads = rng.normal(size=(len(trained), table.dim)).astype(np.float32)
        table.apply_gradients(trained, grads)
        table.erase(erased)
        save = table.save_delta if index else table.save
        save(folder / str(index))
    return folder / str(len(links) - 1)


def random_bags(keys: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of bags, some empty, and weights whose sums may be 0."""
    cuts = np.sort(rng.integers(0, len(keys) + 1, 7))
    weights = rng.integers(-1, 2, len(keys)).astype(np.float32)
    return np.array([0, *cuts, len(keys)]), weights


def expect_equal(served: ServingTable, table: Table, keys: np.ndarray) -> None:
    assert len(served) == len(table)
    values, outcomes = served.lookup(keys, return_outcomes=True)
    wanted, wanted_outcomes = table.lookup(keys, return_outcomes=True)
    assert bits(values) == bits(wanted)
    assert bits(outcomes) == bits(wanted_outcomes)
    offsets, weights = random_bags(keys, np.random.default_rng(len(keys)))
    for pooling in ("sum", "mean"):
        for given_weights in (None, weights):
            pooled = served.pool(keys, offsets, given_weights, pooling)
            assert bits(pooled) == bits(table.pool(keys, offsets, given_weights, pooling))


@settings(max_examples=40)
@given(
    links=chains(),
    asked=KEYS,
    num_shards=st.sampled_from([1, 2, 5]),
    dim=st.sampled_from([1, 3, 8, 19]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_a_frozen_chain_answers_as_its_table_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    links: list[tuple[np.ndarray, np.ndarray]],
    asked: np.ndarray,
    num_shards: int,
    dim: int,
    dtype: Any,
) -> None:
    """Rows of 16 bits frozen as they are lose nothing either."""
    folder = tmp_path_factory.mktemp("chain")
    optimizer = optim.Adagrad(lr=0.1)
    table = Table(
        dim=dim, name="t", optimizer=optimizer, dtype=dtype, default=Default.constant(-0.5)
    )
    last = save_chain(table, folder, links)
    freeze(last, folder / "frozen", dtype=dtype, num_shards=num_shards)
    served = ServingTable(folder / "frozen")
    served.verify()
    expect_equal(served, table, np.concatenate([asked, *(keys for keys, _ in links)]))


def saved(folder: Path, *, dim: int = 4, keys: np.ndarray = LARGE, name: str = "items") -> Table:
    """A table, saved as `checkpoint`."""
    table = Table(dim=dim, name=name, initializer=init.Normal(mean=0.0, stddev=0.5))
    table.find_or_insert(keys)
    table.save(folder / "checkpoint")
    return table


def frozen(folder: Path, **options: Any) -> Path:
    """That table, frozen."""
    saved(folder)
    freeze(folder / "checkpoint", folder / "frozen", **options)
    return folder / "frozen"


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.frozen"))


def test_it_says_what_it_is_and_what_it_was_made_of(tmp_path: Path) -> None:
    table = saved(tmp_path)
    table.find_or_insert(LARGE + 1)
    table.save_delta(tmp_path / "delta")
    manifest = freeze(tmp_path / "delta", tmp_path / "frozen", dtype="int8", num_shards=3)
    assert open_frozen(tmp_path / "frozen") == manifest
    with pytest.raises(
        CheckpointError, match="got 'recsdk-frozen'; .* or a frozen one, which ServingTable opens"
    ):
        open_checkpoint(tmp_path / "frozen")
    assert (manifest.source.sequence, manifest.source.step) == (1, None)
    served = ServingTable(tmp_path / "frozen")
    told = (served.name, served.dim, served.dtype, served.num_shards, len(served))
    assert told == ("items", 4, "int8", 3, len(table))
    assert served.is_whole
    assert served.default_value == 0.0
    # At most 12 bytes a key beside the row, and headers.
    assert served.num_bytes <= 3 * 8192 + len(served) * (12 + 4 + 8)
    served.preload()


def test_a_batch_larger_than_what_is_found_at_a_time_is_whole(tmp_path: Path) -> None:
    table = saved(tmp_path)
    freeze(tmp_path / "checkpoint", tmp_path / "frozen")
    keys = np.random.default_rng(0).permutation(np.concatenate([LARGE, LARGE, LARGE + 1]))
    expect_equal(ServingTable(tmp_path / "frozen"), table, keys)


def test_many_tables_are_pooled_side_by_side(tmp_path: Path) -> None:
    tables = [saved(tmp_path / str(dim), dim=dim, name=f"t{dim}") for dim in (2, 5)]
    for table in tables:
        folder = tmp_path / str(table.dim)
        freeze(folder / "checkpoint", folder / "frozen")
    served = [ServingTable(tmp_path / str(table.dim) / "frozen") for table in tables]
    keys, offsets = LARGE[:9], np.array([0, 4, 4, 9])
    weights = np.arange(9, dtype=np.float32)
    out = np.full((3, 9), 7.0, dtype=np.float32)
    pool_serving([
        (served[0], keys, offsets, out, 0),
        (served[1], keys, offsets, out, 3, weights, "mean"),
    ])  # fmt: skip
    assert bits(out[:, :2]) == bits(tables[0].pool(keys, offsets))
    assert bits(out[:, 3:8]) == bits(tables[1].pool(keys, offsets, weights, "mean"))
    assert set(out[:, [2, 8]].ravel().tolist()) == {7.0}
    before = out.copy()
    with pytest.raises(ValueError, match="offsets must run from 0"):
        pool_serving([(served[0], keys, offsets, out, 1), (served[1], keys, offsets + 1, out, 3)])
    assert bits(out) == bits(before)


def test_some_shards_refuse_keys_of_others(tmp_path: Path) -> None:
    path = frozen(tmp_path, num_shards=4)
    part = ServingTable(path, shards=[2])
    whole = ServingTable(path)
    assert not part.is_whole
    shard = virtual_shards(LARGE) * 4 >> 16
    here = LARGE[shard == 2]
    assert len(part) == len(here) > 0
    assert bits(part.lookup(here)) == bits(whole.lookup(here))
    for key in LARGE[shard != 2][:20]:
        with pytest.raises(ValueError, match="which is not open here"):
            part.lookup(np.array([key]))
    for shards in ([4], [-1]):
        with pytest.raises(ValueError, match="shards must be of 0 to 3"):
            ServingTable(path, shards=shards)
    for shard in (True, "0", 1.0):
        with pytest.raises(TypeError, match="shards must be the numbers of the shards to open"):
            ServingTable(path, shards=[shard])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="given twice"):
        ServingTable(path, shards=[1, 1])
    with pytest.raises(ValueError, match="of no file"):
        ServingTable(path, shards=[])


def test_tables_are_named_and_each_may_have_its_dtype(tmp_path: Path) -> None:
    path = frozen(tmp_path, dtype={"items": "bfloat16"})
    assert ServingTable(path, "items").dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="there is no table 'users'; it has"):
        ServingTable(path, "users")
    for dtype in ({"users": "int8"}, {}, "int2", {"items": "int2"}):
        with pytest.raises(ValueError, match="dtype"):
            freeze(tmp_path / "checkpoint", tmp_path / "other", dtype=dtype)  # type: ignore[arg-type]


def test_what_cannot_be_frozen_leaves_nothing_behind(tmp_path: Path) -> None:
    table = saved(tmp_path)
    bad = np.full((1, 4), np.inf, dtype=np.float32)
    table.upsert(np.array([55]), bad)
    table.save(tmp_path / "infinite")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CapacityError, match="more than 100 rows"):
        freeze(tmp_path / "checkpoint", tmp_path / "x", max_rows=100)
    with pytest.raises(ValueError, match="int8 cannot hold the row of key 55"):
        freeze(tmp_path / "infinite", tmp_path / "x", dtype="int8")
    with pytest.raises(CheckpointError):
        freeze(tmp_path / "nothing", tmp_path / "x")
    with pytest.raises(ValueError, match="one of the source's"):
        freeze(tmp_path / "checkpoint", tmp_path / "checkpoint", overwrite=True)
    with pytest.raises(CheckpointError, match="is no frozen checkpoint that could be replaced"):
        freeze(tmp_path / "checkpoint", tmp_path / "infinite", overwrite=True)
    for num_shards in (0, 65_537):
        with pytest.raises(ValueError, match="num_shards"):
            freeze(tmp_path / "checkpoint", tmp_path / "x", num_shards=num_shards)
    with pytest.raises(ValueError, match="is a URL"):
        freeze(tmp_path / "checkpoint", "memory://x")
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".recsdk-lock")}
    assert sorted(left) == [name for name in before if not name.endswith(".recsdk-lock")]
    freeze(tmp_path / "infinite", tmp_path / "x", max_rows=len(table))
    assert np.isinf(ServingTable(tmp_path / "x").lookup(np.array([55]))).all()


def test_an_open_table_goes_on_while_its_place_is_overwritten(tmp_path: Path) -> None:
    path = frozen(tmp_path)
    before = ServingTable(path)
    values = before.lookup(LARGE)
    with pytest.raises(CheckpointError, match="a frozen checkpoint already; .*overwrite=True"):
        freeze(tmp_path / "checkpoint", path)
    freeze(tmp_path / "checkpoint", path, dtype="int4", overwrite=True)
    assert len(files_of(path)) == 1
    assert bits(before.lookup(LARGE)) == bits(values)
    assert ServingTable(path).dtype == "int4"


def damaged_copies(path: Path, folder: Path, rng: np.random.Generator) -> list[Path]:
    """Copies of a frozen checkpoint, each with one file cut short, longer, changed, or gone."""
    copies = []
    for index in range(60):
        copy = folder / f"copy_{index}"
        shutil.copytree(path, copy)
        file = [*files_of(copy), copy / "manifest.json"][index % 3]
        raw = bytearray(file.read_bytes())
        if index < 6:
            raw = raw[: int(rng.integers(0, len(raw)))]
        elif index < 9:
            raw += b"\0"
        else:
            at = int(rng.integers(0, len(raw) if index % 2 else min(len(raw), 160)))
            raw[at] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(raw)
        copies.append(copy)
    return copies


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    path = frozen(tmp_path, num_shards=2)
    for copy in damaged_copies(path, tmp_path, np.random.default_rng(1)):
        with pytest.raises(CheckpointError, match=copy.name):
            ServingTable(copy).verify()
    files_of(path)[1].unlink()
    with pytest.raises(CheckpointError, match="shard_00001"):
        ServingTable(path)


def test_large_files_are_left_to_be_read_in_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written lies in small pages, which are dropped once it is on the disk."""
    dropped: list[tuple[int, int]] = []
    drop = os.posix_fadvise

    def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((os.fstat(descriptor).st_size, offset + length))
        drop(descriptor, offset, length, advice)

    table = Table(dim=64, name="large")
    table.upsert(LARGE, np.ones((len(LARGE), 64), dtype=np.float32))
    monkeypatch.setattr(os, "posix_fadvise", noted)
    frozen(tmp_path)
    assert dropped == []
    rows = np.concatenate([np.arange(9000), LARGE])
    table.upsert(rows, np.full((len(rows), 64), 2, dtype=np.float32))
    freeze_tables([table], tmp_path / "served")
    served = ServingTable(tmp_path / "served")
    assert dropped == [(served.num_bytes, 0)]
    served.verify()
    assert (served.lookup(rows) == 2).all()


def test_files_of_another_freeze_are_refused(tmp_path: Path) -> None:
    path = frozen(tmp_path, num_shards=2)
    freeze(tmp_path / "checkpoint", tmp_path / "other", num_shards=2)
    for mine, other in zip(files_of(path), files_of(tmp_path / "other"), strict=True):
        kept = mine.read_bytes()
        mine.write_bytes(other.read_bytes())
        with pytest.raises(CheckpointError, match=mine.name):
            ServingTable(path)
        mine.write_bytes(kept)
    with pytest.raises(CheckpointError, match="recsdk freeze"):
        ServingTable(tmp_path / "checkpoint")


@given(
    field=st.sampled_from(["token", "tables", "source", "writer", "version", "format", "more"]),
    value=st.one_of(st.none(), st.integers(), st.text(max_size=5), st.just([{}]), st.just({})),
)
def test_a_manifest_of_another_shape_is_refused(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "shape"
    if not folder.exists():
        folder.mkdir()
        frozen(folder)
    manifest = json.loads((folder / "frozen" / "manifest.json").read_bytes())
    wanted = manifest.get(field)
    raw = json.dumps({**manifest, field: value}, sort_keys=True, separators=(",", ":"))
    if value != wanted:
        with pytest.raises(CheckpointError, match="there"):
            FrozenManifest.from_bytes(raw.encode() + b"\n", "there")


def changed(value: Any, data: st.DataObject) -> Any:
    """A part of a manifest, or a part of that and so on, is something else."""
    parts = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(
        value, list) else []  # fmt: skip
    if parts and data.draw(st.integers(0, 4)):
        part = data.draw(st.sampled_from(parts))
        copy = value.copy()
        copy[part] = changed(value[part], data)
        return copy
    return data.draw(
        st.one_of(
            st.none(),
            st.integers(-(2**64), 2**64),
            st.sampled_from([0.5, True, [], {}, "", "../../x", "/etc/passwd", [{}], 2**40, -1]),
            st.text(max_size=40),
        )
    )


@settings(max_examples=150)
@given(data=st.data())
def test_a_manifest_that_lies_under_its_own_seal_is_refused_or_serves(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "lies"
    if not folder.exists():
        folder.mkdir()
        frozen(folder, num_shards=2)
        shutil.copy(folder / "frozen" / "manifest.json", folder / "whole")
    lie = changed(json.loads((folder / "whole").read_bytes()), data)
    raw = canonical_json(lie)
    if isinstance(lie, dict):
        digest = hashlib.sha256(canonical_json({**lie, "sha256": "0" * 64})).hexdigest()
        raw = canonical_json({**lie, "sha256": digest})
    (folder / "frozen" / "manifest.json").write_bytes(raw)
    try:
        manifest = open_frozen(folder / "frozen")
        assert manifest.to_bytes() == raw
        served = ServingTable(folder / "frozen", manifest.tables[0].name)
        assert served.lookup(LARGE).shape == (len(LARGE), served.dim)
    except CheckpointError:
        pass


def test_threads_read_side_by_side(tmp_path: Path) -> None:
    served = ServingTable(frozen(tmp_path))
    wanted = bits(served.lookup(LARGE))
    equal: list[bool] = []

    def read() -> None:
        equal.extend(bits(served.lookup(LARGE)) == wanted for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 80


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    served = ServingTable(frozen(tmp_path))
    keys = LARGE[:3]
    for offsets in ([], [0, 2], [1, 3], [0, 2, 1, 3]):
        with pytest.raises(ValueError, match="offsets"):
            served.pool(keys, np.array(offsets, dtype=np.int64))
    with pytest.raises(TypeError, match="offsets must be a numpy array"):
        served.pool(keys, None)
    with pytest.raises(ValueError, match="weights"):
        served.pool(keys, np.array([0, 3]), np.ones(2, dtype=np.float32))
    with pytest.raises(ValueError, match="pooling"):
        served.pool(keys, np.array([0, 3]), None, "max")
    with pytest.raises(TypeError):
        served.lookup(keys.astype(np.float64))
    empty = served.pool(keys[:0], np.array([0, 0]))
    assert empty.tolist() == [[0.0] * 4]
    _, outcomes = served.lookup(keys + 1, return_outcomes=True)
    assert set(outcomes.tolist()) == {Outcome.MISSING}


def test_arguments_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    path = frozen(tmp_path)
    served = ServingTable(path)
    call = (LARGE[:2], np.array([0, 2]), np.zeros((1, 9), dtype=np.float32))
    freezing: Any = functools.partial(freeze, tmp_path / "checkpoint", tmp_path / "x")
    for wrong, message in (
        (lambda: ServingTable(path, shards=1), "shards must be the numbers"),  # type: ignore[arg-type]
        (lambda: ServingTable(path, 5), "table must be the name"),  # type: ignore[arg-type]
        (lambda: pool_serving([(served, *call, True)]), "column must be an int"),
        (lambda: pool_serving([(path, *call, 0)]), "start with a ServingTable, got"),
        (lambda: served.follow(tmp_path, interval_seconds=True), "interval_seconds must be"),
        (lambda: freezing(num_shards=True), "num_shards must be an int"),
        (lambda: freezing(max_rows=True), "max_rows must be an int"),
        (lambda: freezing(overwrite="no"), "overwrite must be True or False"),
        (lambda: freezing(progress=1), "progress must be callable"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()


@pytest.mark.parametrize(("dtype", "most"), [("float16", 65504.0), ("bfloat16", 3.3895e38)])
def test_finite_values_never_become_infinite(tmp_path: Path, dtype: Any, most: float) -> None:
    table = Table(dim=2, name="t")
    table.upsert(np.array([4, 5]), np.array([[most, -most], [np.inf, np.nan]], dtype=np.float32))
    table.save(tmp_path / "fits")
    freeze(tmp_path / "fits", tmp_path / "frozen", dtype=dtype)
    values = ServingTable(tmp_path / "frozen").lookup(np.array([4, 5]))
    np.testing.assert_allclose(values, [[most, -most], [np.inf, np.nan]], rtol=2**-8)
    table.upsert(np.array([6]), np.array([[0.0, -1.003 * most]], dtype=np.float32))
    table.save(tmp_path / "large")
    with pytest.raises(ValueError, match=f"{dtype} cannot hold the row of key 6"):
        freeze(tmp_path / "large", tmp_path / "x", dtype=dtype)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("num_rows", [500, 60_000])
def test_a_full_disk_is_told_of_the_file(tmp_path: Path, num_rows: int) -> None:
    table = Table(16, name="user")
    table.find_or_insert(np.arange(num_rows))
    table.save(tmp_path / "saved")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    try:
        with pytest.raises(CheckpointError, match="writing failed: File too large$") as error:
            freeze(tmp_path / "saved", tmp_path / "frozen")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    is_scratch = str(error.value).startswith(f"a scratch file in {tmp_path}: ")
    assert is_scratch == (num_rows == 60_000)
    name = f"{re.escape(str(tmp_path))}/frozen/[0-9a-f]{{32}}/tables/0000/shard_00000.frozen: "
    assert is_scratch or re.match(name, str(error.value))
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["saved"]


def test_the_command_freezes_and_says_what_is_wrong(tmp_path: Path) -> None:
    saved(tmp_path)
    source, target = str(tmp_path / "checkpoint"), str(tmp_path / "frozen")
    command = ["freeze", source, target, "--dtype", "int8", "--num-shards", "2"]
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, "3000 rows of width 4, int8" in done.output) == (0, True)
    again = CliRunner().invoke(main, command)
    assert (again.exit_code, "pass --overwrite" in again.output) == (1, True)
    done = CliRunner().invoke(main, [*command, "--overwrite", "--json"])
    assert json.loads(done.output)["tables"]["items"]["num_rows"] == 3000
    many = CliRunner().invoke(main, ["freeze", source, target + "2", "--max-rows", "10"])
    assert (many.exit_code, "more than 10 rows" in many.output) == (1, True)
    assert CliRunner().invoke(main, ["freeze", source, target, "--dtype", "int3"]).exit_code == 2


def test_the_command_takes_a_predicate_of_some_tables(tmp_path: Path) -> None:
    """Others keep all rows, and need not keep what it asks for."""
    tables = [Table(1, name="item", max_rows=9, eviction=Evict.lfu()), Table(1, name="user")]
    for table in tables:
        table.find_or_insert(np.array([1, 2, 2]))
    shards = [Shard(table=table) for table in tables]
    save_tables(lambda: (shards, SaveOptions()), OneRank(), tmp_path / "two")
    command = ["freeze", str(tmp_path / "two"), str(tmp_path / "frozen")]
    for more, status, said in (
        (["--where", "count > 1"], 1, "table 'user' does not keep that"),
        (["--where", "count > 1", "--table", "items"], 2, "there is no 'items'"),
        (["--table", "item"], 2, "give --where, too"),
        (["--where", "count >"], 2, "predicate 'count >': cannot be read"),
    ):
        wrong = CliRunner().invoke(main, [*command, *more])
        assert (wrong.exit_code, said in wrong.output) == (status, True), wrong.output
        assert not (tmp_path / "frozen").exists()
    done = CliRunner().invoke(main, [*command, "--where", "count > 1", "--table", "item", "--json"])
    num_rows = {name: each["num_rows"] for name, each in json.loads(done.output)["tables"].items()}
    assert num_rows == {"item": 1, "user": 2}
