"""Runs a case of a benchmark on ranks of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import Record, record_of
from benchmarks.steps import OURS, Case

ROOT = Path(__file__).resolve().parent.parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RECSDK_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """What the first rank measured."""

    elapsed: dict[str, list[float]]
    """Milliseconds of a step, of each turn and contestant."""
    processor: dict[str, list[float]]
    """Of all threads of a rank."""
    bytes_sent: tuple[int, int]
    """Bytes of results that all ranks sent in a round of batches, and of those that exist."""
    errors: dict[str, str]
    """Of contestants that could not run."""

    def records(self, workload: str, op: str) -> list[Record]:
        """The step's elapsed time, and its processor time."""
        return [
            record_of(workload, op, "ms", OURS, self.elapsed, self.errors),
            record_of(workload, f"{op}_processor_time", "ms", OURS, self.processor),
        ]


def run_case(num_ranks: int, case: Case, environment: Mapping[str, str] | None = None) -> Outcome:
    """Each rank has one thread, and the threads of its process groups and pipelines."""
    found = launch("steps", num_ranks, asdict(case), environment)
    return Outcome(
        found["elapsed"], found["processor"], tuple(found["bytes_sent"]), found["errors"]
    )


def launch(
    module: str,
    num_ranks: int,
    case: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> Any:
    """Runs a module of this package on ranks; returns the JSON object that the first prints.

    Raises SystemExit if it fails, or takes more than `seconds`.
    """
    told = {**ONE_THREAD, **(environment or {})}
    print("$", module, f"{num_ranks} ranks", case, " ".join(environment or ()), flush=True)
    path = os.pathsep.join(filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))
    ranks = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", f"benchmarks.{module}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *ranks, json.dumps(case)],
        env={**os.environ, **told, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except BaseException as error:
        process.terminate()  # it ends its ranks
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SystemExit(f"benchmarks.{module} took more than {seconds} s") from error
        raise
    if process.returncode:
        tail = "\n".join(stderr.splitlines()[-60:])
        raise SystemExit(f"{tail}\nbenchmarks.{module} ended with exit status {process.returncode}")
    (line,) = [line for line in stdout.splitlines() if line.startswith("{")]
    return json.loads(line)
