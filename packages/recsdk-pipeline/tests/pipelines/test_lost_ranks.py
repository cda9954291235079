"""A rank that dies or hangs ends the others within the process groups' timeout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pipeline_support.launch import TESTS

from rank_templates import Rank
from warm_scripts import start_ranks, statuses_of

NUM_RANKS = 2
GROUP_TIMEOUT_SECONDS = 8
SECONDS_TO_START = 300
SECONDS_TO_NOTICE = 120  # of which the group takes its own; the rest is for a busy machine


@dataclass
class Training:
    """Ranks that train on and on, without torchrun, which would end the others by itself."""

    ranks: list[Rank]
    output: Path
    line: Path
    """A named pipe, for the line that a rank waits for."""

    def wait_until_under_way(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while self.printed().count(" is under way") < NUM_RANKS:  # lines may mix
            assert not any(rank.pipe.poll() for rank in self.ranks), self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.05)

    def printed(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def status_of(self, rank: Rank) -> int | None:
        """Its exit status; None if it dies or does not end."""
        return statuses_of([rank], SECONDS_TO_NOTICE)[0]


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    line, output = tmp_path / "line", tmp_path / "output"
    os.mkfifo(line)
    command = [str(TESTS / "scripts" / "train_forever.py"), getattr(request, "param", "train")]
    variables = {"GROUP_TIMEOUT_SECONDS": str(GROUP_TIMEOUT_SECONDS)}
    ranks = start_ranks(NUM_RANKS, [*command, str(line)], output, variables)
    started = Training(ranks, output, line)
    started.wait_until_under_way()
    yield started
    for rank in ranks:
        rank.end()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_others_end_when_a_rank_is_lost(training: Training, how: signal.Signals) -> None:
    lost, other = training.ranks
    os.kill(lost.pid, how)
    status = training.status_of(other)
    assert status == 1, training.printed()  # an exception, not a signal
    assert "Error" in training.printed()


@pytest.mark.parametrize("training", ["save"], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_others_end_when_a_rank_is_lost_before_the_first_save(
    training: Training, how: signal.Signals
) -> None:
    other, lost = training.ranks  # the first serves torch's store, as torchrun does elsewhere
    os.kill(lost.pid, how)
    with training.line.open("w") as line:
        line.write("go on\n")
    status = training.status_of(other)
    assert status == 1, training.printed()
    assert "Error" in training.printed()
    assert "in save" in training.printed()
