"""The hash that says to which virtual shard a key belongs, and how `max_rows` divides by it.

It never changes: checkpoints, and the ranks that own keys, depend on it. Shape letters: G groups,
N keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NUM_VIRTUAL_SHARDS",
    "default_eviction_groups",
    "eviction_group_quotas",
    "eviction_groups_of",
    "mix64",
    "virtual_shards",
]

NUM_VIRTUAL_SHARDS = 65_536
_ROWS = 4096
_FEWEST_GROUPS = 64
_FEWEST_ROWS = 16


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A fixed bijection of 64-bit words (N,) in which every input bit reaches every output bit.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014), with its increment added first, so that 0 does not map to 0.
    """
    mixed: NDArray[np.uint64] = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def virtual_shards(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The virtual shard of each key (N,): `mix64(key) % 65536`."""
    low_bits = mix64(keys.view(np.uint64)) & np.uint64(NUM_VIRTUAL_SHARDS - 1)
    shards: NDArray[np.int64] = low_bits.view(np.int64)
    return shards


def default_eviction_groups(max_rows: int) -> int:
    """How many groups a table of so many rows has unless told otherwise.

    A power of two: as many as leave each at least 4,096 rows, but no fewer than 64 where that
    leaves 16, and at most 65,536.
    """
    wanted = max(max_rows // _ROWS, 1)
    groups = min(1 << (wanted.bit_length() - 1), NUM_VIRTUAL_SHARDS)
    if max_rows // _FEWEST_GROUPS >= _FEWEST_ROWS:
        groups = max(groups, _FEWEST_GROUPS)
    return int(groups)


def eviction_groups_of(keys: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """The group of each key (N,) among `num_groups`, a power of two: runs of virtual shards."""
    groups: NDArray[np.int64] = virtual_shards(keys) * num_groups // NUM_VIRTUAL_SHARDS
    return groups


def eviction_group_quotas(max_rows: int, num_groups: int) -> NDArray[np.int64]:
    """How many rows of `max_rows` each group has, (G,); they differ by one at most."""
    each, rest = divmod(max_rows, num_groups)
    ends = np.arange(num_groups + 1, dtype=np.int64) * rest // num_groups
    quotas: NDArray[np.int64] = each + np.diff(ends)
    return quotas
