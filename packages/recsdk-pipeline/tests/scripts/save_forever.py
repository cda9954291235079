"""Trains on endless batches, and saves after each; a test starts one per rank, and kills it.

Its arguments are a folder, and what it saves. "paths": each rank saves its tables in the
background, to paths of its own, while the model trains; every third step all ranks save the model
together. "chains": all ranks add to a chain of deltas, which is begun anew every few steps, and the
first removes old chains. Says what has been saved once that is told.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pipeline_support.chains import remove_old, sum_of_rows
from pipeline_support.model import DEVICE, SmallModel, World, batches, hash_tables, spread
from torchrec.distributed.types import ShardingEnv

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import Saver

NUM_PATHS = 3
"""Then one is saved over."""
LONGEST_CHAIN = 5


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
    save = _extend_chain if sys.argv[2] == "chains" else _save_over
    for step in itertools.count():
        pipeline.progress(endless)
        save(model, step, lambda: pipeline.progress(endless))


def _tables_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.module.tables["tables"].tables()
    return found


def _save_over(model: Any, step: int, train: Callable[[], object]) -> None:
    """In the background each table by itself, and at times all ranks together; then over these."""
    started = {}
    for name, table in _tables_of(model).items():
        path = f"{sys.argv[1]}/{name}_{dist.get_rank()}_{step % NUM_PATHS}"
        state = {"step": step, "num_rows": len(table)}
        started[path] = table.save_async(path, overwrite=True, step=step, user_state=state)
    train()
    for path, handle in started.items():
        handle.wait()
        print(f"saved {path} {step}", flush=True)
    if step % 3 == 0:
        path = f"{sys.argv[1]}/all_{step % (3 * NUM_PATHS)}"
        Saver().save(model, path, overwrite=True, step=step)
        print(f"saved {path} {step}", flush=True)


def _extend_chain(model: Any, step: int, _: object) -> None:
    path, state = f"{sys.argv[1]}/step_{step}", {"rows": _rows_in(_tables_of(model))}
    is_delta = step % LONGEST_CHAIN != 0
    Saver().save(model, path, incremental=is_delta, step=step, user_state=state)
    print(f"saved {path} {step}", flush=True)
    if dist.get_rank() == 0:
        remove_old(Path(sys.argv[1]), 1 + step % 2)


def _rows_in(tables: dict[str, Any]) -> dict[str, int]:
    """Of each table what all ranks' rows add up to, in any order."""
    own = {name: sum_of_rows(table) for name, table in tables.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {name: sum(each.get(name, 0) for each in of_ranks) % 2**61 for name in tables}


if __name__ == "__main__":
    main()
