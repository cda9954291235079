"""The page that spreads plain modules over ranks, on two ranks beside the plain loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pages import python_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "spread_plain_modules.md"
ALONE = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
THREE_LINES = ("host_env = ", "sharders = ", "model = DistributedModelParallel(")


def losses_of(source: str, folder: Path, *launcher: str) -> list[float]:
    script = folder / "page.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line[:4] == "loss"]


def test_two_ranks_train_what_the_plain_loop_trains(tmp_path: Path) -> None:
    source = python_of(PAGE)
    lines = source.splitlines(keepends=True)
    plain = [line for line in lines if not line.startswith(THREE_LINES)]
    assert len(plain) == len(lines) - 3
    expected = losses_of("".join(plain), tmp_path)
    assert len(expected) == 10
    assert expected[-1] < 0.1 * expected[0]
    assert ALONE in source
    on_ranks = source.replace(ALONE, 'dist.init_process_group("gloo")')
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert losses_of(on_ranks, tmp_path, *launcher) == pytest.approx(expected, rel=1e-3, abs=2e-6)
