"""Runs on each rank: all cases of some modules, one after the other, and keeps how they ended."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from pipeline_support.model import DEVICE, World

TIMEOUT = timedelta(seconds=180)
BACKENDS = {"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}


def main() -> None:
    modules, folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    dist.init_process_group(BACKENDS[DEVICE.type], timeout=TIMEOUT)
    if DEVICE.type != "cpu":
        torch.get_device_module(DEVICE).set_device(dist.get_rank())
    imported = [importlib.import_module(module) for module in modules.split(",")]
    cases = [case for module in imported for case in inspect.getmembers(module, _is_case)]
    problems = {n: _problem(case) for n, case in cases if not names or n in names}
    path = Path(folder) / f"rank_{dist.get_rank()}.json"
    path.write_text(json.dumps(problems))
    dist.destroy_process_group()


def _is_case(member: object) -> bool:
    return inspect.isfunction(member) and member.__name__.startswith("case_")


def _problem(case) -> str | None:
    host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, ShardingEnv(world_size=size, rank=rank, pg=host_group))
    print(f"rank {rank}: {case.__name__}", flush=True)
    try:
        case(world)
    except (Exception, pytest.fail.Exception):  # of `pytest.raises`
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
        return traceback.format_exc()
    finally:
        dist.barrier()
    return None


if __name__ == "__main__":
    main()
