"""Which keys find room in a table of `max_rows`, in plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache

from recsdk_core.testing._initial_rows import mix64
from recsdk_core.virtual_shards import default_eviction_groups

__all__ = ["Room", "key_hash", "key_of_hash", "shared_keys"]


@lru_cache(2**14)
def key_hash(key: int) -> int:
    """The fixed hash of a signed or unsigned key, whose low 16 bits are its virtual shard."""
    return mix64((key + 0x9E3779B97F4A7C15) % 2**64)


def shared_keys(num_rows: int) -> list[int]:
    """The key that stands for each shared row: that of the lowest hash of its virtual shards."""
    return [key_of_hash(-(-row * 65_536 // num_rows)) for row in range(num_rows)]


@lru_cache(2**14)
def key_of_hash(fixed_hash: int) -> int:
    """The signed key of which `key_hash` makes this."""
    return _signed(_unmix64(fixed_hash) - 0x9E3779B97F4A7C15)


def _unmix64(mixed: int) -> int:
    """The number of which `mix64` makes this one."""
    mixed ^= mixed >> 31 ^ mixed >> 62
    mixed = mixed * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    mixed ^= mixed >> 27 ^ mixed >> 54
    mixed = mixed * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return mixed ^ mixed >> 30 ^ mixed >> 60


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


class Room:
    """`max_rows` divided over groups of keys."""

    def __init__(
        self,
        max_rows: int,
        num_groups: int | None = None,
        owned_groups: tuple[int, int] | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.num_groups = num_groups or default_eviction_groups(max_rows)
        begin, end = owned_groups or (0, self.num_groups)
        self.owned_groups = begin, end
        self._owned = range(begin, end)

    def group(self, key: int) -> int:
        """The group of a key."""
        return (key_hash(key) & 0xFFFF) * self.num_groups >> 16

    def quota(self, group: int) -> int:
        """How many keys a group may have."""
        if group not in self._owned:
            return 0
        each, rest = divmod(self.max_rows, self.num_groups)
        ends = [number * rest // self.num_groups for number in (group, group + 1)]
        return each + ends[1] - ends[0]

    def refused(self, new: Iterable[int], held: Iterable[int]) -> set[int]:
        """Those of the new keys of a step that find no room beside the keys that are there."""
        used = Counter(map(self.group, held))
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for key in set(new):
            groups[self.group(key)].append(key)
        refused: set[int] = set()
        for group, keys in groups.items():
            excess = used[group] + len(keys) - self.quota(group)
            refused.update(sorted(keys, key=key_hash)[: max(excess, 0)])
        return refused
