"""Pipelines of any depth give what training step by step gives, whatever is called between.

The ranks compare the two, in `run_calls`, and say what they have found equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_support.random_calls import SETTINGS, Calls, Chains, calls_of, is_legal, run_calls
from random_programs import APART
from rank_pool import RankPool, npu_pool

from covering import covering
from sampling import SEED, sampled

ROWS = covering(SETTINGS, is_legal, APART)
CALLS = [
    calls_of(ROWS[number % len(ROWS)], 1_000 * SEED + number)
    for number in sampled(range(3 * len(ROWS)), 16)
]


def place_of(calls: Calls) -> tuple[Any, ...]:
    """Programs on as many ranks follow one another, which so keep their groups."""
    parts = calls.program.parts
    return calls.program.row["device"], [part.world_size for part in parts]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    made = {"cpu": RankPool(4), "npu": npu_pool(4)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("calls", sorted(CALLS, key=place_of), ids=lambda calls: str(calls.seed))
def test_pipelines_do_as_steps_one_by_one(
    pools: dict[str, RankPool], tmp_path: Path, calls: Calls
) -> None:
    chains: Chains = [], []
    for number, part in enumerate(calls.program.parts):
        arguments = calls, number, str(tmp_path), chains
        results = pools[part.device].run(part.world_size, run_calls, *arguments)
        chains, _, is_closed = results[0]
        compared = {tuple(notes) for _, notes, _ in results}
        assert len(compared) == 1, "ranks have compared different things"
        assert is_closed or "rows at the end" in compared.pop()
        if is_closed:
            pools[part.device].renew()
