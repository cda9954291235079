"""The hash that says to which virtual shard a key belongs.

It never changes: checkpoints, and the ranks that own keys, depend on it. Shape letter: N keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_VIRTUAL_SHARDS", "mix64", "virtual_shards"]

NUM_VIRTUAL_SHARDS = 65_536


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
