"""Rules of shows and clicks: who is let in, who leaves, and what a call must bring.

tests/stateful compares each decision with a model; Rec SDK's own rule is rebuilt here.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import keys_of

from recsdk_core import Admit, Bags, Evict, Index, Outcome, Table
from recsdk_core.checkpoint.reading import open_checkpoint

BY_CLICKS = {"beta": 2.0, "alpha": 0.5}


def test_a_key_is_let_in_by_what_all_steps_brought() -> None:
    table = Table(2, admission=Admit.show_click(threshold=3.0, **BY_CLICKS))
    outcomes = []
    for keys, clicks in [([1, 2, 2], [0, 0, 0]), ([1], [1]), ([2, 2], [0, 1]), ([3], [2])]:
        _, found = table.map(np.array(keys), insert=True, clicks=np.array(clicks))
        outcomes.append([Outcome(each).name for each in found])
    assert outcomes == [["NOT_ADMITTED"] * 3, ["INSERTED"], ["INSERTED", "FOUND"], ["INSERTED"]]
    _, found = table.map(np.array([4]), insert=True, counts=6, clicks=0)
    assert found[0] == Outcome.INSERTED


def test_order_and_cuts_of_a_step_do_not_matter() -> None:
    rule = Evict.show_click(alpha=0.1, beta=0.7, decay=0.9)
    admission = Admit.show_click(alpha=0.1, beta=0.7, threshold=1.0)
    random = np.random.default_rng(5)
    whole, cut = (
        Table(2, max_rows=60, eviction_groups=1, eviction=rule, admission=admission)
        for _ in range(2)
    )
    for step in range(30):
        keys, clicks = random.zipf(1.3, 200) % 300, random.integers(0, 3, 200)
        counts = random.integers(1, 4, 200)
        with whole.lease(step) as lease:
            whole.map(keys, insert=True, lease=lease, counts=counts, clicks=clicks)
        # Each occurrence by itself, its clicks with the first; those without a row come first, as
        # a call sees them before it inserts.
        order = random.permutation(200)
        apart = np.repeat(keys[order], counts[order])
        first = np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
        of_each = np.where(
            np.arange(len(apart)) == first, np.repeat(clicks[order], counts[order]), 0
        )
        with cut.lease(step) as lease:
            cut.map(apart, insert=True, lease=lease, clicks=of_each)
        assert keys_of(whole) == keys_of(cut)
        for key in sorted(keys_of(whole))[:5]:
            assert whole.explain(key).columns == cut.explain(key).columns


def test_what_a_step_brings_counts_alone() -> None:
    rule = Admit.show_click_of_step(threshold=3.5, **BY_CLICKS)
    table = Table(2, admission=rule)
    for keys, clicks in [([1, 2, 2], [1, 1, 0]), ([1], [1]), ([2, 2, 3], [1, 0, 9])]:
        table.map(np.array(keys), insert=True, clicks=np.array(clicks))
    assert keys_of(table) == {3}
    with table.lease(9) as lease:  # of one step all calls count
        table.map(np.array([1, 2]), insert=True, lease=lease, clicks=np.array([1, 1]))
        table.map(np.array([1]), insert=True, lease=lease, clicks=1)
    assert keys_of(table) == {1, 3}
    assert table.stats().admission_records == 0
    assert table.explain(2).seen is None
    with pytest.raises(
        ValueError, match="max_records must be None where the rule counts nothing, got"
    ):
        replace(rule, max_records=9)


@pytest.mark.parametrize("part", [0.3, 0.01])
@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_the_code_of_rec_sdk(beta: float, part: float) -> None:
    """All shows and clicks count anew; the lowest floor(n * part), at least one, go at a look."""
    alpha, decay, threshold = 1.0, 0.75, 2.0
    table = Table(
        2,
        admission=Admit.show_click_of_step(threshold=threshold, alpha=alpha, beta=beta),
        eviction=Evict.show_click_totals(alpha=alpha, beta=beta, decay=decay).expiring(
            share=part, every=3
        ),
    )
    random = np.random.default_rng(2)
    totals: dict[int, float] = {}
    scores: dict[int, float] = {}
    num_left = 0
    for step in range(1, 25):
        keys, clicks = random.zipf(1.4, 80) % 300 - 100, random.integers(0, 2, 80)
        table.find_or_insert(keys, clicks=clicks)
        count = max(math.floor(len(scores) * part), 1) if step % 3 == 0 else 0
        lowest = sorted(scores, key=lambda key: (scores[key], key))[:count]
        for key in set(lowest) - set(keys.tolist()):  # those that come stay
            del scores[key], totals[key]
            num_left += 1
        for key in sorted(set(keys.tolist())):
            is_own = keys == key
            worth = float(alpha * is_own.sum() + beta * clicks[is_own].sum())
            if key not in totals and worth < threshold:
                continue
            totals[key] = totals.get(key, 0.0) + worth
            is_first = key not in scores
            added = scores.get(key, 0.0) + totals[key]
            scores[key] = added if is_first else math.floor(added * decay * 2**16) / 2**16
        assert keys_of(table) == set(scores), step
        for key, score in scores.items():
            assert table.explain(key).columns["score"] == score
    assert num_left > 3


def test_keys_of_which_nothing_is_known_begin_with_the_first_step_that_sees_them(
    tmp_path: Path,
) -> None:
    plain = Table(2, max_rows=9)
    plain.find_or_insert(np.array([1, 2]))
    plain.save(tmp_path / "plain")
    table = Table(2, max_rows=9, eviction=Evict.show_click_totals(decay=0.5))
    table.load(tmp_path / "plain")
    assert table.explain(1).columns["score"] == 0.0
    for keys in ([1, 1, 3], [1, 3]):
        table.find_or_insert(np.array(keys))
    table.save(tmp_path / "seen")
    table.load(tmp_path / "seen")
    table.find_or_insert(np.array([2, 2]))
    scores = [table.explain(key).columns["score"] for key in (1, 2, 3)]
    assert scores == [2.5, 2.0, 1.5]  # (2 + 3) / 2, 2, (1 + 2) / 2


def test_keys_compare_alike_at_any_step() -> None:
    """Who leaves does not follow from when the others were looked at."""
    rule = Evict.show_click(beta=1.0, decay=0.5)
    for num_idle in (1, 60, 3000):
        table = Table(2, max_rows=3, eviction_groups=1, eviction=rule)
        table.find_or_insert(np.array([1]), counts=9, clicks=0)  # worth 9, a step later 4.5
        table.find_or_insert(np.array([2]), counts=4, clicks=0)
        table.find_or_insert(np.array([3]), counts=3, clicks=2)
        for _ in range(num_idle):
            table.find_or_insert(np.array([3]), clicks=0)
        table.find_or_insert(np.array([4]), clicks=0)
        assert keys_of(table) == {1, 3, 4}, num_idle


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_the_rule_of_rec_sdk(beta: float) -> None:
    """Each step decays after it adds; the lowest floor(n * part), at least one, then go."""
    alpha, decay, part = 1.0, 0.75, 0.2
    rule = Evict.show_click(alpha=alpha, beta=beta, decay=decay)
    table = Table(2, max_rows=10_000, eviction_groups=1, eviction=rule)
    random = np.random.default_rng(2)
    scores: dict[int, float] = {}
    for _ in range(12):
        keys, clicks = random.zipf(1.4, 80) % 500, random.integers(0, 2, 80)
        table.find_or_insert(keys, clicks=clicks)
        for key in set(keys.tolist()):
            is_own = keys == key
            added = alpha * is_own.sum() + beta * clicks[is_own].sum()
            scores[key] = scores.get(key, 0.0) + added
        num_leaving = max(math.floor(len(scores) * part), 1)
        before = keys_of(table)
        assert table.evict(max_rows=len(table) - num_leaving) == num_leaving
        left = before - keys_of(table)
        worst = max(scores[key] for key in left)
        assert worst <= min(scores[key] for key in keys_of(table)) + 1e-3
        for key in left:
            del scores[key]
        scores = {key: score * decay for key, score in scores.items()}


def test_what_a_call_must_bring() -> None:
    both = [
        {"eviction": Evict.show_click(beta=1.0), "max_rows": 9},
        {"admission": Admit.show_click(beta=1.0, threshold=1.0)},
    ]
    keys = np.array([1, 2])
    for rules in both:
        for made in (Table(2, **rules), Index(**rules)):
            with pytest.raises(ValueError, match="goes by clicks, its beta is above 0, and the ca"):
                made.map(keys, insert=True)
            with pytest.raises(ValueError, match="clicks must have one element per key, 2, got 3"):
                made.map(keys, insert=True, clicks=np.array([1, 2, 3]))
            with pytest.raises(ValueError, match="clicks must be 0 or more, got -1"):
                made.map(keys, insert=True, clicks=np.array([1, -1]))
            with pytest.raises(ValueError, match="clicks are given, and only calls that insert"):
                made.map(keys, insert=False, clicks=0)
            assert len(made) == 0
            made.map(keys, insert=True, clicks=1)
            assert len(made) == 2
            made.map(keys[:0], insert=True)
    for rules in ({}, {"eviction": Evict.lfu(), "max_rows": 9}, {"admission": Admit.count(2)}):
        with pytest.raises(ValueError, match="clicks are given, and only calls that insert, with"):
            Table(2, **rules).map(keys, insert=True, clicks=1)
    shown = Table(2, max_rows=9, eviction=Evict.show_click())
    shown.map(keys, insert=True, counts=2)
    shown.map(keys, insert=True, clicks=5)
    assert shown.explain(1).columns["score"] == 3.0


def test_what_is_written_is_shown_once() -> None:
    table = Table(2, max_rows=9, eviction=Evict.show_click(beta=2.0))
    table.upsert(np.array([1, 2]), np.zeros((2, 2), np.float32))
    table.upsert(np.array([2]), np.zeros((1, 2), np.float32), clicks=3)
    assert [table.explain(key).columns["score"] for key in (1, 2)] == [1.0, 8.0]
    keeper = Table(2, admission=Admit.show_click(beta=1.0, threshold=9.0))
    with pytest.raises(ValueError, match="clicks are given, and only"):
        keeper.upsert(np.array([1]), np.zeros((1, 2), np.float32), clicks=1)


def test_numbers_end_and_do_not_wrap() -> None:
    table = Table(2, max_rows=9, eviction=Evict.show_click(alpha=2.0**20, beta=2.0**20))
    for _ in range(3):
        table.map(np.array([1]), insert=True, counts=2**62, clicks=2**63 - 1)
    assert table.explain(1).columns["score"] == 2.0**36
    again = Table(2, max_rows=9, eviction=Evict.show_click_totals(alpha=2.0**20, beta=2.0**20))
    for step in range(1100):
        again.map(np.array([1]), insert=True, counts=2**62, clicks=2**63 - 1)
        assert again.explain(1).columns["score"] == min(2.0**36 * (step + 1), 2.0**46)
    keeper = Table(2, admission=Admit.show_click(alpha=0.0, beta=1.0, threshold=2.0**40))
    for _ in range(3):
        keeper.map(np.array([1]), insert=True, clicks=2**63 - 1)
    assert keeper.explain(1).seen == 3
    keeper.check_invariants()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Evict.show_click(alpha=-1.0), "alpha must be 0, or from"),
        (lambda: Evict.show_click(beta=2.0**21), "beta must be 0, or from"),
        (lambda: Evict.show_click(alpha=1e-6), "alpha must be 0, or from"),
        (lambda: Evict.show_click(alpha=0.0), "alpha and beta are 0"),
        (lambda: Evict.show_click(decay=0.0), "decay must be above 0"),
        (lambda: Evict.show_click(decay=1.5), "decay must be above 0, up to 1, got 1.5"),
        (lambda: Evict.show_click(decay=float("nan")), "decay must be above 0"),
        (lambda: Evict(order="lru", alpha=1.0), "alpha is for show_click"),
        (lambda: Evict(order="show_click", alpha=1.0), "beta is for show_click"),
        (lambda: Evict(order="show_click", by="time"), "shows and clicks have no time"),
        (lambda: Admit.show_click(threshold=0.0), "threshold is 0"),
        (lambda: Admit.show_click(threshold=-1.0), "threshold must be 0 or more"),
        (lambda: Admit.show_click(threshold=float("inf")), "threshold"),
        (lambda: Admit.show_click(threshold=1.0, alpha=-1.0), "alpha must be 0 or more"),
        (lambda: Admit.show_click(threshold=1.0, alpha=0.0), "alpha and beta are 0"),
        (lambda: Admit(kind="show_click", alpha=1.0), "takes alpha, beta, threshold, got"),
    ],
)
def test_settings_that_make_no_sense(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_clicks_are_saved_where_a_rule_takes_them(tmp_path: Path) -> None:
    counting = Table(2, admission=Admit.count(9))
    counting.map(np.array([1, 2]), insert=True)
    counting.save(tmp_path / "counts")
    table = Table(2, admission=Admit.show_click(beta=1.0, threshold=9.0))
    table.load(tmp_path / "counts")  # seen once each, not clicked
    table.map(np.array([1]), insert=True, clicks=6)
    table.save(tmp_path / "clicks")
    for name, num_fields in (("counts", 2), ("clicks", 3)):
        entry = open_checkpoint(tmp_path / name).manifest.tables[0].admission
        assert entry is not None
        assert len(entry.fields) == num_fields
    counting.load(tmp_path / "clicks")
    assert [counting.explain(key).seen for key in (1, 2)] == [2, 1]
    again = copy.deepcopy(table)
    again.load(tmp_path / "clicks")
    _, outcomes = again.map(np.array([1, 2]), insert=True, clicks=0)
    assert outcomes.tolist() == [Outcome.INSERTED, Outcome.NOT_ADMITTED]


@pytest.mark.parametrize(
    "rules",
    [
        {"max_rows": 4, "eviction": Evict.show_click(beta=1.0)},
        {"admission": Admit.show_click(threshold=3.0, beta=1.0)},
    ],
)
def test_pooling_gives_no_row_where_a_rule_needs_clicks(rules: dict[str, Any]) -> None:
    table, keys, offsets = Table(2, **rules), np.array([1, 2]), np.array([0, 2])
    with pytest.raises(ValueError, match="goes by clicks, which pool does not take; map the keys"):
        table.pool(keys, offsets, insert=True)
    assert len(table) == 0
    table.pool(keys, offsets)
    rows, outcomes = table.map(keys, insert=True, clicks=5)
    assert np.array_equal(table.pool_rows(Bags(rows, outcomes, offsets)), table.pool(keys, offsets))
