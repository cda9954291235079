"""Processes that run a function on every rank of a world, for many tests after one another.

Processes and their groups are made once. Shape letter: W ranks.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from device_type import IS_CUDA

from rank_templates import Rank, RankError, begin_torchrec, start_rank

# What most functions of tests need; the last is what torchrec imports to apply an optimizer.
MODULES = ("recsdk_sharding", "worlds", "torch.distributed.optim")
SECONDS_PER_CALL = 300
GROUP_TIMEOUT = timedelta(seconds=180)


class RankPool:
    """W processes at most, each a rank of the worlds that are asked for."""

    def __init__(
        self,
        most_ranks: int,
        backend: str = "gloo",
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        """`environments`: variables that each rank's process has beside those of this one."""
        self._most_ranks = most_ranks
        self._backend = backend
        self._environments = [{}] * most_ranks if environments is None else environments
        self._folder = tempfile.TemporaryDirectory()
        self._num_worlds = 0
        self._world: tuple[int, str, str] | None = None
        self._workers: list[Rank] = []
        self._known: dict[bytes, list[Any]] = {}

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` returns on each rank of a world, with its process group set up.

        Raises RankError if it raised on any rank; skips the test if there are not so many ranks.
        The function must be importable.
        """
        if world_size > self._most_ranks:
            pytest.skip(f"needs {world_size} ranks; there are {self._most_ranks}")
        if not self._workers:
            self._workers = [
                start_rank(_serve, *pair, MODULES) for pair in enumerate(self._environments)
            ]
            self.run(self._most_ranks, begin_torchrec)
        if self._world is None or self._world[0] != world_size:
            self._num_worlds += 1
            path = Path(self._folder.name, f"world_{self._num_worlds}")
            self._world = (world_size, str(path), self._backend)
        members = self._workers[:world_size]
        try:
            for worker in members:
                worker.pipe.send((self._world, function, args))
            replies = [_reply_of(worker.pipe) for worker in members]
        except BaseException:  # a test that took too long, say: the next would get its answer
            self.close()
            raise
        errors = [f"rank {r}: {text}" for r, (ok, text) in enumerate(replies) if not ok]
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return [value for _, value in replies]

    def at_most(self, world_size: int) -> int:
        """So many ranks, or as many as there are: for tests that say something of one rank, too."""
        return min(world_size, self._most_ranks)

    def known(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `run` gives, which is run once: of a function that gives the same bits each time."""
        call = pickle.dumps((world_size, function, args))
        if call not in self._known:
            self._known[call] = self.run(world_size, function, *args)
        return self._known[call]

    def renew(self) -> None:
        """Has the next `run` make new process groups."""
        self._world = None

    def close(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._world = None


def npu_pool(most_ranks: int) -> RankPool:
    """Processes with a simulated NPU each, which copies later.

    With RECSDK_TEST_NPU_HARDWARE in the environment they have one of the machine's each, of those
    in ASCEND_RT_VISIBLE_DEVICES if it is set; at most as many as there are. Likewise with
    RECSDK_TEST_CUDA_HARDWARE they have a CUDA device each, of those in CUDA_VISIBLE_DEVICES.
    """
    if IS_CUDA:
        return _pool_of("CUDA_VISIBLE_DEVICES", cuda_devices, most_ranks, "nccl")
    if not os.environ.get("RECSDK_TEST_NPU_HARDWARE"):
        simulated = {"RECSDK_SIM_NPU": "1", "RECSDK_SIM_NPU_ASYNC": "1"}
        return RankPool(most_ranks, "hccl", [simulated] * most_ranks)
    return _pool_of("ASCEND_RT_VISIBLE_DEVICES", _davinci_devices, most_ranks, "hccl")


def _pool_of(
    variable: str, find_devices: Callable[[], Sequence[str]], most_ranks: int, backend: str
) -> RankPool:
    """Processes with a device each, of those that the variable names, else of all.

    Raises RankError if there is none, as tests would be skipped then.
    """
    named = os.environ.get(variable)
    devices = find_devices() if named is None else [each for each in named.split(",") if each]
    if not devices:
        raise RankError(f"there is no device for a rank; {variable} is {named!r}")
    own = [{variable: device} for device in devices[:most_ranks]]
    return RankPool(len(own), backend, own)


def cuda_devices() -> Sequence[str]:
    """The numbers of CUDA's devices; in a container the nodes in /dev may have others."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _davinci_devices() -> Sequence[str]:
    nodes = Path("/dev").glob("davinci[0-9]*")
    return sorted((node.name.removeprefix("davinci") for node in nodes), key=int)


def _reply_of(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(SECONDS_PER_CALL):
        return False, f"no answer within {SECONDS_PER_CALL} s"
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process died"


def _serve(rank: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    current = None
    while True:
        try:
            world, function, args = pipe.recv()
        except EOFError:
            return
        try:
            if world != current:
                _enter(rank, world, was_in_one=current is not None)
                current = world
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _enter(rank: int, world: tuple[int, str, str], was_in_one: bool) -> None:
    import torch.distributed as dist

    if was_in_one:
        dist.destroy_process_group()
    size, path, backend = world
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
