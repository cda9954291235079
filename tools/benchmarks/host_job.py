"""The host work of a batch on one of several ranks: from ids to a mapped batch, beside `map` alone.

    torchrun ... -m benchmarks.host_job CASES       CASES: `HostCase`s by name, as JSON

All rows exist beforehand. The figure is processor time of the threads that work for a batch: it
leaves out waiting for the other rank, which has the same processors. If the engine has several
threads, it is elapsed time. Two things are taken off: collectives, which are the wire's, and what
starts a batch's copies and operators on a device, which the step does: `device_counts` says how
many they are. The first rank prints one JSON object: the milliseconds of each case.

Shape letters: F features, B samples.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recsdk_core as rc
from benchmarks.steps import (
    OURS,
    Case,
    TablesOnly,
    bags,
    collection,
    indexes_of,
    our_tables,
    raw_ids,
)
from recsdk_sharding import get_default_hybrid_sharders
from recsdk_sharding.device.parcel import Parcel
from recsdk_sharding.device.pooling import DeviceBatch
from recsdk_sharding.exchange.local_sockets import LocalSockets

NUM_BATCHES = 4
MAP = "map_tables alone"
NOT_ITS_OWN = (
    (dist, "all_gather"),
    (dist, "all_to_all_single"),
    (LocalSockets, "start"),
    (LocalSockets, "wait"),
    (LocalSockets, "exchange"),
    (DeviceBatch, "open"),
    (Parcel, "send"),
)
"""Calls of collectives, what stands in for them on one host, and what starts work on a device."""


@dataclass(frozen=True, kw_only=True)
class HostCase:
    """One load."""

    home: str = "cpu"
    """The type of device that has the rows."""
    num_tables: int = 26
    num_rows: int = 100_000
    batch_size: int = 8192
    """Of each rank."""
    bag_size: int = 1
    has_narrow_lengths: bool = False
    """Whether the lengths of bags are int32, as in torchrec's own Criteo readers, or int64."""
    turns: int = 9

    def as_case(self) -> Case:
        return Case(
            part="sparse",
            num_tables=self.num_tables,
            num_rows=self.num_rows,
            batch_size=self.batch_size,
            bag_size=self.bag_size,
        )


def sharded_tables(case: HostCase) -> Any:
    """The tables of the case over all ranks, every row there."""
    load, device = case.as_case(), torch.device(case.home)
    if device.type != "cpu":
        device = torch.device(case.home, 0)
    model = TablesOnly(collection(load, OURS))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.05})
    host = ShardingEnv(dist.get_world_size(), dist.get_rank(), dist.new_group(backend="gloo"))
    sharders = get_default_hybrid_sharders(host_env=host)
    only = ParameterConstraints(sharding_types=["row_wise"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
            compute_device=case.home,
        ),
        constraints={f"table_{feature}": only for feature in load.features()},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    env = None
    if case.home == "cpu":  # a group with a simulated backend takes no tensors of the host
        env = ShardingEnv.from_process_group(dist.new_group(backend="gloo"))
    tables = our_tables(
        DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=sharders)
    )
    fill(case, tables)
    return tables


def fill(case: HostCase, tables: Any) -> None:
    """Gives every index of every table its row."""
    load, world_size = case.as_case(), dist.get_world_size()
    mine = torch.arange(dist.get_rank(), case.num_rows, world_size)
    chunk = max(1, (1 << 20) // case.num_tables)
    for number in range(-(-case.num_rows // (chunk * world_size))):
        ids = raw_ids(mine[number * chunk : (number + 1) * chunk]).repeat(case.num_tables)
        values = tables(bags(load, ids, len(ids) // case.num_tables)).values()
        torch.autograd.backward(values, torch.zeros_like(values))


def host_job(tables: Any, batch: KeyedJaggedTensor) -> Callable[[], None]:
    """From ids to a mapped batch, as a pipeline has it done ahead; returns the rest of the step."""
    context = tables.create_context()
    mapped = tables.input_dist(context, batch).wait().wait()

    def rest() -> None:
        values = tables.compute_and_output_dist(context, mapped).wait().values()
        torch.autograd.backward(values, torch.zeros_like(values))

    return rest


def of_lengths(case: HostCase, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with lengths of the case's type."""
    lengths = batch.lengths().to(torch.int32 if case.has_narrow_lengths else torch.int64)
    return KeyedJaggedTensor(batch.keys(), batch.values(), lengths=lengths)


def contestants(case: HostCase, tables: Any) -> dict[str, Callable[[], object]]:
    """The host job of a training batch, and mapping as many ids by the engine alone."""
    load = case.as_case()
    batches = [raw_ids(indexes_of(load, seed)) for seed in range(NUM_BATCHES)]
    jobs = cycle([of_lengths(case, bags(load, ids, case.batch_size)) for ids in batches])
    indexes = [rc.Index(name=f"index_{number}") for number in range(case.num_tables)]
    everything = raw_ids(torch.arange(case.num_rows))
    for index in indexes:
        index.map(everything, insert=True)
    calls = cycle([list(zip(indexes, ids.chunk(case.num_tables), strict=True)) for ids in batches])
    return {
        "recsdk": lambda: host_job(tables, next(jobs)),
        MAP: lambda: rc.map_tables(next(calls), insert=True),
    }


def race(case: HostCase, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Milliseconds of every turn, the first not counted."""
    is_elapsed = rc.num_threads() > 1
    clock = time.perf_counter if is_elapsed else _seconds_of_threads
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with left_out(time.perf_counter if is_elapsed else time.thread_time) as others:
        for turn in range(-2, case.turns):
            for name, run in runs.items():
                dist.barrier()
                others.clear()
                start = clock()
                found = run()
                seconds = clock() - start - sum(others)
                if callable(found):
                    found()
                del found  # not in the next one's time
                if turn >= 0:
                    samples[name].append(seconds * 1e3)
    return samples


def _seconds_of_threads() -> float:
    """Processor time of the threads of Python: the one that trains, and that of the host jobs."""
    threads = [thread.ident for thread in threading.enumerate()]
    clocks = [time.pthread_getcpuclockid(ident) for ident in threads if ident is not None]
    return sum(map(time.clock_gettime, clocks))


@contextmanager
def left_out(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Inside, the seconds of each call that is not the host job's own are added to the list."""
    seconds: list[float] = []
    with ExitStack() as stack:
        for owner, name in NOT_ITS_OWN:
            timed = _timed(getattr(owner, name), clock, seconds)
            stack.enter_context(patch.object(owner, name, timed))
        yield seconds


def _timed(
    call: Callable[..., Any], clock: Callable[[], float], seconds: list[float]
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        num_before, start = len(seconds), clock()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[num_before:] = [clock() - start]  # in place of those of calls inside

    return timed


def main(arguments: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    cases = {name: HostCase(**case) for name, case in json.loads(arguments[0]).items()}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("cpu:gloo,npu:hccl", timeout=timedelta(seconds=120))
    try:
        found = {
            name: race(case, contestants(case, sharded_tables(case)))
            for name, case in cases.items()
        }
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
