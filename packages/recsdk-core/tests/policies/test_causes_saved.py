"""Deltas and cuts say why keys left: what readers of leavers saw is what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from recsdk_core import Evict, Index, LeaveCause, Table
from recsdk_core.checkpoint.reading import open_checkpoint
from recsdk_core.cli import main

EVICTED, ERASED, EXPIRED = LeaveCause.EVICTED, LeaveCause.ERASED, LeaveCause.EXPIRED
RULE = Evict.lru().expiring(ttl=6, every=2)


def causes_of(path: Path) -> dict[int, int]:
    """Why each key left, as the delta's file has it."""
    found: dict[int, int] = {}
    checkpoint = open_checkpoint(path)
    for block in checkpoint.blocks(0, 0):
        if block.kind == "erased":
            assert (np.diff(block.keys) > 0).all()
            found.update(dict.fromkeys(block.keys.tolist(), block.cause))
    return found


def test_a_delta_has_the_last_cause_of_each_key_that_is_gone(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    table = Table(2, max_rows=60, eviction_groups=2, eviction=RULE)
    leavers = table.leavers()
    table.save(tmp_path / "0")
    total: dict[LeaveCause, int] = dict.fromkeys(LeaveCause, 0)
    for number in range(1, 7):
        for step in range(5):
            keys = random.integers(0, 25 if step < 3 else 90, 20)
            with table.lease(10 * number + step) as lease:  # what leaves in flight is told too
                table.map(keys, insert=True, lease=lease)
            table.erase(random.integers(0, 90, 3))
        table.evict(where="idle >= 3")
        left: dict[int, int] = {}
        while len((batch := leavers.read()).keys):
            left.update(zip(batch.keys.tolist(), batch.causes.tolist(), strict=True))
        gone = {key: cause for key, cause in left.items() if key not in table}
        table.save_delta(tmp_path / str(number))
        assert causes_of(tmp_path / str(number)) == gone
        entry = open_checkpoint(tmp_path / str(number)).manifest.tables[0]
        expected = {cause: list(gone.values()).count(cause) for cause in LeaveCause}
        assert entry.num_by_cause == expected
        assert entry.num_erased == len(gone)
        total = {cause: n + expected[cause] for cause, n in total.items()}
    assert min(total.values()) > 5
    other = Table(2, max_rows=60, eviction_groups=2, eviction=RULE)
    other.load(tmp_path / "6")
    assert all(key in other for batch in table.export() for key in batch.keys.tolist())
    assert len(other) == len(table)


def test_the_command_tells_causes_apart(tmp_path: Path) -> None:
    table = Table(2, max_rows=3, eviction_groups=1, eviction=Evict.lru())
    table.map(np.array([1, 2, 3]), insert=True)
    table.save(tmp_path / "full")
    table.map(np.array([4]), insert=True)  # one leaves
    table.erase(np.array([4, 5]))
    table.save_delta(tmp_path / "delta")
    shown = CliRunner().invoke(main, ["ckpt", "inspect", str(tmp_path / "delta")]).output
    assert ", 2 left (1 evicted, 1 erased, 0 expired)" in shown
    found = CliRunner().invoke(main, ["ckpt", "inspect", str(tmp_path / "delta"), "--json"]).output
    entry = json.loads(found)["tables"][0]
    assert entry["num_by_cause"] == {"evicted": 1, "erased": 1, "expired": 0}
    assert entry["num_erased"] == 2


def test_cuts_of_an_index_tell_causes() -> None:
    index = Index(max_rows=2, eviction_groups=1, eviction=Evict.lru().expiring(ttl=9))
    index.map(np.array([1]), insert=True)
    with index.cut() as cut:
        cut.finish(True)
    index.map(np.array([2]), insert=True)
    index.map(np.array([3]), insert=True)  # 1 leaves
    index.erase(np.array([3]))
    with index.cut(changes_only=True) as cut:
        assert (cut.left.tolist(), cut.causes.tolist()) == ([1, 3], [EVICTED, ERASED])
        cut.finish(True)
    for _ in range(10):
        index.map(np.array([4]), insert=True)
    assert index.expire() == 1
    with index.cut(changes_only=True) as cut:
        assert (cut.left.tolist(), cut.causes.tolist()) == ([2], [EXPIRED])
