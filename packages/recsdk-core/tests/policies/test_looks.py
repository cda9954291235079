"""Looks that measure no more rows than may have changed, and come to what a look at all would.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import os
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import keys_of
from numpy.typing import NDArray

from recsdk_core import Bags, Default, Evict, Table, optim
from recsdk_core.testing import ReferenceTable

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
SHARE = 1 if IS_FULL else 2  # of all sizes: the plain model is slow
NUM_IDS = 3000 // SHARE
MAX_ROWS = 1200 // SHARE


def timeless(step: Any, count: Any) -> Any:
    """A decay without a `now`."""
    return np.log2(count) + step / 8


def aging(now: Any, step: Any, count: Any) -> Any:
    return count / (1 + now - step)


RULES = {
    "norm": Evict.low_norm(every=1),
    "norm_of_old": Evict.low_norm(every=2, min_age=3),
    "norm_below": Evict.low_norm(every=3, below=0.3),
    "norm_share": Evict.low_norm(every=4).expiring(share=0.05, every=4),
    "timeless": Evict.function(timeless, every=2),
    "timeless_of_old": Evict.function(timeless, every=1, min_age=2),
    "aging": Evict.function(aging, every=2),
}


def key_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers * 0x9E3779B97F4A7C1


def contents(table: Any) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for batch in table.export():
        found.update(zip(batch.keys.tolist(), batch.weights.tolist(), strict=True))
    return found


def act(table: Any, random: np.random.Generator, num_keys: int) -> None:
    """A step in which few of the rows come, change or go."""
    keys = key_of(random.integers(0, NUM_IDS, num_keys))
    table.find_or_insert(keys)
    trained = key_of(random.integers(0, NUM_IDS, num_keys))
    grads = random.integers(-8, 9, (num_keys, 2)).astype(np.float32) / 8
    table.apply_gradients(trained, grads)
    if random.random() < 0.3:
        table.erase(key_of(random.integers(0, NUM_IDS, 9)))
    if random.random() < 0.3:
        written = key_of(random.integers(0, NUM_IDS, 5))
        table.upsert(written, random.integers(-4, 5, (5, 2)).astype(np.float32))


GROUPS = (1, 16)


@pytest.mark.parametrize(
    ("name", "groups"),
    list(product(RULES, GROUPS) if IS_FULL else zip(RULES, cycle(GROUPS))),
)
def test_few_changes_of_a_large_table_are_as_in_the_plain_model(name: str, groups: int) -> None:
    config: dict[str, Any] = {
        "max_rows": MAX_ROWS,
        "eviction_groups": groups,
        "eviction": RULES[name],
        "optimizer": optim.SGD(lr=0.25),
    }
    tables = [Table(2, **config), ReferenceTable(2, **config)]
    for step in range(60):
        # Some steps change most rows, after which all are filed anew.
        num_keys = (900 if step % 20 < 2 else 60) // SHARE
        for table in tables:
            act(table, np.random.default_rng(step), num_keys)
        assert contents(tables[0]) == contents(tables[1])
        tables[0].check_invariants()
    stats, expected = (table.stats() for table in tables)
    assert (stats.evicted, stats.expired) == (expected.evicted, expected.expired)
    assert stats.evicted > 100


def write(table: Table, keys: NDArray[np.int64]) -> None:
    table.upsert(keys, np.full((len(keys), 2), 3, np.float32))


def train(table: Table, keys: NDArray[np.int64]) -> None:
    table.apply_gradients(keys, np.full((len(keys), 2), 5, np.float32))


def train_by_rows(table: Table, keys: NDArray[np.int64]) -> None:
    bags = Bags(*table.map(keys, insert=False))
    table.update_rows(bags, np.full((len(keys), 2), 5, np.float32))


def limit(table: Table, keys: NDArray[np.int64]) -> None:
    table.limit_norms(Bags(*table.map(keys, insert=False)), max_norm=1e-3)


@pytest.mark.parametrize("change", [write, train, train_by_rows, limit])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_whatever_changes_weights_is_measured(change: Any, num_threads: int) -> None:
    table = Table(
        2, max_rows=200, eviction=Evict.low_norm(every=1), num_threads=num_threads, hash_seed=3
    )
    keys = key_of(np.arange(100))
    table.map(keys, insert=True)
    table.map(keys[:1], insert=True)  # looks
    for part in (keys[3:9], keys[70:], keys[:1]):
        change(table, part)
        norms = {key: float(np.float32(np.hypot(*row))) for key, row in contents(table).items()}
        table.map(keys[:1], insert=True)
        found = {key: table.explain(key).columns["norm"] for key in norms}
        assert found == pytest.approx(norms, rel=1e-6)


def test_rows_that_begin_with_a_shared_one_are_measured() -> None:
    default = Default.shared_rows(4, begin_with="shared_row")
    table = Table(2, max_rows=50, eviction=Evict.low_norm(every=2), default=default)
    for step in range(8):
        keys = key_of(np.arange(3) + 2 * step)
        with table.lease(step=step) as lease:
            rows, outcomes = table.map(keys, insert=True, lease=lease)
            table.update_rows(Bags(rows, outcomes), np.full((3, 2), step, np.float32))
    norms = {key: float(np.float32(np.hypot(*row))) for key, row in contents(table).items()}
    with table.lease(step=8) as lease:
        table.map(keys[:1], insert=True, lease=lease)
    found = {key: table.explain(key).columns["norm"] for key in norms}
    assert found == pytest.approx(norms, rel=1e-6)


def shown(table: Table, keys: NDArray[np.int64], asked: list[int]) -> int:
    """How many keys the function was shown by a call."""
    asked.clear()
    table.map(keys, insert=True)
    return sum(asked)


def test_a_function_that_ignores_now_sees_who_was_seen(tmp_path: Path) -> None:
    asked: list[int] = []

    def places(step: Any, count: Any) -> Any:
        asked.append(len(step))
        return step + count

    def of_now(now: Any, count: Any) -> Any:
        asked.append(len(count))
        return count + 0 * now

    keys = key_of(np.arange(100))
    often = np.repeat(keys, np.arange(1, 101))  # no two are alike
    table = Table(2, max_rows=200, eviction=Evict.function(places, every=2))
    assert shown(table, often, asked) == 0
    assert shown(table, keys[:3], asked) == 100  # step 2
    assert shown(table, keys[:2], asked) == 0
    table.erase(keys[:1])
    assert shown(table, keys[5:6], asked) == 2
    assert shown(table, keys[:1], asked) == 0
    assert shown(table, keys[:0], asked) == 2  # 5, and the one that came again
    table.save(tmp_path / "saved")
    table.map(keys[7:9], insert=True)
    loaded = Table(2, max_rows=200, eviction=Evict.function(places, every=2))
    loaded.map(keys[:50], insert=True)
    loaded.load(tmp_path / "saved")
    assert [shown(loaded, keys[:0], asked) for _ in range(2)] == [0, 100]
    aging_too = Table(2, max_rows=200, eviction=Evict.function(of_now, every=2))
    assert [shown(aging_too, often, asked) for _ in range(4)] == [0, 100, 0, 100]


@pytest.mark.parametrize("is_of_now", [False, True])
def test_keys_that_are_alike_are_shown_once(is_of_now: bool) -> None:
    asked: list[int] = []

    def places(step: Any, time: Any, count: Any, score: Any) -> Any:
        asked.append(len(step))
        return step + 10 * time + 100 * count + 1000 * score

    def of_now(now: Any, step: Any, time: Any, count: Any, score: Any) -> Any:
        return places(step, time, count, score) + 0 * now

    rule = Evict.function(of_now if is_of_now else places, every=4)
    table = Table(2, max_rows=400, eviction=rule)
    keys = key_of(np.arange(300))
    zeros = np.zeros(100, np.float32)
    table.map(keys[:100], insert=True, times=np.full(100, 1), scores=zeros)
    table.map(keys[100:200], insert=True, times=np.full(100, 2), scores=zeros)
    twice = np.repeat(keys[200:250], 2)
    given: dict[str, Any] = {"times": np.full(150, 1), "scores": np.ones(150, np.float32)}
    table.map(np.concatenate([twice, keys[250:]]), insert=True, **given)
    asked.clear()
    table.map(keys[:0], insert=True, times=np.zeros(0, np.int64), scores=zeros[:0])
    assert asked == [4]
    for key in keys.tolist():
        kept = table.explain(key).columns
        expected = kept["step"] + 10 * kept["time"] + 100 * kept["count"] + 1000 * kept["score"]
        assert kept["place"] == expected


def test_a_look_at_many_keys_does_as_one_at_those_that_were_seen() -> None:
    """Of so many rows some are placed before the others, to tell which are low."""
    rules = [
        Evict.function(lambda step, count: count + step / 4, every=2),
        Evict.function(lambda now, step, count: count + step / 4 + 0 * now, every=2),
        Evict.function(lambda now, step, count: (count + step / 4) / now, every=2, min_age=1),
    ]
    tables = [Table(1, max_rows=160_000, eviction=rule, hash_seed=1) for rule in rules]
    source = np.random.default_rng(3)
    for step in range(12):
        keys = key_of(source.integers(0, 150_000, 60_000) + 20_000 * step)
        for table in tables:
            table.map(keys, insert=True)
        first, *others = [keys_of(table) for table in tables]
        assert all(kept == first for kept in others)
    for table in tables:
        assert table.stats().evicted > 30_000
        table.check_invariants()


def test_a_look_that_fails_looks_again() -> None:
    is_wrong = False

    def places(count: Any) -> Any:
        return count if not is_wrong else count[:-1]

    rule = Evict.function(places, every=1)
    table = Table(2, max_rows=3, eviction_groups=1, eviction=rule)
    table.map(np.array([1, 2, 2, 3, 3, 3]), insert=True)
    is_wrong = True
    with pytest.raises(ValueError, match="must give a number for each of 3 keys"):
        table.map(np.array([4]), insert=True)
    is_wrong = False
    table.map(np.array([4]), insert=True)
    assert [key in table for key in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_table_that_is_cleared_begins_anew() -> None:
    table = Table(2, max_rows=4, eviction_groups=1, eviction=Evict.low_norm(every=1))
    for _ in range(2):
        table.upsert(np.arange(4), np.array([[4, 0], [1, 0], [3, 0], [2, 0]], np.float32))
        table.map(np.array([7, 8]), insert=True)
        assert [key in table for key in (0, 1, 2, 3)] == [True, False, True, False]
        table.clear()
        table.check_invariants()


def often(count: Any) -> Any:
    """How often a key was seen."""
    return count


def a_full_table() -> Table:
    """Of keys 1 to 4, each seen as often; the third call from the first on begins with a look."""
    table = Table(1, max_rows=4, eviction_groups=1, eviction=Evict.function(often, every=3))
    table.map(np.repeat(np.arange(1, 5), np.arange(1, 5)), insert=True)
    table.map(np.array([4]), insert=True)
    return table


def test_what_an_earlier_call_of_the_step_has_seen_stays() -> None:
    table = a_full_table()
    with table.lease(3) as lease:
        table.map(np.array([1]), insert=True, lease=lease)
        table.map(np.array([9]), insert=True, lease=lease)
    assert keys_of(table) == {1, 3, 4, 9}
    table.check_invariants()


def test_a_key_that_came_back_to_its_row_stands_as_a_new_one() -> None:
    table = a_full_table()
    table.map(np.array([8]), insert=True)  # 1 leaves
    table.erase(np.array([2]))
    table.map(np.array([2]), insert=True)
    table.map(np.array([9]), insert=True)
    assert keys_of(table) == {2, 4, 8, 9}
    table.check_invariants()


def of_now(now: Any, step: Any, count: Any, score: Any) -> Any:
    """Keys that were seen long ago stand lower and lower, but some scores stay where they are."""
    return np.where(score == 0.0, count, count / (1.0 + now - step)) + score


def drawn(random: np.random.Generator, step: int, num_keys: int) -> tuple[Any, dict[str, Any]]:
    """Keys of a step, whose ids move on, some several times, and their scores."""
    keys = key_of(random.integers(4 * step, 4 * step + 200, num_keys))
    return keys, {"scores": random.integers(0, 3, num_keys).astype(np.float32) / 4}


@pytest.mark.parametrize("every", [1, 3])
def test_kinds_of_rows_come_and_go(every: int) -> None:
    """Far more kinds come than rows are there, so those that no row has are given to others."""
    rule = Evict.function(of_now, every=every)
    config: dict[str, Any] = {"max_rows": 150, "eviction_groups": 4, "eviction": rule}
    table, model = Table(1, **config), ReferenceTable(1, **config)
    random = np.random.default_rng(every)
    for step in range(160):
        keys, more = drawn(random, step, 40)
        for each in (table, model):
            each.find_or_insert(keys, **more)
            each.erase(keys[:1])
        if step % 8 == 0:
            assert contents(table) == contents(model)
            table.check_invariants()
    assert table.stats().evicted == model.stats().evicted > 300


@pytest.mark.parametrize("every", [1, 2, 5])
def test_looks_of_batches_in_flight_are_not_seen(every: int, tmp_path: Path) -> None:
    """Readers, saves and deltas have what a table has that maps only batches that are done."""
    rule = Evict.function(of_now, every=every)
    config: dict[str, Any] = {"max_rows": 150, "eviction_groups": 4, "eviction": rule}
    ahead, behind = Table(1, **config), Table(1, **config)
    random = np.random.default_rng(7 * every)
    waiting: list[tuple[int, Any, dict[str, Any], Any]] = []
    chain: list[Path] = []
    for step in range(40):
        keys, more = drawn(random, step, 40)
        lease = ahead.lease(step)
        ahead.map(keys, insert=True, lease=lease, **more)
        waiting.append((step, keys, more, lease))
        if len(waiting) > 1 + step % 4:
            done, keys, more, lease = waiting.pop(0)
            lease.release()
            with behind.lease(done) as alone:
                behind.map(keys, insert=True, lease=alone, **more)
        kept = keys_of(behind)
        assert keys_of(ahead) == kept
        for key in list(kept)[:20]:
            assert ahead.explain(key).columns == behind.explain(key).columns
        if step % 7 == 6:
            chain.append(tmp_path / str(step))
            (ahead.save_delta if len(chain) > 1 else ahead.save)(chain[-1])
            loaded = Table(1, **config)
            loaded.load(chain)
            assert keys_of(loaded) == kept
            for key in kept:
                assert loaded.explain(key).columns == behind.explain(key).columns


def test_a_look_by_now_that_fails_is_taken_back() -> None:
    is_wrong = False

    def places(now: Any, step: Any, count: Any) -> Any:
        return count / (1.0 + now - step) if not is_wrong else np.nan * step

    rule = Evict.function(places, every=2)
    table = Table(1, max_rows=60, eviction_groups=1, eviction=rule)
    twin = Table(1, max_rows=60, eviction_groups=1, eviction=rule)
    random = np.random.default_rng(5)
    for step in range(60):
        keys = key_of(random.integers(3 * step, 3 * step + 90, 30))
        if step % 6 == 3:
            kept, is_wrong = keys_of(table), True
            columns = [table.explain(key).columns for key in kept]
            with pytest.raises(ValueError, match="not finite in single precision"):
                table.map(keys, insert=True)
            is_wrong = False
            assert keys_of(table) == kept
            assert [table.explain(key).columns for key in kept] == columns
            table.check_invariants()
        for each in (table, twin):
            each.map(keys, insert=True)
        assert keys_of(table) == keys_of(twin)


def test_what_kinds_take_is_bounded_where_no_two_keys_are_alike() -> None:
    """A kind a row, few beside those, and all of it is counted."""

    def of_now(now: Any, step: Any, time: Any, count: Any, score: Any) -> Any:
        return count / (1.0 + now - step) + score

    def timeless(step: Any, time: Any, count: Any, score: Any) -> Any:
        return step + score

    most = []
    for places in (of_now, timeless):
        rule = Evict.function(places, every=2)
        table = Table(1, max_rows=2000, eviction_groups=4, eviction=rule, hash_seed=1)
        random = np.random.default_rng(0)
        taken = 0
        for _ in range(60):
            keys, times = random.integers(0, 2**62, 400), random.integers(0, 2**60, 400)
            table.map(keys, insert=True, times=times, scores=random.random(400, np.float32))
            taken = max(taken, table.stats().metadata_bytes)
        most.append(taken / 2000)
    assert 4 + 28 + 8 < most[0] - most[1] < 100
