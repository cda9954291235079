"""Runs tables of several sizes and rules over one trace.

Long traces are sampled by key: whole groups of keys take part, with the room that they have in the
whole table, so what happens to each of them is what happens in it. The rate of misses is taken of
all ids that such a part should have got, not of those that it got by chance: frequent ids hit, and
whether one is in the sample would otherwise move the rate. Source: Waldspurger, Park, Garthwaite,
Ahmad, "Efficient MRC construction with SHARDS", FAST 2015, section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core._internal.checks import int_within, require_number
from recsdk_core._internal.keyed import NO_TIME
from recsdk_core.admission import Admit
from recsdk_core.eviction import Evict
from recsdk_core.index import Index
from recsdk_core.outcome import Outcome
from recsdk_core.simulation.traces import Companions, Trace, is_sampled
from recsdk_core.table import Table
from recsdk_core.virtual_shards import default_eviction_groups

__all__ = ["Simulated", "simulate"]

MOST_LOOKUPS = 300_000_000
"""Of all runs together, before a trace is sampled: some minutes."""
FEWEST_ROWS = 16_384
"""That the smallest table has of a sample: with fewer, chance moves the rates by half a point."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What one table did; where the trace was sampled, what the whole table would do, about."""

    rule: str
    max_rows: int
    num_ids: int
    """Ids of the trace."""
    hit_rate: float
    """Ids that had a row, of all ids; later ones of a new id in one step count as hits."""
    refused_rate: float
    """Ids that found no room, of all ids."""
    not_admitted_rate: float
    """Ids that a rule of admission kept out, of all ids."""
    inserted: int
    """Rows that were given to ids."""
    evicted: int
    """Ids that left for others."""
    expired: int
    """Ids that left since they were not seen for long, or as a share of all."""
    returned_rate: float
    """Rows given to ids that had ever had one before, of all that were given."""
    churn_rate: float | None
    """The same of ids that had left shortly before, see `Evict.with_churn`; None: not asked."""
    num_rows: int
    """Rows at the end."""
    index_bytes: int
    """Memory from keys to rows and of what the rules keep of a key, at the end."""
    sample: float
    """The part of the keys that took part; 1: the figures are exact."""


def simulate(
    trace: Trace,
    sizes: Sequence[int],
    rules: Mapping[str, Evict | None],
    *,
    admission: Mapping[str, Admit] = MappingProxyType({}),
    step_ids: int = 8192,
    sample: float | None = None,
    progress: Callable[[int], None] = lambda num_ids: None,
) -> list[Simulated]:
    """What a table with `max_rows` of each of `sizes` does under each of `rules`, by name.

    The rule None refuses ids when the table is full. `admission` has, by a rule's name, what admits
    ids to its tables; by default all ids are admitted. `step_ids` ids are one step. `sample` is the
    share of the keys that take part, a power of 1/2. By default it is 1 while all runs together
    look up at most 3e8 ids; beyond that it is as large as that limit allows, but leaves the
    smallest table 16,384 rows. `progress` is called with the number of ids read since it was called
    before.

    Sizes come in the outer loop of the result. Memory: one row of width 1 a row of each table that
    is simulated, times the sample. Cost: 50 to 500 ns an id, size and rule. Raises ValueError or
    TypeError that names the argument, also for a rule that goes by what the trace has not: times,
    scores, clicks, or ever the norms of rows.
    """
    _check_kinds(trace, sizes, rules, admission, progress)
    sizes = [int_within("simulate", 1, 2**63, sizes=size) for size in sizes]
    step_ids = int_within("simulate", 1, 2**31, step_ids=step_ids)
    if not sizes or not rules:
        raise ValueError(
            f"simulate: give at least one size and one rule, got {len(sizes)} and {len(rules)}"
        )
    if unknown := set(admission) - set(rules):
        raise ValueError(
            f"simulate: admission must be of rules, {', '.join(rules)}, got {sorted(unknown)}"
        )
    for name, rule in rules.items():
        _require_brought(name, rule, admission.get(name), trace)
    part = _sample_of(trace, sizes, len(rules), sample)
    runs = [
        _Run(name, rule, admission.get(name), size, part)
        for size in sizes
        for name, rule in rules.items()
    ]
    num_ids = 0
    latest: int | None = None
    for ids, data in trace.blocks(step_ids):
        num_ids += len(ids)
        chosen = is_sampled(ids, part)
        keys, brought = ids[chosen], {name: values[chosen] for name, values in data.items()}
        for run in runs:
            run.add(keys, brought, latest)
        if "times" in data and (found := int(data["times"].max())) != NO_TIME:
            latest = found if latest is None else max(found, latest)
        progress(len(ids))
    return [run.result(num_ids) for run in runs]


def _check_kinds(
    trace: Trace,
    sizes: Sequence[int],
    rules: Mapping[str, Evict | None],
    admission: Mapping[str, Admit],
    progress: object,
) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(f"simulate: trace must be a Trace, got {type(trace).__name__}")
    if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
        raise TypeError(f"simulate: sizes must be a list of ints, got {sizes!r}")
    for name, given in (("rules", rules), ("admission", admission)):
        if not isinstance(given, Mapping):
            raise TypeError(f"simulate: {name} must be a mapping by name, got {given!r}")
    for name, rule in rules.items():
        if rule is not None and not isinstance(rule, Evict):
            raise TypeError(f"simulate: rules must have an Evict or None each, got {name}={rule!r}")
    for name, lets_in in admission.items():
        if not isinstance(lets_in, Admit):
            raise TypeError(f"simulate: admission must have an Admit each, got {name}={lets_in!r}")
    if not callable(progress):
        raise TypeError(f"simulate: progress must be callable, got {type(progress).__name__}")


def _taken(rule: Evict | None, admission: Admit | None) -> dict[str, bool]:
    """What a table takes beside ids, by the names of traces, and whether it needs that."""
    taken = {}
    if rule is not None and rule.by == "time":
        taken["times"] = True
    if rule is not None and (rule.order == "score" or "score" in rule.columns):
        taken["scores"] = True
    by_clicks = [each for each in (rule, admission) if each is not None and each.takes_clicks]
    if by_clicks:
        taken["clicks"] = any(each.needs_clicks for each in by_clicks)
    return taken


def _require_brought(name: str, rule: Evict | None, admission: Admit | None, trace: Trace) -> None:
    if rule is not None and rule.order == "low_norm":
        raise ValueError(
            f"simulate: the rule {name!r} goes by norms of rows, which come of training; a trace "
            "has none"
        )
    for what, is_needed in _taken(rule, admission).items():
        if is_needed and what not in trace.brings:
            option = {"times": "--time", "scores": "--score"}.get(what, f"--{what}")
            raise ValueError(
                f"simulate: the rule {name!r} goes by {what}; the trace has no {what}: give it "
                f"some ({option} NAME on the command line)"
            )


def _smallest_sample(sizes: Sequence[int]) -> float:
    """Of which each table has a group of keys at least."""
    return 1 / min(map(default_eviction_groups, sizes))


def checked_sample(name: str, sample: float, sizes: Sequence[int]) -> float:
    """`sample`; raises ValueError unless it is a power of 1/2 that is enough for each size."""
    if not 0 < sample <= 1 or np.frexp(sample)[0] != 0.5:
        raise ValueError(f"{name} must be 1, 1/2, 1/4 and so on, got {sample}")
    smallest = _smallest_sample(sizes)
    if sample < smallest:
        raise ValueError(
            f"{name} must be at least {smallest:g} with a size of {min(sizes)}, whose keys are of "
            f"{round(1 / smallest)} group{'s' * (smallest < 1)}, got {sample}"
        )
    return sample


def _sample_of(trace: Trace, sizes: Sequence[int], num_rules: int, sample: float | None) -> float:
    if sample is not None:
        require_number("simulate", sample=sample)
        return checked_sample("simulate: sample", float(sample), sizes)
    smallest = max(_smallest_sample(sizes), FEWEST_ROWS / min(sizes))
    part = 1.0
    while trace.most_ids * part * len(sizes) * num_rules > MOST_LOOKUPS and part / 2 >= smallest:
        part /= 2
    return part


class _Run:
    """One table."""

    def __init__(
        self, name: str, rule: Evict | None, admission: Admit | None, max_rows: int, sample: float
    ) -> None:
        groups = default_eviction_groups(max_rows)
        self._name, self._max_rows, self._sample = name, max_rows, sample
        self._takes = _taken(rule, admission)
        self._counts_churn = rule is not None and rule.churn_steps is not None
        self._table = Table(
            1,
            max_rows=max_rows,
            eviction=rule,
            admission=admission,
            owned_groups=(0, round(groups * sample)),
            hash_seed=0,
        )
        self._had = Index(hash_seed=0)
        self._refused = self._not_admitted = self._inserted = self._returned = 0

    def add(self, keys: NDArray[np.int64], brought: Companions, latest: int | None) -> None:
        """One step; `latest` is the largest time of the steps before, of keys left out too."""
        if "times" in self._takes and self._sample < 1 and latest is not None:
            self._table.time = latest
        data: dict[str, Any] = {n: values for n, values in brought.items() if n in self._takes}
        _, outcomes = self._table.map(keys, insert=True, **data)
        inserted = keys[outcomes == Outcome.INSERTED]
        self._refused += int((outcomes == Outcome.REFUSED).sum())
        self._not_admitted += int((outcomes == Outcome.NOT_ADMITTED).sum())
        self._inserted += len(inserted)
        _, before = self._had.map(inserted, insert=True)
        self._returned += int((before == Outcome.FOUND).sum())

    def result(self, num_ids: int) -> Simulated:
        due = max(num_ids, 1) * self._sample
        stats = self._table.stats()
        misses = self._inserted + self._refused + self._not_admitted
        return Simulated(
            rule=self._name,
            max_rows=self._max_rows,
            num_ids=num_ids,
            hit_rate=max((due - misses) / due, 0.0) if num_ids else 0.0,
            refused_rate=min(self._refused / due, 1.0),
            not_admitted_rate=min(self._not_admitted / due, 1.0),
            inserted=round(self._inserted / self._sample),
            evicted=round(stats.evicted / self._sample),
            expired=round(stats.expired / self._sample),
            returned_rate=self._returned / max(self._inserted, 1),
            churn_rate=stats.returned / max(self._inserted, 1) if self._counts_churn else None,
            num_rows=round(stats.num_rows / self._sample),
            index_bytes=round((stats.index_bytes + stats.metadata_bytes) / self._sample),
            sample=self._sample,
        )
