"""Saves while a pipeline is six batches deep, in chains that move between numbers of ranks.

test_saving.py shows how they ended.
"""

from __future__ import annotations

import json
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.types import ShardingEnv

from pipeline_support.cases_of_resuming import shared_folder, training
from pipeline_support.model import DEVICE, World, assert_equal, batches, content
from rank_templates import begin_torchrec
from recsdk_sharding import Saver, ShardedHashEmbeddingBagCollection
from sampling import IS_FULL

DEPTH = 6
NUM_LINKS = 6 if IS_FULL else 4  # a snapshot and deltas
NUM_BATCHES = 10  # of each part of the training
SAVED_AFTER = 3  # of them, with all batches that fit in flight
RESUMED_FROM = NUM_LINKS // 2


class Training:
    """Training in parts. In the midst of each there is a save; after each keys are erased."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model, self.optimizer, self.pipeline = training(world, DEPTH)

    def run(self, number: int, saved: Any = None, skipped: int = 0) -> None:
        """A part of the training; `saved` is called in its midst, `skipped` batches are done."""
        iterator = iter(batches(self.world, NUM_BATCHES, seed=number)[skipped:])
        for index in range(skipped, NUM_BATCHES):
            self.pipeline.progress(iterator)
            if saved is not None and index + 1 == SAVED_AFTER:
                saved(number)
        with suppress(StopIteration):
            self.pipeline.progress(iterator)
        for table in self.tables():
            keys = [key for part in table.export() for key in part.keys.tolist()]
            table.erase(torch.tensor(sorted(keys)[number::5], dtype=torch.int64))

    def tables(self) -> list[Any]:
        """This rank's."""
        return [
            table
            for module in self.model.modules()
            if isinstance(module, ShardedHashEmbeddingBagCollection)
            for table in module.tables().values()
        ]

    @property
    def state(self) -> dict[str, Any]:
        """What torch's checkpoints take."""
        return {"model": self.model, "optimizer": self.optimizer, "pipeline": self.pipeline}


class Worlds:
    """Process groups of the first ranks, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank, self._most = dist.get_rank(), dist.get_world_size()
        self._count = 0

    def enter(self, size: int) -> World | None:
        """A world of so many ranks; None on others, which wait where they enter the next."""
        dist.destroy_process_group()
        self._count += 1
        if self._rank >= size:
            # A group is destroyed once it is there: one of its own for who has no part in this.
            self._initialize(f"{self._count}_{self._rank}", 0, 1)
            return None
        self._initialize(str(self._count), self._rank, size)
        host = dist.new_group(backend="gloo")
        return World(self._rank, size, ShardingEnv(world_size=size, rank=self._rank, pg=host))

    def leave(self) -> None:
        """Back to the world of all."""
        self.enter(self._most)

    def _initialize(self, name: str, rank: int, size: int) -> None:
        backend = "gloo" if DEVICE.type == "cpu" else "hccl"
        path = self._folder / f"world_{name}"
        dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)


def pairs() -> list[tuple[int, int]]:
    """Numbers of ranks that save and that load."""
    return [tuple(pair) for pair in json.loads(os.environ["RECSDK_TEST_PAIRS"])]


def case_chains_saved_amid_a_deep_pipeline_move_between_worlds(world: World) -> None:
    folder = Path(shared_folder(world))
    worlds = Worlds(folder)
    begin_torchrec()
    try:
        for size in sorted({size for size, _ in pairs()}):
            own = worlds.enter(size)
            if own is not None:
                train_and_save(own, folder / f"from_{size}")
        for size, other in pairs():
            own = worlds.enter(other)
            if own is not None:
                load_and_compare(own, folder / f"from_{size}", is_same=size == other)
    except BaseException:
        traceback.print_exc()  # before others are waited for, which may not come
        raise
    finally:
        worlds.leave()


def train_and_save(world: World, folder: Path) -> None:
    """Leaves the chain, what was held at each save, and what was held at the end."""
    one = Training(world)

    def save(number: int) -> None:
        assert one.pipeline.num_batches_trained == number * NUM_BATCHES + SAVED_AFTER
        Saver().save(one.model, folder / str(number), incremental=number > 0)
        keep(one, folder, str(number))
        if number == RESUMED_FROM:
            dcp.save(one.state, checkpoint_id=folder / "dense")

    for number in range(NUM_LINKS):
        one.run(number, save)
    keep(one, folder, "end")


def keep(one: Training, folder: Path, name: str) -> None:
    torch.save(content(one.model), folder.parent / f"{folder.name}_{name}_{one.world.rank}.pt")


def load_and_compare(world: World, folder: Path, *, is_same: bool) -> None:
    one, last = Training(world), Training(world)
    for number in range(NUM_LINKS):
        Saver().load(one.model, folder / str(number), incremental=number > 0)
        expected = kept(folder, str(number))
        assert_equal(merged(rows_of_all(one)), merged(expected))
        Saver().load(last.model, folder / str(number))
        assert_equal(content(last.model), content(one.model))
    if is_same:
        resume_and_compare(world, folder)


def resume_and_compare(world: World, folder: Path) -> None:
    """Goes on from amid the chain: as if training had never stopped."""
    one = Training(world)
    dcp.load(one.state, checkpoint_id=folder / "dense")
    before = content(one.model)
    assert_equal(before, kept(folder, str(RESUMED_FROM))[world.rank])
    Saver().load(one.model, folder / str(RESUMED_FROM))
    assert_equal(content(one.model), before)
    one.run(RESUMED_FROM, skipped=SAVED_AFTER)
    for number in range(RESUMED_FROM + 1, NUM_LINKS):
        one.run(number)
    assert_equal(content(one.model), kept(folder, "end")[world.rank])


def kept(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """Of every rank that saved."""
    found = sorted(folder.parent.glob(f"{folder.name}_{name}_*.pt"))
    return [torch.load(path) for path in found]


def rows_of_all(one: Training) -> list[dict[str, torch.Tensor]]:
    found: list[Any] = [None] * one.world.size
    dist.all_gather_object(found, content(one.model), group=one.world.host.process_group)
    return found


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows of all ranks in order of their keys; each key is on one rank."""
    columns: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, values in part.items():
            if "/" in name:
                columns.setdefault(name, []).append(values)
    joined = {name: torch.cat(columns[name]) for name in sorted(columns)}
    for name in [name for name in joined if name.endswith("/keys")]:
        keys = joined[name]
        assert len(keys.unique()) == len(keys) > 0
        order = keys.argsort()
        table = name.removesuffix("keys")
        joined.update({n: v[order] for n, v in joined.items() if n.startswith(table)})
    return joined
