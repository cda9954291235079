"""The pipelines on one device: the simulated NPU, or with `make test-cuda` a CUDA device.

test_pipeline_on_ranks.py runs these cases on two simulated NPUs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from device_type import IS_CUDA
from pipeline_support.launch import SIMULATED_NPU, cases_asked_for, cases_of, run_cases

from sampling import sampled

MODULES = (
    "pipeline_support.cases_of_pipeline",
    "pipeline_support.cases_of_evaluation",
    "pipeline_support.cases_of_programs",
    "pipeline_support.cases_of_raw_bags",
    "pipeline_support.cases_of_random_numbers",
    "pipeline_support.cases_of_rec_sdk",
)
# Torchrec's own tables need fbgemm's kernels. Who ends early does so before another rank.
CASES = [name for name in cases_of(MODULES) if not re.search("torchrec|mixed|uneven", name)]


@pytest.fixture(scope="module")
def problems(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    variables = {"RECSDK_TEST_DEVICE": "cuda"} if IS_CUDA else SIMULATED_NPU
    folder: Path = tmp_path_factory.mktemp("cases_on_one_device")
    return run_cases(",".join(MODULES), 1, folder, cases_asked_for(request), **variables)


@pytest.mark.parametrize("case", CASES if IS_CUDA else sampled(CASES, 4))
def test_case_on_one_device(problems: dict[str, list[str]], case: str) -> None:
    assert not problems[case], "\n".join(problems[case])
