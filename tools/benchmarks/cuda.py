"""Training steps of 26 tables of a million rows of width 64 on one CUDA device.

Our pipeline beside torchrec's and beside the engine's part of it, and the work that we leave to the
device beside fbgemm's kernels.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.devices.cuda_steps import (
    DEVICE_WORK,
    ON_TORCH,
    TBE,
    TBE_FROM_HOST,
    CudaCase,
)
from benchmarks.host_job import MAP
from benchmarks.launch import launch
from benchmarks.records import Record, record_of
from benchmarks.steps import OURS, STOCK
from recsdk_sharding.device.kernel_choice import SETTING

LOADS = {
    "8192x1": CudaCase(batch_size=8192, steps_a_turn=32),
    "65536x1": CudaCase(steps_a_turn=16),
    "8192x20": CudaCase(batch_size=8192, bag_size=20),
    "65536x20": CudaCase(bag_size=20, steps_a_turn=4, turns=5),
}
"""Batch, and ids of each feature."""
QUICK = ("65536x1",)
SPARE_PROCESSORS = 2
"""That the engine leaves to the thread that trains, and to autograd's, which wait for it else."""
RACES = {
    "pipelined step": (OURS, STOCK, MAP),
    "device work": (DEVICE_WORK, ON_TORCH, TBE, TBE_FROM_HOST),
}
SECONDS_A_CASE = 420
"""To make and fill the tables, compile kernels, and measure."""


def run(quick: bool) -> Iterator[Record]:
    """Gives records as they are measured, and prints them; goes on where a case fails, and raises
    SystemExit at the end. MINUTES in the environment: how long all cases may take."""
    end = time.monotonic() + 60 * float(os.environ.get("MINUTES") or "inf")
    failed, left_out = [], []
    for optimizer in ("rowwise_adagrad", "adam"):
        for name, load in LOADS.items():
            if quick and not (name in QUICK and optimizer == "rowwise_adagrad"):
                continue
            workload = f"{name}_{optimizer}"
            seconds = min(SECONDS_A_CASE, end - time.monotonic())
            if seconds <= 0:
                left_out.append(workload)
                continue
            try:
                for record in records_of(name, {**asdict(load), "optimizer": optimizer}, seconds):
                    print(json.dumps(asdict(record)), flush=True)
                    yield record
            except SystemExit as error:
                print(error, flush=True)
                failed.append(workload)
    if left_out:
        print(f"left out, as MINUTES were over: {', '.join(left_out)}", flush=True)
    if failed:
        raise SystemExit(f"failed, as is said above: {', '.join(failed)}")


def records_of(name: str, case: Mapping[str, Any], seconds: float) -> Iterator[Record]:
    """Raises SystemExit if ours could not run, once it has given what could, or takes longer."""
    processors = len(os.sched_getaffinity(0))
    threads = {
        "RECSDK_NUM_THREADS": str(max(1, processors - SPARE_PROCESSORS)),
        "OMP_NUM_THREADS": str(processors),
        # If they do not work, it is told; tables would run on torch's operators.
        SETTING: os.environ.get(SETTING, "triton"),
    }
    found = launch("devices.cuda_steps", 1, case, threads, seconds)
    lacking, workload = [], f"{name}_{case['optimizer']}"
    for op, names in RACES.items():
        samples = {n: found["milliseconds"][n] for n in names if n in found["milliseconds"]}
        errors = {n: found["errors"][n] for n in names if n in found["errors"]}
        if names[0] not in samples:
            lacking.append(_why_lacking(f"{workload}, {op}", names[0], samples, errors))
            continue
        yield record_of(workload, op, "ms", names[0], samples, errors)
    if lacking:
        raise SystemExit("\n".join(lacking))


def _why_lacking(
    what: str, ours: str, samples: Mapping[str, Sequence[float]], errors: Mapping[str, str]
) -> str:
    """Why there is no record, and what the others took: it is known, but has nothing beside it."""
    failed = [f"{ours} failed: {errors.get(ours, 'nobody said why')}"]
    failed += [f"{name} failed: {error}" for name, error in errors.items() if name != ours]
    took = [f"{name} took {median(values):.4g} ms a step" for name, values in samples.items()]
    return f"{what}: {'; '.join([*failed, *took])}"
