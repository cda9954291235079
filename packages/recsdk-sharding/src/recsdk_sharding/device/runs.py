"""Sums over consecutive items, as steps that any device runs with the same result.

A run is items that lie side by side and are added to one sum. They are added pairwise: neighbours
first, then neighbours of those sums, and so on. Each step adds distinct items to distinct items, so
no order of execution changes a bit. The engine's plan_run_sum adds in the same order; a table of
orders, run_sums.txt of its tests, holds both to it.

Shape letters: N items, U runs, P pairs of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Runs", "plan_runs", "run_sums"]

ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True)
class Runs(Generic[ArrayT]):
    """How to add up the items of runs that have at least one item each."""

    steps: list[tuple[ArrayT, ArrayT]]
    """For each step the positions (P,) of the items that are added to, and of those added."""
    firsts: ArrayT | None
    """Positions (U,) of the sums after the steps: each run's first item; None: every item."""


def plan_runs(lengths_U: NDArray[np.int64]) -> Runs[NDArray[np.int64]]:
    """The steps for runs of these lengths (U,), at least 1 each. Cost: O(N)."""
    starts_U = np.cumsum(lengths_U) - lengths_U
    steps = []
    distance, longest = 1, int(lengths_U.max(initial=1))
    while distance < longest:
        is_longer_U = lengths_U > distance
        num_pairs = -((distance - lengths_U[is_longer_U]) // (2 * distance))
        within_P = _counting_up(num_pairs)
        targets_P = np.repeat(starts_U[is_longer_U], num_pairs) + 2 * distance * within_P
        steps.append((targets_P, targets_P + distance))
        distance *= 2
    return Runs(steps, starts_U if steps else None)


def _counting_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... count - 1 for each of the counts, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: NDArray[np.int64] = np.arange(total) - np.repeat(ends - counts, counts)
    return numbers


def run_sums(items_ND: torch.Tensor, runs: Runs[torch.Tensor]) -> torch.Tensor:
    """The sums of runs of items, float32 (U, D); writes to `items_ND`."""
    for targets_P, sources_P in runs.steps:
        items_ND.index_add_(0, targets_P, items_ND.index_select(0, sources_P))
    return items_ND if runs.firsts is None else items_ND.index_select(0, runs.firsts)
