"""A stream whose keys drift for ever, through a table with room for a few of them.

Keys come in as rare ones, grow popular, and are never drawn again. Each call reads rows and updates
them. Throughput, memory and the rows themselves are looked at ten times over the stream.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.draws import scramble
from recsdk_core import Admit, Evict, Outcome, Table
from recsdk_core.optim import SGD

CALL = 65_536
DIM = 8
EXPONENT = 0.99
PARTS = 10
RULES: dict[str, dict[str, Any]] = {
    "lru": {"eviction": Evict.lru()},
    "lfu half_life": {"eviction": Evict.lfu(half_life=100.0)},
    "low_norm": {"eviction": Evict.low_norm(every=20)},
    "lru count 2": {
        "eviction": Evict.lru(),
        "admission": Admit.count(2, max_records=1_000_000),
    },
    "show_click ttl": {
        "eviction": Evict.show_click(beta=3.0, decay=0.99).expiring(ttl=200, every=20)
    },
    "lru count_sketch 2": {
        "eviction": Evict.lru(),
        "admission": Admit.count_sketch(2, max_bytes=2**24),
    },
}
NUM_QUICK_RULES = 3


class Drift:
    """Ids by number: ids below the draw's are past, and those above are rarer by a power law."""

    def __init__(self, num_ids: int, num_calls: int, ids_a_call: int) -> None:
        weights = np.arange(1, num_ids + 1, dtype=np.float64) ** -EXPONENT
        self._cumulative = weights.cumsum() / weights.sum()
        self._random = np.random.default_rng(5)
        self._ids_a_call = ids_a_call
        self._num_calls = 0
        self.num_ids = num_ids + num_calls * ids_a_call

    def draw(self) -> np.ndarray:
        ranks = np.searchsorted(self._cumulative, self._random.random(CALL))
        numbers: np.ndarray = np.minimum(ranks, len(self._cumulative) - 1)
        numbers += self._num_calls * self._ids_a_call
        self._num_calls += 1
        return numbers


@dataclass
class Part:
    keys_a_second: float
    resident_bytes: int
    table_bytes: int
    num_wrong: int


def drifting(num_rows: int, num_draws: int, quick: bool) -> list[records.Record]:
    name = f"drift_{num_draws:.0e}_draws_{num_rows:.0e}_rows_dim{DIM}".replace("e+0", "e")
    found = []
    for rule in list(RULES)[: NUM_QUICK_RULES if quick else None]:
        parts = run_through(num_rows, num_draws, RULES[rule])
        for op, unit, values in (
            ("throughput", "Mkeys/s", [part.keys_a_second / 1e6 for part in parts]),
            ("memory of the process", "bytes", [float(part.resident_bytes) for part in parts]),
            ("memory of the table", "bytes", [float(part.table_bytes) for part in parts]),
        ):
            tenths = {f"in tenth {i + 1}": value for i, value in enumerate(values[:-1])}
            found.append(
                records.Record(
                    workload=name,
                    op=f"{op} in the last tenth, {rule}",
                    unit=unit,
                    ours=values[-1],
                    peers=tenths,
                    ratio={i: records.ratio(unit, values[-1], v) for i, v in tenths.items()},
                )
            )
        wrong = float(sum(part.num_wrong for part in parts))
        found.append(
            records.Record(workload=name, op=f"wrong rows, {rule}", unit="entries", ours=wrong)
        )
    return found


def run_through(num_rows: int, num_draws: int, limits: dict[str, Any]) -> list[Part]:
    """Looked at after each part. The table's time is the processor's."""
    num_calls = max(num_draws // CALL, PARTS)
    drift = Drift(4 * num_rows, num_calls, max(1, 3 * num_rows // num_calls))
    table = Table(DIM, max_rows=num_rows, optimizer=SGD(lr=1.0), seed=3, hash_seed=1, **limits)
    num_updates = np.full(drift.num_ids, 0, np.int32)  # of each id since it came
    grads_ND = np.zeros((CALL, DIM), np.float32)
    grads_ND[:, 0] = -1.0
    parts = []
    for part in range(PARTS):
        busy = 0.0
        num_here = num_calls * (part + 1) // PARTS - num_calls * part // PARTS
        for _ in range(num_here):
            numbers = drift.draw()
            keys = scramble(numbers)
            brought: dict[str, Any] = (
                {"clicks": keys & 1} if limits["eviction"].needs_clicks else {}
            )
            start = time.process_time()
            _, outcomes = table.find_or_insert(keys, return_outcomes=True, **brought)
            table.apply_gradients(keys, grads_ND)
            busy += time.process_time() - start
            num_updates[numbers[outcomes == Outcome.INSERTED]] = 0
            np.add.at(num_updates, numbers[outcomes <= Outcome.INSERTED], 1)
        num_wrong = wrong_rows(table, num_updates)
        parts.append(
            Part(num_here * CALL / busy, resident_bytes(), table.memory_bytes(), num_wrong)
        )
    return parts


def wrong_rows(table: Table, num_updates: np.ndarray) -> int:
    """How many rows are not their initial ones, with one added in column 0 for each update."""
    fresh = Table(DIM, seed=3)
    numbers = np.arange(len(num_updates))
    num_wrong = 0
    num_held = 0
    for begin in range(0, len(numbers), 1 << 20):
        part = numbers[begin : begin + (1 << 20)]
        keys = scramble(part)
        rows_ND, outcomes = table.lookup(keys, return_outcomes=True)
        is_held = outcomes == Outcome.FOUND
        num_held += int(is_held.sum())
        wanted_ND = fresh.find_or_insert(keys[is_held])
        fresh.clear()
        wanted_ND[:, 0] += num_updates[part[is_held]]
        is_near = np.abs(rows_ND[is_held, 0] - wanted_ND[:, 0]) < 0.5
        is_equal = (rows_ND[is_held, 1:] == wanted_ND[:, 1:]).all(1)
        num_wrong += int((~(is_near & is_equal)).sum())
    return num_wrong + abs(len(table) - num_held)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
