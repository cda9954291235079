"""Row indexes and raw ids by which workloads are made."""

from __future__ import annotations

import numpy as np


def scramble(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers: SplitMix64's finalizer."""
    x = x.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed.astype(np.int64)


def draw_indexes(
    random: np.random.Generator, num_rows: int, count: int, distribution: str
) -> np.ndarray:
    if distribution == "uniform":
        return random.integers(0, num_rows, count)
    exponent = 1.05  # of the power law; ranks by the inverse of the distribution function
    top = float(num_rows) ** (1 - exponent)
    ranks = (1 + random.random(count) * (top - 1)) ** (1 / (1 - exponent))
    scattered = scramble(np.minimum(ranks.astype(np.int64), num_rows)).view(np.uint64)
    rows: np.ndarray = scattered % np.uint64(num_rows)
    return rows.astype(np.int64)
