"""Chains saved amid a deep pipeline: each spawn runs the case of cases_of_saving.py."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest
from pipeline_support.launch import run_cases

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
SIZES = (1, 2, 3, 4, 8)
# By the number of ranks that they need, so that none of them takes too long.
PAIRS = (
    [[pair for pair in product(SIZES, repeat=2) if max(pair) == most] for most in SIZES]
    if IS_FULL
    else [[(2, 2), (2, 3), (3, 1)]]
)


@pytest.mark.parametrize("pairs", PAIRS, ids=lambda pairs: f"{max(map(max, pairs))}ranks")
def test_chains_saved_amid_a_deep_pipeline(pairs: list[tuple[int, int]], tmp_path: Path) -> None:
    variables = {"RECSDK_TEST_PAIRS": json.dumps(pairs)}
    problems = run_cases(
        "pipeline_support.cases_of_saving", max(map(max, pairs)), tmp_path, **variables
    )
    assert len(problems) == 1
    for found in problems.values():
        assert not found, "\n".join(found)
