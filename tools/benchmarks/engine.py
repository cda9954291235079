"""The engine beside its peers: hash maps in C++, and embedding lookups and updates from Python.

Every part runs twice, the second time with huge pages switched on for the peers too: half of an
easy win over a peer on small pages is the page size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.records import Record, ratio

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "cpp-bench"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}


def run(quick: bool) -> list[Record]:
    build()
    results: list[Record] = []
    for pages, environment in (("", {}), ("_hugepages", HUGE_PAGES)):
        for workload, keys, repetitions in map_workloads(quick, with_growth=not pages):
            command = [str(BUILD / "bench" / "maps_bench"), "--workload", workload]
            command += ["--keys", keys, "--reps", str(repetitions)]
            results += run_part(command, environment, pages)
        command = [sys.executable, "-m", "benchmarks.embeddings", *(["--quick"] if quick else [])]
        results += run_part(command, {**environment, "PYTHONPATH": str(ROOT / "tools")}, pages)
    return results


def map_workloads(quick: bool, with_growth: bool) -> list[tuple[str, str, int]]:
    """Workload, number of keys and repetitions of each run of maps_bench."""
    if quick:
        return [("uniform", "1e5", 9), ("uniform", "1e6", 9)]
    sizes = [("uniform", size, 15) for size in ("1e5", "1e6", "1e7")] + [("uniform", "5e7", 9)]
    growth = [("growth", "1e7", 1), ("growth", "4e7", 1)] if with_growth else []
    return [*sizes, ("dense", "1e7", 15), *growth]


def build() -> None:
    """Configures and builds maps_bench."""
    configure = ["cmake", "-S", str(ROOT / "cpp"), "-B", str(BUILD), "-G", "Ninja"]
    options = ["-DRECSDK_BUILD_BENCH=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([*configure, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "maps_bench"], check=True)


def run_part(command: list[str], environment: dict[str, str], suffix: str) -> list[Record]:
    """Runs a program that prints one JSON object a line, and reads them as records."""
    print("$", " ".join(Path(part).name if "/" in part else part for part in command), suffix)
    output = subprocess.run(
        command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
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
