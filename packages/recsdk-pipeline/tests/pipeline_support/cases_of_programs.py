"""Programs of calls of pipelines over one model, drawn at random, beside a plain loop's model.

test_pipeline_on_ranks.py shows how they ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from pipeline_support.cases_of_pipeline import hashed
from pipeline_support.cases_of_resuming import shared_folder
from pipeline_support.model import (
    DEVICE,
    World,
    assert_equal,
    batches,
    content,
    plain_evaluation,
    plain_step,
    with_bad_ids,
)
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import Saver
from recsdk_sharding.exchange import PeerError
from sampling import SEED, sampled

NUM_PROGRAMS = 40
NUM_CALLS = 14


@dataclass
class Given:
    """Batches of this rank that an iterator gives, and how many it has given."""

    all: list[Any]
    bad_step: int | None = None
    num_given: int = 0
    num_seen: int = 0
    """Whose outputs have come."""
    num_inserted: int = 0
    """The program's, when it began."""
    iterator: Iterator[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.iterator = self._give()

    def _give(self) -> Iterator[Any]:
        for batch in self.all:
            self.num_given += 1
            yield batch

    def has_next(self) -> bool:
        """Whether all ranks have one more batch."""
        return least(len(self.all) - self.num_seen) > 0


def least(number: int) -> int:
    """Over all ranks."""
    found = torch.tensor(number, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def with_own_group(world: World) -> World:
    """The exchange of a group has one order of jobs, which the twin's would disturb."""
    group = dist.new_group(backend="gloo")
    return replace(world, host=ShardingEnv(world_size=world.size, rank=world.rank, pg=group))


class Program:
    """One model under pipelines, its twin under the plain loop, and calls that are drawn."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)  # the same on all ranks
        self.seed = seed
        self.model, self.optimizer = hashed(world)
        self.twin, self.twin_optimizer = hashed(with_own_group(world))
        self.pipelines = [self._pipeline()]
        self.training: dict[int, Given] = {}
        self.evaluated: dict[int, Given] = {}
        self.num_made = 0
        self.saved: list[tuple[str, dict[str, torch.Tensor]]] = []
        self.log: list[str] = []
        self.has_abandoned = False
        self.num_inserted = 0

    def _pipeline(self) -> Any:
        depth = self.draw.choice((1, 2, 3, 6, 12))
        return HybridTrainPipelineSparseDist(self.model, self.optimizer, DEVICE, pipe_n_batch=depth)

    def _given(self, may_be_bad: bool) -> Given:
        counts = [self.draw.randrange(0, 9) for _ in range(self.world.size)]
        if self.draw.random() < 0.4:
            counts = [max(counts)] * self.world.size
        self.num_made += 1
        found = batches(self.world, counts[self.world.rank], seed=100 * self.seed + self.num_made)
        given = Given(found, num_inserted=self.num_inserted)
        if may_be_bad and min(counts) > 0 and self.draw.random() < 0.3:
            given.bad_step = self.draw.randrange(min(counts))
            if self.world.rank == self.draw.randrange(self.world.size):
                found[given.bad_step] = with_bad_ids(found[given.bad_step])
        return given

    def run(self) -> None:
        calls = ("train", "train", "train", "train_anew", "evaluate", "evaluate_some", "drop")
        calls += ("save", "add_pipeline", "lr")
        for _ in range(NUM_CALLS):
            which = self.draw.randrange(len(self.pipelines))
            call = self.draw.choice(calls)
            self.log.append(f"{call} {which}")
            getattr(self, call)(which)
        self.check()
        for pipeline in self.pipelines:
            pipeline.drop()
        for folder, expected in self.saved:
            fresh, _ = hashed(with_own_group(self.world))
            Saver().load(fresh, folder)
            tables = {n: v for n, v in content(fresh).items() if "layers" not in n}
            assert_equal(tables, {n: v for n, v in expected.items() if "layers" not in n})

    def train(self, which: int) -> None:
        if which not in self.training:
            self.training[which] = self._given(may_be_bad=True)
        given = self.training[which]
        for _ in range(self.draw.randrange(1, 6)):
            if not self.step(which, given):
                del self.training[which]
                break
        self.check()

    def step(self, which: int, given: Given) -> bool:
        """One step; whether there may be a further one."""
        pipeline = self.pipelines[which]
        if not given.has_next():
            try:
                pipeline.progress(given.iterator)
            except StopIteration:
                self.insert_abandoned()
                return False
            raise AssertionError("it goes on after the end")
        batch = given.all[given.num_seen]
        if given.num_seen == given.bad_step:
            try:
                pipeline.progress(given.iterator)
            except (TypeError, PeerError):
                self.forget_flights(which)
                return False
            raise AssertionError("bad ids were taken")
        output = pipeline.progress(given.iterator)
        assert_equal([output], [plain_step(self.twin, self.twin_optimizer, batch)])
        given.num_seen += 1
        return True

    def forget_flights(self, which: int) -> None:
        """A failure abandons all that the pipeline has in flight."""
        for group in (self.training, self.evaluated):
            if which in group:
                group[which].num_seen = group[which].num_given
        self.insert_abandoned()

    def insert_abandoned(self) -> None:
        """Gives the twin the rows that batches made which were never trained.

        Some show later, once older batches of other pipelines are trained.
        """
        self.has_abandoned = True
        for own, other in zip(tables_of(self.model), tables_of(self.twin), strict=True):
            keys = [key for part in own.export() for key in part.keys.tolist()]
            known = {key for part in other.export() for key in part.keys.tolist()}
            further = sorted(set(keys) - known)
            if further:
                other.find_or_insert(torch.tensor(further).numpy())
                self.num_inserted += 1

    def train_anew(self, which: int) -> None:
        self.training.pop(which, None)
        self.training[which] = self._given(may_be_bad=False)
        given = self.training[which]
        if not self.step(which, given):
            del self.training[which]
        else:
            self.insert_abandoned()
        self.check()

    def evaluate(self, which: int) -> None:
        self._evaluate(which, self._given(may_be_bad=False), 100)

    def evaluate_some(self, which: int) -> None:
        if which not in self.evaluated:
            self.evaluated[which] = self._given(may_be_bad=False)
        if self._evaluate(which, self.evaluated[which], self.draw.randrange(1, 4)):
            del self.evaluated[which]

    def _evaluate(self, which: int, given: Given, most: int) -> bool:
        """Whether its end has come."""
        pipeline, before = self.pipelines[which], given.num_inserted
        self.model.eval()
        try:
            for _ in range(most):
                if not given.has_next():
                    try:
                        pipeline.progress(given.iterator)
                    except StopIteration:
                        return True
                    raise AssertionError("it goes on after the end")
                output = pipeline.progress(given.iterator)
                if self.has_abandoned:
                    self.insert_abandoned()
                expected = plain_evaluation(self.twin, [given.all[given.num_seen]])
                given.num_seen += 1
                # What was looked ahead did not see rows that show since they were abandoned.
                if not self.hides_rows() and least(before - self.num_inserted) == 0:
                    assert_equal([output], expected)
        finally:
            self.model.train()
        self.check()
        return False

    def drop(self, which: int) -> None:
        self.pipelines[which].drop()
        self.forget_flights(which)
        self.check()

    def save(self, which: int) -> None:
        folder = f"{shared_folder(self.world)}/{len(self.saved)}"
        Saver().save(self.model, folder)
        self.saved.append((folder, content(self.model)))

    def add_pipeline(self, which: int) -> None:
        if len(self.pipelines) < 3:
            self.pipelines.append(self._pipeline())

    def lr(self, which: int) -> None:
        rate = self.draw.choice((0.01, 0.1, 0.3))
        for optimizer in (self.optimizer, self.twin_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate

    def hides_rows(self) -> bool:
        """Whether a batch in flight may have made rows that another pipeline trains.

        They are hidden until that batch is trained.
        """
        in_flight = sum(given.num_given > given.num_seen for given in self.training.values())
        return len(self.pipelines) > 1 and least(-in_flight) < 0

    def check(self) -> None:
        if self.has_abandoned:
            self.insert_abandoned()
        if not self.hides_rows():
            assert_equal(content(self.model), content(self.twin))
            return
        found, expected = content(self.model), content(self.twin)
        for name in [name.removesuffix("/keys") for name in found if name.endswith("/keys")]:
            keys = found.pop(f"{name}/keys")
            places = torch.searchsorted(expected[f"{name}/keys"], keys)
            assert torch.equal(expected.pop(f"{name}/keys")[places], keys)
            for column in [column for column in found if column.startswith(f"{name}/")]:
                assert torch.equal(found.pop(column), expected.pop(column)[places]), column
        assert_equal(found, {n: v for n, v in expected.items() if "/" not in n})


def tables_of(model: Any) -> list[Any]:
    return list(model.module.tables["tables"].tables().values())


def case_any_program_equals_the_plain_loop(world: World) -> None:
    for seed in sampled(range(1000 * SEED, 1000 * SEED + NUM_PROGRAMS), 3):
        program = Program(world, seed)
        try:
            program.run()
        except BaseException:
            print("program", seed, program.log, flush=True)
            raise
