"""Optimizers that accumulate, and what they must equal, on the cpu and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import on_ranks
import torch
from comparing import assert_rows_close
from rank_pool import RankPool
from worlds import Setup, merged

from optimizer_cases import PLAIN
from recsdk_sharding import AccumulateAdagrad, AccumulateAdam, AccumulateSGD, RowOptimizer
from sampling import IS_FULL

STEPS = 3
CLASSES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (AccumulateSGD, torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (AccumulateAdagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4}),
    "adam": (AccumulateAdam, torch.optim.Adam, {"lr": 0.02, "eps": 1e-4}),
}
ACCUMULATE = {"use_accumulate": True, "accumulate_step": STEPS}


def assert_equals_large_batches(pool: RankPool, pairs: Sequence[tuple[Setup, Setup]]) -> None:
    """Of each pair two updates of three backwards each, against two of three times the size."""
    by_rank = pool.run(pool.at_most(2), on_ranks.train_sums_of_each, list(pairs), STEPS)
    for of_ranks in zip(*by_rank, strict=True):
        found, expected = zip(*of_ranks, strict=True)
        assert_rows_close(merged([r["rows"] for r in found]), merged([r["rows"] for r in expected]))
        for result in found:
            assert result["counts"] == [{0}, {0}, {1}, {1}, {1}, {2}]


def every_optimizer(like: Setup, *, is_odd: bool) -> list[tuple[Setup, Setup]]:
    """Optimizers with the config's option, and without: all in the full profile, else half of them.

    Bags and sequences have the other half each, on the cpu and on a device. Each of the three
    tables has another one.
    """
    pairs = []
    chosen = list(PLAIN.values()) if IS_FULL else list(PLAIN.values())[is_odd::2]
    for first in range(0, len(chosen), 3):
        of_tables = tuple({"settings": s} for s in (chosen[first:] + chosen)[:3])
        large = replace(like, optimizer=RowOptimizer, arguments={}, of_tables=of_tables)
        small = replace(large, options={**like.options, "accumulate_steps": STEPS})
        pairs.append((small, large))
    return pairs
