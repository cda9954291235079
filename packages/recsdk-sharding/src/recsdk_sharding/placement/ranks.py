"""Which rank owns a key.

Two rules. "virtual_shard", the default: a key belongs to virtual shard `mix64(key) % 65536`, and
each rank owns one range of virtual shards: of V shards rank r of W owns those with
`shard * W // V == r`. "modulo": rank `uint64(key) % W`, for compatibility; it is skewed for keys
with a stride. Both are fixed for ever, since checkpoints and placements depend on them.

Shape letters: N keys, W ranks, V virtual shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, mix64, virtual_shards

__all__ = [
    "NUM_VIRTUAL_SHARDS",
    "RankMap",
    "RankRule",
    "mix64",
    "ranks_of_tensor",
    "virtual_shards",
]

RankRule: TypeAlias = Literal["virtual_shard", "modulo"]


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
            raise ValueError(f"rank_rule must be one of {get_args(RankRule)}, got {self.rule!r}")

    def owners(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each key: int64 (N,) in 0 to W - 1. Any 64-bit key is fine."""
        owners: NDArray[np.int64]
        if self.rule == "modulo":
            owners = (keys.view(np.uint64) % np.uint64(self.world_size)).view(np.int64)
        else:
            owners = (virtual_shards(keys) * self.world_size) // NUM_VIRTUAL_SHARDS
        return owners

    def may_share_keys(self, rank: int, other: RankMap, other_rank: int) -> bool:
        """False if, by their rules, a rank of this map and one of another can share no key."""
        if self.rule != other.rule:
            return True
        if self.rule == "modulo":
            divisor = math.gcd(self.world_size, other.world_size)
            return rank % divisor == other_rank % divisor
        low, high = self._run(rank)
        other_low, other_high = other._run(other_rank)
        return low < other_high and other_low < high

    def _run(self, rank: int) -> tuple[int, int]:
        """The first virtual shard that a rank owns, and the one after its last."""
        low, high = (-(-(rank + i) * NUM_VIRTUAL_SHARDS // self.world_size) for i in (0, 1))
        return low, high

    def to_tensor(self) -> torch.Tensor:
        """As an entry of a `state_dict`: int64 (2,), how many ranks, and the number of the rule."""
        return torch.tensor([self.world_size, get_args(RankRule).index(self.rule)])

    def owned_by(self, rank: int, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys (N,) belong to `rank`."""
        is_owned: NDArray[np.bool_] = self.owners(keys) == rank
        return is_owned


def ranks_of_tensor(entry: torch.Tensor) -> RankMap:
    """The map of an entry that `to_tensor` made. Raises ValueError for any other tensor."""
    rules = get_args(RankRule)
    numbers = entry.tolist() if entry.dtype == torch.int64 and entry.shape == (2,) else []
    if not numbers or not 0 <= numbers[1] < len(rules):
        raise ValueError(f"ranks must be int64 (2,), number of ranks and of the rule, got {entry}")
    return RankMap(numbers[0], rules[numbers[1]])
