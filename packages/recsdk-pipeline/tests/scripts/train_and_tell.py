"""Trains and tells Prometheus and a file, each rank on a port of its own, until a file is there.

train_and_tell.py PORT FOLDER
"""

from __future__ import annotations

import sys
import time
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_support.model import DEVICE, SmallModel, World, batches, hash_tables, spread
from torchrec.distributed.types import ShardingEnv

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.telemetry import JsonLines, Prometheus, Telemetry

STEPS_AT_ONCE = 5


class Labelled(SmallModel):
    def forward(self, batch):
        loss, logits = super().forward(batch)
        return loss, (torch.sigmoid(logits), batch.labels)


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    host = ShardingEnv(world_size=size, rank=rank, pg=dist.new_group(backend="gloo"))
    world = World(rank, size, host)
    model, optimizer = spread(Labelled(tables=hash_tables()), world)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE)
    given = cycle(batches(world, 20))
    sinks = [Prometheus(port=port), JsonLines(folder / "run.jsonl")]
    with Telemetry(
        model, pipeline, every=5, to=sinks, ranks="each", predictions=lambda output: output
    ):
        while not is_told_to_stop(folder):
            for _ in range(STEPS_AT_ONCE):
                pipeline.progress(given)
            time.sleep(0.4)
        pipeline.drop()
    dist.destroy_process_group()


def is_told_to_stop(folder: Path) -> bool:
    """The same on all ranks."""
    told = [(folder / "stop").exists()]
    dist.broadcast_object_list(told)
    return told[0]


if __name__ == "__main__":
    main()
