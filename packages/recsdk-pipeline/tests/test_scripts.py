"""The documented flow, as a user writes it."""

from __future__ import annotations

import re

import pytest
from pipeline_support.launch import TESTS, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_seven_steps_learn(num_ranks: int) -> None:
    done = run_ranks(num_ranks, str(TESTS / "scripts" / "seven_steps.py"))
    assert done.returncode == 0, done.stdout
    reports = re.findall(r"rank \d epoch (\d): 50 batches, loss ([\d.]+)", done.stdout)
    assert len(reports) == 4 * num_ranks, done.stdout
    first, last = ([float(loss) for epoch, loss in reports if epoch == e] for e in "03")
    assert max(last) < 0.1 < min(first)
