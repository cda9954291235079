"""What the ranks of random programs have: ids of any kind, in bags of any lengths.

Shape letters: B samples, G bags of a feature, N ids, W ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from policy_batches import Array, Bags, time_of
from worlds import EDGE_KEYS

LENGTHS = (0, 1, 2, 4)
"""Of bags whose means are exact."""
FIRST_TIME = -7
"""What all ranks set before the first batch: of times that ranks set for it the latest counts."""
WEIGHTS = {1: (1.0,), 2: (1.5, 0.5), 4: (1.5, 0.5, 1.75, 0.25)}
"""Of the ids of a bag, which add up to a power of two."""
TYPES = (torch.int64, torch.int32, torch.uint64)
"""Of ids."""


@dataclass(frozen=True)
class Batch:
    """What all ranks have."""

    ends: tuple[int, ...]
    """Where the samples of each rank begin, and where the last one's end."""
    bags: dict[str, Bags]
    """By feature."""
    has_times: tuple[bool, ...]
    """Whether the ids of each rank come with times and counts."""
    times_set: tuple[int | None, ...]
    """The time that each rank sets before."""
    types: tuple[torch.dtype, ...]
    """Of each rank's ids."""

    def own(self, ranks: slice) -> dict[str, Bags]:
        """What some ranks have that follow one another."""
        begin, end, _ = ranks.indices(len(self.ends) - 1)
        return {
            name: each.own(self.ends[begin], self.ends[end]) for name, each in self.bags.items()
        }


@functools.lru_cache(maxsize=64)
def batch_of(
    seed: int,
    number: int,
    world_size: int,
    names: tuple[str, ...],
    *,
    types_vary: bool,
    bags_vary: bool,
    times_vary: bool,
) -> Batch:
    """`types_vary`: ids have few bits, and each rank has them in a type of its own.

    `times_vary`: ids of some ranks may have no times, as only one table reads what they lack.
    """
    source = np.random.default_rng([seed, number, 2])
    sizes = source.integers(0, 5, world_size) * int(source.random() < 0.9)
    ends = tuple(np.cumsum([0, *sizes]).tolist())
    bags = {name: _bags_of(source, number, sizes, bags_vary) for name in names}
    share = float(source.choice([1, 0.5, 0.5, 0] if times_vary else [1, 1, 0]))
    has_times = tuple((source.random(world_size) < share).tolist())
    sets_time = source.random(world_size) < source.choice([0, 0.5, 1])
    times_set = (time_of(number) + source.integers(FIRST_TIME + 1, 5, world_size)).tolist()
    pairs = zip(sets_time, times_set, strict=True)
    times = tuple(time if sets else None for sets, time in pairs)
    if not types_vary:
        return Batch(ends, bags, has_times, times, (torch.int64,) * world_size)
    few = {name: replace(each, keys_N=each.keys_N >> 34) for name, each in bags.items()}
    types = tuple(TYPES[n] for n in source.integers(0, len(TYPES), world_size))
    return Batch(ends, few, has_times, times, types)


def _bags_of(source: Any, batch: int, sizes: Array, varies: bool) -> Bags:
    num_bags_W = source.integers(1, 4, len(sizes)) * (sizes > 0) if varies else sizes
    starts = np.cumsum([0, *num_bags_W])
    firsts = np.append(np.repeat(starts[:-1], sizes), starts[-1])
    bag_B = np.arange(sizes.sum())
    if varies:
        bag_B = firsts[:-1] + source.integers(0, np.repeat(num_bags_W, sizes))
    lengths_G = source.choice(LENGTHS, starts[-1]) if source.random() < 0.8 else np.ones(starts[-1])
    lengths_G = lengths_G.astype(np.int64) * int(source.random() < 0.85)
    num_keys = int(lengths_G.sum())
    keys_N = (source.zipf(1.3, num_keys) % 300 + 3 * batch) * 0x9E3779B97F4A7C1
    is_edge_N = source.random(num_keys) < 0.1
    keys_N = np.where(is_edge_N, source.choice(EDGE_KEYS, num_keys), keys_N.astype(np.int64))
    weights = [source.permutation(WEIGHTS[n]) for n in lengths_G.tolist() if n]
    return Bags(
        keys_N,
        _data_of(source, batch, num_keys),
        np.concatenate([np.zeros(0), *weights]).astype(np.float32),
        lengths_G,
        bag_B,
        firsts,
    )


def _data_of(source: Any, batch: int, num_keys: int) -> dict[str, Array]:
    return {
        "scores": source.integers(-9, 10, num_keys).astype(np.float32),
        "clicks": source.integers(0, 3, num_keys),
        "times": time_of(batch) + source.integers(-4, 5, num_keys),
        "counts": source.integers(1, 4, num_keys),
    }
