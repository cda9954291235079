"""Process groups with backend "hccl"."""

from __future__ import annotations

from pathlib import Path

from warm_scripts import start_ranks, statuses_of

SCRIPT = Path(__file__).with_name("support") / "collectives.py"


def test_collectives_on_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "printed"
    ranks = start_ranks(2, [str(SCRIPT)], output, {}, modules=(), num_templates=1)
    assert statuses_of(ranks, 500) == [0, 0], output.read_text()
