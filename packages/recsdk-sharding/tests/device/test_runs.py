"""Planned sums equal plain ones, for any lengths of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsdk_sharding.device.runs import Runs, plan_runs, run_sums
from recsdk_sharding.placement.devices import row_budget

_BESIDE = Path(__file__).parents[1] / "support" / "run_sums.txt"
ORDERS = _BESIDE if _BESIDE.exists() else Path(__file__).parents[4] / "cpp/tests/data/run_sums.txt"
"""How a run of 1, 2, 3, ... items is added: what the engine is tested against too."""


@given(st.lists(st.integers(1, 70), max_size=12))
def test_sums_are_those_of_the_items(lengths: list[int]) -> None:
    plan = plan_runs(np.array(lengths, dtype=np.int64))
    total = sum(lengths)
    items = torch.arange(1.0, 2 * total + 1).view(total, 2)  # whole numbers: any order is exact
    runs = Runs(
        [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in plan.steps],
        None if plan.firsts is None else torch.from_numpy(plan.firsts),
    )
    found = run_sums(items.clone(), runs)
    expected = [part.sum(0) for part in items.split(lengths)]
    assert torch.equal(found, torch.stack(expected) if lengths else items)


@given(st.lists(st.integers(1, 70), max_size=12))
def test_no_step_touches_an_item_twice_and_few_steps_do(lengths: list[int]) -> None:
    plan = plan_runs(np.array(lengths, dtype=np.int64))
    for targets, sources in plan.steps:
        assert len(np.unique(np.concatenate([targets, sources]))) == 2 * len(targets)
    assert sum(len(targets) for targets, _ in plan.steps) == sum(lengths) - len(lengths)
    assert len(plan.steps) == max(max(lengths, default=1) - 1, 0).bit_length()


def order_of(length: int) -> str:
    """How the items 0 to length - 1 of a run are added, as in the table of orders."""
    terms = [str(item) for item in range(length)]
    while len(terms) > 1:
        pairs = [f"({a}+{b})" for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


def test_the_table_of_orders_is_that_of_neighbours() -> None:
    lines = ORDERS.read_text().splitlines()
    assert lines == [order_of(length) for length in range(1, len(lines) + 1)]


@given(st.lists(st.integers(1, 40), max_size=12))
def test_runs_are_added_in_the_order_of_the_table(lengths: list[int]) -> None:
    plan = plan_runs(np.array(lengths, dtype=np.int64))
    terms = [str(item) for length in lengths for item in range(length)]
    for targets, sources in plan.steps:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            terms[target] = f"({terms[target]}+{terms[source]})"
    firsts = range(len(terms)) if plan.firsts is None else plan.firsts.tolist()
    orders = ORDERS.read_text().splitlines()
    assert [terms[first] for first in firsts] == [orders[length - 1] for length in lengths]


def test_the_budget_of_a_rank_holds_what_the_hash_gives_it() -> None:
    assert row_budget(1000, 1.0) == 1000
    assert row_budget(10, 1 / 4) == 10
    assert 250_000 + 2_000 < row_budget(1_000_000, 1 / 4) < 250_000 + 3_000
