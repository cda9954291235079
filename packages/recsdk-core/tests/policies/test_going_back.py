"""A table that goes back to a checkpoint decides on as one of another process that loads it.

Steps of leases only ascend within a process: those of the other one begin at 1 again.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import Admit, Evict, Table, optim

RULES: dict[str, dict[str, Any]] = {
    "expiring": {"eviction": Evict.lru().expiring(ttl=1, every=1)},
    "expiring a share": {"eviction": Evict.lfu().expiring(share=0.2, every=1), "max_rows": 16},
    "evicting": {"eviction": Evict.lfu(half_life=2.5, min_age=2), "max_rows": 16},
    "measured": {"eviction": Evict.low_norm(below=0.5, every=1)},
    "admitting": {"admission": Admit.probability(0.4) | Admit.count(3)},
    "both": {
        "admission": Admit.probability(0.6),
        "eviction": Evict.lru().expiring(ttl=3, every=3),
        "max_rows": 16,
    },
}


def empty(rules: str) -> Table:
    return Table(2, seed=3, optimizer=optim.SGD(lr=0.5), **RULES[rules])


def train(table: Table, step: int, keys: Any) -> list[int]:
    with table.lease(step=step) as lease:
        outcomes = table.map(keys, insert=True, lease=lease)[1]
    table.apply_gradients(keys, np.full((len(keys), 2), 0.25, np.float32))
    return outcomes.tolist()


def rows_of(table: Table) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for batch in table.export():
        found |= zip(batch.keys.tolist(), batch.weights.tolist(), strict=True)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rules", RULES)
def test_a_table_that_goes_back_decides_as_one_that_begins(
    rules: str, seed: int, tmp_path: Path
) -> None:
    source = random.Random(seed)

    def keys() -> Any:
        return np.array([source.randrange(30) for _ in range(source.randint(0, 10))], np.int64)

    without_rules = Table(2, seed=3, optimizer=optim.SGD(lr=0.5))
    without_rules.upsert(np.arange(8), np.full((8, 2), 0.3, np.float32))
    without_rules.save(tmp_path / "rows of no step")
    table, step = empty(rules), 0
    table.save(tmp_path / "none")
    saved = [tmp_path / "rows of no step", tmp_path / "none"]
    for number in range(12):
        back = saved[number % 2] if number < 4 else source.choice(saved)
        table.load(back)
        other = empty(rules)
        other.load(back)
        for of_other in range(1, source.randint(2, 6)):
            step += 1
            if source.random() < 0.2:  # neither sees what a batch in flight does
                saved.append(tmp_path / f"{number} before {of_other}")
                with table.lease(step=step) as lease:
                    table.map(keys(), insert=True, lease=lease)
                    table.save(saved[-1])
                break
            batch = keys()
            assert train(table, step, batch) == train(other, of_other, batch)
            assert rows_of(table) == rows_of(other)
        saved.append(tmp_path / f"{number}")
        table.save(saved[-1])


def with_its_optimizer_again(table: Table) -> Table:
    table.set_optimizer(optim.SGD(lr=0.5))
    return table


COPIES: dict[str, Callable[[Table], Table]] = {
    "copied": copy.deepcopy,
    "pickled": lambda table: pickle.loads(pickle.dumps(table)),
    "with its optimizer again": with_its_optimizer_again,
}


@pytest.mark.parametrize("is_back", [True, False])
@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("rules", RULES)
def test_a_copy_decides_as_the_table_that_went_back(
    rules: str, kind: str, is_back: bool, tmp_path: Path
) -> None:
    """Made before it goes back or after; without a step between."""
    source = np.random.default_rng(3)
    batches = [source.integers(0, 30, 10) for _ in range(4)]
    table = empty(rules)
    table.save(tmp_path / "none")
    decided = [train(table, step, keys) for step, keys in enumerate(batches, 1)]
    if is_back:
        table.load(tmp_path / "none")
    table = COPIES[kind](table)
    if not is_back:
        table.load(tmp_path / "none")
    assert [train(table, step, keys) for step, keys in enumerate(batches, 11)] == decided
