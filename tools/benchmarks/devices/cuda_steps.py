"""Training steps of tables on one CUDA device: recsdk's beside torchrec's and fbgemm's, in turns.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.devices.cuda_steps CASE

CASE is a `CudaCase` as JSON.
Ours are trained from raw ids on the host, the others from dense indexes: they do not hash. All rows
exist beforehand. Prints one JSON object: milliseconds a step of each turn, and who could not run.
With `home` cpu or npu (simulated) it runs what there is there, which says nothing about speed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.host_job import MAP, HostCase
from benchmarks.host_job import fill as fill_tables
from benchmarks.steps import OURS, STOCK, Case, bags, collection, indexes_of, our_tables, raw_ids
from recsdk_core import map_tables
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.data import ClickBatch
from recsdk_sharding import get_default_hybrid_sharders
from recsdk_sharding.device.kernel_choice import choose_kernels, fused_kernels
from recsdk_sharding.device.kernels import offer_kernels
from recsdk_sharding.device.pooling import DeviceBatch
from recsdk_sharding.exchange import exchanges_of

NUM_BATCHES = 4
SECONDS_OF_TURNS = 240
"""After which no other turn begins, if there was one that counts."""
OPTIMIZERS: Mapping[str, tuple[Any, dict[str, float]]] = {
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-8}),
    "adam": (torch.optim.Adam, {"lr": 0.001}),
}
DEVICE_WORK = "device work"
ON_TORCH = "device work on torch's operators"
TBE, TBE_FROM_HOST = "TBE", "TBE, ids from the host"


@dataclass(frozen=True, kw_only=True)
class CudaCase:
    """One load."""

    home: str = "cuda"
    optimizer: Literal["rowwise_adagrad", "adam"] = "rowwise_adagrad"
    num_tables: int = 26
    num_rows: int = 1_000_000
    dim: int = 64
    batch_size: int = 65_536
    bag_size: int = 1
    turns: int = 7
    steps_a_turn: int = 8

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.home == "cpu" else torch.device(self.home, 0)

    def as_case(self) -> Case:
        return Case(
            part="sparse",
            num_tables=self.num_tables,
            num_rows=self.num_rows,
            dim=self.dim,
            batch_size=self.batch_size,
            bag_size=self.bag_size,
        )


class Training(nn.Module):
    """Tables, and a loss whose gradient costs next to nothing."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss: torch.Tensor = self.tables(batch.sparse).values().sum()
        return loss, loss.detach()


def host_batch(case: CudaCase, name: str, seed: int) -> ClickBatch:
    """Raw ids for ours, indexes for the others. A batch of its own each time: what one contestant
    has a batch remember, its offsets say, is copied to the device with it."""
    batch = ClickBatch(
        dense=torch.zeros(case.batch_size, 1),
        sparse=bags(case.as_case(), _ids_of(case, name == OURS, seed), case.batch_size),
        labels=torch.zeros(case.batch_size),
    )
    return batch if case.home == "cpu" else batch.pin_memory()


@cache  # drawing takes longer than all that is measured
def _ids_of(case: CudaCase, is_raw: bool, seed: int) -> torch.Tensor:
    return raw_ids(_ids_of(case, False, seed)) if is_raw else indexes_of(case.as_case(), seed)


def sharded(case: CudaCase, name: str) -> DistributedModelParallel:
    """The model on the device, every row there."""
    model = Training(collection(case.as_case(), name))
    kind, settings = OPTIMIZERS[case.optimizer]
    apply_optimizer_in_backward(kind, model.parameters(), dict(settings))
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    only = ParameterConstraints(sharding_types=["table_wise"])
    if name == OURS:
        host = ShardingEnv(1, 0, dist.new_group(backend="gloo"))
        sharders = list(get_default_hybrid_sharders(host_env=host))
        only = ParameterConstraints(sharding_types=["row_wise"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device=case.home),
        constraints={f"table_{feature}": only for feature in case.as_case().features()},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    made = DistributedModelParallel(model, device=case.device, plan=plan, sharders=sharders)
    if name == OURS:
        load = HostCase(home=case.home, num_tables=case.num_tables, num_rows=case.num_rows)
        fill_tables(load, our_tables(made))
    return made


# ---- contestants --------------------------------------------------------------------------------


class Pipelined:
    """Whole steps in each one's pipeline, from batches in pinned memory."""

    def __init__(
        self, case: CudaCase, name: str, model: DistributedModelParallel, kernels: Any
    ) -> None:
        kind: Any = HybridTrainPipelineSparseDist if name == OURS else TrainPipelineSparseDist
        self._home, self._kernels, self._exchanges = case.home, kernels, exchanges_of(model)
        optimizer = CombinedOptimizer([model.fused_optimizer])
        self._pipeline = kind(model, optimizer, case.device, execute_all_batches=True)
        self._batches = cycle([host_batch(case, name, seed) for seed in range(NUM_BATCHES)])

    def step(self) -> Any:
        return self._pipeline.progress(self._batches)

    def start_turn(self) -> None:
        """A turn begins and ends with as many batches mapped ahead: it maps as many as it trains,
        and none of them while others run."""
        offer_kernels(self._home, self._kernels)
        self.step()
        self.end_turn()

    def end_turn(self) -> None:
        """The host's work of the batches ahead is a part of the turn."""
        for exchange in self._exchanges:
            exchange.wait_for_jobs()


class MapAlone:
    """The engine's part of our step alone: it finds the rows of a batch's ids."""

    def __init__(self, case: CudaCase, model: DistributedModelParallel) -> None:
        (own,) = our_tables(model)._input_dists
        ids = [_ids_of(case, True, seed).chunk(case.num_tables) for seed in range(NUM_BATCHES)]
        self._batches = cycle([list(zip(own.config.indexes, each, strict=True)) for each in ids])

    def step(self) -> None:
        map_tables(next(self._batches), insert=False)  # all are there

    def start_turn(self) -> None:
        """Nothing runs ahead."""

    def end_turn(self) -> None:
        """Nothing runs ahead."""


class DeviceWork:
    """What is left of our step once the host has mapped its batch: the copy of it, and the rest."""

    def __init__(self, case: CudaCase, model: DistributedModelParallel, kernels: Any) -> None:
        self._case, self._tables, self._kernels = case, our_tables(model), kernels
        batches = [host_batch(case, OURS, seed).sparse for seed in range(NUM_BATCHES)]
        self._batches = cycle(batches)
        self._mapped: list[tuple[Any, Any, list[DeviceBatch]]] = []

    def start_turn(self) -> None:
        """Maps as many batches as a turn has steps."""
        offer_kernels(self._case.home, self._kernels)
        for _ in range(self._case.steps_a_turn):
            held: list[DeviceBatch] = []
            with mock.patch.object(DeviceBatch, "open", lambda each, to=held: to.append(each)):
                context = self._tables.create_context()
                mapped = self._tables.input_dist(context, next(self._batches)).wait().wait()
            self._mapped.append((context, mapped, held))

    def step(self) -> None:
        context, mapped, held = self._mapped.pop(0)
        for batch in held:
            batch.open()
        values = self._tables.compute_and_output_dist(context, mapped).wait().values()
        values.sum().backward()

    def end_turn(self) -> None:
        """All that was mapped is trained."""


class TableBatched:
    """fbgemm's kernels alone: those of torchrec's tables, called with indexes and offsets."""

    def __init__(self, case: CudaCase, model: DistributedModelParallel, *, from_host: bool) -> None:
        (tables,) = (m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        (self._tables,) = (m.emb_module for each in tables._lookups for m in each._emb_modules)
        self._device = case.device
        sparse = [host_batch(case, STOCK, seed).sparse for seed in range(NUM_BATCHES)]
        pairs = [(each.values(), each.offsets()) for each in sparse]
        if case.home != "cpu" and from_host:
            pairs = [(values, offsets.pin_memory()) for values, offsets in pairs]
        elif case.home != "cpu":
            pairs = [(values.to(case.device), offsets.to(case.device)) for values, offsets in pairs]
        self._batches = cycle(pairs)

    def step(self) -> None:
        indexes, offsets = (
            each.to(self._device, non_blocking=True) for each in next(self._batches)
        )
        self._tables(indexes, offsets).sum().backward()

    def start_turn(self) -> None:
        """Nothing runs between turns."""

    def end_turn(self) -> None:
        """Nothing runs between turns."""


def contestants(case: CudaCase) -> dict[str, Callable[[], Any]]:
    """What makes each. Models are made by the first that needs them: one that fails leaves the
    others in the race."""
    model = cache(partial(sharded, case))

    def own() -> Any:
        return fused_kernels() if choose_kernels(case.device) == "triton" else {}

    made: dict[str, Callable[[], Any]] = {
        OURS: lambda: Pipelined(case, OURS, model(OURS), own()),
        MAP: lambda: MapAlone(case, model(OURS)),
    }
    if case.home != "cpu":
        made[DEVICE_WORK] = lambda: DeviceWork(case, model(OURS), own())
        made[ON_TORCH] = lambda: DeviceWork(case, model(OURS), {})
    if case.home != "npu":
        made[STOCK] = lambda: Pipelined(case, STOCK, model(STOCK), {})
        made[TBE] = lambda: TableBatched(case, model(STOCK), from_host=False)
        made[TBE_FROM_HOST] = lambda: TableBatched(case, model(STOCK), from_host=True)
    return made


# ---- the race -----------------------------------------------------------------------------------


def turn_of(case: CudaCase, contestant: Any) -> float:
    """Milliseconds a step."""
    contestant.start_turn()
    synchronize(case)
    start = time.perf_counter()
    for _ in range(case.steps_a_turn):
        contestant.step()
    contestant.end_turn()
    synchronize(case)
    return (time.perf_counter() - start) / case.steps_a_turn * 1e3


def synchronize(case: CudaCase) -> None:
    if case.home != "cpu":
        torch.accelerator.synchronize()


def race(case: CudaCase, makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """All turns; who raises, for want of memory say, is out."""
    errors: dict[str, str] = {}
    samples: dict[str, list[float]] = {name: [] for name in makers}
    running: dict[str, Any] = {}
    begin = time.perf_counter()
    for turn in range(-1, case.turns):  # the first does not count: kernels are compiled
        names = [name for name in makers if name not in errors]
        if not names or (turn > 0 and time.perf_counter() - begin > SECONDS_OF_TURNS):
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            try:
                if name not in running:
                    running[name] = makers[name]()
                found = turn_of(case, running[name])
            except Exception as error:
                errors[name] = _told(error)
                running.pop(name, None)
                continue
            if turn >= 0:
                samples[name].append(found)
    return {
        "milliseconds": {name: values for name, values in samples.items() if name not in errors},
        "errors": errors,
    }


def _told(error: Exception) -> str:
    """In one line, with the place: a machine that is lent is gone when somebody asks."""
    place = extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"{said} ({Path(place.filename).name}:{place.lineno})"


def main(arguments: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    case = CudaCase(**json.loads(arguments[0]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backends = {"cpu": "gloo", "npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl"}
    if case.home == "cuda":
        torch.cuda.set_device(case.device)
    dist.init_process_group(backends[case.home], timeout=timedelta(seconds=300))
    try:
        print(json.dumps(race(case, contestants(case))), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
