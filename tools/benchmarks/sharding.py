"""Each sharding type on two ranks beside torchrec's, what travels, and what the planner expects.

One rank's cores are shared by all: the figures compare, they do not scale.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.estimates import estimates_of
from benchmarks.launch import run_case
from benchmarks.records import Record
from benchmarks.steps import Case

TYPES = (
    "row_wise",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
IF_QUICK = ("row_wise", "table_wise", "column_wise", "data_parallel")
"""The others are much as row_wise and column_wise on one node."""


def run(quick: bool) -> list[Record]:
    plain = Case(part="sparse", num_tables=8 if quick else 26, turns=3 if quick else 15)
    types = IF_QUICK if quick else TYPES
    cases = [(2, replace(plain, sharding_type=name)) for name in types]
    cases.append((2, replace(plain, bag_size=10, batch_size=512)))
    if not quick:
        cases.append((4, plain))
    results = []
    for num_ranks, case in cases:
        if case.sharding_type == "data_parallel":
            case = replace(case, num_rows=2000)  # torchrec sends the gradients of all rows
        results += records_of(num_ranks, case)
    return results


def records_of(num_ranks: int, case: Case) -> list[Record]:
    name = f"{case.sharding_type}_{num_ranks}ranks_{case.bag_size}ids"
    outcome = run_case(num_ranks, case)
    found = outcome.records(name, "sparse_step")
    if case.sharding_type == "row_wise":
        sent, existing = outcome.bytes_sent
        found.append(
            Record(
                workload=name,
                op="results_on_the_wire",
                unit="bytes",
                ours=sent,
                peers={"results that exist": existing},
                ratio={"results that exist": existing / sent},
            )
        )
    return found + estimates_of(name, num_ranks, case, found[0].ours)
