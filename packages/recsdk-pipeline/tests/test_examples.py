"""The examples learn from a small synthetic log what a user would expect them to."""

from __future__ import annotations

import re

import pytest
from pipeline_support.launch import TESTS, run_ranks

EXAMPLES = TESTS.parent / "examples"


def figures(text: str, name: str) -> list[float]:
    """What an example printed after `name`, in order."""
    return [float(figure) for figure in re.findall(rf"{re.escape(name)} ([01]\.\d+)", text)]


def run_example(num_ranks: int, name: str, *options: str) -> str:
    done = run_ranks(num_ranks, str(EXAMPLES / name), *options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_dlrm_tells_clicks_from_others() -> None:
    output = run_example(2, "dlrm.py", "--examples", "20000", "--epochs", "1")
    assert figures(output, "held-out AUC")[-1] > 0.6


@pytest.mark.parametrize(
    ("name", "epochs", "num_ranks"), [("two_tower.py", 4, 2), ("next_item.py", 8, 1)]
)
def test_retrieval_beats_popularity(name: str, epochs: int, num_ranks: int) -> None:
    output = run_example(num_ranks, name, "--users", "400", "--epochs", str(epochs))
    (popular,) = figures(output, "recall@10 of the most popular items:")
    assert figures(output, ", recall@10")[-1] > 2 * popular > 0
