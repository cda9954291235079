"""How often keys without a row were seen, about, in plain Python."""

from __future__ import annotations

from collections.abc import Mapping

from recsdk_core.testing._initial_rows import mix64
from recsdk_core.testing._room import key_hash, key_of_hash

__all__ = ["Sketch"]

_INCREMENT = 0x9E3779B97F4A7C15
_DEPTH = 4


class Sketch:
    """A count-min sketch for each virtual shard; counters end at `most`."""

    def __init__(self, max_bytes: int, most: int) -> None:
        self._width = max_bytes // (8 * 65_536)
        self._most = most
        self._step: int | None = None
        self._before: dict[tuple[int, int, int], int] = {}
        self._counters: dict[tuple[int, int, int], int] = {}
        self._in_step: dict[int, int] = {}

    def _places(self, key: int) -> list[tuple[int, int, int]]:
        """Shard, column and row of each counter of a key."""
        key_bits = key_hash(key)
        mixed = [mix64((key_bits + (row + 1) * _INCREMENT) % 2**64) for row in range(_DEPTH)]
        return [(key_bits & 0xFFFF, bits * self._width >> 64, r) for r, bits in enumerate(mixed)]

    def count_of(self, key: int, count: int, step: int) -> int:
        """How often a key counts as seen that a call of a step brings so often."""
        is_same = step == self._step
        counters = self._before if is_same else self._counters
        own = count + (self._in_step.get(key, 0) if is_same else 0)
        return own + min(counters.get(place, 0) for place in self._places(key))

    def count(self, seen: Mapping[int, int], has_row: set[int], step: int) -> None:
        """A call of a step has seen keys without a row, so often each; some have one now."""
        if step != self._step:
            self._step, self._before, self._in_step = step, dict(self._counters), {}
        for key, count in seen.items():
            self._in_step[key] = self._in_step.get(key, 0) + count
        self._in_step = {k: count for k, count in self._in_step.items() if k not in has_row}
        self._counters = dict(self._before)
        for key, count in self._in_step.items():
            for place in self._places(key):
                total = self._counters.get(place, 0) + count
                self._counters[place] = min(total, self._most)

    def end_step(self) -> None:
        """What comes is of another step."""
        self._step = None

    def words(self) -> dict[int, int]:
        """The four counters of each column in one number, by the key that stands for them."""
        words: dict[int, int] = {}
        for (shard, column, row), count in self._counters.items():
            key = key_of_hash(column << 16 | shard)
            words[key] = words.get(key, 0) | count << 16 * row
        return words

    def clear(self) -> None:
        """Nothing was counted."""
        self.end_step()
        self._counters = {}
