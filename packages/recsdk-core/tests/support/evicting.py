"""The keys that have rows under a rule of eviction, in plain Python. Shape letter: N keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recsdk_core import Evict
from recsdk_core.testing import Eviction, KeyMeta, Room


class RuledKeys:
    """The keys of a table, and what its rule keeps of them."""

    def __init__(self, rule: Evict, max_rows: int) -> None:
        self.eviction = Eviction(rule, Room(max_rows))
        self.metas: dict[int, KeyMeta] = {}

    def call(
        self, keys: Sequence[int], brought: Mapping[str, Any] | None = None
    ) -> tuple[set[int], set[int]]:
        """A call without a step: the keys that leave, and those that are refused.

        `brought`: what the call gives beside keys (N,), by the names of `Table.map`.
        """
        brought = brought or {}
        step = self.eviction.step_of(None)
        names = ("times", "scores", "counts", "clicks")
        seen = self.eviction.seen(list(keys), *(brought.get(name) for name in names))
        leaving, refused = self.eviction.decide(self.metas, seen, step)
        for key in leaving:
            del self.metas[key]
        for key in seen.keys() - refused:
            self.metas[key] = self.eviction.touched(self.metas.get(key), seen[key], step)
        self.eviction.decided(step, None)
        return set(leaving), refused
