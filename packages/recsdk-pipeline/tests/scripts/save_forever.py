"""Trains on endless batches, and saves after each; a test starts one per rank, and kills it.

Its argument is a folder. Each rank saves its tables in the background, to paths of its own, while
the model trains; every third step all ranks save the model together. Says what has been saved once
that is told.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import warnings
from datetime import timedelta

import torch.distributed as dist
from pipeline_support.model import DEVICE, SmallModel, World, batches, hash_tables, spread
from torchrec.distributed.types import ShardingEnv

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import Saver

NUM_PATHS = 3
"""Then one is saved over."""


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
    tables = model.module.tables["tables"].tables()
    endless = itertools.cycle(batches(world, 10))
    for step in itertools.count():
        pipeline.progress(endless)
        started = {}
        for name, table in tables.items():
            path = f"{sys.argv[1]}/{name}_{rank}_{step % NUM_PATHS}"
            state = {"step": step, "num_rows": len(table)}
            started[path] = table.save_async(path, overwrite=True, step=step, user_state=state)
        pipeline.progress(endless)
        for path, handle in started.items():
            handle.wait()
            print(f"saved {path} {step}", flush=True)
        if step % 3 == 0:
            path = f"{sys.argv[1]}/all_{step % (3 * NUM_PATHS)}"
            Saver().save(model, path, overwrite=True, step=step)
            print(f"saved {path} {step}", flush=True)


if __name__ == "__main__":
    main()
