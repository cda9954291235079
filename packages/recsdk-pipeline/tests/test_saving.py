"""Chains saved amid a deep pipeline: one spawn runs the case of cases_of_saving.py."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

from pipeline_support.launch import run_cases

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
PAIRS = list(product((1, 2, 3, 4, 8), repeat=2)) if IS_FULL else [(2, 2), (2, 3), (3, 1)]


def test_chains_saved_amid_a_deep_pipeline(tmp_path: Path) -> None:
    most = max(size for pair in PAIRS for size in pair)
    variables = {"RECSDK_TEST_PAIRS": json.dumps(PAIRS)}
    problems = run_cases("cases_of_saving", most, tmp_path, **variables)
    assert len(problems) == 1
    for found in problems.values():
        assert not found, "\n".join(found)
