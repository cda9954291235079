"""Stopping and resuming over several ranks: one spawn runs the cases of cases_of_resuming.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pipeline_support.launch import TESTS, cases_asked_for, run_cases

from recsdk_pipeline import HybridTrainPipelineSparseDist

MODULE = "cases_of_resuming"
CASES = re.findall(r"^def (case_\w+)", (TESTS / f"{MODULE}.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def problems(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("cases")
    return run_cases(MODULE, 2, folder, cases_asked_for(request))


@pytest.mark.parametrize("case", CASES)
def test_case_on_two_ranks(problems: dict[str, list[str]], case: str) -> None:
    assert not problems[case], "\n".join(problems[case])


def test_data_that_cannot_tell_its_position_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="state_dict"):
        HybridTrainPipelineSparseDist(model, optimizer, torch.device("cpu"), data=[1, 2])
