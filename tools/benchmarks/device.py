"""The way of a batch to rows in device memory, as far as it can be measured on a simulated device.

The host job is timed beside the engine's `map` of the same ids. A simulated device says nothing
about speed: its operators, copies and waits are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from benchmarks.host_job import HostCase
from benchmarks.launch import launch
from benchmarks.records import Record, record_of
from benchmarks.steps import OURS

SIMULATED = {"RECSDK_SIM_NPU": "1"}
LOADS = {
    "26tables_1id": HostCase(),
    "26tables_1id_int32lengths": HostCase(has_narrow_lengths=True),
    "26tables_20ids": HostCase(bag_size=20, batch_size=4096),
    "200tables_1id": HostCase(num_tables=200, num_rows=20_000, batch_size=1024),
}
LEFT_OUT_IF_QUICK = ("26tables_20ids",)
FEWER_ROWS_IF_QUICK = 5
"""Inserting all rows takes a simulated device longer than all that is measured."""
COUNTED_IF_QUICK = ("1tables_1ids", "26tables_1ids", "26tables_20ids")
COUNTED = {
    f"{num_tables}tables_{bag_size}ids": HostCase(
        home="npu", num_tables=num_tables, num_rows=1000, batch_size=256, bag_size=bag_size
    )
    for num_tables in (1, 26, 200)
    for bag_size in (1, 20)
}


def run(quick: bool) -> list[Record]:
    return counted_records(quick) + timed_records(quick)


def counted_records(quick: bool) -> list[Record]:
    """What a step of one rank hands to the device, in one process for all cases."""
    names = COUNTED_IF_QUICK if quick else COUNTED
    cases = {name: asdict(COUNTED[name]) for name in names}
    return [
        Record(workload=name, op=op, unit="bytes" if op.startswith("bytes") else "count", ours=n)
        for name, found in launch("device_counts", 1, cases, SIMULATED).items()
        for op, n in found.items()
    ]


def timed_records(quick: bool) -> list[Record]:
    """Each number of ranks and threads runs all its cases in the same processes."""
    cases = {
        f"{name}_{home}": _of_run(replace(load, home=home), quick)
        for name, load in LOADS.items()
        if not quick or name not in LEFT_OUT_IF_QUICK
        for home in ("npu", "cpu")
    }
    return [
        record
        for ranks, threads in ((1, 1), (1, 2), (2, 1))
        if not quick or (ranks, threads) != (1, 2)
        for record in host_records(cases, ranks, threads)
    ]


def _of_run(load: HostCase, quick: bool) -> HostCase:
    if not quick:
        return replace(load, turns=21)
    return replace(load, turns=5, num_rows=load.num_rows // FEWER_ROWS_IF_QUICK)


def host_records(cases: Mapping[str, HostCase], ranks: int, threads: int) -> list[Record]:
    environment = {**SIMULATED, "RECSDK_NUM_THREADS": str(threads)}
    told = {name: asdict(case) for name, case in cases.items()}
    return [
        record_of(f"{name}_{ranks}ranks_{threads}threads", "host_job", "ms", OURS, samples)
        for name, samples in launch("host_job", ranks, told, environment).items()
    ]
