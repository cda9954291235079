"""Runs a case of `benchmarks.steps` on ranks of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.steps import Case

ROOT = Path(__file__).resolve().parent.parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RECSDK_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """What the first rank measured."""

    milliseconds: dict[str, list[float]]
    """A step's, of each turn and contestant."""
    bytes_sent: tuple[int, int]
    """Bytes of results that all ranks sent in a round of batches, and of those that exist."""
    errors: dict[str, str]
    """Of contestants that could not run."""


def run_case(num_ranks: int, case: Case, environment: Mapping[str, str] | None = None) -> Outcome:
    """Each rank has one thread, and the threads of its process groups and pipelines."""
    print("$ steps", f"{num_ranks} ranks", case, " ".join(environment or ()), flush=True)
    ranks = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "benchmarks.steps"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks, json.dumps(asdict(case))],
        env={
            **os.environ,
            **ONE_THREAD,
            **(environment or {}),
            "PYTHONPATH": str(ROOT / "tools"),
        },
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-60:])
        raise SystemExit(f"{tail}\nbenchmarks.steps ended with exit status {done.returncode}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    return Outcome(found["milliseconds"], tuple(found["bytes_sent"]), found["errors"])
