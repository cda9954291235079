"""Ranks are killed amid saves: what was told as saved is there and whole, or something later."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pipeline_support.chains import saves_in, sum_of_rows
from pipeline_support.launch import TESTS
from pipeline_support.model import WIDTH

from quick_folders import quick_folder
from rank_templates import Rank
from recsdk_core import CheckpointError, Table, optim
from recsdk_core.checkpoint import open_checkpoint
from sampling import SEED, crossed
from warm_scripts import start_ranks

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SECONDS_TO_START = 300
SECONDS_TO_NOTICE = 120
NUM_SAVED = 14
"""By then most paths were saved to."""
NAMES = [f"{name}_{rank}_{k}" for name in ("people", "things") for rank in (0, 1) for k in range(3)]
PATHS = [*NAMES, "all_0", "all_3", "all_6"]
TABLES = {"people": WIDTH, "things": WIDTH}
DIFFERENCES = ("optimizer", "seed", "initializer")


@pytest.mark.parametrize(
    ("how", "lost", "what"),
    crossed(SIGNALS, ([0], [1], [0, 1]), ("paths", "chains"), size=4),
    ids=str,
)
def test_what_was_told_as_saved_is_there(
    tmp_path: Path, how: signal.Signals, lost: list[int], what: str
) -> None:
    draw = random.Random(f"{SEED} {how} {lost} {what}")
    with quick_folder() as folder:
        output = tmp_path / "output"
        command = [str(TESTS / "scripts" / "save_forever.py"), folder, what]
        ranks = start_ranks(2, command, output, {"GROUP_TIMEOUT_SECONDS": "20"})
        try:
            wait_until_saved(ranks, output)
            time.sleep(0.1 * draw.random())
            for rank in lost:
                os.kill(ranks[rank].pid, how)
            for rank in ranks:
                assert rank.pipe.poll(SECONDS_TO_NOTICE), output.read_text()
        finally:
            for rank in ranks:
                rank.end()
        told = told_by(output)
        if what == "chains":
            check_chains(Path(folder), told)
            return
        assert set(told) <= {f"{folder}/{name}" for name in PATHS}
        for name in PATHS:
            check(f"{folder}/{name}", told.get(f"{folder}/{name}"))
        assert sorted(path.name for path in Path(folder).iterdir()) == sorted(PATHS)


def wait_until_saved(ranks: Sequence[Rank], output: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while not output.exists() or output.read_text().count("saved ") < NUM_SAVED:
        assert not any(rank.pipe.poll() for rank in ranks), output.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told_by(output: Path) -> dict[str, int]:
    """The step of the last save that each path was told to have."""
    lines = re.findall(r"saved (\S+) (\d+)\n", output.read_text(errors="replace"))
    return {path: int(step) for path, step in lines}


def check_chains(run: Path, told: dict[str, int]) -> None:
    """The latest save is the last one told, or later; and each that is there has all its rows."""
    saves = saves_in(run)
    step = open_checkpoint(saves[-1]).manifest.step
    assert step is not None
    assert step >= max(told.values())
    for save in saves:
        found = open_checkpoint(save)
        for entry in found.manifest.tables:
            table = new_table(entry.name)
            table.load(save, name=entry.name, allow=("seed", "initializer"))
            assert sum_of_rows(table) == found.user_state()["rows"][entry.name], save


def check(path: str, told: int | None) -> None:
    """What is there is whole, and not from before what was told; the next save leaves no rest."""
    try:
        check_whole(path, told or 0)
    except CheckpointError as error:
        if told is not None or "there is no checkpoint" not in str(error):
            raise
    new_table("people").save(path, overwrite=True)
    assert len(list(Path(path).iterdir())) == 2


def check_whole(path: str, told: int) -> None:
    found = open_checkpoint(path)
    assert found.manifest.step is not None
    assert found.manifest.step >= told
    state = found.user_state()
    for entry in found.manifest.tables:
        table = new_table(entry.name)
        table.load(path, name=entry.name, allow=DIFFERENCES)
        assert len(table) > 0
        assert state is None or len(table) == state["num_rows"]


def new_table(name: str) -> Table:
    return Table(TABLES[name], name=name, optimizer=optim.Adagrad(lr=0.1))
