"""What tables that evict share with ranks, devices and planners.

That the same keys stay on any number of ranks is crossed with all else in test_crossed_policies.py.
"""

from __future__ import annotations

from typing import Any

import eviction_on_ranks
import pytest
import torch
from rank_pool import RankPool
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import Admit, Evict, optim
from recsdk_sharding import (
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
)
from recsdk_sharding.device.home import DeviceHome
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.ranks import RankMap
from recsdk_sharding.planning.planned_tables import PlannedTable


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
    batch = KeyedJaggedTensor(["user"], ids, lengths=torch.tensor([1]))
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
    by_clicks: dict[str, dict[str, Any]] = {
        "Admit.show_click": {"admission": Admit.show_click(threshold=2.0, beta=1.0)},
        "Admit.show_click_of_step": {
            "admission": Admit.count(2) | Admit.show_click_of_step(threshold=2.0, beta=1.0)
        },
        "Evict.show_click_totals": {"max_rows": 9, "eviction": Evict.show_click_totals(beta=1.0)},
    }
    for rule, given in by_clicks.items():
        asked = HashEmbeddingConfig(**BAG, **given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"'user': {rule}\(\) with beta above 0 needs the"):
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
