"""The pipeline over several ranks: one spawn runs every case of cases_of_pipeline.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pipeline_support.launch import TESTS, run_cases

MODULE = "cases_of_pipeline"
CASES = re.findall(r"^def (case_\w+)", (TESTS / f"{MODULE}.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("cases")
    return run_cases(MODULE, 2, folder)


@pytest.mark.parametrize("case", CASES)
def test_case_on_two_ranks(problems: dict[str, list[str]], case: str) -> None:
    assert not problems[case], "\n".join(problems[case])
