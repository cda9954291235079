"""What Rec SDK's own tests of admission, expiry and clicks check holds here, cpu and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_support.launch import SIMULATED_NPU, run_cases

from sampling import crossed


@pytest.mark.parametrize(("num_ranks", "device"), crossed((1, 2), ("cpu", "npu"), size=2))
def test_cases(tmp_path: Path, num_ranks: int, device: str) -> None:
    variables = SIMULATED_NPU if device == "npu" else {}
    found = run_cases("pipeline_support.cases_of_rec_sdk", num_ranks, tmp_path, **variables)
    assert found
    for name, problems in found.items():
        assert not problems, "\n".join([name, *problems])
