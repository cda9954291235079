"""Steps of a DLRM from raw ids, beside torchrec's on dense indexes of the same data.

The sparse part is input dist, lookup, output dist, backward and update of the tables alone; the
whole step is that of the DLRM of `recsdk demo` in each one's pipeline. On two ranks ours takes part
a second time, without the memory that these share. Every case runs a second time with huge pages
switched on for the peer.

The last cases have the layers that torchrec's script for DLRM has by default, and the plan that
each one's planner chooses. Their dense layers take most of the time: these alone take part in whole
steps, and the sparse part alone is beside them.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.engine import HUGE_PAGES
from benchmarks.launch import run_case
from benchmarks.records import Record
from benchmarks.steps import Case

ONE_HOT = Case(part="sparse")
MULTI_HOT = Case(part="sparse", bag_size=30, num_tables=8, batch_size=1024)
# Source: the defaults of dlrm_main.py in torchrec_dlrm of github.com/facebookresearch/dlrm.
OF_SCRIPT = Case(
    part="whole",
    sharding_type=None,
    dense_layers=(512, 256),
    over_layers=(512, 512, 256),
    batch_size=512,
    steps_a_turn=16,
)
IF_QUICK = (
    ("one_hot_1ranks", "sparse"),
    ("one_hot_1ranks", "whole"),
    ("one_hot_2ranks", "whole"),
    ("multi_hot_1ranks", "sparse"),
)
SCRIPTS = {"width64": OF_SCRIPT, "width16": replace(OF_SCRIPT, dim=16, batch_size=1024)}


def run(quick: bool) -> list[Record]:
    return own_records(quick) + ([] if quick else records_of_script())


def records_of_script() -> list[Record]:
    """The DLRM of torchrec's script, and its sparse part."""
    results = []
    for name, case in SCRIPTS.items():
        for num_ranks in (1, 2):
            for part in ("whole", "sparse"):
                case = replace(case, part=part, turns=15, with_dense_alone=part == "whole")
                outcome = run_case(num_ranks, case)
                workload = f"torchrec_dlrm_{name}_{num_ranks}ranks"
                results += outcome.records(workload, f"{part}_step")
    return results


def own_records(quick: bool) -> list[Record]:
    results = []
    for pages, environment in (("", {}), ("_hugepages", HUGE_PAGES)):
        for load, case in (("one_hot", ONE_HOT), ("multi_hot", MULTI_HOT)):
            for num_ranks in (1, 2):
                for part in ("sparse", "whole"):
                    name = f"{load}_{num_ranks}ranks{pages}"
                    if quick and (name, part) not in IF_QUICK:
                        continue
                    is_alone = (pages, num_ranks, part, quick) == ("", 1, "sparse", False)
                    case = replace(
                        case,
                        part=part,
                        turns=3 if quick else 15,
                        with_managed_collisions=is_alone,
                        with_sending=num_ranks > 1 and not pages,
                    )
                    outcome = run_case(num_ranks, case, environment)
                    results += outcome.records(name, f"{part}_step")
    return results
