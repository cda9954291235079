"""Tables with rules of admission let in the same keys on any number of ranks, with eviction too.

`testing.ReferenceTable` says in plain Python which keys stay of the joined batches of all ranks,
and what becomes of each occurrence; a row is the number of times that it was trained.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import eviction_on_ranks
import numpy as np
import pytest
from eviction_on_ranks import (
    ADMISSION,
    DEVICE_SIZES,
    GROUPS,
    MAX_ROWS,
    ROW_WISE,
    RULES,
    WIDTH,
    Case,
    Outcomes,
    Rows,
    batches,
    cases,
    run,
    time_of,
    whole,
)
from plans import Spec
from rank_pool import RankPool

from recsdk_core import Admit, CheckpointError, Outcome
from recsdk_core.testing import ReferenceTable
from recsdk_sharding import HashEmbeddingBagConfig

STEPS = 14
NO_LIMIT_OF_ROWS = {
    "max_rows": None,
    "eviction": None,
    "eviction_groups": None,
    "num_embeddings": 4_096,
}
COLUMNS: dict[str, Spec] = dict.fromkeys(RULES, ("column_wise", [(1, 0), (WIDTH - 1, 1)]))


class _Expected:
    """Keys, rows and outcomes of all tables."""

    def __init__(self, admission: dict[str, Admit], *, is_limited: bool = True) -> None:
        self.num = dict.fromkeys(Outcome, 0)
        self.num_lost = 0
        self.rows: Rows = {}
        self.outcomes: list[Outcomes] = [{} for _ in range(STEPS)]
        for position, (name, rule) in enumerate(RULES.items()):
            limits: dict[str, Any] = {}
            if is_limited:
                limits = {"max_rows": MAX_ROWS, "eviction_groups": GROUPS[name], "eviction": rule}
            table = ReferenceTable(WIDTH, name=name, admission=admission[name], **limits)
            self.rows[name] = self._train(table, position)
            self.num_lost += table.stats().records_lost

    def _train(self, table: ReferenceTable, position: int) -> dict[int, list[float]]:
        counts: dict[int, int] = {}
        for step, lists in enumerate(batches(0, STEPS)):
            keys = np.array([key for bag in lists[position] for key in bag])
            is_timed = table.eviction is not None and table.eviction.by == "time"
            with table.lease(step=step + 1) as lease:
                times = time_of(step) if is_timed else None
                _, outcomes = table.map(keys, True, lease=lease, times=times)
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
    found = _Expected(ADMISSION)
    assert found.num[Outcome.NOT_ADMITTED] > 200
    assert found.num[Outcome.REFUSED] > 5
    assert found.num_lost > 10
    return found


def with_rules(found: list[Case], expected: _Expected, **changes: Any) -> list[Case]:
    changes = {"admission": ADMISSION, "outcomes": expected.outcomes, **changes}
    return [replace(case, **changes) for case in found]


def test_unsharded_tables_do_as_the_plain_model(expected: _Expected) -> None:
    for case in with_rules([Case(None), Case(None, is_sequence=True)], expected):
        assert run(case, 0, STEPS, None, None) == expected.rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_keys_rows_and_outcomes_on_any_number_of_ranks(
    ranks: RankPool, expected: _Expected, world_size: int
) -> None:
    eviction_on_ranks.assert_all_have(
        ranks, with_rules(cases(world_size), expected), expected.rows, world_size, STEPS
    )


@pytest.mark.parametrize("world_size", DEVICE_SIZES)
def test_devices_do_the_same(npus: RankPool, expected: _Expected, world_size: int) -> None:
    tried = [case for case in cases(world_size) if case.local_size is None]
    eviction_on_ranks.assert_all_have(
        npus, with_rules(tried, expected, device="npu"), expected.rows, world_size, STEPS
    )


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_counts_have_a_limit_of_their_own_without_one_of_rows(
    ranks: RankPool, npus: RankPool, device: str
) -> None:
    rules = dict.fromkeys(RULES, Admit.count(2, max_records=1_024))
    expected = _Expected(rules, is_limited=False)
    assert expected.num[Outcome.NOT_ADMITTED] > 200
    case = Case(ROW_WISE, state=NO_LIMIT_OF_ROWS, admission=rules, device=device)
    case = replace(case, outcomes=expected.outcomes)
    pool = npus if device == "npu" else ranks
    eviction_on_ranks.assert_all_have(pool, [case], expected.rows, 3, STEPS)


@pytest.mark.parametrize("devices", [("cpu", "cpu", "cpu", "cpu"), ("npu", "cpu", "npu", "npu")])
def test_saved_and_resumed_at_another_number_of_ranks(
    ranks: RankPool, npus: RankPool, expected: _Expected, tmp_path: Path, devices: tuple[str, ...]
) -> None:
    ways = [(1, ROW_WISE), (3, ROW_WISE), (2, COLUMNS), (4 if devices[3] == "cpu" else 1, ROW_WISE)]
    ends = [0, 4, 7, 10, STEPS]
    at: str | None = None
    for number, ((world_size, plan), device) in enumerate(zip(ways, devices, strict=True)):
        to = str(tmp_path / str(number))
        [case] = with_rules([Case(plan, depth=2, device=device)], expected)
        pool = npus if device == "npu" else ranks
        parts = pool.run(world_size, run, case, ends[number], ends[number + 1], at, to)
        at = to
    assert whole(parts) == expected.rows


def test_limited_counts_go_on_on_other_ranks_and_devices(
    ranks: RankPool, npus: RankPool, tmp_path: Path
) -> None:
    rules = dict.fromkeys(RULES, Admit.count(2, max_records=1_024))
    expected = _Expected(rules, is_limited=False)
    at: str | None = None
    ways = [(2, "npu", 0, 5), (3, "cpu", 5, 9), (1, "npu", 9, STEPS)]
    for world_size, device, first, last in ways:
        case = Case(ROW_WISE, state=NO_LIMIT_OF_ROWS, admission=rules, device=device)
        case = replace(case, outcomes=expected.outcomes, depth=2)
        to = str(tmp_path / str(last))
        pool = npus if device == "npu" else ranks
        parts = pool.run(world_size, run, case, first, last, at, to)
        at = to
    assert whole(parts) == expected.rows


def test_a_device_loads_the_counts_that_the_cpu_would(
    ranks: RankPool, npus: RankPool, tmp_path: Path
) -> None:
    """Into fewer records than there are, of groups that memory does not divide over."""
    rules = dict.fromkeys(RULES, Admit.count(2, max_records=4_096))
    room = NO_LIMIT_OF_ROWS | {"max_rows": 9_000, "eviction_groups": 4}
    saved = str(tmp_path / "saved")
    case = Case(ROW_WISE, state=room, admission=rules)
    ranks.run(2, run, case, 0, 7, None, saved)
    npus.run(2, run, replace(case, device="npu"), 0, 7, None, f"{saved}_by_npus")
    assert saved_rules(f"{saved}_by_npus") == saved_rules(saved)
    found = []
    for most in (64, 4_096):
        fewer = replace(case, admission=dict.fromkeys(RULES, Admit.count(2, max_records=most)))
        for pool, device in ((ranks, "cpu"), (npus, "npu")):
            parts = pool.run(2, run, replace(fewer, device=device), 7, STEPS, saved, None)
            found.append(whole(parts))
    assert found[0] == found[1] != found[2] == found[3]


def saved_rules(folder: str) -> list[Any]:
    """What a checkpoint says of its tables' admission."""
    manifest = json.loads(Path(folder, "full", "manifest.json").read_text())
    rules = [table["admission"]["rule"] for table in manifest["tables"]]
    assert all(rule["arguments"]["max_records"] for rule in rules)
    return rules


def test_a_sketch_of_another_size_is_refused_where_columns_are_cut_anew(
    ranks: RankPool, expected: _Expected, tmp_path: Path
) -> None:
    [case] = with_rules([Case(COLUMNS)], expected)
    ranks.run(2, run, case, 0, 2, None, str(tmp_path / "saved"))
    larger = ADMISSION | {"full": Admit.count_sketch(2, max_bytes=2**20)}
    other = replace(case, plan=None, admission=larger)
    with pytest.raises(CheckpointError, match=r"'full.*with the same, or allow 'admission'"):
        run(other, 2, 3, str(tmp_path / "saved"), None)


def test_a_state_dict_goes_on_as_its_model(ranks: RankPool, expected: _Expected) -> None:
    case = Case(ROW_WISE, admission=ADMISSION)
    found = ranks.run(3, eviction_on_ranks.copies, case, 0, 8, STEPS)
    for which in (0, 1):
        assert whole([of_rank[which] for of_rank in found]) == expected.rows


def test_a_plain_bag_goes_on_over_ranks(ranks: RankPool, expected: _Expected) -> None:
    parts = ranks.run(3, eviction_on_ranks.bag_on_ranks, 5, STEPS, ADMISSION["user"])
    assert whole(parts)["user"] == expected.rows["user"]


BAG = {"name": "user", "embedding_dim": 2, "num_embeddings": 9}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"admission": 3}, TypeError, "admission must be an Admit, as Admit.count"),
        (
            {"max_rows": 9, "eviction_groups": 8, "admission": Admit.count(2, max_records=4)},
            ValueError,
            "max_records of admission is 4, and ids fall into 8 groups; pass 8 or more, or set "
            "eviction_groups to a power of two up to 4",
        ),
    ],
)
def test_settings_that_make_no_sense(
    arguments: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"table 'user': .*{message}"):
        HashEmbeddingBagConfig(**BAG, **arguments)  # type: ignore[arg-type]
