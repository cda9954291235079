"""Which keys leave a full table, in plain Python."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from recsdk_core._internal.keyed import NO_TIME
from recsdk_core.eviction import Evict
from recsdk_core.testing._arithmetic import power
from recsdk_core.testing._clock import Clock
from recsdk_core.testing._optimizers import exp_of_negative, log_of_ratio
from recsdk_core.testing._room import Room, key_hash

__all__ = ["Eviction", "KeyMeta", "Seen", "decayed", "decayed_score", "norm_of", "number_at"]

_LOG2 = 0.6931471805599453
_UNITS = 2**16
_MOST = 2**52


@dataclass
class KeyMeta:
    """What eviction keeps of a key."""

    step: int
    """The step that saw it last."""
    born: int
    """The step in which it came."""
    time: int = NO_TIME
    count: int = 0
    """Occurrences, decayed, in units of 2**-16."""
    score: float | None = None
    show_click: int = 0
    """alpha * shows + beta * clicks, decayed, in units of 2**-16; by totals undecayed."""
    measured: float = math.inf
    """The norm of its row, or what a function gave, at the latest look."""
    worth: int | None = None
    """By totals: what it was worth before the latest step; None: no step before has seen it; -2:
    no step at all has."""

    def measured_as(self, measured: float) -> KeyMeta:
        """The same but for what a look has found; a look makes one of each key."""
        return KeyMeta(
            self.step,
            self.born,
            self.time,
            self.count,
            self.score,
            self.show_click,
            measured,
            self.worth,
        )


@dataclass
class Seen:
    """What a call brings of a key."""

    count: int = 0
    shows: int = 0
    """As `counts` says."""
    clicks: int = 0
    time: int = NO_TIME
    score: float | None = None


Step: TypeAlias = Mapping[int, Seen]


class Eviction:
    """A rule, and the clock of its table; tables keep the keys."""

    def __init__(self, rule: Evict, room: Room, *, is_limited: bool = True) -> None:
        self.rule = rule
        self._is_limited = is_limited
        self._room = room
        self.clock = Clock()
        self.churn_lost = 0
        self._left: dict[int, int] = {}
        """By key that left, in which step."""
        self.time: int | None = None
        """The table's, or what the call under way tells: keys expire by it."""
        self.expiring: set[int] = set()
        """Of the keys that the latest decision made leave, those that had expired."""

    @property
    def step(self) -> int:
        """The step of the last call that decided."""
        return self.clock.step

    def step_of(self, lease_step: int | None) -> int:
        """See `Clock`."""
        return self.clock.step_of(lease_step)

    def decided(self, step: int, lease_step: int | None) -> None:
        """A call has decided."""
        self.clock.decided(step, lease_step)

    def left(self, keys: Iterable[int], step: int) -> None:
        """Keys that leave by the rule in a step."""
        rule = self.rule
        if rule.churn_steps is None:
            return
        most = 2**20 if rule.churn_records is None else rule.churn_records
        room = Room(most, self._room.num_groups if self._is_limited else None)
        self._left |= dict.fromkeys(keys, step)
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for key, left in list(self._left.items()):
            if step - left > rule.churn_steps:
                del self._left[key]
            else:
                groups[room.group(key)].append(key)
        for group, among in groups.items():
            among.sort(key=lambda key: (self._left[key], key_hash(key)))
            for key in among[: max(len(among) - room.quota(group), 0)]:
                del self._left[key]
                self.churn_lost += 1

    def came(self, keys: Iterable[int], step: int) -> int:
        """Keys that get a row in a step: how many of them have returned."""
        left = [self._left.pop(key) for key in keys if key in self._left]
        return sum(step - of <= (self.rule.churn_steps or 0) for of in left)

    def forget(self, keys: Iterable[int] | None = None) -> None:
        """Forgets that these keys left, or that any did."""
        for key in list(self._left) if keys is None else keys:
            self._left.pop(key, None)

    def seen(
        self, keys: Iterable[int], times: Any, scores: Any, counts: Any = None, clicks: Any = None
    ) -> dict[int, Seen]:
        """What a call brings, by key."""
        found: defaultdict[int, Seen] = defaultdict(Seen)
        for i, key in enumerate(keys):
            seen = found[key]
            seen.count += 1
            seen.shows += number_at(counts, i, 1)
            seen.clicks += number_at(clicks, i, 0)
            if times is not None:
                seen.time = max(seen.time, number_at(times, i, 0))
            if scores is not None:
                score = float(scores[i]) + 0.0
                seen.score = score if seen.score is None else max(seen.score, score)
        return found

    def touched(self, meta: KeyMeta | None, seen: Seen, step: int) -> KeyMeta:
        """The metadata of a key, None: a new one, after a call of this step."""
        if meta is None:
            meta = KeyMeta(step, step)
            meta.score = None if seen.score is not None else 0.0
        is_first = meta.step != step
        made = replace(meta, step=step, time=max(meta.time, seen.time))
        if is_first:
            made.count = decayed(meta, self.rule, step)
            if self.rule.order == "show_click_totals":
                made.worth = decayed_score(meta, self.rule, step)
            else:
                made.show_click = decayed_score(meta, self.rule, step)
        if meta.worth == -2:
            made.worth = None
        made.count += min(seen.count, max(-((made.count - _MOST) // _UNITS), 0)) * _UNITS
        made.show_click += _units(self.rule.alpha) * seen.shows
        made.show_click += _units(self.rule.beta) * seen.clicks
        made.show_click = min(made.show_click, _MOST)
        if seen.score is not None:
            keeps = not is_first and meta.score is not None
            made.score = max(seen.score, meta.score or 0.0) if keeps else seen.score
        return made

    def order(self, meta: KeyMeta) -> float | int:
        """The lowest leaves first."""
        if self.rule.order == "score":
            return meta.score or 0.0
        if self.rule.order == "lru":
            return meta.step if self.rule.by == "step" else meta.time
        if self.rule.order == "show_click_totals":
            return decayed_score(meta, self.rule, meta.step)
        if self.rule.order == "show_click":
            return self._order_of_score(meta)
        if self.rule.order in ("low_norm", "function"):
            return meta.measured
        if self.rule.half_life is None:
            return meta.count
        return _log2(max(meta.count, 1)) + meta.step / self.rule.half_life

    def _order_of_score(self, meta: KeyMeta) -> float | int:
        decay = self.rule.decay or 1.0
        if decay == 1.0:
            return meta.show_click
        return _log2(max(meta.show_click, 1)) + meta.step * -_log2(decay)

    def may_leave(self, meta: KeyMeta, step: int) -> bool:
        """Whether a key may leave in a step: it does not see it, and the key is old enough."""
        is_old = self.rule.min_age == 0 or step - meta.born >= self.rule.min_age
        return meta.step != step and is_old

    def lowest(
        self,
        keys: Mapping[int, KeyMeta],
        step: int,
        excess: Mapping[int, int],
        tie: Callable[[int], int] = key_hash,
    ) -> list[int]:
        """The keys that leave each group that has too many, in the order in which they leave."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for key, meta in keys.items():
            if self.may_leave(meta, step):
                groups[self._room.group(key)].append(key)
        found = []
        for group in sorted(excess):
            ranked = sorted(groups[group], key=lambda key: (self.order(keys[key]), tie(key)))
            found += ranked[: max(excess[group], 0)]
        return found

    def decide(
        self, keys: Mapping[int, KeyMeta], seen: Step, step: int
    ) -> tuple[list[int], set[int]]:
        """The keys that leave for those of a call, and those of the call that find no room."""
        looks = self.rule.expires and self.is_look_due(step)
        self.expiring = set(self.expired(keys, step)) - seen.keys() if looks else set()
        keys = {key: meta for key, meta in keys.items() if key not in self.expiring}
        new = {key: self.touched(None, seen[key], step) for key in seen if key not in keys}
        excess = self._excess([*keys, *new])
        leaving = self.lowest({k: m for k, m in keys.items() if k not in seen}, step, excess)
        for key in leaving:
            excess[self._room.group(key)] -= 1
        refused = set()
        for key in sorted(new, key=lambda key: (self.order(new[key]), key_hash(key))):
            group = self._room.group(key)
            if excess.get(group, 0) > 0:
                excess[group] -= 1
                refused.add(key)
        return [*leaving, *self.expiring], refused

    def is_look_due(self, step: int) -> bool:
        """Whether a step begins with a look at all keys, if there are any."""
        return self.clock.is_due(step, self.rule.expire_every or 100)

    def places(self, keys: Mapping[int, KeyMeta]) -> dict[int, float]:
        """What the rule's function makes of each key."""
        columns = {
            "now": self.step,
            "step": np.array([meta.step for meta in keys.values()], np.int64),
            "time": np.array([meta.time for meta in keys.values()], np.int64),
            "count": np.array([meta.count // _UNITS for meta in keys.values()], np.int64),
            "score": np.array([meta.score or 0.0 for meta in keys.values()], np.float32),
        }
        assert self.rule.places is not None
        found = self.rule.places(**{name: columns[name] for name in self.rule.columns})
        return dict(zip(keys, np.asarray(found).astype(np.float32).tolist(), strict=True))

    def expired(self, keys: Mapping[int, KeyMeta], step: int) -> list[int]:
        """The keys that have expired as of the latest step, and may leave in this one."""
        now = NO_TIME if self.time is None else self.time
        found = [
            key
            for key, meta in keys.items()
            if self.may_leave(meta, step) and self._has_expired(meta, now)
        ]
        return found + self._share({k: m for k, m in keys.items() if k not in set(found)}, step)

    def _share(self, keys: Mapping[int, KeyMeta], step: int) -> list[int]:
        """The part of each group's keys that leaves at a look."""
        share = self.rule.share
        if share is None:
            return []
        counts: defaultdict[int, int] = defaultdict(int)
        for key in keys:
            counts[self._room.group(key)] += 1
        most = {group: max(int(count * share), 1) for group, count in counts.items()}
        is_by_totals = self.rule.order == "show_click_totals"
        return self.lowest(keys, step, most, int if is_by_totals else key_hash)

    def _has_expired(self, meta: KeyMeta, now: int) -> bool:
        rule = self.rule
        if rule.below is not None and meta.measured < rule.below:
            return True
        if rule.by == "time" and meta.time == NO_TIME:
            return False
        since, until = (meta.time, now) if rule.by == "time" else (meta.step, self.step)
        idle = min(max(until - since, 0), 2**63 - 1)
        if rule.ttl is not None and idle >= rule.ttl:
            return True
        if rule.rare_ttl is None or rule.rare_count is None or idle < rule.rare_ttl:
            return False
        return decayed(meta, rule, self.step) < rule.rare_count * _UNITS

    def _excess(self, keys: Iterable[int]) -> dict[int, int]:
        excess: dict[int, int] = {}
        for key in keys:
            group = self._room.group(key)
            excess[group] = excess.get(group, -self._room.quota(group)) + 1
        return {group: count for group, count in excess.items() if count > 0}

    def beyond(self, keys: Mapping[int, KeyMeta], max_rows: int) -> list[int]:
        """The keys that leave so that each group has at most its part of `max_rows`."""
        part = Room(max_rows, self._room.num_groups, self._room.owned_groups)
        counts: dict[int, int] = {}
        for key in keys:
            counts[part.group(key)] = counts.get(part.group(key), 0) + 1
        excess = {group: count - part.quota(group) for group, count in counts.items()}
        return self.lowest(keys, self.step_of(None), excess)


def norm_of(weights: Iterable[float]) -> float:
    """The norm of a row as a look keeps it."""
    total = 0.0
    for weight in weights:
        total += weight * weight
    with np.errstate(over="ignore"):
        norm = float(np.float32(math.sqrt(total)))
    return 0.0 if math.isnan(norm) else norm


def decayed(meta: KeyMeta, rule: Evict, step: int) -> int:
    """The count of a key as of a step, in units of 2**-16."""
    if rule.half_life is None or step <= meta.step:
        return meta.count
    elapsed = min(step - meta.step, 2**63 - 1)
    return int(meta.count * exp_of_negative(-_LOG2 * (elapsed / rule.half_life)))


def decayed_score(meta: KeyMeta, rule: Evict, step: int) -> int:
    """What shows and clicks make of a key as of a step, in units of 2**-16."""
    if rule.order == "show_click_totals":
        if meta.worth is None or meta.worth == -2:
            return meta.show_click
        total = float(meta.worth) + float(meta.show_click)
        return int(min(total * (rule.decay or 1.0), 2.0**62))
    if rule.decay is None or step <= meta.step:
        return meta.show_click
    elapsed = min(step - meta.step, 2**63 - 1)
    return int(meta.show_click * power(rule.decay, elapsed))


def number_at(given: Any, place: int, otherwise: int) -> int:
    """What comes with a key: one number for each key, one for all, or none."""
    if given is None:
        return otherwise
    return given if isinstance(given, int) else int(given[place])


def _units(weight: float | None) -> int:
    return round((weight or 0.0) * _UNITS)


def _log2(value: float) -> float:
    fraction, exponent = math.frexp(value)
    rest, doublings = 2.0 * fraction, exponent - 1
    if rest >= 1.4:
        rest, doublings = rest / 2.0, doublings + 1
    return doublings + log_of_ratio((rest - 1.0) / (rest + 1.0)) / _LOG2
