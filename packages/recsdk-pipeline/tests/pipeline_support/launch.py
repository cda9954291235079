"""Runs scripts on ranks, warm ones or torchrun's; many cases share ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import warm_scripts
from rank_templates import Rank

TESTS = Path(__file__).resolve().parents[1]
SECONDS_TO_END = 500
DIED = 70  # the status of a rank that could not say its own


def environment() -> dict[str, str]:
    """The environment of a rank: one thread, and the tests' own modules on the path."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def torchrun(num_ranks: int, *command: str) -> list[str]:
    """The command line that runs `command` (a script or -m module, with arguments) on ranks."""
    options = ["--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *options, *command]


def run_ranks(num_ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` on ranks that have imported torchrec already; return its status and output.

    `variables` are added to the environment. The status is that of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        ranks = warm_scripts.start_ranks(num_ranks, command, output, variables)
        return _ended(command, ranks, output)


def run_launcher(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `recsdk demo` or torchrun, as under_torchrun.py says, whose ranks are warm."""
    script = str(TESTS / "scripts" / "under_torchrun.py")
    # The store of the launcher would be the ranks' too, who are forked from it.
    variables = {**variables, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        started = warm_scripts.start_scripts([script, *command], output, [variables])
        return _ended(command, started, output)


def _ended(
    command: Sequence[str], started: Sequence[Rank], output: Path
) -> subprocess.CompletedProcess[str]:
    statuses = warm_scripts.statuses_of(started, SECONDS_TO_END)
    failed = [DIED if status is None else status for status in statuses if status != 0]
    text = output.read_text(errors="replace")
    return subprocess.CompletedProcess(command, failed[0] if failed else 0, text)


def run_under_torchrun(
    num_ranks: int, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `command` on ranks to its end, and return its status and output.

    `variables` are added to the environment. Ranks that don't end in time are aborted, all of
    them; each prints where its threads stand, and AssertionError carries that.
    """
    process = subprocess.Popen(
        torchrun(num_ranks, *command),
        env={**environment(), "PYTHONFAULTHANDLER": "1", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        for rank in ranks_of(process):
            os.kill(rank, signal.SIGABRT)
        output, _ = process.communicate()
        raise AssertionError(f"{command} did not end in {SECONDS_TO_END} s:\n{output}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """The process ids of torchrun's children."""
    task = Path("/proc", str(launcher.pid), "task")
    return [int(pid) for file in task.glob("*/children") for pid in file.read_text().split()]


SIMULATED_NPU = {
    "RECSDK_SIM_NPU": "1",
    "RECSDK_SIM_NPU_ASYNC": "1",
    "RECSDK_TEST_DEVICE": "npu",
}
"""What makes `run_cases` run them there."""


def cases_of(modules: Sequence[str]) -> list[str]:
    """The names of the modules' cases, without importing them: that takes ranks."""
    source = "".join((TESTS / f"{module.replace('.', '/')}.py").read_text() for module in modules)
    return re.findall(r"^def (case_\w+)", source, re.MULTILINE)


def cases_asked_for(request: pytest.FixtureRequest) -> list[str]:
    """The `case`s of the tests of this run that use the fixture that asks, in its module.

    So a run of a few tests runs a few cases.
    """
    return [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames
    ]


def run_cases(
    modules: str, num_ranks: int, folder: Path, cases: Sequence[str] = (), **variables: str
) -> dict[str, list[str]]:
    """Run cases of `modules` (joined by commas) on ranks; return each case's problems.

    A problem is of one rank.

    A case is a function `case_NAME(world)`. Cases run in order on all ranks; by default all do.
    """
    command = ("-m", "pipeline_support.run_cases", modules, str(folder), *cases)
    done = run_ranks(num_ranks, *command, **variables)
    if done.returncode != 0:
        raise AssertionError(
            f"{modules} on {num_ranks} ranks ended with {done.returncode}:\n{done.stdout}"
        )
    problems: dict[str, list[str]] = {}
    for rank in range(num_ranks):
        for name, problem in json.loads((folder / f"rank_{rank}.json").read_text()).items():
            found = problems.setdefault(name, [])
            if problem is not None:
                found.append(f"rank {rank}: {problem}")
    return problems
