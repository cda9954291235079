"""What a bounded table costs a model: the demo's model on tables with a limit, by rule and size.

Each feature's table may have a share of the rows that an unbounded table has in the end; tables of
few ids, as of genders and hours, are left whole. "1 in 20" admits a new id by that chance at each
occurrence; "count 20" its twentieth. What admission keeps of other ids is not counted as memory.
"One shared", "a tenth shared", "two fifths shared", "half shared" and "most shared" give one row,
or so much of a table's memory, to ids without one, which share them: the hashing trick for those.
"Begun shared" has ids that get a row begin with what they shared. A label of 1 is a click on each
id of the example. Beside them: the hashing trick, `nn.EmbeddingBag` whose rows the ids share by the
remainder of a hash, in as many bytes as our tables take; and torchrec's managed collisions with as
many rows as our tables. All have the same dense model, see the same batches, and train rows by
Adagrad of one rate. The figure is the AUC on held-out examples, the mean over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
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
    TakesClicks,
    Vectors,
    auc,
    hash_bag,
    streams,
    trained,
)
from recsdk_core import Admit, Default, Evict, Table, optim
from recsdk_core.nn import HashEmbeddingBag
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
    "count 100, two fifths shared": {"admission": Admit.count(100)},
    "count 20, a tenth shared": {"admission": Admit.count(20)},
    "lfu, half shared": {"eviction": Evict.lfu()},
    "lfu, half begun shared": {"eviction": Evict.lfu()},
    "lru count 2": {"eviction": Evict.lru(), "admission": Admit.count(2)},
    "lfu half life": {"eviction": Evict.lfu(half_life=50.0)},
    "lru ttl": {"eviction": Evict.lru().expiring(ttl=50, every=10)},
    "low norm": {"eviction": Evict.low_norm(every=10)},
    "show click": {"eviction": Evict.show_click(beta=3.0, decay=0.99)},
    "show click let in": {"admission": Admit.show_click(threshold=5.0, beta=3.0)},
    "count sketch 20, a tenth shared": {"admission": Admit.count_sketch(20, max_bytes=2**20)},
}
QUICK_RULES = (
    "first come",
    "lfu",
    "lfu 1 in 20, one shared",
    "count 20, a tenth shared",
    "count sketch 20, a tenth shared",
    "low norm",
    "show click",
)
SHARED_PARTS = {
    "one shared": 0.0,
    "a tenth shared": 0.1,
    "two fifths shared": 0.4,
    "half shared": 0.5,
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


def takes_clicks(limits: Mapping[str, Any]) -> bool:
    return any(each.needs_clicks for each in limits.values())


def bytes_of_a_row(limits: Mapping[str, Any]) -> float:
    """What a row of a full table takes, with its key and what its rule keeps of it."""
    limits = {name: value for name, value in limits.items() if name != "admission"}
    table = Table(
        ROW_WIDTH, optimizer=optim.Adagrad(), max_rows=NUM_ROWS_OF_SAMPLE, hash_seed=1, **limits
    )
    brought: dict[str, Any] = {"clicks": 0} if takes_clicks(limits) else {}
    table.find_or_insert(np.arange(NUM_ROWS_OF_SAMPLE) * np.int64(_MIX), **brought)
    stats = table.stats()
    return (stats.row_bytes + stats.index_bytes + stats.metadata_bytes) / stats.num_rows


@cache
def budget_of_a_row() -> float:
    """Bytes for each row of the share that a table may have, of every contestant."""
    return bytes_of_a_row(RULES["lfu"])


def room_of(rule: str, num_rows: int, num_ids: int) -> dict[str, Any]:
    """How many rows ids have for themselves, `num_rows` at most, and how many others share."""
    if num_rows >= num_ids:
        return {"max_rows": num_rows}
    shared = rule.partition(", ")[2]
    part = SHARED_PARTS.get(shared.replace(BEGUN, ""))
    left = budget_of_a_row() * num_rows
    default = Default()
    if part is not None:
        num_shared = min(max(int(part * left / BYTES_OF_A_SHARED_ROW), 1), 65_536)
        left -= num_shared * BYTES_OF_A_SHARED_ROW
        begin_with: Any = "shared_row" if BEGUN in shared else "initial_row"
        default = Default.shared_rows(num_shared, begin_with=begin_with)
    max_rows = min(max(int(left / bytes_of_a_row(RULES[rule])), 0), num_rows)
    return {"max_rows": max_rows, "default": default}


class ByClicks(TakesClicks):
    """A bag whose rule goes by clicks: each of an example's ids is clicked if the example is."""

    def __init__(self, bag: HashEmbeddingBag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        clicks = None
        if self.training:
            clicks = self.clicks_B.repeat_interleave(offsets.diff())
        pooled: torch.Tensor = self.bag(ids, offsets, clicks=clicks)
        return pooled


def bounded_bag(rule: str, name: str, rate: float, seed: int, **room: Any) -> nn.Module:
    limits = RULES[rule]
    bag = hash_bag(name, rate, seed, **room, **limits)
    return ByClicks(bag) if takes_clicks(limits) else bag


def auc_of(stream: Stream, data: ClickData, vectors: Vectors, seed: int) -> float:
    return auc(trained(stream, data, vectors, seed), stream, data)


def aucs(
    stream: Stream, shares: tuple[float, ...], rules: Iterable[str], seed: int
) -> dict[tuple[float, str], float]:
    """By share and contestant; share 1 is the unbounded table's."""
    data, rate = stream.data(seed), stream.recipe.learning_rate
    whole = {name: hash_bag(name, rate, seed) for name in data.features}
    found = {(1.0, "unbounded"): auc_of(stream, data, Vectors(whole), seed)}
    sizes = {name: len(bag.table) for name, bag in whole.items()}
    for share in shares:
        rows = {
            name: size if size <= FEW_IDS else round(share * size) for name, size in sizes.items()
        }
        for rule in rules:
            bags = {
                name: bounded_bag(rule, name, rate, seed, **room_of(rule, rows[name], sizes[name]))
                for name in rows
            }
            found[share, rule] = auc_of(stream, data, Vectors(bags), seed)
        scale = budget_of_a_row() / BYTES_OF_A_SHARED_ROW
        torch.manual_seed(seed)
        shared = {name: SharedRows(round(scale * size), rate) for name, size in rows.items()}
        found[share, TRICK] = auc_of(stream, data, Vectors(shared), seed)
        managed = {name: ManagedRows(size, rate) for name, size in rows.items()}
        found[share, MANAGED] = auc_of(stream, data, Vectors(managed), seed)
    return found


def run(quick: bool, movielens: str | None = None) -> list[records.Record]:
    torch.set_num_threads(1)
    shares = (0.1, 0.5) if quick else SHARES
    rules = QUICK_RULES if quick else tuple(RULES)
    seeds = (0,) if quick else (0, 1, 2)
    made = []
    for stream in streams(quick, movielens):
        each = [aucs(stream, shares, rules, seed) for seed in seeds]
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
                for rule in rules
            ]
    return made
