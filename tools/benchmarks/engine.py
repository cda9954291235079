"""The engine beside its peers: hash maps in C++, and embedding lookups and updates from Python.

Every part runs twice, the second time with huge pages switched on for the peers too: half of an
easy win over a peer on small pages is the page size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import Record, ratio

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "cpp-bench"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One run of a program."""

    program: str
    workload: str
    keys: str
    repetitions: int
    dim: int = 1
    is_pinned: bool = True  # to one processor
    with_huge_pages_too: bool = True  # there are peers whose page size matters

    def command(self) -> list[str]:
        pin = ["taskset", "--cpu-list", str(max(os.sched_getaffinity(0)))]
        options = {"workload": self.workload, "keys": self.keys, "dim": self.dim}
        options["reps"] = self.repetitions
        given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        program = str(BUILD / "bench" / self.program)
        return [*(pin if self.is_pinned else []), program, *given]


def run(quick: bool) -> list[Record]:
    build("maps_bench", "rows_bench")
    results: list[Record] = []
    for pages, environment in (("", {}), ("_hugepages", HUGE_PAGES)):
        for part in QUICK_PARTS if quick else PARTS:
            if not pages or part.with_huge_pages_too:
                results += run_part(part.command(), environment, pages)
        command = [sys.executable, "-m", "benchmarks.embeddings", *(["--quick"] if quick else [])]
        results += run_part(command, {**environment, "PYTHONPATH": str(ROOT / "tools")}, pages)
    return results


def maps(workload: str, keys: str, repetitions: int) -> Part:
    return Part(program="maps_bench", workload=workload, keys=keys, repetitions=repetitions)


def alone(program: str, workload: str, keys: str, repetitions: int, dim: int) -> Part:
    """A part without peers, or whose peers are not other libraries."""
    return Part(
        program=program,
        workload=workload,
        keys=keys,
        repetitions=repetitions,
        dim=dim,
        is_pinned=workload != "threads",
        with_huge_pages_too=False,
    )


QUICK_PARTS = [
    maps("uniform", "1e5", 9),
    maps("uniform", "1e6", 9),
    alone("rows_bench", "pool", "2e5", 9, 64),
    alone("rows_bench", "many", "1e6", 9, 64),
]
PARTS = [
    maps("uniform", "1e5", 25),
    maps("uniform", "1e6", 15),
    maps("uniform", "1e7", 15),
    maps("uniform", "5e7", 9),
    maps("dense", "1e7", 15),
    alone("maps_bench", "flood", "1e5", 25, 1),
    alone("maps_bench", "growth", "1e7", 1, 1),
    alone("maps_bench", "growth", "4e7", 1, 1),
    alone("maps_bench", "growth", "1e7", 1, 64),
    *(alone("rows_bench", "pool", "1e6", 15, dim) for dim in (16, 32, 64, 128)),
    alone("rows_bench", "pool", "1e7", 15, 64),
    alone("rows_bench", "threads", "1e6", 15, 64),
    alone("rows_bench", "threads", "1e7", 15, 64),
    alone("rows_bench", "many", "1e6", 15, 64),
    alone("rows_bench", "insert", "4e6", 5, 16),
    *(alone("rows_bench", "fill", "1e6", 9, dim) for dim in (8, 32, 64)),
]


def build(*programs: str) -> None:
    """Configures and builds programs of cpp/bench."""
    configure = ["cmake", "-S", str(ROOT / "cpp"), "-B", str(BUILD), "-G", "Ninja"]
    options = ["-DRECSDK_BUILD_BENCH=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([*configure, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--target", *programs], check=True)


def run_part(command: list[str], environment: dict[str, str], suffix: str) -> list[Record]:
    """Runs a program that prints one JSON object a line, and reads them as records."""
    shown = " ".join(Path(part).name if "/" in part else part for part in command)
    print("$", shown, suffix, flush=True)
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{shown} ended with exit status {done.returncode}; see its message above")
    output = done.stdout
    return [read_record(line, suffix) for line in output.splitlines() if line.startswith("{")]


def read_record(line: str, suffix: str) -> Record:
    raw = json.loads(line)
    contestants: dict[str, list[float]] = raw["contestants"]
    ours = contestants["recsdk"]
    unit = raw["unit"]
    peers = {name: values[0] for name, values in contestants.items() if name != "recsdk"}
    return Record(
        workload=raw["workload"] + suffix,
        op=raw["op"],
        unit=unit,
        ours=ours[0],
        peers=peers,
        ratio={name: ratio(unit, ours[0], value) for name, value in peers.items()},
        spread={name: (values[1], values[2]) for name, values in contestants.items()},
        errors=raw.get("errors", {}),
    )
