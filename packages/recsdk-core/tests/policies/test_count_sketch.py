"""Admission by a sketch: never late, early within the bound, the same for every cut of a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from kept import keys_of, records_of
from numpy.typing import NDArray

from recsdk_core import Admit, CapacityError, CheckpointError, Evict, Outcome, Table, _ext
from recsdk_core.checkpoint import reshard
from recsdk_core.cli import main
from recsdk_core.testing._room import key_of_hash

FEWEST = 8 * 65_536
NEW, NOT = Outcome.INSERTED, Outcome.NOT_ADMITTED


def keys_of_shards(count: int, num_shards: int) -> NDArray[np.int64]:
    """Distinct keys of the first virtual shards, in turns."""
    return np.array([key_of_hash(i // num_shards << 16 | i % num_shards) for i in range(count)])


def sketch(n: int, width: int = 1) -> Admit:
    return Admit.count_sketch(n, max_bytes=width * FEWEST)


def test_no_key_is_late_and_few_are_early() -> None:
    width, num_shards, n = 128, 4, 24
    pool = keys_of_shards(4000, num_shards)
    about, exact = Table(1, admission=sketch(n, width)), Table(1, admission=Admit.count(n))
    random = np.random.default_rng(1)
    for _ in range(20):
        keys = pool[random.zipf(1.3, 600) % len(pool)]
        had = keys_of(about)
        seen = {key: about.explain(key).seen or 0 for key in set(keys.tolist()) - had}
        about.map(keys, insert=True)
        exact.map(keys, insert=True)
        assert keys_of(exact) <= keys_of(about)
        enough = {key for key, before in seen.items() if before + (keys == key).sum() >= n}
        assert keys_of(about) - had == enough
        about.check_invariants()
    counts = dict(zip(*records_of(exact)[:2], strict=True))
    num_counted = (sum(counts.values()) + n * len(exact)) / num_shards
    assert 0 < len(keys_of(about) - keys_of(exact)) < len(counts) / 100
    rest = sorted(counts.keys() - keys_of(about))[:400]
    beyond = [(about.explain(key).seen or 0) - counts[key] for key in rest]
    assert min(beyond) >= 0
    assert sum(more > math.e * num_counted / width for more in beyond) <= len(rest) * math.exp(-4)
    assert max(beyond) > 0


def test_order_threads_and_the_cut_of_a_step_decide_nothing() -> None:
    random = np.random.default_rng(3)
    pool = keys_of_shards(6000, 32)
    rule = sketch(6, 9) | Admit.probability(0.02)
    whole, cut = (Table(2, num_threads=n, hash_seed=n, admission=rule) for n in (1, 2))
    for step in range(12):
        keys = pool[random.zipf(1.3, 3000) % len(pool)]
        with whole.lease(step) as lease, cut.lease(step) as first, cut.lease(step) as second:
            whole.map(keys, insert=True, lease=lease)
            shuffled = random.permutation(keys)
            cut.map(shuffled[:1000], insert=True, lease=first)
            cut.map(shuffled[1000:1100], insert=True, lease=second)
            cut.map(shuffled[1100:], insert=True, lease=first)
        assert keys_of(whole) == keys_of(cut)
        assert records_of(whole) == records_of(cut)
    assert 0 < len(whole) < len(pool)
    # So does a batch of a step without a lease.
    alone, other = (Table(2, admission=sketch(6, 9)) for _ in range(2))
    alone.map(pool[:1000], insert=True)
    with other.lease(0) as lease:
        other.map(pool[:1000], insert=True, lease=lease)
    assert (keys_of(alone), records_of(alone)) == (keys_of(other), records_of(other))


def test_what_a_step_brings_of_others_does_not_matter() -> None:
    first, *others = keys_of_shards(50, 1)
    table = Table(1, admission=sketch(3))
    assert table.map(np.array([first, *others]), insert=True)[1].tolist() == [NOT] * 50
    assert table.map(np.array([first]), insert=True)[1].tolist() == [NEW]  # 50 were counted before


def test_counts_stay_of_keys_that_left() -> None:
    key, other = keys_of_shards(2, 2)
    table = Table(1, max_rows=1, eviction_groups=1, eviction=Evict.lru(), admission=sketch(3))
    for _ in range(3):
        table.map(np.array([key]), insert=True)
    assert key in table
    before = records_of(table)
    table.map(np.array([other, other, other]), insert=True)
    assert (key in table, other in table) == (False, True)
    table.erase(np.array([other, key]))
    assert records_of(table) == before  # twice, as the step of its row did not count
    assert table.map(np.array([key]), insert=True)[1].tolist() == [NEW]
    assert "it was seen 0 times so far" in str(table.explain(int(other)))
    table.upsert(np.array([other]), np.ones((1, 1), np.float32))
    assert other in table
    table.clear()
    assert records_of(table)[0] == []


def test_a_call_that_fails_counts_nothing() -> None:
    keys = keys_of_shards(4, 1)
    table = Table(1, max_rows=1, on_full="raise", admission=sketch(2))
    with table.lease(1) as lease:
        table.map(keys[:1], insert=True, lease=lease)
        with pytest.raises(CapacityError):
            table.map(np.repeat(keys[1:3], 2), insert=True, lease=lease)
        table.check_invariants()
    other = Table(1, max_rows=1, on_full="raise", admission=sketch(2))
    other.map(keys[:1], insert=True)
    assert records_of(table) == records_of(other)
    assert table.map(keys[:1], insert=True)[1].tolist() == [NEW]


def test_memory_ends_at_max_bytes() -> None:
    table = Table(1, admission=sketch(9, 3))
    for begin in range(0, 400_000, 50_000):
        table.map(np.arange(begin, begin + 50_000), insert=True)
    stats = table.stats()
    assert stats.admission_records == 0
    assert 3 * FEWEST <= stats.metadata_bytes < 3 * FEWEST + 2**16
    full = Table(1, admission=sketch(2))
    full.map(np.array([5]), insert=True, counts=2**62)
    assert 5 in full
    table.map(np.array([-5]), insert=True, counts=8)
    table.check_invariants()


def test_a_sketch_is_loaded_into_one_of_its_size(tmp_path: Path) -> None:
    table = Table(1, name="item", admission=sketch(5, 2))
    table.map(np.arange(100), insert=True)
    table.save(tmp_path / "one")
    shown = CliRunner().invoke(main, ["ckpt", "inspect", str(tmp_path / "one")]).output
    assert "at step 1, counts of " in shown
    assert " words of a sketch" in shown
    for rule in (sketch(5), Admit.count(5)):
        wrong = Table(1, name="item", admission=rule)
        with pytest.raises(CheckpointError, match="saved with admission by .*max_bytes=1048576"):
            wrong.load(tmp_path / "one")
        wrong.load(tmp_path / "one", allow=["admission"])
        assert records_of(wrong)[0] == []
    lower = Table(1, name="item", admission=sketch(3, 2))  # counters end at 3 here
    table.map(np.array([7]), insert=True, counts=3)
    table.save(tmp_path / "two")
    lower.load(tmp_path / "two")
    lower.check_invariants()
    assert lower.map(np.array([7]), insert=True)[1].tolist() == [NEW]
    with pytest.raises(ValueError, match="pass 'virtual_shard'"):
        reshard(tmp_path / "one", tmp_path / "three", world_size=3, rule="modulo")
    counting = Table(1, admission=Admit.count(5))
    with pytest.raises(ValueError, match="is one of a sketch, and it has none"):
        restore(counting, records_of(table))
    with pytest.raises(ValueError, match="is none of a sketch of its max_bytes"):
        restore(table, [[12345], [1], [1], [0]])


def restore(table: Table, records: list[list[int]]) -> None:
    _ext.Restore(table._engine).add_records(*(np.array(part, np.int64) for part in records))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sketch(0), "n must be at least 1"),
        (lambda: sketch(2**15), "n must be"),
        (lambda: Admit.count_sketch(2, max_bytes=FEWEST - 1), "max_bytes must be at least 524288"),
        (lambda: Admit(kind="count_sketch", n=2), "max_bytes is of rules with count_sketch"),
        (lambda: Admit(kind="count", n=2, max_bytes=FEWEST), "max_bytes is of rules with count"),
        (lambda: sketch(2) | Admit.count(3), "take Admit.count in place of Admit.count_sketch"),
        (lambda: sketch(2) & Admit.show_click(threshold=2.0), "by a sketch or by exact counts"),
        (lambda: sketch(2) | sketch(3, 2), "max_bytes is 524288 in one rule and 1048576"),
        (
            lambda: Admit(kind="count_sketch", n=2, max_bytes=FEWEST, max_records=5),
            "the rule counts nothing",
        ),
    ],
)
def test_rules_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_terms_share_the_counters() -> None:
    rule = sketch(2) & (Admit.probability(1e-12) | Admit.count_sketch(4, max_bytes=FEWEST))
    table = Table(1, admission=rule)
    assert [table.map(np.array([3]), insert=True)[1].item() for _ in range(4)] == [
        NOT,
        NOT,
        NOT,
        NEW,
    ]
