"""Pooling from frozen tables, beside FBGEMM's inference tables and torch's quantized bags.

Ours takes raw 64-bit ids. So does one peer, nearly: FBGEMM's tables with the hash look-up that they
have for pruned rows ("fbgemm hashed"), which finds 32-bit ids. The others are given the index of
each row for free: "fbgemm dense", and torch's `embedding_bag_byte` ("torch int8"), whose results
ours are checked against. All use one thread, and what is counted is the processor's time: on a
quiet machine that is what a call takes, and on a busy one it is not what others take. Files and
peers are in memory before the first call.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
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

from benchmarks import following, records
from benchmarks.draws import draw_indexes, scramble
from benchmarks.models.frozen import run as run_frozen
from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze
from recsdk_core.serving.manifest import FrozenDType

NUM_BATCHES = 8
NUM_BAGS, BAG_LENGTH = 4096, 20
SEED = 1
ROWS_AT_ONCE = 100_000
MOST_BYTES = 3 << 29  # of the rows of a peer
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


def contestants_of(
    case: Case, served: ServingTable, batches: list[Batch]
) -> dict[str, Callable[[], object]]:
    offsets = np.arange(0, NUM_BAGS * BAG_LENGTH + 1, BAG_LENGTH)
    torch_offsets = torch.from_numpy(offsets.astype(np.int32))

    def all_of(call: Callable[[Batch], object]) -> Callable[[], object]:
        def run() -> None:
            for batch in batches:
                call(batch)

        return run

    found = {"ours": all_of(lambda batch: served.pool(batch.keys_N, offsets))}
    dense, hashed = fbgemm(case, False), fbgemm(case, True)
    found[DENSE] = all_of(lambda batch: dense(batch.indexes_N, torch_offsets))
    found[HASHED] = all_of(lambda batch: hashed(batch.indexes_N, torch_offsets))
    if case.dtype == "int8":
        rows = torch_rows(case)

        def pooled(batch: Batch) -> torch.Tensor:
            bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
            result: torch.Tensor = bag(
                rows, batch.indexes_N, torch_offsets, include_last_offset=True
            )
            return result

        ours = torch.from_numpy(served.pool(batches[0].keys_N, offsets))
        torch.testing.assert_close(ours, pooled(batches[0]), rtol=1e-4, atol=1e-4)
        found[TORCH] = all_of(pooled)
    return found


def run_case(case: Case, repetitions: int) -> list[records.Record]:
    parent = Path(__file__).resolve().parents[2] / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        served = frozen(case, Path(folder))
        samples = records.race(
            contestants_of(case, served, batches_of(case)), repetitions, time.process_time
        )
        a_batch = {name: [ms / NUM_BATCHES for ms in each] for name, each in samples.items()}
        opened = records.race(
            {"ours": lambda: ServingTable(Path(folder) / "frozen")}, repetitions, time.process_time
        )
        size = {"ours": [served.num_bytes / case.num_rows]}
        return [
            records.record_of(case.name, "pool a batch", "ms", "ours", a_batch),
            records.record_of(case.name, "open", "ms", "ours", opened),
            records.record_of(case.name, "a key with its row", "bytes", "ours", size),
        ]


def run(quick: bool, movielens: str | None = None) -> list[records.Record]:
    """Every case that fits, with `quick` two sizes of int8 rows; and what types cost a model."""
    os.environ["RECSDK_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if quick:
        cases = [
            Case(num_rows=rows, dim=64, dtype="int8", distribution="zipf")
            for rows in (10**5, 10**6)
        ]
        read = [record for case in cases for record in run_case(case, 5)]
        return read + following.run_case(10**6, 5) + run_frozen(quick, movielens)
    dtypes: tuple[FrozenDType, ...] = ("int8", "int4", "float32")
    axes = itertools.product(
        (10**5, 10**6, 10**7, 5 * 10**7), (16, 64, 128), dtypes, ("zipf", "uniform")
    )
    every = [Case(num_rows=r, dim=d, dtype=t, distribution=law) for r, d, t, law in axes]
    fitting = [case for case in every if case.num_rows * case.dim * 4 <= MOST_BYTES]
    read = [record for case in fitting for record in run_case(case, 9)]
    followed = [record for rows in (10**6, 10**7) for record in following.run_case(rows, 9)]
    return read + followed + run_frozen(quick, movielens)
