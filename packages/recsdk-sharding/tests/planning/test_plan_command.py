"""`recsdk plan`: tables of described data are planned as the planner plans them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from recsdk_sharding.planning.command import plan

COLUMNS = [
    {"name": "label", "ids": None},
    {"name": "user", "ids": {"num_ids": 1000, "num_distinct": 300_000, "zipf": None}},
    {"name": "seen", "ids": {"num_ids": 20_000, "num_distinct": 5_000_000, "zipf": None}},
]


def described(folder: Path, columns: Any = COLUMNS) -> Path:
    path = folder / "clicks.json"
    text = {"format": "recsdk.data.describe/1", "rows": 1000, "columns": columns}
    path.write_text(json.dumps(text))
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(plan, list(map(str, arguments)))


def planned(output: str) -> dict[str, list[str]]:
    """The cells of each table's line, by its name."""
    lines = [line.split() for line in output.splitlines()]
    return {cells[1]: cells[2:] for cells in lines if cells[:1] == ["tables"]}


def test_rows_and_traffic_are_those_of_the_description(tmp_path: Path) -> None:
    path = described(tmp_path)
    done = run(path, "--world-size", 4, "--dim", 32, "--dim", "seen=16", "--growth", 2)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("4 ranks, cpu, batches of 4096 on each")
    tables = planned(done.output)
    assert {name: cells[1] for name, cells in tables.items()} == {"user": "32", "seen": "16"}
    assert tables["seen"][3] == "2,500,000"  # 5,000,000 twice, over 4 ranks
    seen, user = (float(tables[name][-1]) for name in ("seen", "user"))
    assert seen > 5 * user  # twenty ids a row
    alone = planned(run(path, "--column", "user", "--optimizer", "adam").output)
    assert list(alone) == ["user"]
    # 64 columns of 12 bytes, a key and its place in the index, of 300,000 rows.
    assert float(alone["user"][4]) == pytest.approx(300_000 * (64 * 12 + 8 + 25) / 2**20, rel=0.1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--dim", "x"], "--dim must be DIM or COLUMN=DIM, such as user=128, got 'x'"),
        (["--dim", "0"], "--dim must be DIM or COLUMN=DIM, such as user=128, got '0'"),
        (["--dim", "item=8"], "--dim must be of a column among user, seen, got 'item=8'"),
        (["--column", "user", "--dim", "seen=8"], "a column among user, got 'seen=8'"),
        (["--column", "label"], "clicks.json, user, seen, got 'label'"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], problem: str, tmp_path: Path) -> None:
    done = run(described(tmp_path), *arguments)
    assert done.exit_code == 2, done.output
    assert problem in done.output
    assert not dist.is_initialized()


def test_too_little_memory_is_told_with_what_is_needed(tmp_path: Path) -> None:
    done = run(described(tmp_path), "--host-memory", "0.1")
    assert done.exit_code == 1, done.output
    [line] = done.output.splitlines()
    told = re.fullmatch(
        r"Error: no plan fits 1 rank of 0.1 GiB; give more --world-size, more --host-memory or a "
        r"smaller --dim; the tables take ([0-9.]+) GiB in all",
        line,
    )
    assert told is not None, line
    assert run(described(tmp_path), "--host-memory", 4 * float(told[1])).exit_code == 0
    assert not dist.is_initialized()


def test_what_is_no_description(tmp_path: Path) -> None:
    path = described(tmp_path, COLUMNS[:1])
    assert "no column has ids" in run(path).output
    for text, problem in (("{", "is no JSON"), ("[]", "not of the format")):
        path.write_text(text)
        assert problem in run(path).output
    path.write_text('{"format": "recsdk.data.describe/1", "rows": 0}')
    assert "clicks.json: columns is missing; describe the data again" in run(path).output
    assert "none.json" in run(tmp_path / "none.json").output
