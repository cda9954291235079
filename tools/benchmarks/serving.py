"""Pooling from frozen tables, beside FBGEMM's inference tables and torch's quantized bags.

Ours takes raw 64-bit ids. So does one peer, nearly: FBGEMM's tables with the hash look-up that they
have for pruned rows ("fbgemm hashed"), which finds 32-bit ids. The others are given the index of
each row for free: "fbgemm dense", and torch's `embedding_bag_byte` ("torch int8"), whose results
ours are checked against. General stores of bytes have cases of their own (`stores`). All use one
thread, and what is counted is the processor's time: on a quiet machine that is what a call takes,
and on a busy one it is not what others take. Single bags alone are timed on the wall. Files and
peers are in memory before the first call. With two threads each takes every other batch. "Its
lines of memory" is a loop in C++ (`cpp/bench/serving_bench.cc`) that only reads the lines which
pooling these keys must: its time over ours is our share of what memory allows.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks import engine, following, records, stores
from benchmarks.draws import draw_indexes, scramble
from benchmarks.models.frozen import run as run_frozen
from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze
from recsdk_core.serving.manifest import FrozenDType

NUM_BATCHES = 8
NUM_BAGS, BAG_LENGTH = 4096, 20
NUM_SINGLE = 2000
ENDS = np.arange(0, NUM_BAGS * BAG_LENGTH + 1, BAG_LENGTH)
SEED = 1
ROWS_AT_ONCE = 100_000
MOST_BYTES = 17 << 30  # of memory, of a machine of 24 GiB
HASHED, DENSE, TORCH = "fbgemm hashed", "fbgemm dense", "torch int8"
PEER_TYPES: dict[FrozenDType, Any] = {
    "float32": SparseType.FP32,
    "float16": SparseType.FP16,
    "int8": SparseType.INT8,
    "int4": SparseType.INT4,
}


@dataclass(kw_only=True, frozen=True)
class Case:
    """A table, and how keys are drawn from it."""

    num_rows: int
    dim: int
    dtype: FrozenDType
    distribution: str

    @property
    def num_bytes(self) -> int:
        """Memory: of the table that is trained, or of the frozen one and its peers behind it."""
        held = {"float32": 4.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}[self.dtype] * self.dim + 8
        count = 4 if self.dtype == "int8" else 3
        trained = 4 * self.dim + 40
        return int(self.num_rows * max(trained, count * held + 32))

    @property
    def name(self) -> str:
        rows = f"{self.num_rows:.0e}".replace("e+0", "e")
        law = "zipf1.05" if self.distribution == "zipf" else self.distribution
        return f"{law}_{rows}_dim{self.dim}_{self.dtype}_bags{NUM_BAGS}x{BAG_LENGTH}"


@dataclass(kw_only=True, frozen=True)
class Batch:
    """Bags: raw keys, and the indexes that peers get."""

    keys_N: np.ndarray
    indexes_N: torch.Tensor


def batches_of(case: Case) -> list[Batch]:
    random = np.random.default_rng(SEED)
    ids = scramble(np.arange(1, case.num_rows + 1))
    count = NUM_BAGS * BAG_LENGTH
    drawn = [
        draw_indexes(random, case.num_rows, count, case.distribution) for _ in range(NUM_BATCHES)
    ]
    return [Batch(keys_N=ids[i], indexes_N=torch.from_numpy(i.astype(np.int32))) for i in drawn]


def weights_of(first: int, count: int, dim: int) -> np.ndarray:
    random = np.random.default_rng((SEED, first))
    return random.standard_normal((count, dim), dtype=np.float32)


def frozen(case: Case, folder: Path) -> ServingTable:
    """The table, made by training's own way: a checkpoint, which is then frozen."""
    table = Table(dim=case.dim, name="bench")
    for first in range(0, case.num_rows, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, case.num_rows - first)
        keys = scramble(np.arange(first + 1, first + count + 1))
        table.upsert(keys, weights_of(first, count, case.dim))
    table.save(folder / "checkpoint")
    del table
    freeze(folder / "checkpoint", folder / "frozen", dtype=case.dtype)
    served = ServingTable(folder / "frozen")
    served.preload()
    return served


def fbgemm(case: Case, is_hashed: bool) -> Any:
    """An inference table with rows of any values."""
    options: dict[str, Any] = {}
    if is_hashed:
        every_row = torch.arange(case.num_rows, dtype=torch.int32)
        options = {"index_remapping": [every_row], "use_array_for_index_remapping": False}
    spec = ("bench", case.num_rows, case.dim, PEER_TYPES[case.dtype], EmbeddingLocation.HOST)
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [spec],
        device="cpu",
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        **options,
    )
    module.fill_random_weights()
    return module


def torch_rows(case: Case) -> torch.Tensor:
    """The rows of the table as torch's operators have them."""
    pack = torch.ops.quantized.embedding_bag_byte_prepack
    return torch.cat(
        [
            pack(
                torch.from_numpy(
                    weights_of(first, min(ROWS_AT_ONCE, case.num_rows - first), case.dim)
                )
            )
            for first in range(0, case.num_rows, ROWS_AT_ONCE)
        ]
    )


@dataclass(kw_only=True, frozen=True)
class Contestant:
    """Who pools, and the bytes that it holds, if they can be told."""

    pool: Callable[[Batch, np.ndarray], Any]
    num_bytes: int | None


def of_fbgemm(case: Case, is_hashed: bool) -> Contestant:
    module = fbgemm(case, is_hashed)
    held = [*module.split_embedding_weights(split_scale_shifts=False)]
    tensors = [each for pair in held for each in pair if each is not None]

    def pool(batch: Batch, ends: np.ndarray) -> object:
        return module(batch.indexes_N, torch.from_numpy(ends.astype(np.int32)))

    num_bytes = None if is_hashed else sum(each.nbytes for each in tensors)  # of its map, who knows
    return Contestant(pool=pool, num_bytes=num_bytes)


def of_torch(case: Case) -> Contestant:
    rows = torch_rows(case)
    bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets

    def pool(batch: Batch, ends: np.ndarray) -> object:
        offsets = torch.from_numpy(ends.astype(np.int32))
        return bag(rows, batch.indexes_N, offsets, include_last_offset=True)

    return Contestant(pool=pool, num_bytes=rows.nbytes)


def contestants_of(case: Case, served: ServingTable, batch: Batch) -> dict[str, Contestant]:
    found = {
        "ours": Contestant(
            pool=lambda batch, ends: served.pool(batch.keys_N, ends), num_bytes=served.num_bytes
        ),
        DENSE: of_fbgemm(case, False),
        HASHED: of_fbgemm(case, True),
    }
    if case.dtype == "int8":
        found[TORCH] = of_torch(case)
        ours = torch.from_numpy(found["ours"].pool(batch, ENDS))
        torch.testing.assert_close(ours, found[TORCH].pool(batch, ENDS), rtol=1e-4, atol=1e-4)
    return found


def singles_of(batch: Batch) -> list[Batch]:
    """The first bags, each alone."""
    starts = range(0, min(NUM_BAGS, NUM_SINGLE) * BAG_LENGTH, BAG_LENGTH)
    parts = [slice(first, first + BAG_LENGTH) for first in starts]
    return [Batch(keys_N=batch.keys_N[p], indexes_N=batch.indexes_N[p].clone()) for p in parts]


def single_bags(
    contestants: dict[str, Contestant], bags: list[Batch], repetitions: int
) -> dict[str, list[float]]:
    """By contestant, the 99th percentile of a bag in each repetition, in microseconds."""
    ends = np.array([0, BAG_LENGTH])
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, each in contestants.items():
            call = functools.partial(_pool_one, each, ends)
            found[name].append(stores.single_p99(call, bags))
    return found


def _pool_one(contestant: Contestant, ends: np.ndarray, bag: Batch) -> object:
    return contestant.pool(bag, ends)


def beside_lines(
    case: Case, folder: Path, batches: list[Batch], repetitions: int
) -> list[records.Record]:
    """Pooling in C++ beside a loop that reads the same lines of memory."""
    engine.build("serving_bench")
    ids = folder / "ids"
    np.concatenate([batch.keys_N for batch in batches]).astype(np.int64).tofile(ids)
    [file] = (folder / "frozen").rglob("*.frozen")
    program = str(engine.BUILD / "bench" / "serving_bench")
    options = {"workload": case.name, "file": file, "ids": ids, "bag": BAG_LENGTH}
    options["reps"] = repetitions
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return engine.run_part([program, *given], {}, "")


def run_case(case: Case, repetitions: int) -> list[records.Record]:
    parent = Path(__file__).resolve().parents[2] / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        served = frozen(case, Path(folder))
        batches = batches_of(case)
        contestants = contestants_of(case, served, batches[0])

        def all_of(each: Contestant) -> Callable[[], object]:
            return lambda: [each.pool(batch, ENDS) for batch in batches]

        def on_two(each: Contestant) -> Callable[[], object]:
            return lambda: list(two.map(lambda batch: each.pool(batch, ENDS), batches))

        def a_batch(race: Callable[[Contestant], Callable[[], object]]) -> dict[str, list[float]]:
            runs = {name: race(each) for name, each in contestants.items()}
            samples = records.race(runs, repetitions, time.process_time)
            return {name: [ms / NUM_BATCHES for ms in each] for name, each in samples.items()}

        by_one = a_batch(all_of)
        with ThreadPoolExecutor(2) as two:
            by_two = a_batch(on_two)
        single = single_bags(contestants, singles_of(batches[0]), repetitions)
        opened = records.race(
            {"ours": lambda: ServingTable(Path(folder) / "frozen")}, repetitions, time.process_time
        )
        size = {
            name: [each.num_bytes / case.num_rows]
            for name, each in contestants.items()
            if each.num_bytes is not None
        }
        return [
            records.record_of(case.name, "pool a batch", "ms", "ours", by_one),
            records.record_of(case.name, "pool a batch, two threads", "ms", "ours", by_two),
            records.record_of(case.name, "p99 of a bag", "us", "ours", single),
            records.record_of(case.name, "open", "ms", "ours", opened),
            records.record_of(case.name, "a key with its row", "bytes", "ours", size),
            *beside_lines(case, Path(folder), batches, repetitions),
        ]


def run(quick: bool, movielens: str | None = None) -> list[records.Record]:
    """Every case that fits; with `quick` two sizes of int8 rows; and what types cost a model."""
    os.environ["RECSDK_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if quick:
        cases = [
            Case(num_rows=rows, dim=64, dtype="int8", distribution="zipf")
            for rows in (10**5, 10**6)
        ]
        read = [record for case in cases for record in run_case(case, 5)]
        stored = stores.run_case(10**5, 5)
        return read + stored + following.run_case(10**6, 5) + run_frozen(quick, movielens)
    dtypes: tuple[FrozenDType, ...] = ("int8", "int4", "float32")
    axes = itertools.product(
        (10**5, 10**6, 10**7, 5 * 10**7), (16, 64, 128), dtypes, ("zipf", "uniform")
    )
    every = [Case(num_rows=r, dim=d, dtype=t, distribution=law) for r, d, t, law in axes]
    fitting = [case for case in every if case.num_bytes <= MOST_BYTES]
    for case in every:
        if case not in fitting:
            print(f"left out, for {case.num_bytes / 2**30:.0f} GiB of memory: {case.name}")
    read = [record for case in fitting for record in run_case(case, 9)]
    stored = [record for rows in (10**6, 10**7) for record in stores.run_case(rows, 9)]
    followed = [record for rows in (10**6, 10**7) for record in following.run_case(rows, 9)]
    return read + stored + followed + run_frozen(quick, movielens)
