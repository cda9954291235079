"""Tables that evict, or refuse, give the same keys and rows on any number of ranks.

`testing.Eviction` and `testing.Room` say in plain Python which keys stay of the joined batches of
all ranks; a row is the number of times that it was trained. Shape letter: W ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import eviction_on_ranks
import pytest
import torch
from eviction_on_ranks import (
    DEVICE_SIZES,
    GROUPS,
    MAX_ROWS,
    ROW_WISE,
    RULES,
    WIDTH,
    Case,
    Left,
    Rows,
    batches,
    cases,
    run,
    time_of,
    whole,
)
from plans import Spec
from rank_pool import RankPool

from recsdk_core import Admit, Evict, LeaveCause, optim
from recsdk_core.testing import Eviction, KeyMeta, Room
from recsdk_sharding import (
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)
from recsdk_sharding.device.home import DeviceHome
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.ranks import RankMap
from recsdk_sharding.planning.planned_tables import PlannedTable
from sampling import crossed

STEPS = 14


LIMITS: dict[str, dict[str, Any]] = {
    "limited": {},
    "unlimited": {"max_rows": None, "eviction_groups": None, "num_embeddings": 2_000},
}
"""Arguments of tables; the unlimited ones have room for all keys."""


class _Expected:
    """Keys and rows of all tables."""

    def __init__(self, steps: int = STEPS, *, is_limited: bool = True) -> None:
        self._is_limited = is_limited
        self.num_left = self.num_expired = self.num_refused = 0
        self.rows: Rows = {}
        self.left: Left = {name: {} for name in RULES}
        self.returned: dict[str, tuple[int, int]] = {"full": (0, 0)}
        for position, (name, rule) in enumerate(RULES.items()):
            keys = [[key for bag in step[position] for key in bag] for step in batches(0, steps)]
            room = Room(MAX_ROWS, GROUPS[name]) if is_limited else Room(2**32 - 1, 1)
            counts = (
                self._refusing(keys, room)
                if rule is None
                else self._evicting(name, keys, rule, room)
            )
            self.rows[name] = {key: [-float(n)] * WIDTH for key, n in counts.items()}

    def _refusing(self, steps: list[list[int]], room: Room) -> dict[int, int]:
        counts: dict[int, int] = {}
        for keys in steps:
            refused = room.refused((key for key in keys if key not in counts), counts)
            self.num_refused += len(refused)
            for key in keys:
                if key not in refused:
                    counts[key] = counts.get(key, 0) + 1
        return counts

    def _evicting(
        self, name: str, steps: list[list[int]], rule: Evict, room: Room
    ) -> dict[int, int]:
        model = Eviction(rule, room, is_limited=self._is_limited)
        metas: dict[int, KeyMeta] = {}
        counts: dict[int, int] = {}
        num_returned = 0
        for number, keys in enumerate(steps):
            step = model.step_of(None)
            seen = model.seen(keys, time_of(number) if rule.by == "time" else None, None)
            model.time = time_of(number)  # is set for each batch
            leaving, refused = model.decide(metas, seen, step)
            self.num_expired += len(model.expiring)
            self.num_left += len(leaving)
            num_returned += model.came(
                [k for k in seen if k not in metas and k not in refused], step
            )
            model.left(leaving, step)
            for key in leaving:
                cause = LeaveCause.EXPIRED if key in model.expiring else LeaveCause.EVICTED
                row = number, int(cause), -float(counts[key])
                self.left[name].setdefault(key, []).append(row)
                del metas[key], counts[key]
            for key in seen.keys() - refused:
                metas[key] = model.touched(metas.get(key), seen[key], step)
            for key in keys:
                if key not in refused:
                    counts[key] = counts.get(key, 0) + 1
            model.decided(step, None)
        self.returned[name] = num_returned, model.churn_lost
        return counts


@pytest.fixture(scope="module")
def expected() -> _Expected:
    found = _Expected()
    assert found.num_left > 200
    assert found.num_expired > 50
    assert found.num_refused > 50
    assert sum(num_returned for num_returned, _ in found.returned.values()) > 20
    assert found.returned["ad"][1] > 0
    return found


def test_unsharded_tables_do_as_the_plain_model(expected: _Expected) -> None:
    for is_sequence in (False, True):
        rows = run_whole(Case(None, is_sequence=is_sequence))
        assert rows == expected.rows


def run_whole(case: Case) -> Rows:
    return run(case, 0, STEPS, None, None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_keys_and_rows_on_any_number_of_ranks(
    ranks: RankPool, expected: _Expected, world_size: int
) -> None:
    first = Case(ROW_WISE, depth=3)
    others = [case for case in cases(world_size) if case != first]
    tried = [replace(first, returned=expected.returned), *others]
    tried = [replace(case, left=expected.left) for case in tried]
    eviction_on_ranks.assert_all_have(ranks, tried, expected.rows, world_size, STEPS)


def test_saved_and_resumed_at_another_number_of_ranks(
    ranks: RankPool, expected: _Expected, tmp_path: Path
) -> None:
    columns: dict[str, Spec] = dict.fromkeys(RULES, ("column_wise", [(1, 0), (WIDTH - 1, 1)]))
    ways = [(1, ROW_WISE), (3, ROW_WISE), (2, columns), (4, ROW_WISE)]
    ends = [0, 4, 7, 10, STEPS]
    at: str | None = None
    for number, (world_size, plan) in enumerate(ways):
        to = str(tmp_path / str(number))
        step = ends[number], ends[number + 1]
        case = Case(plan, depth=2, left=expected.left)
        parts = ranks.run(world_size, run, case, *step, at, to)
        at = to
    assert whole(parts) == expected.rows
    assert run(Case(None), STEPS, STEPS, at, None) == expected.rows


@pytest.mark.parametrize("world_size", DEVICE_SIZES)
def test_devices_do_the_same(npus: RankPool, expected: _Expected, world_size: int) -> None:
    tried = [
        replace(case, device="npu", left=expected.left)
        for case in cases(world_size)
        if case.local_size is None
    ]
    eviction_on_ranks.assert_all_have(npus, tried, expected.rows, world_size, STEPS)


@pytest.fixture(scope="module")
def unlimited() -> _Expected:
    found = _Expected(is_limited=False)
    assert found.num_expired > 50
    assert found.num_left == found.num_expired
    assert found.num_refused == 0
    return found


@pytest.mark.parametrize(("world_size", "device"), crossed((1, 2, 3, 4), ("cpu", "npu"), size=4))
def test_ids_expire_without_max_rows(
    ranks: RankPool, npus: RankPool, unlimited: _Expected, world_size: int, device: str
) -> None:
    tried = [
        replace(case, device=device, state=LIMITS["unlimited"], left=unlimited.left)
        for case in cases(world_size)
        if case.local_size is None or device == "cpu"
    ]
    pool = ranks if device == "cpu" else npus
    eviction_on_ranks.assert_all_have(pool, tried, unlimited.rows, world_size, STEPS)


@pytest.mark.parametrize("limits", LIMITS)
def test_devices_save_and_resume_at_another_number_of_ranks(
    ranks: RankPool, npus: RankPool, tmp_path: Path, limits: str
) -> None:
    expected = _Expected(is_limited=limits == "limited")
    columns: dict[str, Spec] = dict.fromkeys(RULES, ("column_wise", [(1, 0), (WIDTH - 1, 1)]))
    ways = [(1, "npu", ROW_WISE), (3, "cpu", ROW_WISE), (2, "npu", columns), (1, "npu", ROW_WISE)]
    ends = [0, 4, 7, 10, STEPS]
    at: str | None = None
    for number, (world_size, device, plan) in enumerate(ways):
        to = str(tmp_path / str(number))
        case = Case(plan, device=device, depth=2, state=LIMITS[limits], left=expected.left)
        pool = npus if device == "npu" else ranks
        parts = pool.run(world_size, run, case, ends[number], ends[number + 1], at, to)
        at = to
    assert whole(parts) == expected.rows


def test_a_row_of_a_device_begins_with_the_values_of_the_key_that_has_it(npus: RankPool) -> None:
    [(written, first)] = npus.run(1, eviction_on_ranks.rows_of_batches_that_nobody_read)
    assert written == first
    assert len(first) == 4


def test_batches_in_flight_may_keep_back_all_rows_of_a_device(npus: RankPool) -> None:
    [(text, held)] = npus.run(1, eviction_on_ranks.leases_that_keep_all_rows)
    assert "table 'user': the device has 8 rows, and batches in flight keep back those" in text
    assert "raise num_embeddings" in text
    assert len(held) == 4
    assert set(held) > {3, 4, 5}


def test_what_num_embeddings_planned_is_the_limit_of_a_device(npus: RankPool) -> None:
    [held] = npus.run(1, eviction_on_ranks.more_keys_than_were_planned)
    assert held == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 3, 4, 5]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("max_rows", [None, 40, 5_000, 1_000_000])
def test_the_planner_counts_spare_rows_of_devices(max_rows: int | None, world_size: int) -> None:
    many = max_rows or 5_000
    for num_embeddings in (10, many, 2 * many):
        groups = None if max_rows is None else 8
        rule = Evict.lru().expiring(ttl=9)
        settings = {"max_rows": max_rows, "eviction_groups": groups, "eviction": rule}
        config = HashEmbeddingBagConfig(**{**BAG, **settings, "num_embeddings": num_embeddings})  # type: ignore[arg-type]
        planned = PlannedTable(
            "user", num_embeddings, max_rows, "float32", optim.SGD(), 1, groups, evicts=True
        ).rows_on_device(world_size)
        ranks = RankMap.of_groups(world_size, "virtual_shard", config.num_groups)
        shards = [[Shard(ranks, index, (0, 2))] for index in range(world_size)]
        stores = DeviceHome(torch.device("cpu")).make_stores([(config, own) for own in shards])
        rows = [len(store) - 1 for store in stores]
        limit = num_embeddings if max_rows is None else max_rows
        assert all(count >= limit // world_size + 4096 for count in rows[:1])
        assert max(rows) <= planned <= max(rows) + 16


def test_a_state_dict_goes_on_as_its_model(ranks: RankPool, expected: _Expected) -> None:
    found = ranks.run(3, eviction_on_ranks.copies, Case(ROW_WISE), 0, 8, STEPS)
    for which in (0, 1):
        assert whole([of_rank[which] for of_rank in found]) == expected.rows


def test_a_plain_bag_goes_on_over_ranks(ranks: RankPool, expected: _Expected) -> None:
    parts = ranks.run(3, eviction_on_ranks.bag_on_ranks, 5, STEPS)
    assert whole(parts)["user"] == expected.rows["user"]


def test_more_ranks_than_groups_are_refused_at_planning(ranks: RankPool) -> None:
    for texts in ranks.run(3, eviction_on_ranks.refusals, 2, "virtual_shard"):
        for text in texts[:2]:
            assert "over 3 ranks" in text
            assert "2 groups of ids" in text
            assert "set eviction_groups to a power of two from 3 on" in text
        assert "row_wise" not in texts[2:]
    [text, *_] = ranks.run(2, eviction_on_ranks.refusals, 8, "modulo")[0]
    assert "rank_rule='modulo'" in text


BAG = {"name": "user", "embedding_dim": 2, "num_embeddings": 9}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"eviction": Evict.lru()}, ValueError, "eviction makes room in max_rows; set max_rows"),
        ({"eviction_groups": 4}, ValueError, "eviction_groups divides max_rows; set max_rows too"),
        ({"max_rows": 9, "eviction_groups": 3}, ValueError, "must be a power of two up to max_r"),
        ({"max_rows": 9, "eviction_groups": 16}, ValueError, "must be a power of two up to max_r"),
        ({"max_rows": 9, "eviction": "lru"}, TypeError, "eviction must be an Evict"),
    ],
)
def test_settings_that_make_no_sense(
    arguments: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"table 'user': .*{message}"):
        HashEmbeddingBagConfig(**BAG, **arguments)  # type: ignore[arg-type]


def test_what_collections_refuse() -> None:
    timed = HashEmbeddingConfig(**BAG, max_rows=9, eviction=Evict.lru(by="time"))  # type: ignore[arg-type]
    collection = HashEmbeddingCollection([timed])
    collection.requires_grad_(False)
    ids = torch.tensor([3])
    batch = eviction_on_ranks.KeyedJaggedTensor(["user"], ids, lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"'user': Evict.lru\(by='time'\) needs the times of ids"):
        collection(batch)
    for wrong, kind in ((1.5, TypeError), (2**63, ValueError)):
        with pytest.raises(kind, match="set_time: the time must be"):
            collection.set_time(wrong)  # type: ignore[arg-type]
    collection.set_time(-7)
    collection(batch)
    assert 3 in collection.tables()["user"]
    scored = HashEmbeddingConfig(**BAG, max_rows=9, eviction=Evict.score())  # type: ignore[arg-type]
    collection = HashEmbeddingCollection([scored]).requires_grad_(False)
    with pytest.raises(ValueError, match=r"'user': Evict.score\(\) needs the scores of ids"):
        collection(batch)
    collection.eval()(batch)
    clicked = Admit.show_click(threshold=2.0, beta=1.0)
    asked = HashEmbeddingConfig(**BAG, admission=clicked)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"'user': Admit.show_click\(\) with beta above 0 needs the"
    ):
        HashEmbeddingCollection([asked]).requires_grad_(False)(batch)


def test_what_counts_occurrences_has_each_of_them_sent() -> None:
    rules = {
        "Evict.lfu()": Evict.lfu(),
        "rare_count": Evict.lru().expiring(rare_ttl=1, rare_count=2),
        None: Evict.lru().expiring(ttl=1),
    }
    for told, rule in rules.items():
        config = HashEmbeddingConfig(**BAG, max_rows=9, eviction=rule)  # type: ignore[arg-type]
        assert config.counting_rule == told
