"""Any number of ranks loads what any number of ranks saved: snapshots and chains of deltas.

Ranks are threads here, each with tables of its own; recsdk-sharding tests the same with processes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import CheckpointError, Table, optim
from recsdk_core.checkpoint import Sharding, compact, open_checkpoint, reshard
from recsdk_core.checkpoint._fields import canonical_json
from recsdk_core.checkpoint.model.loading import Loading, load_tables
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.testing.strategies import EDGE_KEYS
from sampling import crossed

SIZES = (1, 2, 3, 4, 8)
RULES = ("virtual_shard", "modulo")
OPTIMIZERS = (optim.Adagrad(lr=0.1), optim.Adam(lr=0.1, bias_correction="row"))


class Meeting:
    """Where threads that stand for ranks gather."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=400)


class ThreadRanks:
    """One thread's view of a meeting."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.world_size = len(meeting.values)
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        found = list(self._meeting.values)
        self._meeting.barrier.wait()
        return found


class World:
    """Tables spread over ranks."""

    def __init__(self, size: int, rule: str, optimizer: Any = OPTIMIZERS[0]) -> None:
        sharding = Sharding(rule=rule)
        self.size = size
        self.owners = [Owner(rank, size, sharding) for rank in range(size)]
        self.tables = [
            {
                "user": Table(dim=3, name="user", optimizer=optimizer),
                "item": Table(dim=5, name="item", optimizer=optimizer, seed=3),
            }
            for _ in range(size)
        ]

    def on_each(self, call: Callable[[list[Shard], ThreadRanks], Any]) -> list[Any]:
        meeting = Meeting(self.size)

        def run(rank: int) -> Any:
            owner = self.owners[rank]
            shards = [Shard(table=t, owner=owner) for t in self.tables[rank].values()]
            return call(shards, ThreadRanks(rank, meeting))

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))

    def train(self, keys: Any, step: int, erased: Sequence[int] = ()) -> None:
        grads = np.random.default_rng(step).normal(size=(len(keys), 5)).astype(np.float32)
        for tables, owner in zip(self.tables, self.owners, strict=True):
            own = owner.owns(keys)
            for table in tables.values():
                table.find_or_insert(keys[own])
                table.apply_gradients(keys[own], grads[own, : table.dim].copy())
                table.erase(np.array(erased, dtype=np.int64))

    def save(self, path: Any, is_delta: bool = False) -> None:
        options = SaveOptions(is_delta=is_delta, step=1)
        self.on_each(lambda shards, ranks: save_tables(lambda: (shards, options), ranks, path))

    def load(self, path: Any, is_delta: bool = False) -> None:
        loading = Loading(is_delta=is_delta)
        self.on_each(lambda shards, ranks: load_tables(lambda: (shards, loading), ranks, path))

    def rows(self) -> dict[str, dict[int, tuple[bytes, ...]]]:
        """All rows; each key is on the rank that owns it."""
        found: dict[str, dict[int, tuple[bytes, ...]]] = {"user": {}, "item": {}}
        for tables, owner in zip(self.tables, self.owners, strict=True):
            for name, table in tables.items():
                for batch in table.export():
                    assert owner.owns(batch.keys).all()
                    arrays = [batch.weights, *batch.state.values()]
                    for index, key in enumerate(batch.keys.tolist()):
                        assert key not in found[name]
                        found[name][key] = tuple(array[index].tobytes() for array in arrays)
        return found

    def counts(self) -> set[int]:
        return {t.update_count for tables in self.tables for t in tables.values()}


def keys_of(step: int) -> Any:
    random = np.random.default_rng(step).integers(-(2**63), 2**63 - 1, 30)
    return np.unique(np.concatenate([np.array(EDGE_KEYS), random, np.arange(step, step + 20)]))


CASES = crossed(SIZES, SIZES, RULES, RULES, range(len(OPTIMIZERS)), size=6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, case: tuple[int, int, str, str, int]
) -> None:
    writers, readers, rule, other_rule, optimizer = case
    world = World(writers, rule, OPTIMIZERS[optimizer])
    world.train(keys_of(0), step=0)
    paths = [tmp_path / "0"]
    world.save(paths[0])
    held = [(world.rows(), world.counts())]
    for number in range(1, 6):
        if number == 3:  # the chain goes on with another number of ranks
            again = World(readers, other_rule, OPTIMIZERS[optimizer])
            again.load(paths[-1])
            world = again
        keys = keys_of(number)
        world.train(keys, number, erased=[*keys[number::9], *EDGE_KEYS[number : number + 2]])
        world.train(np.array(EDGE_KEYS[number + 1 : number + 2]), number)
        paths.append(tmp_path / str(number))
        world.save(paths[-1], is_delta=True)
        held.append((world.rows(), world.counts()))
    reader = World(readers, other_rule, OPTIMIZERS[optimizer])
    for number, path in enumerate(paths):
        reader.load(path, is_delta=number > 0)
        assert (reader.rows(), reader.counts()) == held[number]
    compact(paths, tmp_path / "compact")
    reshard(tmp_path / "5", tmp_path / "reshard", world_size=readers, rule=other_rule)
    for name in ("compact", "reshard"):
        reader = World(readers, other_rule, OPTIMIZERS[optimizer])
        reader.load(tmp_path / name)
        assert (reader.rows(), reader.counts()) == held[5]


def test_all_ranks_raise_if_one_fails(tmp_path: Path) -> None:
    world = World(3, "virtual_shard")
    world.train(keys_of(0), step=0)

    def fail(shards: list[Shard], ranks: ThreadRanks) -> str:
        def progress(num_bytes: int) -> None:
            if ranks.rank == 1:
                raise OSError("the disk of rank 1 is gone")

        try:
            save_tables(lambda: (shards, SaveOptions(progress=progress)), ranks, tmp_path / "one")
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    texts = world.on_each(fail)
    assert "the disk of rank 1 is gone" in texts[1]
    for rank in (0, 2):
        assert "rank 1 failed, so no rank went on" in texts[rank]
    assert list(tmp_path.iterdir()) == []
    world.save(tmp_path / "one")
    assert open_checkpoint(tmp_path / "one").manifest.world_size == 3


def test_all_ranks_raise_if_one_has_no_path(tmp_path: Path) -> None:
    world = World(3, "virtual_shard")

    def fail(shards: list[Shard], ranks: ThreadRanks) -> str:
        path = "" if ranks.rank == 1 else tmp_path / "one"
        with pytest.raises((CheckpointError, ValueError)) as caught:
            save_tables(lambda: (shards, SaveOptions()), ranks, path)
        return str(caught.value)

    texts = world.on_each(fail)
    assert texts[1] == "path must have 1 to 1024 characters, got 0"
    assert all("rank 1 failed" in texts[rank] for rank in (0, 2))
    world.save(tmp_path / "one")


def test_no_rank_changes_if_one_cannot_read(tmp_path: Path) -> None:
    world = World(4, "virtual_shard")
    world.train(keys_of(0), step=0)
    world.save(tmp_path / "one")
    world.train(keys_of(1), step=1)
    before = world.rows()
    file = open_checkpoint(tmp_path / "one").manifest.tables[1].files[2]
    path = tmp_path / "one" / file.path
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))

    def fail(shards: list[Shard], ranks: ThreadRanks) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_tables(lambda: (shards, Loading()), ranks, tmp_path / "one")
        return str(caught.value)

    texts = world.on_each(fail)
    assert all("rank_00002.rows" in text for text in texts)
    assert world.rows() == before


def test_ranks_that_save_different_tables_are_refused(tmp_path: Path) -> None:
    world = World(2, "virtual_shard")
    world.tables[1].pop("item")

    def fail(shards: list[Shard], ranks: ThreadRanks) -> str:
        with pytest.raises(CheckpointError) as caught:
            save_tables(lambda: (shards, SaveOptions()), ranks, tmp_path / "one")
        return str(caught.value)

    texts = world.on_each(fail)
    assert all("'item' is cut into 2 shards, but the ranks have only [0]" in text for text in texts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "given", "other"),
    [("step", 1, 2), ("codec", "none", "zstd"), ("overwrite", False, True)],
)
def test_ranks_that_save_otherwise_are_refused(
    tmp_path: Path, name: str, given: Any, other: Any
) -> None:
    world = World(3, "modulo")

    def fail(shards: list[Shard], ranks: ThreadRanks) -> None:
        options = SaveOptions(**{name: other if ranks.rank == 2 else given})
        text = f"^save: {name} is {given!r} on rank 0 and {other!r} on rank 2; all ranks must pass"
        with pytest.raises(CheckpointError, match=text):
            save_tables(lambda: (shards, options), ranks, tmp_path / "one")

    world.on_each(fail)
    assert list(tmp_path.iterdir()) == []
    world.save(tmp_path / "one")  # no save is open


def test_ranks_of_which_one_loads_while_another_saves_are_refused(tmp_path: Path) -> None:
    world = World(2, "modulo")

    def call(shards: list[Shard], ranks: ThreadRanks) -> None:
        if ranks.rank == 0:
            save_tables(lambda: (shards, SaveOptions()), ranks, tmp_path / "one")
        else:
            load_tables(lambda: (shards, Loading()), ranks, tmp_path / "one")

    def fail(shards: list[Shard], ranks: ThreadRanks) -> None:
        with pytest.raises(CheckpointError, match="rank 0 calls save while rank 1 calls load"):
            call(shards, ranks)

    world.on_each(fail)
    assert list(tmp_path.iterdir()) == []
    world.save(tmp_path / "one")


def test_each_rank_loads_a_table_of_its_own(tmp_path: Path) -> None:
    world, reader = World(1, "modulo"), World(2, "modulo")
    world.train(keys_of(0), step=0)
    world.save(tmp_path / "one")

    def load(_: list[Shard], ranks: ThreadRanks) -> None:
        table = reader.tables[ranks.rank][("user", "item")[ranks.rank]]
        shards = [Shard(table=table, owner=world.owners[0])]
        load_tables(lambda: (shards, Loading()), ranks, tmp_path / "one")

    reader.on_each(load)
    sizes = [[len(table) for table in tables.values()] for tables in reader.tables]
    assert sizes == [[len(keys_of(0)), 0], [0, len(keys_of(0))]]


def test_incremental_loading_follows_what_was_loaded(tmp_path: Path) -> None:
    world, reader = World(2, "modulo"), World(3, "virtual_shard")
    world.train(keys_of(0), step=0)
    world.save(tmp_path / "0")
    for number in (1, 2):
        world.train(keys_of(number), step=number)
        world.save(tmp_path / str(number), is_delta=True)

    def error(path: Path) -> str:
        def fail(shards: list[Shard], ranks: ThreadRanks) -> str:
            with pytest.raises(CheckpointError) as caught:
                load_tables(lambda: (shards, Loading(is_delta=True)), ranks, path)
            return str(caught.value)

        return "; ".join(reader.on_each(fail))

    assert "load that first" in error(tmp_path / "1")
    reader.load(tmp_path / "0")
    assert "is missing before it" in error(tmp_path / "2")
    reader.load(tmp_path / "1", is_delta=True)
    reader.load(tmp_path / "2", is_delta=True)
    assert reader.rows() == world.rows()
    assert "out of order" in error(tmp_path / "1") or "repeated" in error(tmp_path / "1")


def test_keys_in_files_of_other_ranks_are_not_lost_in_silence(tmp_path: Path) -> None:
    world = World(2, "virtual_shard")
    world.train(keys_of(0), step=0)
    world.save(tmp_path / "one")
    manifest = tmp_path / "one" / "manifest.json"
    value = json.loads(manifest.read_bytes())
    for table in value["tables"]:
        table["sharding"]["rule"] = "modulo"
    unsealed = canonical_json({**value, "sha256": "0" * 64})
    value["sha256"] = hashlib.sha256(unsealed).hexdigest()
    manifest.write_bytes(canonical_json(value))
    with pytest.raises(CheckpointError, match=r"rank_0000[01]\.rows: has keys of another file"):
        open_checkpoint(tmp_path / "one").verify()
    with pytest.raises(CheckpointError, match="has keys of another file"):
        reshard(tmp_path / "one", tmp_path / "two", world_size=2)
    reader = World(2, "modulo")

    def fail(shards: list[Shard], ranks: ThreadRanks) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_tables(lambda: (shards, Loading()), ranks, tmp_path / "one")
        return str(caught.value)

    for text in reader.on_each(fail):
        assert "but the ranks found" in text
    assert reader.rows() == {"user": {}, "item": {}}
