"""Keys without a row read what their table says, on any number of ranks and every sharding type.

`testing.ReferenceTable` says which keys have a row of the joined batches of all ranks; a row is the
number of times that it was trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import eviction_on_ranks
import numpy as np
import pytest
from eviction_on_ranks import (
    ADMISSION,
    GROUPS,
    MAX_ROWS,
    RULES,
    WIDTH,
    Case,
    Outcomes,
    Reads,
    batches,
    cases,
    run,
    time_of,
)
from rank_pool import RankPool

from recsdk_core import Default, Outcome
from recsdk_core.testing import ReferenceTable
from recsdk_sharding import HashEmbeddingBagConfig

STEPS = 14
DEFAULT: dict[str, Default] = {
    "user": Default.constant(0.5),
    "item": Default.zeros(),
    "ad": Default.constant(-2.0),
    "full": Default.constant(3.0),
}
"""Of each table."""


class _Expected:
    """What keys read, and what becomes of them, step by step."""

    def __init__(self) -> None:
        self.outcomes: list[Outcomes] = [{} for _ in range(STEPS)]
        self.reads: list[Reads] = [{} for _ in range(STEPS)]
        for position, name in enumerate(RULES):
            self._train(position, name)

    def _train(self, position: int, name: str) -> None:
        rule = RULES[name]
        limits: dict[str, Any] = {"max_rows": MAX_ROWS, "eviction_groups": GROUPS[name]}
        table = ReferenceTable(WIDTH, name=name, admission=ADMISSION[name], eviction=rule, **limits)
        counts: dict[int, int] = {}
        for step, lists in enumerate(batches(0, STEPS)):
            keys = np.array([key for bag in lists[position] for key in bag])
            times = time_of(step) if rule is not None and rule.by == "time" else None
            with table.lease(step=step + 1) as lease:
                _, outcomes = table.map(keys, True, lease=lease, times=times)
            had_row = {
                key: outcome in (Outcome.FOUND, Outcome.INSERTED)
                for key, outcome in zip(keys.tolist(), outcomes.tolist(), strict=True)
            }
            for key, outcome in zip(keys.tolist(), outcomes.tolist(), strict=True):
                if outcome == Outcome.INSERTED:
                    counts[key] = 0
                kept = 0 if had_row[key] else outcome
                self.outcomes[step].setdefault(name, {})[key] = kept
            value = DEFAULT[name].value
            self.reads[step][name] = {
                key: -float(counts[key]) if found else value for key, found in had_row.items()
            }
            for key in keys.tolist():
                if had_row[key]:
                    counts[key] += 1


@pytest.fixture(scope="module")
def expected() -> _Expected:
    return _Expected()


def with_defaults(found: list[Case], expected: _Expected, **changes: Any) -> list[Case]:
    given: dict[str, Any] = {
        "admission": ADMISSION,
        "default": DEFAULT,
        "outcomes": expected.outcomes,
        "reads": expected.reads,
        **changes,
    }
    return [replace(case, **given) for case in found if case.accumulate == 1]


def test_unsharded_tables_read_their_defaults(expected: _Expected) -> None:
    for case in with_defaults([Case(None), Case(None, is_sequence=True)], expected):
        run(case, 0, STEPS, None, None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sharding_type_reads_the_defaults(
    ranks: RankPool, expected: _Expected, world_size: int
) -> None:
    tried = with_defaults(cases(world_size), expected)
    ranks.run(world_size, eviction_on_ranks.run_all, tried, 0, STEPS)


@pytest.mark.parametrize("world_size", [1, 3])
def test_devices_read_the_defaults(npus: RankPool, expected: _Expected, world_size: int) -> None:
    tried = [case for case in cases(world_size) if case.local_size is None]
    tried = with_defaults(tried, expected, device="npu")
    npus.run(world_size, eviction_on_ranks.run_all, tried, 0, STEPS)


@pytest.mark.parametrize("default", [0.5, None, "zeros"])
def test_what_is_no_default_is_refused(default: Any) -> None:
    with pytest.raises(TypeError, match="table 'user': default must be a Default, as Default.con"):
        HashEmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=9, default=default)
