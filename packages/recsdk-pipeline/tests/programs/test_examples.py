"""The examples learn from a small synthetic log what a user would expect them to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pipeline_support.launch import TESTS, run_launcher, run_ranks

EXAMPLES = TESTS.parent / "examples"


LONGER = {"dlrm.py", "interactions.py", "move_from_torchrec.py", "next_item.py", "two_tower.py"}
"""Over ranks; and what they share."""


def test_small_examples_stay_small() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert sizes.keys() >= LONGER
    assert [name for name, size in sizes.items() if size >= 80 and name not in LONGER] == []


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
    ("name", "epochs", "num_ranks"), [("two_tower.py", 3, 2), ("next_item.py", 6, 1)]
)
def test_retrieval_beats_popularity(name: str, epochs: int, num_ranks: int) -> None:
    output = run_example(num_ranks, name, "--users", "250", "--epochs", str(epochs))
    (popular,) = figures(output, "recall@10 of the most popular items:")
    assert figures(output, ", recall@10")[-1] > 2 * popular > 0


@pytest.mark.parametrize(
    ("name", "needs", "figure", "at_least"),
    [
        ("retrieval.py", "faiss", "held-out items found", 0.9),
        ("sasrec.py", "", "recall@10", 0.9),
        ("dlrm_parquet.py", "pyarrow", "held-out AUC", 0.72),
    ],
)
def test_small_examples_learn(
    name: str, needs: str, figure: str, at_least: float, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs, reason=f"{needs} is not installed")
    [reached] = figures(run_example(1, name, str(tmp_path)), figure)
    assert reached > at_least


def test_a_model_that_moved_from_torchrec_trains_on_as_it_would_have(tmp_path: Path) -> None:
    [difference] = figures(
        run_example(2, "move_from_torchrec.py", str(tmp_path)), "largest difference of a loss"
    )
    assert difference < 1e-5


def test_a_server_follows_an_online_training(tmp_path: Path) -> None:
    output = run_example(1, "online.py", str(tmp_path))
    losses = figures(output, "loss")
    assert "with 8 deltas" in output
    assert len(losses) == 8
    assert max(losses) < 0.6  # of items that are new each hour; 0.693 is to know nothing


def test_lightning_trains_rows_and_layers() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    output = run_example(1, "with_lightning.py")
    assert figures(output, "after")[0] < figures(output, "before")[0] / 2
    assert "300 users and 200 items have rows" in output


def test_accelerate_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    output = run_example(1, "with_accelerate.py", str(tmp_path))
    [first], [_, last] = figures(output, "loss"), figures(output, "then")
    assert last < first / 2
    assert "the resumed run's loss is the same" in output


def test_a_job_whose_rank_dies_ends_as_if_it_had_not(tmp_path: Path) -> None:
    ended = "to 40: loss"
    whole = figures(run_example(2, "resumable.py", str(tmp_path / "whole")), ended)
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    command = (str(EXAMPLES / "resumable.py"), str(tmp_path / "stopped"))
    done = run_launcher(*options, *command, DIE_AT_STEP="25")
    assert done.returncode == 0, done.stdout
    assert f"from step 20 {ended}" in done.stdout
    assert figures(done.stdout, ended) == whole


def test_a_server_over_http_follows_the_demo(tmp_path: Path) -> None:
    for needs in ("fastapi", "httpx", "matplotlib", "uvicorn"):
        pytest.importorskip(needs, reason=f"{needs} is not installed")
    options = (str(tmp_path), "--steps", "60", "--requests", "100")
    output = run_example(1, "http_serving/train_and_serve.py", *options)
    assert "step 120: 3 deltas, all served" in output
    [trained], [served], [old] = (
        figures(output, f"{model}: held-out AUC") for model in ("trainer", "served", "not followed")
    )
    assert abs(trained - served) < 0.002 < trained - old  # of int8
    assert served > 0.6
    assert "100 requests of 16 examples, 4 at once" in output
    assert (tmp_path / "freshness.png").read_bytes().startswith(b"\x89PNG")
