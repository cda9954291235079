"""A step of the plain modules, fused and by RowOptimizer, beside nn.EmbeddingBag(sparse=True).

A step drops gradients, looks up a batch of bags, and trains with a given gradient. A turn is
several steps in a row, as a loop makes them, over batches of which none comes again soon. Ours
takes raw 64-bit ids. The peer cannot, so there are several of it: "dense indexes" is given the
index of each id for free, and is what our rows are checked against; "modulo" makes indexes from the
raw ids by the remainder, so that ids share rows; "pandas map" and "fbgemm map" look each id up in
an exact map of all ids, so that they train the same rows from the same ids as ours does, though no
id may be new. All use one thread, and what is counted is the processor's time: on a quiet machine
that is what a step takes, and on a busy one it is not what others take.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from benchmarks import records
from benchmarks.draws import draw_indexes, scramble
from benchmarks.embeddings import ZeroCollisionHash
from recsdk_core.nn import HashEmbeddingBag, RowOptimizer
from recsdk_core.runtime import set_num_threads

LEARNING_RATE = 0.01
NUM_BATCHES = 64
NUM_CHECKED = 8
STEPS_A_TURN = 16
SEED = 1
OPTIMIZERS: dict[str, tuple[type, type]] = {
    "adam": (torch.optim.Adam, torch.optim.SparseAdam),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "sgd": (torch.optim.SGD, torch.optim.SGD),
}
DENSE, MODULO, PANDAS, FBGEMM = PEERS = ("dense indexes", "modulo", "pandas map", "fbgemm map")
OURS = ("fused", "row_optimizer", "row_optimizer_clip")


@dataclass(kw_only=True)
class Batch:
    """Bags: raw keys, and the dense indexes that a peer gets."""

    keys_N: torch.Tensor
    indexes_N: torch.Tensor
    offsets: torch.Tensor
    grad_BD: torch.Tensor


@dataclass(kw_only=True)
class Workload:
    """Batches over the ids of a table, and the first rows of it."""

    num_rows: int
    num_bags: int
    mean_length: int
    dim: int

    def __post_init__(self) -> None:
        random = np.random.default_rng(SEED)
        self.ids = scramble(np.arange(1, self.num_rows + 1))
        self.weights = torch.from_numpy(
            random.normal(size=(self.num_rows, self.dim)).astype(np.float32)
        )
        self.batches = [self._draw(random) for _ in range(NUM_BATCHES)]
        index, hashed, num_rows = pd.Index(self.ids), ZeroCollisionHash(self.ids), self.num_rows
        self.indexers: dict[str, Callable[[Batch], torch.Tensor]] = {
            DENSE: lambda batch: batch.indexes_N,
            MODULO: lambda batch: batch.keys_N.remainder(num_rows),
            PANDAS: lambda batch: torch.from_numpy(index.get_indexer(batch.keys_N.numpy())),
            FBGEMM: lambda batch: torch.from_numpy(hashed.slots(batch.keys_N.numpy())),
        }
        self.slots = torch.from_numpy(hashed.slots(self.ids))

    def _draw(self, random: np.random.Generator) -> Batch:
        lengths = random.poisson(self.mean_length, self.num_bags)
        indexes = draw_indexes(random, self.num_rows, int(lengths.sum()), "zipf")
        grad_BD = random.normal(size=(self.num_bags, self.dim)).astype(np.float32)
        return Batch(
            keys_N=torch.from_numpy(self.ids[indexes]),
            indexes_N=torch.from_numpy(indexes),
            offsets=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])),
            grad_BD=torch.from_numpy(grad_BD),
        )

    @property
    def name(self) -> str:
        rows = f"{self.num_rows:.0e}".replace("e+0", "e")
        return f"zipf1.05_{rows}_dim{self.dim}_bags{self.num_bags}x{self.mean_length}"


@dataclass(kw_only=True)
class Contestant:
    """A module and how it is trained."""

    module: Any
    forward: Callable[[Batch], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    clips: bool = False

    def step(self, batch: Batch) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.forward(batch).backward(batch.grad_BD)  # type: ignore[no-untyped-call]
        if self.clips:
            nn.utils.clip_grad_norm_(self.module.parameters(), 1e9)
        if self.optimizer is not None:
            self.optimizer.step()


def callable_of(module: nn.Module, is_compiled: bool) -> Callable[..., torch.Tensor]:
    """What calls it. Compiled ones have code of their own: dynamo keeps few variants of a code."""

    def call(*args: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = module(*args)
        return pooled

    if not is_compiled:
        return call
    code = call.__code__.replace()
    own = FunctionType(code, globals(), code.co_name, None, call.__closure__)
    compiled: Callable[..., torch.Tensor] = torch.compile(own)
    return compiled


def our(workload: Workload, name: str, kind: type, is_compiled: bool) -> Contestant:
    options = {"lr": LEARNING_RATE}
    given: Any = {"optimizer": kind, "optimizer_kwargs": options} if name == "fused" else {}
    module: Any = HashEmbeddingBag(workload.dim, include_last_offset=True, name="bench", **given)
    optimizer = None if given else RowOptimizer(module.parameters(), kind, **options)
    module.table.upsert(torch.from_numpy(workload.ids), workload.weights)
    call = callable_of(module, is_compiled)
    return Contestant(
        module=module,
        forward=lambda batch: call(batch.keys_N, batch.offsets),
        optimizer=optimizer,
        clips=name.endswith("clip"),
    )


def peer(workload: Workload, name: str, kind: Any, is_compiled: bool) -> Contestant:
    places = workload.slots if name == FBGEMM else torch.arange(workload.num_rows)
    module: Any = nn.EmbeddingBag(
        int(places.max()) + 1, workload.dim, mode="sum", include_last_offset=True, sparse=True
    )
    module.weight.data[places] = workload.weights
    call = callable_of(module, is_compiled)
    index = workload.indexers[name]

    def forward(batch: Batch) -> torch.Tensor:
        pooled: torch.Tensor = call(index(batch), batch.offsets)
        return pooled

    optimizer = kind(module.parameters(), lr=LEARNING_RATE)
    return Contestant(module=module, forward=forward, optimizer=optimizer)


def check_rows(workload: Workload, contestants: dict[str, Contestant]) -> None:
    """Raises unless all that are exact have equal rows after a step of some batches."""
    for contestant in contestants.values():
        for batch in workload.batches[:NUM_CHECKED]:
            contestant.step(batch)
    ids = torch.from_numpy(workload.ids)
    found = {name: contestants[name].module.table.lookup(ids) for name in OURS}
    found |= {
        PANDAS: contestants[PANDAS].module.weight.detach(),
        FBGEMM: contestants[FBGEMM].module.weight.detach()[workload.slots],
    }
    expected = contestants[DENSE].module.weight.detach()
    for name, rows in found.items():
        # Adam divides gradients by their size, so where one nearly cancels its rounding shows.
        num_off = torch.isclose(rows, expected, rtol=1e-4, atol=1e-5).logical_not().sum().item()
        if num_off > 1e-5 * rows.numel():
            worst = (rows - expected).abs().max().item()
            raise SystemExit(f"{workload.name} {name}: {num_off} numbers differ, by up to {worst}")


def turns(workload: Workload, contestant: Contestant) -> Callable[[], None]:
    """Takes the next batches in every turn."""
    batches = itertools.cycle(workload.batches)

    def turn() -> None:
        for batch in itertools.islice(batches, STEPS_A_TURN):
            contestant.step(batch)

    return turn


def compare(
    workload: Workload, optimizer: str, is_compiled: bool, repetitions: int
) -> list[records.Record]:
    our_kind, peer_kind = OPTIMIZERS[optimizer]
    how = "compiled" if is_compiled else "eager"
    contestants = {name: our(workload, name, our_kind, is_compiled) for name in OURS}
    contestants |= {name: peer(workload, name, peer_kind, is_compiled) for name in PEERS}
    check_rows(workload, contestants)
    steps = {name: turns(workload, each) for name, each in contestants.items()}
    raced = records.race(steps, repetitions, time.process_time)
    samples = {name: [each / STEPS_A_TURN for each in times] for name, times in raced.items()}
    return [record_of(workload.name, f"{optimizer}_{how}_{name}", name, samples) for name in OURS]


def record_of(workload: str, op: str, ours: str, samples: dict[str, list[float]]) -> records.Record:
    """Ratios are medians over pairs: ours and a peer's in one turn."""
    taken = {"ours": samples[ours]} | {name: samples[name] for name in PEERS}
    made = records.record_of(workload, op, "ms", "ours", taken)
    ratios = {name: float(np.median(np.divide(samples[name], taken["ours"]))) for name in PEERS}
    return replace(made, ratio=ratios)


def run(quick: bool) -> list[records.Record]:
    torch.set_num_threads(1)
    set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.2f}")
    shapes = [(1_000_000, 2048, 10, 64)]
    if not quick:
        shapes += [(1_000_000, 2048, 10, 16), (100_000, 2048, 10, 64), (1_000_000, 8192, 10, 64)]
    found = []
    for num_rows, num_bags, mean_length, dim in shapes:
        workload = Workload(num_rows=num_rows, num_bags=num_bags, mean_length=mean_length, dim=dim)
        for optimizer in OPTIMIZERS:
            for is_compiled in (False, True):
                found += compare(workload, optimizer, is_compiled, 10 if quick else 20)
    return found
