"""The pipelines over several ranks: one spawn runs the cases of cases_of_*.py named here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pipeline_support.launch import SIMULATED_NPU, cases_asked_for, cases_of, run_cases

from sampling import sampled

MODULES = (
    "pipeline_support.cases_of_pipeline",
    "pipeline_support.cases_of_evaluation",
    "pipeline_support.cases_of_failing",
    "pipeline_support.cases_of_leaving",
    "pipeline_support.cases_of_programs",
    "pipeline_support.cases_of_raw_bags",
    "pipeline_support.cases_of_random_numbers",
)
MODULES_ON_CPU = (
    *MODULES,
    "pipeline_support.cases_of_resuming",
    "pipeline_support.cases_of_telemetry",
    "pipeline_support.cases_of_one_alone",
)


# fbgemm's kernels, which torchrec's own tables need, exist for cpu and cuda only.
CASES_WITHOUT_FBGEMM = [n for n in cases_of(MODULES) if not re.search("torchrec|mixed", n)]


@pytest.fixture(scope="module")
def problems(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("cases")
    return run_cases(",".join(MODULES_ON_CPU), 2, folder, cases_asked_for(request))


@pytest.mark.parametrize("case", cases_of(MODULES_ON_CPU))
def test_case_on_two_ranks(problems: dict[str, list[str]], case: str) -> None:
    assert not problems[case], "\n".join(problems[case])


@pytest.fixture(scope="module")
def problems_on_npu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("cases_on_npu")
    return run_cases(",".join(MODULES), 2, folder, cases_asked_for(request), **SIMULATED_NPU)


@pytest.mark.parametrize("case", sampled(CASES_WITHOUT_FBGEMM, 12))
def test_case_on_two_simulated_npus(problems_on_npu: dict[str, list[str]], case: str) -> None:
    assert not problems_on_npu[case], "\n".join(problems_on_npu[case])
