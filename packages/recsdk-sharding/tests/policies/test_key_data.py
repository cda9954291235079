"""Times, scores, counts and clicks that come with ids reach the tables, on any number of ranks.

`testing.ReferenceTable` says in plain Python which keys stay of the joined batches of all ranks;
a row is the number of times that it was trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import eviction_on_ranks
import numpy as np
import pytest
import torch
from eviction_on_ranks import (
    DEVICE_SIZES,
    GROUPS,
    MAX_ROWS,
    ROW_WISE,
    WIDTH,
    Case,
    Outcomes,
    Rows,
    batches,
    cases,
    data_of,
    run,
    whole,
)
from plans import Spec
from rank_pool import RankPool
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import Admit, Evict, Outcome
from recsdk_core.testing import ReferenceTable
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    KeyedJaggedTensorWithTimestamp,
)
from recsdk_sharding._configs.data_taken import taken_by

STEPS = 14
RULES: dict[str, Evict | None] = {
    "user": Evict.lru(by="time").expiring(ttl=9, every=2),
    "item": Evict.show_click(beta=2.0, decay=0.5, min_age=2).expiring(share=0.2, every=3),
    "ad": Evict.score(),
    "full": None,
}
ADMISSION = {"user": Admit.count(3), "full": Admit.show_click(threshold=7, beta=1.5)}
EXPIRING = {**RULES, "item": RULES["user"], "ad": Evict.lru(by="time").expiring(ttl=5, every=1)}
COLUMNS: dict[str, Spec] = dict.fromkeys(RULES, ("column_wise", [(1, 0), (WIDTH - 1, 1)]))


class _Expected:
    """Keys, rows and outcomes of all tables."""

    def __init__(self, rules: dict[str, Evict | None], *, is_limited: bool = True) -> None:
        self.num = dict.fromkeys(Outcome, 0)
        self.num_expired = self.num_evicted = 0
        self.rows: Rows = {}
        self.outcomes: list[Outcomes] = [{} for _ in range(STEPS)]
        for position, (name, rule) in enumerate(rules.items()):
            limits: dict[str, Any] = {}
            if is_limited:
                limits = {"max_rows": MAX_ROWS, "eviction_groups": GROUPS[name]}
            more = {"eviction": rule, "admission": ADMISSION.get(name), **limits}
            table = ReferenceTable(WIDTH, name=name, **more)
            self.rows[name] = self._train(table, position)
            self.num_expired += table.stats().expired
            self.num_evicted += table.stats().evicted

    def _train(self, table: ReferenceTable, position: int) -> dict[int, list[float]]:
        counts: dict[int, int] = {}
        for step, lists in enumerate(batches(0, STEPS)):
            keys = np.array([key for bag in lists[position] for key in bag])
            taken = taken_by(table.eviction, table.admission)
            data = {n: d[position].reshape(-1) for n, d in data_of(step).items() if n in taken}
            if "times" in data:
                latest = int(data["times"].max())
                table.time = latest if table.time is None else max(table.time, latest)
            with table.lease(step=step + 1) as lease:
                _, outcomes = table.map(keys, True, lease=lease, **data)
            held = {key for key in keys.tolist() + list(counts) if key in table}
            counts = {key: n for key, n in counts.items() if key in held}
            for key, outcome in zip(keys.tolist(), outcomes.tolist(), strict=True):
                self.num[Outcome(outcome)] += 1
                found = 0 if outcome == Outcome.INSERTED else outcome
                self.outcomes[step].setdefault(table.name, {})[key] = found
                if key in held:
                    counts[key] = counts.get(key, 0) + 1
        return {key: [-float(n)] * WIDTH for key, n in counts.items()}


@pytest.fixture(scope="module")
def expected() -> _Expected:
    found = _Expected(RULES)
    assert found.num[Outcome.NOT_ADMITTED] > 100
    assert found.num[Outcome.REFUSED] > 5
    assert found.num_expired > 10
    assert found.num_evicted > 50
    return found


def with_data(found: list[Case], expected: _Expected, **changes: Any) -> list[Case]:
    more = {"rules": RULES, "admission": ADMISSION, "has_data": True, **changes}
    return [replace(case, outcomes=expected.outcomes, **more) for case in found]


def test_unsharded_tables_do_as_the_plain_model(expected: _Expected) -> None:
    for case in with_data([Case(None), Case(None, is_sequence=True)], expected):
        assert run(case, 0, STEPS, None, None) == expected.rows


def test_a_table_needs_no_time_before_it_has_an_id() -> None:
    rule = Evict.lru(by="time").expiring(ttl=5, every=1)
    configs = [
        HashEmbeddingBagConfig(
            name=name, embedding_dim=2, num_embeddings=9, feature_names=[name], eviction=rule
        )
        for name in ("user", "item")
    ]
    collection = HashEmbeddingBagCollection(configs).requires_grad_(False)
    tables = collection.tables()
    for lengths, times in (([0, 0], []), ([2, 0], [10, 11]), ([1, 1], [12, 30])):
        ids = torch.arange(len(times))
        collection(
            KeyedJaggedTensorWithTimestamp(
                ["user", "item"],
                ids,
                torch.tensor(times, dtype=torch.int64),
                lengths=torch.tensor(lengths),
            )
        )
    assert (tables["user"].time, tables["item"].time) == (12, 30)
    assert (len(tables["user"]), len(tables["item"])) == (2, 1)
    plain = KeyedJaggedTensor(["user", "item"], torch.tensor([5]), lengths=torch.tensor([0, 1]))
    collection(plain)  # counts as seen at the table's clock
    fresh = HashEmbeddingBagCollection(configs).requires_grad_(False)
    with pytest.raises(ValueError, match="'item': .* needs the times of ids"):
        fresh(plain)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_keys_rows_and_outcomes_on_any_number_of_ranks(
    ranks: RankPool, expected: _Expected, world_size: int
) -> None:
    eviction_on_ranks.assert_all_have(
        ranks, with_data(cases(world_size), expected), expected.rows, world_size, STEPS
    )


@pytest.mark.parametrize("world_size", DEVICE_SIZES)
def test_devices_do_the_same(npus: RankPool, expected: _Expected, world_size: int) -> None:
    tried = [case for case in cases(world_size) if case.local_size is None]
    eviction_on_ranks.assert_all_have(
        npus, with_data(tried, expected, device="npu"), expected.rows, world_size, STEPS
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ids_expire_without_a_limit_of_rows(ranks: RankPool, world_size: int) -> None:
    expected = _Expected(EXPIRING, is_limited=False)
    assert expected.num_expired > 50
    none = {"max_rows": None, "eviction_groups": None}
    tried = [replace(case, state=none) for case in cases(world_size)[:3]]
    eviction_on_ranks.assert_all_have(
        ranks,
        with_data(tried, expected, rules=EXPIRING, state=none),
        expected.rows,
        world_size,
        STEPS,
    )


@pytest.mark.parametrize("devices", [("cpu", "cpu", "cpu", "cpu"), ("npu", "cpu", "npu", "npu")])
def test_saved_and_resumed_at_another_number_of_ranks(
    ranks: RankPool, npus: RankPool, expected: _Expected, tmp_path: Path, devices: tuple[str, ...]
) -> None:
    ways = [(1, ROW_WISE), (3, ROW_WISE), (2, COLUMNS), (4 if devices[3] == "cpu" else 1, ROW_WISE)]
    ends = [0, 4, 7, 10, STEPS]
    at: str | None = None
    for number, ((world_size, plan), device) in enumerate(zip(ways, devices, strict=True)):
        to = str(tmp_path / str(number))
        [case] = with_data([Case(plan, depth=2, device=device)], expected)
        pool = npus if device == "npu" else ranks
        parts = pool.run(world_size, run, case, ends[number], ends[number + 1], at, to)
        at = to
    assert whole(parts) == expected.rows


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("kind", ["row_wise", "data_parallel", "column_wise"])
def test_ids_of_a_rank_without_times_have_the_latest(
    ranks: RankPool, kind: str, is_sequence: bool
) -> None:
    plan: dict[str, Spec] = {"user": (kind,)}
    if kind == "column_wise":
        plan = {"user": ("column_wise", [(1, 0), (WIDTH - 1, 1)])}
    found = ranks.run(2, eviction_on_ranks.times_of_some_ranks, plan, is_sequence)
    assert [time for time, _ in found] == [60, 60]
    assert {**found[0][1], **found[1][1]} == {5: 60, 6: 40, 7: 60}


def test_a_plain_bag_over_ranks_takes_what_comes_with_ids(ranks: RankPool) -> None:
    found = ranks.run(2, eviction_on_ranks.times_of_a_bag)
    for text, time, _ in found:
        assert "must have the shape of keys, (1, 2)" in text or "rank" in text
        assert time == 40
    assert {**found[0][2], **found[1][2]} == {5: 35, 7: 40, 8: 40}


@pytest.mark.parametrize(
    ("rule", "has_data", "is_trained", "count"),
    [
        (None, True, True, 1),
        (Evict.lru(), True, True, 1),
        (RULES["user"], False, True, 1),
        (RULES["user"], True, False, 1),
        (RULES["user"], True, True, 2),
    ],
)
def test_nothing_is_sent_that_no_table_takes(
    ranks: RankPool, rule: Evict | None, has_data: bool, is_trained: bool, count: int
) -> None:
    given = {"user": rule}, has_data, is_trained
    assert ranks.run(2, eviction_on_ranks.exchanges_of_a_batch, *given) == [count, count]


def test_torchrecs_pipeline_sends_times_too(ranks: RankPool) -> None:
    batches = [([1, 1, 2], [10, 20, 30]), ([2, 5], [90, 5]), ([1], [100]), ([3, 3], [200, 170])]
    found = ranks.run(2, eviction_on_ranks.times_by_a_stock_pipeline, batches)
    assert [time for _, time in found] == [200, 200]
    assert sorted(key for keys, _ in found for key in keys) == [3]
