"""Which rank owns a key.

Two rules. "virtual_shard", the default: a key belongs to virtual shard `mix64(key) % 65536`, and
each rank owns one range of virtual shards: of V shards rank r of W owns those with
`shard * W // V == r`. Where ranks own whole groups of a table with `max_rows`, V is the number of
groups, and a virtual shard a run of the 65536. "modulo": rank `uint64(key) % W`, for compatibility;
it is skewed for keys with a stride. Both are fixed for ever, since checkpoints and placements
depend on them.

Shape letters: N keys, W ranks, V virtual shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core.virtual_shards import (
    NUM_VIRTUAL_SHARDS,
    eviction_groups_of,
    mix64,
    virtual_shards,
)

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
    num_virtual_shards: int = NUM_VIRTUAL_SHARDS
    """V, a power of two up to 65536; of "modulo" that."""

    @staticmethod
    def of_groups(world_size: int, rule: RankRule, num_groups: int | None) -> RankMap:
        """A map by which ranks own whole groups of keys; None: it need not."""
        if num_groups is None or num_groups % world_size == 0:
            return RankMap(world_size, rule)  # it has whole groups in any case
        return RankMap(world_size, rule, num_groups)

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= self.num_virtual_shards:
            raise ValueError(
                f"world_size must be 1 to {self.num_virtual_shards}, got {self.world_size}"
            )
        shards = self.num_virtual_shards
        if not 1 <= shards <= NUM_VIRTUAL_SHARDS or shards & (shards - 1):
            raise ValueError(
                f"num_virtual_shards must be a power of two up to {NUM_VIRTUAL_SHARDS}, got "
                f"{shards}"
            )
        if not isinstance(self.rule, str) or self.rule not in get_args(RankRule):
            raise ValueError(f"rank_rule must be one of {get_args(RankRule)}, got {self.rule!r}")

    def owners(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each key: int64 (N,) in 0 to W - 1. Any 64-bit key is fine."""
        owners: NDArray[np.int64]
        if self.rule == "modulo":
            owners = (keys.view(np.uint64) % np.uint64(self.world_size)).view(np.int64)
        else:
            shards = eviction_groups_of(keys, self.num_virtual_shards)
            owners = (shards * self.world_size) // self.num_virtual_shards
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
        """The first of 65536 virtual shards that a rank owns, and the one after its last."""
        low, high = self.owned_groups(rank, self.num_virtual_shards)
        width = NUM_VIRTUAL_SHARDS // self.num_virtual_shards
        return low * width, high * width

    def owned_groups(self, rank: int, num_groups: int) -> tuple[int, int]:
        """The first of so many groups that a rank owns, and the one after its last."""
        units = min(num_groups, self.num_virtual_shards)  # which a rank has whole
        low, high = (-(-(rank + i) * units // self.world_size) for i in (0, 1))
        return low * (num_groups // units), high * (num_groups // units)

    def share_of(self, rank: int) -> float:
        """The part of all keys that a rank owns, as far as they are spread evenly."""
        if self.rule == "modulo":
            return 1 / self.world_size
        low, high = self.owned_groups(rank, self.num_virtual_shards)
        return (high - low) / self.num_virtual_shards

    def to_tensor(self) -> torch.Tensor:
        """As an entry of a `state_dict`: int64 (3,).

        How many ranks, the number of the rule, and how many virtual shards.
        """
        number = get_args(RankRule).index(self.rule)
        numbers = [self.world_size, number, self.num_virtual_shards]
        return torch.tensor(numbers, device="cpu")

    def owned_by(self, rank: int, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys (N,) belong to `rank`."""
        is_owned: NDArray[np.bool_] = self.owners(keys) == rank
        return is_owned


def ranks_of_tensor(entry: torch.Tensor) -> RankMap:
    """The map of an entry that `to_tensor` made. Raises ValueError for any other tensor."""
    rules = get_args(RankRule)
    numbers = entry.tolist() if entry.dtype == torch.int64 and entry.shape == (3,) else []
    if not numbers or not 0 <= numbers[1] < len(rules):
        raise ValueError(
            "ranks must be int64 (3,), number of ranks, of the rule, and of virtual shards, got "
            f"{entry}"
        )
    return RankMap(numbers[0], rules[numbers[1]], numbers[2])
