"""What a bounded table costs a model: the demo's model on tables with a limit, by rule and size.

Each feature's table may have a share of the rows that an unbounded table has in the end; tables of
few ids, as of genders and hours, are left whole. "1 in 20" admits a new id by that chance at each
occurrence; "count 5" its fifth. "One shared", "a fifth shared", "half shared", "two thirds shared"
and "most shared" give one row, or so much of a table's memory, to ids without one, which share
them: the hashing trick for those. "Begun shared" has ids that get a row begin with what they
shared. Beside them: the hashing trick, `nn.EmbeddingBag` whose rows the ids share by the remainder
of a hash, in as many bytes as our tables take; and torchrec's managed collisions with as many rows
as our tables. All have the same dense model, see the same batches, and train rows by Adagrad of one
rate. The figure is the AUC on held-out examples, the mean over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks import records
from benchmarks.models.training import (
    OwnOptimizer,
    Stream,
    Vectors,
    auc,
    hash_bag,
    streams,
    trained,
)
from recsdk_core import Admit, Default, Evict, Table, optim
from recsdk_pipeline.data import ClickData
from recsdk_pipeline.demo.model import ROW_WIDTH

FEW_IDS = 100
SHARES = (0.05, 0.1, 0.25, 0.5)
RULES: dict[str, dict[str, Any]] = {
    "first come": {},
    "lru": {"eviction": Evict.lru()},
    "lfu": {"eviction": Evict.lfu()},
    "lfu 1 in 20": {"eviction": Evict.lfu(), "admission": Admit.probability(0.05)},
    "first come, one shared": {},
    "lfu, one shared": {"eviction": Evict.lfu()},
    "lfu 1 in 20, one shared": {"eviction": Evict.lfu(), "admission": Admit.probability(0.05)},
    "first come, most shared": {},
    "count 100, most shared": {"admission": Admit.count(100)},
    "count 50, two thirds shared": {"admission": Admit.count(50)},
    "count 5, a fifth shared": {"admission": Admit.count(5)},
    "lfu, half shared": {"eviction": Evict.lfu()},
    "lfu, half begun shared": {"eviction": Evict.lfu()},
}
SHARED_PARTS = {
    "one shared": 0.0,
    "a fifth shared": 0.2,
    "half shared": 0.5,
    "two thirds shared": 2 / 3,
    "most shared": 0.9,
}
"""Of a table's memory, what is for rows that its ids without one share; at least one is shared."""
BEGUN = "begun "
BYTES_OF_A_SHARED_ROW = 2 * 4 * ROW_WIDTH
"""With Adagrad's state, as a row of the hashing trick."""
TRICK = "hashing trick"
MANAGED = "torchrec managed collisions"
STEPS_A_ROUND = 10
"""After how many batches managed collisions choose anew which ids have rows."""
NUM_ROWS_OF_SAMPLE = 100_000
_MIX = -7046029254386353131
"""2**64 over the golden ratio, as int64: Fibonacci hashing."""


class SharedRows(OwnOptimizer):
    """The hashing trick: the row of an id is the remainder of its hash."""

    def __init__(self, num_rows: int, rate: float) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.bag = nn.EmbeddingBag(
            num_rows, ROW_WIDTH, mode="mean", sparse=True, include_last_offset=True
        )
        nn.init.uniform_(self.bag.weight, -0.05, 0.05)
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=rate)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.bag(mixed(ids, self.num_rows), offsets)
        return pooled


class ManagedRows(nn.Module):
    """torchrec's managed collisions: frequent ids have rows of their own, the rest share one."""

    def __init__(self, num_rows: int, rate: float) -> None:
        super().__init__()
        self.rows = SharedRows(num_rows, rate)
        self.managed = MCHManagedCollisionModule(
            zch_size=num_rows,
            device=torch.device("cpu"),
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=STEPS_A_ROUND,
            input_hash_size=2**62,
            input_hash_func=mixed,
        )

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found = self.managed({"ids": JaggedTensor(values=ids, offsets=offsets)})
        pooled: torch.Tensor = self.rows.bag(found["ids"].values(), offsets)
        evicted = self.managed.evict()
        if evicted is not None:
            with torch.no_grad():
                self.rows.bag.weight[evicted] = 0.0
        return pooled


def mixed(ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A row for each id, alike to a drawn one."""
    hashed = ids * _MIX
    return (hashed ^ (hashed >> 32)).remainder(num_rows)


def bytes_of_a_row(limits: Mapping[str, Any]) -> float:
    """What a row of a full table takes, with its key and what its rule keeps of it."""
    limits = {name: value for name, value in limits.items() if name != "admission"}
    table = Table(ROW_WIDTH, optimizer=optim.Adagrad(), max_rows=NUM_ROWS_OF_SAMPLE, **limits)
    table.find_or_insert(np.arange(NUM_ROWS_OF_SAMPLE) * np.int64(_MIX))
    stats = table.stats()
    return (stats.row_bytes + stats.index_bytes + stats.metadata_bytes) / stats.num_rows


@cache
def largest_row() -> float:
    """What a row of the largest of our tables takes: each contestant has as many bytes a row."""
    return max(bytes_of_a_row(limits) for limits in RULES.values())


def room_of(rule: str, num_rows: int, num_ids: int) -> dict[str, Any]:
    """How many rows of a table ids have for themselves, `num_rows` at most, and the others share.

    All of them take as much memory as `num_rows` rows of the largest of our tables.
    """
    shared = rule.partition(", ")[2]
    part = SHARED_PARTS.get(shared.replace(BEGUN, ""))
    if part is None or num_rows >= num_ids:
        return {"max_rows": num_rows}
    num_bytes = largest_row() * num_rows
    num_shared = min(max(int(part * num_bytes / BYTES_OF_A_SHARED_ROW), 1), 65_536)
    left = num_bytes - num_shared * BYTES_OF_A_SHARED_ROW
    max_rows = min(max(int(left / bytes_of_a_row(RULES[rule])), 0), num_rows)
    begin_with: Any = "shared_row" if BEGUN in shared else "initial_row"
    return {
        "max_rows": max_rows,
        "default": Default.shared_rows(num_shared, begin_with=begin_with),
    }


def auc_of(stream: Stream, data: ClickData, vectors: Vectors, seed: int) -> float:
    return auc(trained(stream, data, vectors, seed), stream, data)


def aucs(stream: Stream, shares: tuple[float, ...], seed: int) -> dict[tuple[float, str], float]:
    """By share and contestant; share 1 is the unbounded table's."""
    data, rate = stream.data(seed), stream.recipe.learning_rate
    whole = {name: hash_bag(name, rate, seed) for name in data.features}
    found = {(1.0, "unbounded"): auc_of(stream, data, Vectors(whole), seed)}
    sizes = {name: len(bag.table) for name, bag in whole.items()}
    for share in shares:
        rows = {
            name: size if size <= FEW_IDS else round(share * size) for name, size in sizes.items()
        }
        for rule, limits in RULES.items():
            bags = {
                name: hash_bag(name, rate, seed, **room_of(rule, rows[name], sizes[name]), **limits)
                for name in rows
            }
            found[share, rule] = auc_of(stream, data, Vectors(bags), seed)
        scale = largest_row() / BYTES_OF_A_SHARED_ROW
        torch.manual_seed(seed)
        shared = {name: SharedRows(round(scale * size), rate) for name, size in rows.items()}
        found[share, TRICK] = auc_of(stream, data, Vectors(shared), seed)
        managed = {name: ManagedRows(size, rate) for name, size in rows.items()}
        found[share, MANAGED] = auc_of(stream, data, Vectors(managed), seed)
    return found


def run(quick: bool, movielens: str | None = None) -> list[records.Record]:
    torch.set_num_threads(1)
    shares = (0.1, 0.5) if quick else SHARES
    seeds = (0,) if quick else (0, 1, 2)
    made = []
    for stream in streams(quick, movielens):
        each = [aucs(stream, shares, seed) for seed in seeds]
        mean = {key: statistics.mean(one[key] for one in each) for key in each[0]}
        for share in shares:
            peers = {name: mean[share, name] for name in (TRICK, MANAGED)}
            peers["unbounded"] = mean[1.0, "unbounded"]
            made += [
                records.Record(
                    workload=f"{stream.name}_rows{share:.0%}",
                    op=f"auc_{rule.replace(' ', '_')}",
                    unit="AUC",
                    ours=mean[share, rule],
                    peers=peers,
                    ratio={name: mean[share, rule] / value for name, value in peers.items()},
                )
                for rule in RULES
            ]
    return made
