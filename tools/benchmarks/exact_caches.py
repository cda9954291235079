"""Caches that decide key by key, in plain Python: what rules of a table are compared with.

Each returns which keys of a stream were held when they came, (N,) bool.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np

__all__ = ["EXACT_CACHES"]

Hits = np.ndarray


def lru_hits(keys: list[int], room: int) -> Hits:
    held: OrderedDict[int, None] = OrderedDict()
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys):
        if key in held:
            hits[i] = True
            held.move_to_end(key)
            continue
        if len(held) == room:
            held.popitem(last=False)
        held[key] = None
    return hits


def lfu_hits(keys: list[int], room: int) -> Hits:
    """By how often a key was seen since it came; of those seen as often, the oldest leaves."""
    counts: Counter[int] = Counter()
    heap: list[tuple[int, int, int]] = []
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys):
        hits[i] = key in counts
        if not hits[i]:
            while len(counts) == room:
                count, _, lowest = heapq.heappop(heap)
                if counts.get(lowest) == count:
                    del counts[lowest]
                elif lowest in counts:
                    heapq.heappush(heap, (counts[lowest], i, lowest))
            heapq.heappush(heap, (1, i, key))
        counts[key] += 1
    return hits


class _Frequencies:
    """How often keys came lately: up to 15, halved each ten times the room, as W-TinyLFU counts.

    By key and not by a sketch, so as if that never mistook one key for another.
    """

    MOST = 15

    def __init__(self, room: int) -> None:
        self._period = 10 * room
        self._num_seen = 0
        self._counts: dict[int, int] = {}

    def see(self, key: int) -> None:
        self._counts[key] = min(self._counts.get(key, 0) + 1, self.MOST)
        self._num_seen += 1
        if self._num_seen >= self._period:
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
            self._num_seen //= 2

    def of(self, key: int) -> int:
        return self._counts.get(key, 0)


def w_tiny_lfu_hits(keys: list[int], room: int) -> Hits:
    """A window of 1 % in order of use, and behind it a segmented cache that admits by frequency.

    Source: Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy" (2017).
    """
    window_room = max(1, room // 100)
    main_room = room - window_room
    protected_room = main_room * 4 // 5
    window: OrderedDict[int, None] = OrderedDict()
    probation: OrderedDict[int, None] = OrderedDict()
    protected: OrderedDict[int, None] = OrderedDict()
    seen = _Frequencies(room)
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys):
        seen.see(key)
        hits[i] = True
        if key in window:
            window.move_to_end(key)
        elif key in protected:
            protected.move_to_end(key)
        elif key in probation:
            del probation[key]
            protected[key] = None
            if len(protected) > protected_room:
                probation[protected.popitem(last=False)[0]] = None
        else:
            hits[i] = False
            window[key] = None
            if len(window) <= window_room:
                continue
            candidate = window.popitem(last=False)[0]
            if len(probation) + len(protected) < main_room:
                probation[candidate] = None
                continue
            victim = next(iter(probation))
            if seen.of(candidate) > seen.of(victim):
                del probation[victim]
                probation[candidate] = None
    return hits


def belady_hits(keys: list[int], room: int) -> Hits:
    """The optimum, which knows the future: whoever is needed last leaves."""
    never = len(keys)
    following = np.full(len(keys), never)
    last: dict[int, int] = {}
    for i, key in enumerate(keys):
        if key in last:
            following[last[key]] = i
        last[key] = i
    needed: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys):
        hits[i] = key in needed
        if not hits[i] and len(needed) == room:
            while True:
                latest, lowest = heapq.heappop(heap)
                if needed.get(lowest) == -latest:
                    break
            del needed[lowest]
        needed[key] = int(following[i])
        heapq.heappush(heap, (-needed[key], key))
    return hits


EXACT_CACHES: dict[str, Callable[[list[int], int], Hits]] = {
    "exact LRU": lru_hits,
    "exact LFU": lfu_hits,
    "W-TinyLFU": w_tiny_lfu_hits,
    "Belady's optimum": belady_hits,
}
