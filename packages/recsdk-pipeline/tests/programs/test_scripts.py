"""The documented flow, as a user writes it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from device_type import IS_CUDA
from pipeline_support.launch import TESTS, run_launcher, run_ranks, run_under_torchrun

from sampling import IS_FULL

SCRIPT = TESTS / "scripts" / "seven_steps.py"
# All that a user changes for another device.
FOR_NPU = (
    ("\nimport torch\n", "\nimport torch\nimport torch_npu\n"),
    ('torch.device("cpu")', 'torch.device("npu")'),
    ('init_process_group(backend="gloo")', 'init_process_group(backend="hccl")'),
)
FOR_CUDA = (
    ('torch.device("cpu")', 'torch.device("cuda")'),
    ('init_process_group(backend="gloo")', 'init_process_group(backend="nccl")'),
)

# Means, and first values by a function of the user's.
MEANS = (
    (
        "\n\n# Step 3:",
        "\n\ndef small_values(row):\n    row.uniform_(-0.05, 0.05).add_(0.001)\n\n\n# Step 3:",
    ),
    (
        "feature_names=[feature],\n",
        "feature_names=[feature], pooling=PoolingType.MEAN, init_fn=small_values,\n",
    ),
    (
        "from torchrec.optim.keyed",
        "from torchrec.modules.embedding_configs import PoolingType\nfrom torchrec.optim.keyed",
    ),
)
SIMULATED_NPU = {"RECSDK_SIM_NPU": "1", "RECSDK_SIM_NPU_ASYNC": "1"}


Run = Callable[..., subprocess.CompletedProcess[str]]


def assert_learns(run: Run, num_ranks: int, script: Path, **environment: str) -> str:
    """Each rank's loss falls; what was printed."""
    done = run(num_ranks, str(script), **environment)
    assert done.returncode == 0, done.stdout
    reports = re.findall(r"rank \d epoch (\d): 50 batches, loss ([\d.]+)", done.stdout)
    assert len(reports) == 3 * num_ranks, done.stdout
    first, last = ([float(loss) for epoch, loss in reports if epoch == e] for e in "02")
    assert max(last) < 0.1 < min(first)
    return done.stdout


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_seven_steps_learn(num_ranks: int) -> None:
    assert_learns(run_ranks, num_ranks, SCRIPT)


def changed(changes: Sequence[tuple[str, str]], folder: Path) -> Path:
    """The script with changes, each in one place."""
    text = SCRIPT.read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = folder / "seven_steps_changed.py"
    script.write_text(text)
    return script


def run_torchrun_warm(
    num_ranks: int, script: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """torchrun, whose ranks have imported torchrec already."""
    return run_launcher("--standalone", "--nproc-per-node", str(num_ranks), script, **variables)


ON_NPUS: list[tuple[Run, int, Sequence[tuple[str, str]]]]
ON_NPUS = [(run_torchrun_warm, 2, FOR_NPU + MEANS)]
if IS_FULL:
    ON_NPUS += [(run_ranks, 1, FOR_NPU), (run_ranks, 4, FOR_NPU), (run_under_torchrun, 2, FOR_NPU)]


@pytest.mark.parametrize(("run", "num_ranks", "changes"), ON_NPUS)
def test_seven_steps_learn_on_a_simulated_npu(
    run: Run, num_ranks: int, changes: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    printed = assert_learns(run, num_ranks, changed(changes, tmp_path), **SIMULATED_NPU)
    if run is run_under_torchrun:  # warm ranks say it before their output is kept
        assert printed.count("is a simulation") == 1


@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device; make test-cuda")
def test_seven_steps_learn_on_a_cuda_device(tmp_path: Path) -> None:
    assert_learns(run_ranks, 1, changed(FOR_CUDA + MEANS, tmp_path))


def test_seven_steps_can_be_changed_for_cuda(tmp_path: Path) -> None:
    compile(changed(FOR_CUDA + MEANS, tmp_path).read_text(), "seven_steps.py", "exec")


def test_a_table_in_device_memory_learns_without_sharding() -> None:
    script = str(TESTS / "scripts" / "device_memory.py")
    done = run_ranks(1, script, **SIMULATED_NPU)
    assert done.returncode == 0, done.stdout
    reports = re.findall(r"step \d+: loss ([\d.]+), (\d+) rows", done.stdout)
    (first, few), (last, many) = [(float(loss), int(rows)) for loss, rows in reports]
    assert last < 0.2 < first
    assert few < many == 400
