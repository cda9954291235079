"""A rank that dies or hangs ends the others within the process groups' timeout."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from pipeline_support.launch import TESTS, environment

NUM_RANKS = 2
GROUP_TIMEOUT_SECONDS = 8
SECONDS_TO_NOTICE = 120  # of which the group takes its own; the rest is for a busy machine


def start_ranks(then: str) -> list[subprocess.Popen[str]]:
    """Ranks without torchrun, which would end the others by itself."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {
        **environment(),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NUM_RANKS),
        "GROUP_TIMEOUT_SECONDS": str(GROUP_TIMEOUT_SECONDS),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(TESTS / "scripts" / "train_forever.py"), then],
            env={**shared, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    started = start_ranks(getattr(request, "param", "train"))
    for rank, process in enumerate(started):
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == f"rank {rank} is under way\n":
                break
        assert process.poll() is None, "".join(lines)
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_others_end_when_a_rank_is_lost(
    ranks: list[subprocess.Popen[str]], how: signal.Signals
) -> None:
    lost, other = ranks
    lost.send_signal(how)
    start = time.monotonic()
    output, _ = other.communicate(timeout=SECONDS_TO_NOTICE)
    assert time.monotonic() - start < SECONDS_TO_NOTICE
    assert other.returncode > 0  # an exception, not a signal
    assert "Error" in output


@pytest.mark.parametrize("ranks", ["save"], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_others_end_when_a_rank_is_lost_before_the_first_save(
    ranks: list[subprocess.Popen[str]], how: signal.Signals
) -> None:
    other, lost = ranks  # the first serves torch's store, as torchrun itself does elsewhere
    lost.send_signal(how)
    output, _ = other.communicate(input="go on\n", timeout=SECONDS_TO_NOTICE)
    assert other.returncode > 0
    assert "Error" in output
    assert "in save" in output
