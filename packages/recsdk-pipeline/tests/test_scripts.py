"""The documented flow, as a user writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pipeline_support.launch import TESTS, run_ranks

SCRIPT = TESTS / "scripts" / "seven_steps.py"
# All that a user changes for another device.
FOR_NPU = (
    ("\nimport torch\n", "\nimport torch\nimport torch_npu\n"),
    ('torch.device("cpu")', 'torch.device("npu")'),
    ('init_process_group(backend="gloo")', 'init_process_group(backend="hccl")'),
)


def assert_learns(num_ranks: int, script: Path, **environment: str) -> str:
    """Each rank's loss falls; returns the output."""
    done = run_ranks(num_ranks, str(script), **environment)
    assert done.returncode == 0, done.stdout
    reports = re.findall(r"rank \d epoch (\d): 50 batches, loss ([\d.]+)", done.stdout)
    assert len(reports) == 4 * num_ranks, done.stdout
    first, last = ([float(loss) for epoch, loss in reports if epoch == e] for e in "03")
    assert max(last) < 0.1 < min(first)
    return done.stdout


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_seven_steps_learn(num_ranks: int) -> None:
    assert_learns(num_ranks, SCRIPT)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_seven_steps_learn_on_a_simulated_npu(num_ranks: int, tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    for before, after in FOR_NPU:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = tmp_path / "seven_steps_npu.py"
    script.write_text(text)
    output = assert_learns(num_ranks, script, RECSDK_SIM_NPU="1", RECSDK_SIM_NPU_ASYNC="1")
    assert output.count("is a simulation") == 1


def test_a_table_in_device_memory_learns_without_sharding() -> None:
    script = str(TESTS / "scripts" / "device_memory.py")
    done = run_ranks(1, script, RECSDK_SIM_NPU="1", RECSDK_SIM_NPU_ASYNC="1")
    assert done.returncode == 0, done.stdout
    reports = re.findall(r"step \d+: loss ([\d.]+), (\d+) rows", done.stdout)
    (first, few), (last, many) = [(float(loss), int(rows)) for loss, rows in reports]
    assert last < 0.2 < first
    assert few < many == 400
