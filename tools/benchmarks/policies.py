"""What rules cost and what they keep, beside the same stream without a rule and exact rules.

Cost is the processor's time of one thread; with and without a rule take turns within one process. A
stream is of raw ids, Zipf of exponent 0.99 in random order or uniform, in calls of `CALL` keys.
Rules with looks at all rows have one in each turn. A ratio above 1 means that the table with the
rule is better. What it keeps depends on no machine.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.draws import scramble
from benchmarks.drift import drifting
from benchmarks.exact_caches import EXACT_CACHES
from benchmarks.models import bounded, unseen
from recsdk_core import Admit, Evict, Outcome, Table
from recsdk_core.runtime import set_num_threads

EXPONENT = 0.99
CALL = 65_536
CALLS_A_TURN = 8
DIM = 32
WITHOUT = "without a rule"
RULES = {"lru": Evict.lru(), "lfu": Evict.lfu(), "lfu half_life": Evict.lfu(half_life=100.0)}


def worth(now: int, step: np.ndarray, count: np.ndarray) -> np.ndarray:
    """How often a key was seen, less by how long ago that was."""
    return count / (1.0 + now - step)


def decayed(step: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The same to how keys compare as a half-life of 100 steps, and of no `now`."""
    found: np.ndarray = np.log2(count) + step / 100.0
    return found


MORE_RULES = {
    "show_click": Evict.show_click(beta=3.0, decay=0.99),
    "score": Evict.score(),
    "lru by time": Evict.lru(by="time"),
    "lru ttl": Evict.lru().expiring(ttl=10**6, every=CALLS_A_TURN),
    "lru min_age": Evict.lru(min_age=1),
    "lru churn": Evict.lru().with_churn(100),
    "low_norm": Evict.low_norm(every=CALLS_A_TURN),
    "function": Evict.function(worth, every=CALLS_A_TURN),
    "function without now": Evict.function(decayed, every=CALLS_A_TURN),
}
ADMISSION = {
    "count": Admit.count(2),
    "count, 1e6 records": Admit.count(2, max_records=10**6),
    "count_sketch": Admit.count_sketch(2, max_bytes=2**26),
    "probability": Admit.probability(0.01),
    "show_click": Admit.show_click(threshold=100.0, beta=3.0),
    "count and probability": Admit.count(2) & Admit.probability(0.01),
}


def data_of(table: Table, keys: np.ndarray) -> dict[str, Any]:
    """What a table's rules take beside keys, made of the keys."""
    rule, admission = table.eviction, table.admission
    brought: dict[str, Any] = {}
    if any(each is not None and each.needs_clicks for each in (rule, admission)):
        brought["clicks"] = keys & 1
    if rule is not None and rule.order == "score":
        brought["scores"] = (keys & 1023).astype(np.float32)
    if rule is not None and rule.by == "time":
        brought["times"] = keys & 0xFFFF
    return brought


class Zipf:
    """Draws ids of `num_ids`, by rank: id r is drawn as often as 1 / (r + 1) ** EXPONENT says."""

    def __init__(self, num_ids: int) -> None:
        weights = np.arange(1, num_ids + 1, dtype=np.float64) ** -EXPONENT
        self._cumulative = weights.cumsum() / weights.sum()

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        ranks: np.ndarray = np.searchsorted(self._cumulative, random.random(count))
        drawn: np.ndarray = np.minimum(ranks, len(self._cumulative) - 1)
        return drawn


def ids(numbers: np.ndarray) -> np.ndarray:
    scrambled: np.ndarray = scramble(numbers + 1)
    return scrambled


def filled(num_keys: int, rule: Evict | None, max_rows: int | None) -> Table:
    """A table of `num_keys` keys, in random order of how often they will be drawn."""
    table = Table(DIM, max_rows=max_rows, eviction=rule, hash_seed=1)
    order = np.random.default_rng(1).permutation(num_keys)
    for begin in range(0, num_keys, CALL):
        keys = ids(order[begin : begin + CALL])
        table.map(keys, insert=True, **data_of(table, keys))
    return table


def paired(
    workload: str, op: str, ours: str, samples: dict[str, list[float]], base: str
) -> records.Record:
    """Ratios are medians over pairs: with and without the rule in one turn."""
    made = records.record_of(workload, op, "ms", ours, {n: samples[n] for n in (ours, base)})
    return replace(made, ratio={base: float(np.median(np.divide(samples[base], samples[ours])))})


Turn = Callable[[], object]


def race_calls(turns: dict[str, Callable[[], Turn]], repetitions: int) -> dict[str, list[float]]:
    """Milliseconds of the processor per call; each contestant prepares a turn, which is timed."""
    raced = records.race(turns, repetitions, time.process_time)
    return {name: [each / CALLS_A_TURN for each in times] for name, times in raced.items()}


Call = Callable[[Table, np.ndarray, dict[str, Any]], object]
"""A table's call with keys, and with what its rules take beside them."""


def turns_of(table: Table, batches: Iterable[np.ndarray], call: Call) -> Callable[[], Turn]:
    """Prepares turns of a table: so many calls with the batches that are next."""
    coming = iter(batches)

    def prepare() -> Turn:
        chosen = [(keys, data_of(table, keys)) for keys in itertools.islice(coming, CALLS_A_TURN)]

        def turn() -> None:
            for keys, brought in chosen:
                call(table, keys, brought)

        return turn

    return prepare


def workload(name: str, count: int) -> str:
    return f"{name}_{count:.0e}_dim{DIM}".replace("e+0", "e")


def map_keys(table: Table, keys: np.ndarray, brought: dict[str, Any]) -> None:
    table.map(keys, insert=True, **brought)


def read(table: Table, keys: np.ndarray, brought: dict[str, Any]) -> None:
    table.find_or_insert(keys, **brought)


GRADS_ND = np.random.default_rng(2).normal(size=(CALL, DIM)).astype(np.float32)


def update(table: Table, keys: np.ndarray, _: dict[str, Any]) -> None:
    table.apply_gradients(keys, GRADS_ND)


def read_and_update(table: Table, keys: np.ndarray, brought: dict[str, Any]) -> None:
    read(table, keys, brought)
    update(table, keys, brought)


STEP: dict[str, Call] = {"find_or_insert and update": read_and_update}
OPS: dict[str, Call] = {"map": map_keys, "find_or_insert": read, "update": update} | STEP


def cost_of_finding(
    num_keys: int, repetitions: int, rules: dict[str, Evict], ops: dict[str, Call]
) -> list[records.Record]:
    """Every key has a row, and room is left.

    Where its memory lies makes one of two equal tables a quarter faster, mostly the one that was
    filled first. So each rule has two rounds: once the table without it is filled first, and once
    the other.
    """
    room = num_keys * 3 // 2
    zipf, random = Zipf(num_keys), np.random.default_rng(2)
    streams: dict[str, Callable[[], np.ndarray]] = {
        "zipf0.99": lambda: zipf.draw(random, CALL),
        "uniform": lambda: random.integers(0, num_keys, CALL),
    }
    drawn = {
        workload(name, num_keys): [ids(draw()) for _ in range(4 * CALLS_A_TURN)]
        for name, draw in streams.items()
    }
    found = []
    for name, rule in rules.items():
        limits: dict[str, tuple[Evict | None, int | None]] = {
            WITHOUT: (None, None),
            name: (rule, room),
        }
        rounds = []
        for order in (list(limits), list(reversed(limits))):
            tables = {each: filled(num_keys, *limits[each]) for each in order}
            rounds.append(race_tables(tables, drawn, repetitions, ops))
            del tables  # before the next are filled
        found += [over_both(*same) for same in zip(*rounds, strict=True)]
    return found


def over_both(first: records.Record, second: records.Record) -> records.Record:
    """The mean of two rounds, of ratios the geometric one."""

    def ends(name: str) -> tuple[float, float]:
        (low, high), (other_low, other_high) = first.spread[name], second.spread[name]
        return min(low, other_low), max(high, other_high)

    return replace(
        first,
        ours=(first.ours + second.ours) / 2,
        peers={name: (each + second.peers[name]) / 2 for name, each in first.peers.items()},
        ratio={name: math.sqrt(each * second.ratio[name]) for name, each in first.ratio.items()},
        spread={name: ends(name) for name in first.spread},
        pairs={},
    )


def race_tables(
    tables: dict[str, Table],
    drawn: dict[str, list[np.ndarray]],
    repetitions: int,
    ops: dict[str, Call],
) -> list[records.Record]:
    found = []
    for (name, batches), (op, call) in itertools.product(drawn.items(), ops.items()):
        turns = {
            rule: turns_of(table, itertools.cycle(batches), call) for rule, table in tables.items()
        }
        samples = race_calls(turns, repetitions)
        rules = [rule for rule in tables if rule != WITHOUT]
        found += [paired(name, f"{op}, {rule}", rule, samples, WITHOUT) for rule in rules]
    return found


def new_keys() -> Iterator[np.ndarray]:
    for begin in itertools.count(0, CALL):
        yield ids(np.arange(begin, begin + CALL))


def cost_of_evicting(
    num_rows: int, repetitions: int, rules: dict[str, Evict]
) -> list[records.Record]:
    """Every key is new: into a table that grows, and into one that is full."""
    base = "insert below the limit"
    tables = {base: Table(DIM, hash_seed=1)}
    tables |= {
        name: Table(DIM, max_rows=num_rows, eviction=rule, hash_seed=1)
        for name, rule in rules.items()
    }
    turns = {}
    for name, table in tables.items():
        batches = new_keys()
        num_before = (1 if name == base else 3) * num_rows
        for keys in itertools.islice(batches, num_before // CALL):
            table.map(keys, insert=True, **data_of(table, keys))
        turns[name] = turns_of(table, batches, read)
    samples = race_calls(turns, repetitions)
    name = workload("new_keys", num_rows)
    return [paired(name, f"insert and evict, {rule}", rule, samples, base) for rule in rules]


def cost_of_evicting_singly(num_rows: int, repetitions: int) -> list[records.Record]:
    """The same of each rule by itself: more tables of 1e7 rows do not fit beside each other."""
    found = []
    for name, rule in (RULES | MORE_RULES).items():
        found += cost_of_evicting(num_rows, repetitions, {name: rule})
    return found


def cost_of_keeping_out(repetitions: int) -> list[records.Record]:
    """Every key is new, and is let in by a rule that keeps out all or nearly all of them."""
    base = "insert without a rule"
    tables = {base: Table(DIM, hash_seed=1)}
    tables |= {name: Table(DIM, admission=each, hash_seed=1) for name, each in ADMISSION.items()}
    turns = {name: turns_of(table, new_keys(), read) for name, table in tables.items()}
    samples = race_calls(turns, repetitions)
    name = workload("new_keys", repetitions * CALLS_A_TURN * CALL)
    return [paired(name, f"keep out, {rule}", rule, samples, base) for rule in ADMISSION]


def cost_of_refusing(repetitions: int) -> list[records.Record]:
    """A call for one key that finds no room: nobody is old enough to leave, or nobody may."""
    num_rows = 100_000
    rules = {"min_age": Evict.lru(min_age=2**40), "without eviction": None}
    tables = {
        name: Table(4, max_rows=num_rows, eviction_groups=1, eviction=rule, hash_seed=1)
        for name, rule in rules.items()
    }
    for table in tables.values():
        table.map(ids(np.arange(num_rows)), insert=True)
    newcomer = ids(np.arange(num_rows, num_rows + 1))
    turns = {
        name: turns_of(table, itertools.repeat(newcomer), map_keys)
        for name, table in tables.items()
    }
    samples = race_calls(turns, 10 * repetitions)
    return [
        paired("all_young_1e5", "refuse one key, min_age", "min_age", samples, "without eviction")
    ]


def exact(workload: str, op: str, ours: float, peers: dict[str, float]) -> records.Record:
    """A share, in percent, that is the same in every run."""
    return records.Record(
        workload=workload,
        op=op,
        unit="%",
        ours=ours,
        peers=peers,
        ratio={name: ours / value for name, value in peers.items()},
    )


def first_eviction(num_rows: int) -> records.Record:
    """The share of the capacity that is used when the first key leaves."""
    table = Table(1, max_rows=num_rows, eviction=Evict.lru())
    step = max(num_rows // 1000, 1)
    share = 0.0
    for begin in itertools.count(0, step):
        table.map(ids(np.arange(begin, begin + step)), insert=True)
        if table.stats().evicted:
            break
        share = 100.0 * len(table) / num_rows
    return exact(f"new_keys_{num_rows:.0e}".replace("e+0", "e"), "first eviction at", share, {})


def kept_of_the_top(num_rows: int) -> records.Record:
    """Of 4 times as many keys as rows, each with a score: how many of the highest stay.

    Keys of a call stay whatever their score, so calls are a thousandth of the rows.
    """
    num_keys, call = 4 * num_rows, num_rows // 1000
    scores = np.random.default_rng(3).permutation(num_keys).astype(np.float32)
    table = Table(1, max_rows=num_rows, eviction=Evict.score())
    keys = ids(np.arange(num_keys))
    for begin in range(0, num_keys, call):
        part = slice(begin, begin + call)
        table.map(keys[part], insert=True, scores=scores[part])
    top = ids(np.flatnonzero(scores >= num_keys - num_rows))
    _, outcomes = table.map(top, insert=False)
    share = 100.0 * float(np.mean(outcomes == Outcome.FOUND))
    name = f"scores_{num_rows:.0e}".replace("e+0", "e")
    return exact(name, "kept of the true top N", share, {})


def hit_rates(num_ids: int, draws_an_id: int) -> list[records.Record]:
    """Zipf over ten times as many ids as rows; of the stream's second half."""
    room = num_ids // 10
    drawn = Zipf(num_ids).draw(np.random.default_rng(4), draws_an_id * num_ids)
    half = len(drawn) // 2
    numbers = drawn.tolist()
    shares = {
        name: 100.0 * float(hits(numbers, room)[half:].mean())
        for name, hits in EXACT_CACHES.items()
    }
    name = f"zipf{EXPONENT}_{num_ids:.0e}_ids_{room:.0e}_rows".replace("e+0", "e")
    found = []
    for rule, call in itertools.product(RULES, (64, 4096)):
        is_decaying = RULES[rule].half_life is not None
        chosen = Evict.lfu(half_life=20 * room / call) if is_decaying else RULES[rule]
        table = Table(1, max_rows=room, eviction=chosen)
        hits = [
            table.map(ids(drawn[begin : begin + call]), insert=True)[1] == Outcome.FOUND
            for begin in range(0, len(drawn), call)
        ]
        share = 100.0 * float(np.concatenate(hits)[half:].mean())
        found.append(exact(name, f"hit rate, {rule}, calls of {call}", share, shares))
    return found


def run(quick: bool, movielens: str | None = None) -> list[records.Record]:
    """Costs, what is kept, hit rates, drift; what limits cost a model, and what unseen ids read."""
    set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.2f}")
    repetitions = 7 if quick else 15
    num_rows = 100_000 if quick else 1_000_000
    num_keys = 1_000_000 if quick else 10_000_000
    return [
        *cost_of_finding(num_keys, repetitions, RULES, OPS),
        *cost_of_finding(num_keys, repetitions, MORE_RULES, STEP if quick else OPS),
        *cost_of_evicting(1_000_000, repetitions, RULES | MORE_RULES),
        *([] if quick else cost_of_evicting_singly(10_000_000, repetitions)),
        *cost_of_keeping_out(repetitions),
        *cost_of_refusing(repetitions),
        *(first_eviction(n) for n in ((10_000, 1_000_000) if quick else (10_000, 10**6, 10**7))),
        kept_of_the_top(1_000_000),
        *hit_rates(num_rows, 10),
        *drifting(num_rows, 100 * num_rows, quick),
        *bounded.run(quick, movielens),
        *unseen.run(quick),
    ]
