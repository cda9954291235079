"""The page that spreads plain modules over ranks, on two ranks beside the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import python_of
from warm_scripts import start_ranks, statuses_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "spread_plain_modules.md"
ALONE = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
SECONDS_TO_END = 600
THREE_LINES = ("host_env = ", "sharders = ", "model = DistributedModelParallel(")


def losses_of(source: str, folder: Path, num_ranks: int) -> list[float]:
    script, output = folder / "page.py", folder / f"printed_by_{num_ranks}"
    script.write_text(source)
    ranks = start_ranks(num_ranks, [str(script)], output, {}, folder=folder, num_templates=1)
    statuses, printed = statuses_of(ranks, SECONDS_TO_END), output.read_text(errors="replace")
    assert statuses == [0] * num_ranks, printed
    return [float(line.split()[1]) for line in printed.splitlines() if line[:4] == "loss"]


def test_two_ranks_train_what_the_plain_loop_trains(tmp_path: Path) -> None:
    source = python_of(PAGE)
    lines = source.splitlines(keepends=True)
    plain = [line for line in lines if not line.startswith(THREE_LINES)]
    assert len(plain) == len(lines) - 3
    expected = losses_of("".join(plain), tmp_path, 1)
    assert len(expected) == 10
    assert expected[-1] < 0.1 * expected[0]
    assert ALONE in source
    on_ranks = source.replace(ALONE, 'dist.init_process_group("gloo")')
    assert losses_of(on_ranks, tmp_path, 2) == pytest.approx(expected, rel=1e-3, abs=2e-6)
