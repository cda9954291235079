"""Keys without a row read what their table says, on any number of ranks and every sharding type.

`testing.ReferenceTable` says which keys have a row of the joined batches of all ranks; a row is the
number of times that it was trained.
"""

from __future__ import annotations

import functools
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
    SIZES,
    WIDTH,
    Case,
    Outcomes,
    Reads,
    batches,
    cases,
    run,
    time_of,
)
from plans import Spec
from rank_pool import RankPool

from recsdk_core import Default, Outcome, init
from recsdk_core.testing import ReferenceTable
from recsdk_core.testing._room import key_hash
from recsdk_sharding import HashEmbeddingBagConfig
from sampling import IS_FULL, crossed

STEPS = 14
FIRST = 2.0
"""What rows begin with."""
DEFAULTS: dict[str, dict[str, Default]] = {
    "constant": {
        "user": Default.constant(0.5),
        "item": Default.zeros(),
        "ad": Default.constant(-2.0),
        "full": Default.constant(3.0),
    },
    "shared": {
        "user": Default.shared_rows(4),
        "item": Default.shared_rows(64),
        "ad": Default.shared_rows(16),
        "full": Default.shared_rows(4),
    },
    "begun": {
        "user": Default.shared_rows(4, begin_with="shared_row"),
        "item": Default.shared_rows(64, begin_with="shared_row"),
        "ad": Default.shared_rows(16),
        "full": Default.shared_rows(8, begin_with="shared_row"),
    },
    "mixed": {
        "user": Default.initial_row(),
        "item": Default.shared_rows(8),
        "ad": Default.constant(1.0),
        "full": Default.initial_row(),
    },
}
"""Of each table, by name."""
KEPT = ("shared", "begun", "mixed") if IS_FULL else ("begun", "mixed")
"""Those with something that a save must keep; in the last two is each kind of default."""
DEVICES = [("cpu", "cpu", "cpu", "cpu"), ("npu", "cpu", "npu", "npu")]
"""On which a model is made, saved and resumed."""
COLUMNS: dict[str, Spec] = dict.fromkeys(RULES, ("column_wise", [(1, 0), (WIDTH - 1, 1)]))


class _Expected:
    """What keys read, and what becomes of them, step by step."""

    def __init__(self, default: dict[str, Default]) -> None:
        self.default = default
        self.outcomes: list[Outcomes] = [{} for _ in range(STEPS)]
        self.reads: list[Reads] = [{} for _ in range(STEPS)]
        for position, name in enumerate(RULES):
            self._train(position, name)

    def _train(self, position: int, name: str) -> None:
        rule = RULES[name]
        limits: dict[str, Any] = {"max_rows": MAX_ROWS, "eviction_groups": GROUPS[name]}
        table = ReferenceTable(WIDTH, name=name, admission=ADMISSION[name], eviction=rule, **limits)
        counts: dict[int, int] = {}
        firsts: dict[int, float] = {}
        reads = self.default[name]
        shared = [FIRST] * (reads.n or 0)
        for step, lists in enumerate(batches(0, STEPS)):
            keys = np.array([key for bag in lists[position] for key in bag])
            times = time_of(step) if rule is not None and rule.by == "time" else None
            with table.lease(step=step + 1) as lease:
                _, outcomes = table.map(keys, True, lease=lease, times=times)
            had_row = {
                key: outcome in (Outcome.FOUND, Outcome.INSERTED)
                for key, outcome in zip(keys.tolist(), outcomes.tolist(), strict=True)
            }
            which = dict.fromkeys(keys.tolist(), 0)
            if reads.n is not None:
                which = {key: (key_hash(key) & 0xFFFF) * reads.n >> 16 for key in which}
            begins_shared = reads.begin_with == "shared_row"
            for key, outcome in zip(keys.tolist(), outcomes.tolist(), strict=True):
                if outcome == Outcome.INSERTED:
                    counts[key] = 0
                    firsts[key] = shared[which[key]] if begins_shared else FIRST
                kept = 0 if had_row[key] else outcome
                self.outcomes[step].setdefault(name, {})[key] = kept
            self.reads[step][name] = {
                key: firsts[key] - counts[key]
                if found
                else shared[which[key]]
                if shared
                else FIRST
                if reads.kind == "initial_row"
                else reads.value
                for key, found in had_row.items()
            }
            for key in keys.tolist():
                if had_row[key]:
                    counts[key] += 1
                elif shared:
                    shared[which[key]] -= 1.0


@functools.cache
def expected_of(kind: str) -> _Expected:
    return _Expected(DEFAULTS[kind])


def with_defaults(found: list[Case], expected: _Expected, **changes: Any) -> list[Case]:
    given: dict[str, Any] = {
        "admission": ADMISSION,
        "default": expected.default,
        "outcomes": expected.outcomes,
        "reads": expected.reads,
        "state": {"initializer": init.Constant(value=FIRST)},
        **changes,
    }
    return [replace(case, **given) for case in found if case.accumulate == 1]


@pytest.mark.parametrize("kind", DEFAULTS)
def test_unsharded_tables_read_their_defaults(kind: str) -> None:
    for case in with_defaults([Case(None), Case(None, is_sequence=True)], expected_of(kind)):
        run(case, 0, STEPS, None, None)


@pytest.mark.parametrize(("world_size", "kind"), crossed(SIZES, DEFAULTS, size=6))
def test_every_sharding_type_reads_the_defaults(
    ranks: RankPool, kind: str, world_size: int
) -> None:
    tried = with_defaults(cases(world_size), expected_of(kind))
    ranks.run(world_size, eviction_on_ranks.run_all, tried, 0, STEPS)


@pytest.mark.parametrize(
    ("world_size", "kind"), crossed(DEVICE_SIZES, DEFAULTS if IS_FULL else KEPT, size=4)
)
def test_devices_read_the_defaults(npus: RankPool, kind: str, world_size: int) -> None:
    tried = [case for case in cases(world_size) if case.local_size is None]
    tried = with_defaults(tried, expected_of(kind), device="npu")
    npus.run(world_size, eviction_on_ranks.run_all, tried, 0, STEPS)


@pytest.mark.parametrize(("kind", "devices"), crossed(KEPT, DEVICES, size=2))
def test_saved_and_resumed_at_another_number_of_ranks(
    ranks: RankPool, npus: RankPool, tmp_path: Path, kind: str, devices: tuple[str, ...]
) -> None:
    ways = [(1, ROW_WISE), (3, ROW_WISE), (2, COLUMNS), (4 if devices[3] == "cpu" else 1, ROW_WISE)]
    ends = [0, 4, 7, 10, STEPS]
    at: str | None = None
    expected = expected_of(kind)
    for number, ((world_size, plan), device) in enumerate(zip(ways, devices, strict=True)):
        to = str(tmp_path / str(number))
        [case] = with_defaults([Case(plan, depth=2, device=device)], expected)
        pool = npus if device == "npu" else ranks
        pool.run(world_size, run, case, ends[number], ends[number + 1], at, to)
        at = to


@pytest.mark.parametrize("default", [0.5, None, "zeros"])
def test_what_is_no_default_is_refused(default: Any) -> None:
    with pytest.raises(TypeError, match="table 'user': default must be a Default, as Default.con"):
        HashEmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=9, default=default)
