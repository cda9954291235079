"""What a step hands to a simulated device, by its parts: operators, waits of the host, bytes.

    torchrun ... -m benchmarks.device_counts CASES       CASES: `HostCase`s by name, as JSON

All rows exist beforehand. The first rank prints one JSON object: the figures of each case.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist

from benchmarks.host_job import HostCase, sharded_tables
from benchmarks.steps import bags, indexes_of, raw_ids
from recsdk_npusim.counting import Counts, counting

__all__ = ["count"]


def count(case: HostCase) -> dict[str, float]:
    """Figures of one step of training, by name."""
    tables, load = sharded_tables(case), case.as_case()
    batch = bags(load, raw_ids(indexes_of(load, 0)), case.batch_size)
    context = tables.create_context()
    with counting() as planning:
        mapped = tables.input_dist(context, batch).wait().wait()
    with counting() as forward:
        values = tables.compute_and_output_dist(context, mapped).wait().values()
    grad = torch.ones_like(values)
    with counting() as backward:
        values.backward(grad)
    parts = {"planning": planning, "forward": forward, "backward and update": backward}
    return {
        **{f"operators, {name}": part.num_operators for name, part in parts.items()},
        "operators": _total(parts, "num_operators"),
        "waits": _total(parts, "waits"),
        "bytes to the device an id": _total(parts, "bytes_to_device") / len(batch.values()),
        "bytes to the host": _total(parts, "bytes_to_host"),
    }


def _total(parts: dict[str, Counts], name: str) -> int:
    return sum(getattr(part, name) for part in parts.values())


def main(argv: list[str]) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    try:
        cases = {name: HostCase(**case) for name, case in json.loads(argv[0]).items()}
        found = {name: count(case) for name, case in cases.items()}
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
