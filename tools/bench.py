"""Runs a benchmark: prints a table and writes build/bench/NAME.json.

    python tools/bench.py NAME      QUICK=1 in the environment: a subset, under three minutes

Figures depend on the machine and on what else it does: quote ratios, and run nothing beside it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from pathlib import Path

from benchmarks import records

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "checkpoint",
    "cuda",
    "data",
    "device",
    "engine",
    "nn",
    "policies",
    "serving",
    "sharding",
    "train",
)

OF_MODELS = ("policies", "serving")
"""Those that train a model as well."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--movielens", metavar="DIR", help="the models of policies and serving learn that too"
    )
    args = parser.parse_args()
    name = args.name
    quick = os.environ.get("QUICK", "0") not in ("", "0")
    if args.movielens and name not in OF_MODELS:
        parser.error(f"--movielens is of {' and '.join(OF_MODELS)}")
    run = importlib.import_module(f"benchmarks.{name}").run
    path = ROOT / "build" / "bench" / f"{name}.json"
    results: list[records.Record] = []
    try:
        for record in run(quick, args.movielens) if name in OF_MODELS else run(quick):
            results.append(record)
            records.write(path, results)  # some come one by one, and the run may be cut off
    finally:
        if results:
            records.show(f"{name}, {platform.machine()}, {os.cpu_count()} processors", results)
            print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
