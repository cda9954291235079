"""Which rank owns a key.

Two rules. "virtual_shard", the default: a key belongs to virtual shard `mix64(key) % 65536`, and
the ranks own equal contiguous runs of virtual shards: of V shards rank r of W owns those with
`shard * W // V == r`. "modulo": rank `uint64(key) % W`, for compatibility; it is skewed for keys
with a stride. Both are fixed for ever, since checkpoints and initial placements depend on them.

Shape letters: N keys, W ranks, V virtual shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_VIRTUAL_SHARDS", "RankMap", "RankRule", "mix64", "virtual_shards"]

NUM_VIRTUAL_SHARDS = 65_536

RankRule: TypeAlias = Literal["virtual_shard", "modulo"]


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


@dataclass(frozen=True)
class RankMap:
    """The fixed map from keys to ranks.

    >>> import numpy as np
    >>> RankMap(world_size=2, rule="modulo").owners(np.array([4, 7, -1]))
    array([0, 1, 1])
    """

    world_size: int
    """Number of ranks W, 1 to 65536."""
    rule: RankRule = "virtual_shard"
    """"virtual_shard" or "modulo"."""

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= NUM_VIRTUAL_SHARDS:
            raise ValueError(f"world_size must be 1 to {NUM_VIRTUAL_SHARDS}, got {self.world_size}")
        if self.rule not in get_args(RankRule):
            raise ValueError(f"rank rule must be one of {get_args(RankRule)}, got {self.rule!r}")

    def owners(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each key: int64 (N,) in 0 to W - 1. Any 64-bit key is fine."""
        owners: NDArray[np.int64]
        if self.rule == "modulo":
            owners = (keys.view(np.uint64) % np.uint64(self.world_size)).view(np.int64)
        else:
            owners = (virtual_shards(keys) * self.world_size) // NUM_VIRTUAL_SHARDS
        return owners

    def owned_by(self, rank: int, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys (N,) belong to `rank`."""
        is_owned: NDArray[np.bool_] = self.owners(keys) == rank
        return is_owned
