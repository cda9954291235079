"""What admission knows of keys is saved and loaded: decisions go on as if nothing had been.

Shape letter: N keys.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import keys_of, records_of
from numpy.typing import NDArray

from recsdk_core import Admit, CheckpointError, Evict, Table, optim
from recsdk_core.checkpoint import chain_of, compact, diff, reshard
from recsdk_core.checkpoint.model.loading import Loading, load_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import open_checkpoint
from recsdk_core.testing import Room

MAX_RECORDS = 900
RULES = [
    Admit.count(3, max_records=MAX_RECORDS),
    Admit.count(4) & Admit.probability(0.5),
    Admit.probability(0.2),
    Admit.count_sketch(3, max_bytes=2**19),
    Admit.show_click(alpha=0.5, beta=1.5, threshold=2.5, max_records=MAX_RECORDS),
    Admit.show_click_of_step(alpha=0.5, beta=0.75, threshold=1.5)
    | Admit.count(4, max_records=MAX_RECORDS),
]


def stream(num_steps: int) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(5)
    keys = [random.zipf(1.2, 900) % 5000 + 50 * step for step in range(num_steps)]
    return [of_step * 0x9E3779B97F4A7C1 for of_step in keys]


def test_a_delta_after_a_load_without_counts_is_refused(tmp_path: Path) -> None:
    table, other = (Table(2, admission=Admit.count(2)) for _ in range(2))
    table.map(np.array([5, 6, 6]), insert=True)
    table.save(tmp_path / "saved")
    other.load(tmp_path / "saved", allow=["admission"])
    with pytest.raises(CheckpointError, match="save or load one in full first"):
        other.save_delta(tmp_path / "delta")


@pytest.mark.parametrize("eviction", [None, Evict.lru()], ids=["stays", "lru"])
@pytest.mark.parametrize(
    "rule", RULES, ids=["count", "and", "probability", "sketch", "clicks", "step"]
)
def test_a_table_goes_on_where_its_copy_stood(
    rule: Admit, eviction: Evict | None, tmp_path: Path
) -> None:
    def empty(**changes: Any) -> Table:
        config: dict[str, Any] = {"max_rows": 700, "eviction_groups": 8, "admission": rule}
        config |= {"eviction": eviction, "optimizer": optim.Adam(lr=0.1)}
        return Table(2, **{**config, **changes})

    def see(table: Table, keys: NDArray[np.int64], lease: Any = None) -> None:
        clicks = (keys % 3 == 0).astype(np.int64) if rule.needs_clicks else None
        table.map(keys, insert=True, lease=lease, clicks=clicks)

    def loaded(*names: str) -> Table:
        table = empty(hash_seed=5, num_threads=1)
        table.load([tmp_path / name for name in names])
        return table

    table, batches = empty(), stream(9)
    for keys in batches[:3]:
        see(table, keys)
    table.save(tmp_path / "full")
    for keys in batches[3:6]:
        see(table, keys)
    table.save_delta(tmp_path / "delta")
    compact(tmp_path / "delta", tmp_path / "whole")
    reshard(tmp_path / "delta", tmp_path / "three", world_size=3)
    counts = records_of(table)
    assert (len(counts[0]) > 500) == (rule.kind != "probability")
    with table.lease(40) as lease:  # what is saved is as without it
        see(table, batches[6], lease)
        table.save_async(tmp_path / "beside").wait()
        copies = [copy.deepcopy(table), pickle.loads(pickle.dumps(table))]
    renamed, other = copy.deepcopy(copies[0]), copy.deepcopy(copies[0])
    other.set_optimizer(optim.SGD(lr=0.5))
    copies += [other, loaded("full", "delta"), loaded("whole"), loaded("three"), loaded("beside")]
    for one in copies:
        assert records_of(one) == counts
    for one in copies:
        see(one, batches[6])
    for one in (table, *copies):
        for keys in batches[7:]:
            see(one, keys)
        assert (keys_of(one), records_of(one)) == (keys_of(table), records_of(table))
        one.check_invariants()
    renamed.rename("item")  # draws go by the name
    assert records_of(renamed) == counts


@pytest.mark.parametrize("keys", [[], [7]], ids=["none", "one"])
@pytest.mark.parametrize("rule", [Admit.count(3), RULES[4]], ids=["count", "clicks"])
def test_what_has_few_counts_is_made_anew_as_it_was(
    rule: Admit, keys: list[int], tmp_path: Path
) -> None:
    """Of ranks without a key that waits for a row the files of counts have none, and all parts."""
    table = Table(2, admission=rule)
    table.map(np.array(keys, np.int64), insert=True, clicks=1 if rule.needs_clicks else None)
    table.save(tmp_path / "saved")
    compact(tmp_path / "saved", tmp_path / "whole")
    reshard(tmp_path / "saved", tmp_path / "three", world_size=3)
    assert len(records_of(table)[0]) == len(keys)
    for name in ("whole", "three"):
        made = Table(2, admission=rule)
        made.load(tmp_path / name)
        assert records_of(made) == records_of(table)
        chains = (chain_of(tmp_path / each) for each in ("saved", name))
        assert all(table.is_equal for table in diff(*chains))


def test_ranks_of_another_number_take_their_keys(tmp_path: Path) -> None:
    table = Table(2, admission=RULES[0])
    for keys in stream(4):
        table.map(keys, insert=True)
    table.save(tmp_path / "one")
    found: list[list[int]] = [[], [], [], []]
    for rank in range(3):
        part = Table(2, admission=RULES[0])
        shard = Shard(table=part, owner=Owner(rank, 3))
        load_tables(lambda own=shard: ([own], Loading()), OneRank(), tmp_path / "one")
        for all_of, of_part in zip(found, records_of(part), strict=True):
            all_of += of_part
    order = np.argsort(found[0])
    assert [[part[i] for i in order] for part in found] == records_of(table)


def test_a_smaller_limit_keeps_the_counts_seen_last(tmp_path: Path) -> None:
    table = Table(2, admission=Admit.count(3))
    for keys in stream(4):
        table.map(keys, insert=True)
    table.save(tmp_path / "saved")
    small = Table(2, admission=Admit.count(3, max_records=100))
    small.load(tmp_path / "saved")
    all_keys, *rest = records_of(table)
    before = dict(zip(all_keys, zip(*rest, strict=True), strict=True))
    kept_keys, *rest = records_of(small)
    assert len(kept_keys) == 100
    assert small.stats().records_lost == len(before) - 100
    kept = dict(zip(kept_keys, zip(*rest, strict=True), strict=True))
    assert kept.items() <= before.items()
    group = Room(100, 1).group
    assert {group(key) for key in before} == {0}
    assert min(step for _, step, _ in kept.values()) >= max(
        step for key, (_, step, _) in before.items() if key not in kept
    )
    plain = Table(2)
    plain.load(tmp_path / "saved")
    assert keys_of(plain) == keys_of(table)
    plain.save(tmp_path / "plain")
    table.load(tmp_path / "plain")
    assert records_of(table) == [[], [], [], []]


def test_files_of_counts_are_verified(tmp_path: Path) -> None:
    table = Table(2, admission=RULES[0])
    table.map(stream(1)[0], insert=True)
    table.save(tmp_path / "saved")
    entry = open_checkpoint(tmp_path / "saved").manifest.tables[0].admission
    assert entry is not None
    assert entry.step == 1
    arguments = {"rule": [{"kind": "count", "n": 3}], "max_records": MAX_RECORDS}
    assert json.loads(json.dumps(entry.rule.arguments)) == arguments
    path = tmp_path / "saved" / entry.files[0].path
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank_00000\.counts"):
        open_checkpoint(tmp_path / "saved").verify()
    before = records_of(table)
    with pytest.raises(CheckpointError, match=r"rank_00000\.counts"):
        table.load(tmp_path / "saved")
    assert records_of(table) == before
