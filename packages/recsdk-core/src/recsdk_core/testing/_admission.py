"""Which new keys a rule of admission lets in, in plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from recsdk_core._ext import table_hash
from recsdk_core.admission import Admit
from recsdk_core.testing._arithmetic import power
from recsdk_core.testing._initial_rows import mix64
from recsdk_core.testing._room import Room, key_hash
from recsdk_core.testing._sketch import Sketch
from recsdk_core.virtual_shards import default_eviction_groups

__all__ = ["Admission", "AdmissionRecord"]

_INCREMENT = 0x9E3779B97F4A7C15
_MOST = 2**31 - 1


@dataclass(frozen=True)
class AdmissionRecord:
    """What is kept of a key without a row."""

    count: int
    """How often it was seen, as far as the rule asks; of a sketch the four counters that the key
    stands for."""
    step: int
    """The step that saw it last."""
    clicks: int = 0
    """Its clicks, if the rule takes them."""


class Admission:
    """A rule, and the counts of keys without a row of its table."""

    def __init__(self, rule: Admit, seed: int, name: str, room: Room | None) -> None:
        self.rule = rule
        self.records: dict[int, AdmissionRecord] = {}
        self.num_lost = 0
        self._salt = mix64(seed ^ mix64(table_hash(name)))
        self._terms = list(rule.terms())
        self._most = max((term.n or 0 for term in self._terms), default=0)
        if rule.keeps_clicks:
            self._most = _MOST
        self._clicks: Mapping[int, int] = {}
        self._sketch: Sketch | None = None
        if rule.max_bytes is not None:
            self._most = 0
            most_sketched = max(t.n or 0 for t in self._terms if t.kind == "count_sketch")
            self._sketch = Sketch(rule.max_bytes, most_sketched)
        self._room: Room | None = None
        if rule.max_records is not None and room is None:
            self._room = Room(rule.max_records, default_eviction_groups(rule.max_records))
        elif rule.max_records is not None and room is not None:
            self._room = Room(rule.max_records, room.num_groups, room.owned_groups)
        self._in_step: dict[int, int] = {}
        self._clicks_in_step: dict[int, int] = {}
        self._step: int | None = None

    @property
    def num_records(self) -> int:
        """Keys without a row whose count is kept."""
        return 0 if self._sketch is not None else len(self.records)

    def admitted(
        self, seen: Mapping[int, int], step: int, clicks: Mapping[int, int] | None = None
    ) -> set[int]:
        """Of the keys without a row, each with how often a call sees it, those that are let in.

        `clicks` of the call, by key, are also those that `decided` counts next.
        """
        self._clicks = clicks or {}
        return {key for key, count in seen.items() if self._admits(key, count, step)}

    def _total(self, key: int, count: int) -> int:
        before = self.records[key].count if key in self.records else 0
        return min(before + count, self._most)

    def _all_clicks(self, key: int) -> int:
        if not self.rule.keeps_clicks:
            return 0
        before = self.records[key].clicks if key in self.records else 0
        return min(before + self._clicks.get(key, 0), _MOST)

    def _admits(self, key: int, count: int, step: int) -> bool:
        in_step, clicks_in_step = count, self._clicks.get(key, 0)
        if self._step == step:
            in_step += self._in_step.get(key, 0)
            clicks_in_step += self._clicks_in_step.get(key, 0)
        held: list[bool] = []
        for place, term in enumerate(self._terms):
            if term.kind == "count":
                held.append(self._total(key, count) >= (term.n or 0))
            elif term.kind == "count_sketch":
                assert self._sketch is not None
                held.append(self._sketch.count_of(key, count, step) >= (term.n or 0))
            elif term.kind == "show_click":
                worth = (term.alpha or 0.0) * self._total(key, count)
                worth += (term.beta or 0.0) * self._all_clicks(key)
                held.append(worth >= (term.threshold or 0.0))
            elif term.kind == "show_click_of_step":
                worth = (term.alpha or 0.0) * in_step + (term.beta or 0.0) * clicks_in_step
                held.append(worth >= (term.threshold or 0.0))
            elif term.kind == "probability":
                held.append(self._draw(place, key, step) >= power(1.0 - (term.p or 0.0), in_step))
            else:
                second, first = held.pop(), held.pop()
                held.append((first and second) if term.kind == "all" else (first or second))
        return held[0]

    def _draw(self, place: int, key: int, step: int) -> float:
        """Uniform in [0, 1), from the table, a term of the rule, the key and the step."""
        bits = mix64(self._salt + (place + 1) * _INCREMENT)
        bits = mix64(bits ^ (key % 2**64))
        bits = mix64(bits ^ (step % 2**64))
        return (bits >> 11) * 2.0**-53

    def decided(self, seen: Mapping[int, int], rows: Iterable[int], step: int) -> None:
        """A call has seen keys without a row; `rows` are the keys that have one now."""
        has_row = set(rows)
        if self._step != step:
            self._in_step, self._clicks_in_step = {}, {}
        self._step = step
        for key, count in seen.items():
            self._in_step[key] = self._in_step.get(key, 0) + count
            self._clicks_in_step[key] = self._clicks_in_step.get(key, 0) + self._clicks.get(key, 0)
        if self._sketch is not None:
            for key in has_row:
                self._in_step.pop(key, None)
                self._clicks_in_step.pop(key, None)
            self._sketch.count(seen, has_row, step)
            words = self._sketch.words()
            self.records = {key: AdmissionRecord(word, 0) for key, word in words.items()}
        if self._most == 0:
            return
        fresh = [key for key in seen if key not in has_row and key not in self.records]
        leaving, unrecorded = self._beyond(fresh, set(seen), step)
        counted = {key: self._total(key, count) for key, count in seen.items()}
        clicked = {key: self._all_clicks(key) for key in seen}
        for key in seen:
            if key in has_row:
                self.records.pop(key, None)
            elif key not in unrecorded or key in self.records:
                self.records[key] = AdmissionRecord(counted[key], step, clicked[key])
        for key in leaving:
            del self.records[key]
        self.num_lost += len(leaving)

    def _beyond(self, fresh: list[int], seen: set[int], step: int) -> tuple[list[int], set[int]]:
        """The keys whose count leaves for those of a call, and those of the call that have none."""
        leaving: list[int] = []
        unrecorded: set[int] = set()
        if self._room is None:
            return leaving, unrecorded
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for key in fresh:
            groups[self._room.group(key)].append(key)
        for group, keys in groups.items():
            held = [key for key in self.records if self._room.group(key) == group]
            excess = max(len(held) + len(keys) - self._room.quota(group), 0)
            excess = min(excess, len(keys))
            old = [k for k in held if k not in seen and self.records[k].step != step]
            chosen = sorted(old, key=lambda k: (self.records[k].step, key_hash(k)))[:excess]
            leaving += chosen
            unrecorded |= set(sorted(keys, key=key_hash)[: excess - len(chosen)])
        return leaving, unrecorded

    def loaded(self) -> None:
        """All of it was saved and loaded: a step that goes on begins anew."""
        self._step = None
        if self._sketch is not None:
            self._sketch.end_step()

    def forget(self, keys: Iterable[int]) -> None:
        """Keys that were erased, or written, have no count any more, but for what a sketch has."""
        if self._sketch is not None:
            return
        for key in keys:
            self.records.pop(key, None)

    def clear(self) -> None:
        """All keys were taken out."""
        self.records.clear()
        if self._sketch is not None:
            self._sketch.clear()
        self._step = None
