"""Planned sums equal plain ones, for any lengths of segments."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsdk_sharding.device.kernels import GradientIndex, sum_gradients
from recsdk_sharding.device.segments import Segments, plan_segments
from recsdk_sharding.placement.devices import row_budget


@given(st.lists(st.integers(1, 70), max_size=12))
def test_sums_are_those_of_the_items(lengths: list[int]) -> None:
    plan = plan_segments(np.array(lengths, dtype=np.int64))
    total = sum(lengths)
    items = torch.arange(1.0, 2 * total + 1).view(total, 2)  # whole numbers: any order is exact
    segments = Segments(
        [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in plan.steps],
        None if plan.firsts is None else torch.from_numpy(plan.firsts),
    )
    every = torch.arange(total)
    found = sum_gradients(items, GradientIndex(every, every, None, segments))
    expected = [part.sum(0) for part in items.split(lengths)]
    assert torch.equal(found, torch.stack(expected) if lengths else items)


@given(st.lists(st.integers(1, 70), max_size=12))
def test_no_step_touches_an_item_twice_and_few_steps_do(lengths: list[int]) -> None:
    plan = plan_segments(np.array(lengths, dtype=np.int64))
    for targets, sources in plan.steps:
        assert len(np.unique(np.concatenate([targets, sources]))) == 2 * len(targets)
    assert sum(len(targets) for targets, _ in plan.steps) == sum(lengths) - len(lengths)
    assert len(plan.steps) == max(max(lengths, default=1) - 1, 0).bit_length()


def test_the_budget_of_a_rank_holds_what_the_hash_gives_it() -> None:
    assert row_budget(1000, 1) == 1000
    assert row_budget(10, 4) == 10
    assert 250_000 + 2_000 < row_budget(1_000_000, 4) < 250_000 + 3_000
