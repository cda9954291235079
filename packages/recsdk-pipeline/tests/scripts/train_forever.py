"""Trains on endless batches; says when it is under way. Started once per rank by a test.

Its arguments: "train", or "save", and a named pipe. To "save", rank 0 waits then for a line in
the pipe, and saves.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import tempfile
import time
import warnings
from datetime import timedelta

import torch.distributed as dist
from pipeline_support.model import DEVICE, SmallModel, World, batches, hash_tables, spread
from torchrec.distributed.types import ShardingEnv

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import Saver

STEPS_UNDER_WAY = 20


def wait_for_a_line(rank: int, pipe: str) -> None:
    """Rank 0 waits for a line; the others until the test ends them, lest they take the line."""
    while rank > 0:
        time.sleep(1)
    with open(pipe) as line:
        line.readline()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    timeout = timedelta(seconds=int(os.environ["GROUP_TIMEOUT_SECONDS"]))
    dist.init_process_group("gloo", timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo", timeout=timeout)
    world = World(rank, size, ShardingEnv(world_size=size, rank=rank, pg=group))
    model, optimizer = spread(SmallModel(tables=hash_tables()), world)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE)
    endless = itertools.cycle(batches(world, 10))
    for step in itertools.count(1):
        pipeline.progress(endless)
        if step == STEPS_UNDER_WAY:
            print(f"rank {rank} is under way", flush=True)
            if sys.argv[1] == "save":
                wait_for_a_line(rank, sys.argv[2])
                Saver().save(model, f"{tempfile.gettempdir()}/never_{os.getpid()}")


if __name__ == "__main__":
    main()
