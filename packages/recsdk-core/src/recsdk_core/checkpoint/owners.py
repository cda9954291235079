"""Which keys a rank owns, or a file has.

Shape letter: N keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recsdk_core.checkpoint.manifest import Sharding
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, virtual_shards

__all__ = ["Owner"]


@dataclass(frozen=True)
class Owner:
    """Which keys a rank owns."""

    rank: int = 0
    """This rank."""
    world_size: int = 1
    """Ranks W."""
    sharding: Sharding = field(default_factory=Sharding)
    """The rule."""

    def mask(self) -> NDArray[np.uint8] | None:
        """uint8 (65536,): 1 for virtual shards that it owns; None if the rule is another."""
        if self.world_size == 1 or self.sharding.rule != "virtual_shard":
            return None
        owners = self._owners(np.arange(NUM_VIRTUAL_SHARDS))
        mask: NDArray[np.uint8] = (owners == self.rank).astype(np.uint8)
        return mask

    def modulo(self) -> tuple[int, int] | None:
        """(rank, world size); None if the rule is another."""
        if self.world_size == 1 or self.sharding.rule != "modulo":
            return None
        return self.rank, self.world_size

    def owns(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of keys (N,) it owns."""
        unsigned = keys.view(np.uint64)
        owned: NDArray[np.bool_]
        if self.sharding.rule == "modulo":
            owned = unsigned % np.uint64(self.world_size) == np.uint64(self.rank)
        else:
            owned = self._owners(virtual_shards(keys)) == self.rank
        return owned

    def _owners(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Who has virtual shards of 65536, which lie in runs in those of the rule."""
        count = self.sharding.num_virtual_shards
        found: NDArray[np.int64] = shards * count // NUM_VIRTUAL_SHARDS * self.world_size // count
        return found

    def may_share_keys(self, other: Owner) -> bool:
        """False if both own no key in common, as far as the rules tell."""
        if self.sharding.rule != other.sharding.rule:
            return True
        if self.sharding.rule == "modulo":
            divisor = int(np.gcd(self.world_size, other.world_size))
            return self.rank % divisor == other.rank % divisor
        low, high = _run(self)
        other_low, other_high = _run(other)
        return low < other_high and other_low < high


def _run(owner: Owner) -> tuple[int, int]:
    """The first of 65536 virtual shards that a rank owns, and the one after its last."""
    shards = owner.sharding.num_virtual_shards
    width = NUM_VIRTUAL_SHARDS // shards
    low, high = (width * -(-(owner.rank + i) * shards // owner.world_size) for i in (0, 1))
    return low, high
