"""Steps of a DLRM from raw ids, beside torchrec's on dense indexes of the same data.

The sparse part is input dist, lookup, output dist, backward and update of the tables alone; the
whole step is that of the DLRM of `recsdk demo` in each one's pipeline. Every case runs a second
time with huge pages switched on for the peer.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.engine import HUGE_PAGES
from benchmarks.launch import run_case
from benchmarks.records import Record, record_of
from benchmarks.steps import OURS, Case

ONE_HOT = Case(part="sparse")
MULTI_HOT = Case(part="sparse", bag_size=30, num_tables=8, batch_size=1024)


def run(quick: bool) -> list[Record]:
    results = []
    for pages, environment in (("", {}), ("_hugepages", HUGE_PAGES)):
        for load, case in (("one_hot", ONE_HOT), ("multi_hot", MULTI_HOT)):
            for num_ranks in (1, 2):
                for part in ("sparse", "whole"):
                    is_more = pages or (num_ranks, part) == (2, "sparse")
                    if quick and (is_more or (load, num_ranks) == ("multi_hot", 2)):
                        continue
                    is_alone = (pages, num_ranks, part) == ("", 1, "sparse")
                    case = replace(
                        case,
                        part=part,
                        turns=5 if quick else 15,
                        with_managed_collisions=is_alone,
                    )
                    name = f"{load}_{num_ranks}ranks{pages}"
                    outcome = run_case(num_ranks, case, environment)
                    results.append(
                        record_of(
                            name, f"{part}_step", "ms", OURS, outcome.milliseconds, outcome.errors
                        )
                    )
    return results
