"""Lookups and updates from Python: recsdk_core.Table beside pandas, torch and fbgemm.

    python -m benchmarks.embeddings [--quick]

Prints one JSON object per operation on a line of its own, as maps_bench does. Peers that do not
hash get row indexes that are dense already. Every result is compared with a peer's.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

import recsdk_core as rc
from benchmarks.draws import draw_indexes, scramble
from benchmarks.records import race, record_of

NUM_BAGS = 8192
NUM_BATCHES = 4
MEAN_LENGTH = 10
LEARNING_RATE = 0.01
EPS = 1e-8
SEED = 1


@dataclass(kw_only=True)
class Batch:
    """One batch of bags: raw keys, and the dense indexes that the peers get."""

    indexes_N: torch.Tensor
    keys_N: torch.Tensor
    offsets: torch.Tensor
    grad_BD: torch.Tensor


Step = Callable[[Batch], Callable[[], object]]
"""The forward of a batch; what it returns does backward and update."""


@dataclass(kw_only=True)
class Workload:
    """A table of `num_rows` rows, and batches over it."""

    name: str
    num_rows: int
    dim: int
    keys: np.ndarray
    batches: list[Batch]


def make_workload(num_rows: int, dim: int, distribution: str) -> Workload:
    random = np.random.default_rng(SEED)
    keys = scramble(np.arange(1, num_rows + 1))
    batches = []
    for _ in range(NUM_BATCHES):
        lengths = random.poisson(MEAN_LENGTH, NUM_BAGS)
        indexes = draw_indexes(random, num_rows, int(lengths.sum()), distribution)
        batches.append(
            Batch(
                indexes_N=torch.from_numpy(indexes),
                keys_N=torch.from_numpy(keys[indexes]),
                offsets=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])),
                grad_BD=torch.from_numpy(random.normal(size=(NUM_BAGS, dim)).astype(np.float32)),
            )
        )
    name = f"{distribution}_{num_rows:.0e}_dim{dim}".replace("e+0", "e")
    return Workload(name=name, num_rows=num_rows, dim=dim, keys=keys, batches=batches)


def emit(workload: str, op: str, unit: str, samples: dict[str, list[float]], **errors: str) -> None:
    record = record_of(workload, op, unit, "recsdk", samples)
    contestants = {
        name: [record.ours if name == "recsdk" else record.peers[name], *record.spread[name]]
        for name in samples
    }
    line = {"workload": workload, "op": op, "unit": unit, "contestants": contestants}
    print(json.dumps({**line, "errors": errors}), flush=True)


def filled_table(
    workload: Workload, weights: torch.Tensor, optimizer: rc.optim.Optimizer, **options: Any
) -> rc.Table:
    table = rc.Table(workload.dim, name="bench", optimizer=optimizer, num_threads=1, **options)
    for begin in range(0, workload.num_rows, 1 << 16):
        end = begin + (1 << 16)
        table.upsert(torch.from_numpy(workload.keys[begin:end]), weights[begin:end])
    return table


def tbe(workload: Workload, weights: torch.Tensor, optimizer: EmbOptimType) -> Any:
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.num_rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer,
        learning_rate=LEARNING_RATE,
        eps=EPS,
    )
    module.split_embedding_weights()[0].copy_(weights)
    return module


def check_close(what: str, ours: torch.Tensor, peer: torch.Tensor) -> None:
    if not torch.allclose(ours, peer, rtol=1e-4, atol=1e-5):
        raise SystemExit(f"{what}: results differ by up to {(ours - peer).abs().max().item()}")


def cycle(batches: list[Any], run: Callable[[Any], object]) -> Callable[[], object]:
    """A contestant that takes the next batch in every turn."""
    position = iter(range(1 << 30))
    return lambda: run(batches[next(position) % len(batches)])


def forward(workload: Workload, repetitions: int) -> None:
    weights = torch.randn(workload.num_rows, workload.dim)
    table = filled_table(workload, weights, rc.optim.SGD(lr=LEARNING_RATE))
    peer_tbe = tbe(workload, weights, EmbOptimType.EXACT_SGD)
    peer_bag = torch.nn.EmbeddingBag(
        workload.num_rows, workload.dim, mode="sum", include_last_offset=True, sparse=True
    )
    peer_bag.weight.data.copy_(weights)
    mapped = {
        id(b): rc.Bags(*table.map(b.keys_N, insert=False), b.offsets) for b in workload.batches
    }
    first = workload.batches[0]
    with torch.no_grad():
        expected = peer_bag(first.indexes_N, first.offsets)
        check_close("pool", table.pool(first.keys_N, first.offsets), expected)
        check_close("pool_rows", table.pool_rows(mapped[id(first)]), expected)
        peers = {
            "fbgemm TBE": cycle(workload.batches, lambda b: peer_tbe(b.indexes_N, b.offsets)),
            "nn.EmbeddingBag": cycle(workload.batches, lambda b: peer_bag(b.indexes_N, b.offsets)),
        }
        known = cycle(workload.batches, lambda b: table.pool_rows(mapped[id(b)]))
        raw = cycle(workload.batches, lambda b: table.pool(b.keys_N, b.offsets))
        emit(
            workload.name, "forward_known_rows", "ms", race({"recsdk": known, **peers}, repetitions)
        )
        emit(workload.name, "forward_raw_ids", "ms", race({"recsdk": raw, **peers}, repetitions))


def training(workload: Workload, repetitions: int) -> None:
    """Forward, backward and update, from raw ids; the peers' from dense indexes."""
    weights = torch.randn(workload.num_rows, workload.dim)
    lr, eps = LEARNING_RATE, EPS
    cases: dict[str, tuple[rc.optim.Optimizer, Any, Any]] = {
        "sgd": (rc.optim.SGD(lr=lr), EmbOptimType.EXACT_SGD, torch.optim.SGD),
        "rowwise_adagrad": (
            rc.optim.RowwiseAdagrad(lr=lr, eps=eps),
            EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            None,
        ),
        "adagrad": (
            rc.optim.Adagrad(lr=lr, eps=eps),
            EmbOptimType.EXACT_ADAGRAD,
            torch.optim.Adagrad,
        ),
        "adam": (rc.optim.Adam(lr=lr), None, torch.optim.SparseAdam),
    }
    for name, (ours, fbgemm_optimizer, torch_optimizer) in cases.items():
        steps = {"recsdk": our_step(filled_table(workload, weights, ours))}
        errors = {}
        if fbgemm_optimizer is None:
            errors["fbgemm TBE"] = error_of(lambda: tbe(workload, weights, EmbOptimType.ADAM))
        else:
            steps["fbgemm TBE"] = tbe_step(tbe(workload, weights, fbgemm_optimizer))
        if torch_optimizer is not None:
            steps["torch.optim"] = torch_step(workload, weights, torch_optimizer)
        whole = {n: cycle(workload.batches, both(step)) for n, step in steps.items()}
        emit(workload.name, f"train_{name}", "ms", race(whole, repetitions), **errors)
        backward = {n: cycle(workload.batches, step) for n, step in steps.items()}
        emit(workload.name, f"backward_{name}", "ms", race(backward, repetitions), **errors)


def both(step: Step) -> Callable[[Batch], None]:
    """Forward and backward as one."""

    def run(batch: Batch) -> None:
        step(batch)()

    return run


def our_step(table: rc.Table) -> Step:
    def forward(batch: Batch) -> Callable[[], object]:
        bags = rc.Bags(*table.map(batch.keys_N, insert=True), batch.offsets)
        table.pool_rows(bags)
        return lambda: table.update_rows(bags, batch.grad_BD)

    return forward


def tbe_step(module: Any) -> Step:
    def forward(batch: Batch) -> Callable[[], object]:
        pooled = module(batch.indexes_N, batch.offsets)
        return lambda: pooled.backward(batch.grad_BD)

    return forward


def torch_step(
    workload: Workload, weights: torch.Tensor, optimizer_class: Callable[..., torch.optim.Optimizer]
) -> Step:
    bag = torch.nn.EmbeddingBag(
        workload.num_rows, workload.dim, mode="sum", include_last_offset=True, sparse=True
    )
    bag.weight.data.copy_(weights)
    optimizer = optimizer_class(bag.parameters(), lr=LEARNING_RATE)

    def forward(batch: Batch) -> Callable[[], object]:
        optimizer.zero_grad()
        pooled = bag(batch.indexes_N, batch.offsets)

        def backward() -> None:
            pooled.backward(batch.grad_BD)
            optimizer.step()

        return backward

    return forward


HALF_ROWS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16_nearest": {"dtype": "bfloat16", "rounding": "nearest"},
    "float16": {"dtype": "float16"},
}


def half_rows(workload: Workload, repetitions: int) -> None:
    """Rows of 16 bits beside our own of 32: forward on known rows, update, and memory."""
    weights = torch.randn(workload.num_rows, workload.dim)
    lr, eps = LEARNING_RATE, EPS
    optimizers: dict[str, rc.optim.Optimizer] = {
        "sgd": rc.optim.SGD(lr=lr),
        "rowwise_adagrad": rc.optim.RowwiseAdagrad(lr=lr, eps=eps),
        "adagrad": rc.optim.Adagrad(lr=lr, eps=eps),
    }
    for name, optimizer in optimizers.items():
        tables = {
            kind: filled_table(workload, weights, optimizer, **options)
            for kind, options in {"float32": {}, **HALF_ROWS}.items()
        }
        steps = {kind: our_step(table) for kind, table in tables.items()}
        first = workload.batches[0]
        plain = tables["float32"].pool(first.keys_N, first.offsets)
        for kind in HALF_ROWS:
            pooled = tables[kind].pool(first.keys_N, first.offsets)
            if not torch.allclose(pooled, plain, rtol=2**-6, atol=0.2):
                raise SystemExit(f"{kind}: results differ from those of float32")
        known = {
            kind: [rc.Bags(*table.map(b.keys_N, insert=False), b.offsets) for b in workload.batches]
            for kind, table in tables.items()
        }
        reads = {kind: cycle(known[kind], table.pool_rows) for kind, table in tables.items()}
        forward_ms = race(reads, repetitions)
        update_ms = race(
            {kind: cycle(workload.batches, step) for kind, step in steps.items()}, repetitions
        )
        for kind in HALF_ROWS:
            for op, samples in (("forward", forward_ms), ("update", update_ms)):
                pair = {"recsdk": samples[kind], "rows of 32 bits": samples["float32"]}
                emit(workload.name, f"{op}_{name}_{kind}", "ms", pair)
            if kind == "bfloat16_nearest":
                continue
            sizes = {"recsdk": bytes_a_row(tables[kind])}
            sizes["rows of 32 bits"] = bytes_a_row(tables["float32"])
            emit(workload.name, f"bytes_a_row_{name}_{kind}", "bytes", sizes)


def bytes_a_row(table: rc.Table) -> list[float]:
    """Of weights, optimizer state, keys and states of rows; the index is the same for all."""
    stats = table.stats()
    return [(stats.row_bytes + stats.metadata_bytes) / stats.num_rows]


def mapping(num_keys: int, repetitions: int) -> None:
    """Raw ids to row numbers, from Python."""
    random = np.random.default_rng(SEED)
    keys = scramble(np.arange(1, num_keys + 1))
    table = rc.Table(1, name="bench", num_threads=1)
    for begin in range(0, num_keys, 1 << 16):
        table.map(keys[begin : begin + (1 << 16)], insert=True)
    index = pd.Index(keys)
    queries = [keys[random.integers(0, num_keys, 1 << 16)] for _ in range(4)]
    if not (table.map(queries[0], insert=False)[0] == index.get_indexer(queries[0])).all():
        raise SystemExit("map: row numbers differ from pandas")
    hashed = ZeroCollisionHash(keys)
    if not (keys[hashed.rows(queries[0])] == queries[0]).all():
        raise SystemExit("map: fbgemm's zero-collision hash does not find its keys")
    contestants = {
        "recsdk": lambda query: table.map(query, insert=False),
        "pandas Index.get_indexer": index.get_indexer,
        "fbgemm ZCH (read only)": hashed.slots,
    }
    position = iter(range(1 << 30))
    turns = {
        name: lambda call=call: call(queries[next(position) % 4])
        for name, call in contestants.items()
    }
    name = f"uniform_{num_keys:.0e}".replace("e+0", "e")
    emit(name, "map_65536", "ms", race(turns, repetitions))
    new = scramble(np.arange(num_keys + 1, num_keys + (1 << 16)))
    error = error_of(lambda: hashed.slots(new, is_read_only=False))
    fresh = iter(range(1 << 30))

    def insert() -> None:
        begin = num_keys + 1 + next(fresh) * (1 << 16)
        table.map(scramble(np.arange(begin, begin + (1 << 16))), insert=True)

    emit(name, "map_65536_new", "ms", race({"recsdk": insert}, repetitions), fbgemm_ZCH=error)


class ZeroCollisionHash:
    """fbgemm's hash of ids on the CPU, which only reads: keys are put where it looks for them."""

    MAX_PROBE = 512

    def __init__(self, keys: np.ndarray) -> None:
        size = len(keys) * 4 // 3
        buffer, _ = torch.ops.fbgemm.create_zch_buffer(size, False, None, True)
        self._identities = buffer
        identities = buffer.numpy()[:, 0]
        self._row_of_slot = np.full(size, -1)
        home = self.slots(keys)  # of a key that is not there, the slot that it would have
        left = np.arange(len(keys))
        for probe in range(self.MAX_PROBE):
            slots = (home[left] + probe) % size
            free = np.flatnonzero(identities[slots] == -1)
            _, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            identities[slots[placed]] = keys[left[placed]]
            self._row_of_slot[slots[placed]] = left[placed]
            left = np.delete(left, placed)
            if len(left) == 0:
                break

    def slots(self, keys: np.ndarray, is_read_only: bool = True) -> np.ndarray:
        found, _ = torch.ops.fbgemm.zero_collision_hash(
            torch.from_numpy(keys), self._identities, self.MAX_PROBE, True, readonly=is_read_only
        )
        slots: np.ndarray = found.numpy()
        return slots

    def rows(self, keys: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._row_of_slot[self.slots(keys)]
        return rows


def error_of(call: Callable[[], object]) -> str:
    """The first line of what a call raises that a peer cannot do."""
    try:
        call()
    except Exception as error:
        return str(error).splitlines()[0][:120]
    raise SystemExit("a peer can do what it could not: give it its place in the benchmark")


def call_overhead(repetitions: int) -> None:
    """One call with one key: what a call costs beside its work."""
    calls = 2000
    table = rc.Table(4, name="bench", num_threads=1)
    keys = np.array([3], dtype=np.int64)
    tensor = torch.from_numpy(keys)
    table.map(keys, insert=True)
    for kind, argument in (("numpy", keys), ("torch", tensor)):

        def many(argument: object = argument) -> None:
            for _ in range(calls):
                table.map(argument, insert=False)

        samples = race({"recsdk": many}, repetitions)
        emit(
            "one_key",
            f"call_{kind}",
            "us",
            {"recsdk": [v * 1e3 / calls for v in samples["recsdk"]]},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    repetitions = 8 if quick else 16
    call_overhead(repetitions)
    for num_keys in [1_000_000] if quick else [1_000_000, 10_000_000]:
        mapping(num_keys, repetitions)
    # The largest at which four tables with Adam's state fit into 60 % of 24 GiB.
    for num_rows in [200_000] if quick else [1_000_000, 5_000_000]:
        for distribution in ("uniform", "zipf1.05"):
            workload = make_workload(num_rows, 64, distribution)
            forward(workload, repetitions)
            training(workload, repetitions)
    half_rows(make_workload(200_000 if quick else 1_000_000, 64, "uniform"), repetitions)
    for dim in [] if quick else [16, 32, 128]:
        workload = make_workload(1_000_000, dim, "uniform")
        forward(workload, repetitions)
        training(workload, repetitions)


if __name__ == "__main__":
    main()
