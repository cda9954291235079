"""Small jobs for a host exchange, run on every rank."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from interrupting import Interrupting
from recsdk_sharding import get_default_hybrid_sharders
from recsdk_sharding._modules.host_env import make_host_group
from recsdk_sharding.exchange import (
    ExchangeJob,
    HostExchange,
    Pending,
    Splits,
    exchange_of_group,
    exchanges_of,
    go_on,
    of_model,
)


class Job(ExchangeJob[Any]):
    """Sends `number` to all ranks; the result is (rank, number) of all."""

    def __init__(
        self, number: int, *, fail_in: str = "", text: str = "", step: int = 0, tag: int = 1
    ) -> None:
        self.training = True
        self.tag = tag
        self._number = number
        self._fail_in = fail_in
        self._text = text or f"{fail_in} is not well"
        self._step = step

    def step(self) -> int:
        return self._step

    def prepare(self) -> tuple[Splits, None]:
        if self._fail_in == "prepare":
            raise ValueError(self._text)
        counts = (self._number,) * dist.get_world_size()
        return Splits(batch_size=self._number, counts=counts), None

    def transfer(
        self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: None
    ) -> list[list[int]]:
        if self._fail_in == "transfer":
            raise RuntimeError("Connection closed by peer")
        own = torch.full((self._number,), self._number)
        sizes = [entry.counts[dist.get_rank()] for entry in splits]
        received = torch.empty(sum(sizes), dtype=torch.int64)
        sends = [self._number] * len(splits)
        dist.all_to_all_single(received, own.repeat(len(splits)), sizes, sends, group=group)
        return [part.tolist() for part in received.split(sizes)]

    def finish(self, received: list[list[int]]) -> Any:
        if self._fail_in == "finish":
            raise ValueError(self._text)
        assert all(part == [len(part)] * len(part) for part in received)
        return [(rank, len(part)) for rank, part in enumerate(received)]


class Blocking(Job):
    """Waits in `prepare` until it is let go."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(1)
        self._gate = gate
        self.started = threading.Event()

    def prepare(self) -> tuple[Splits, None]:
        self.started.set()
        self._gate.wait()
        return super().prepare()


def new_exchange() -> HostExchange:
    """An exchange on a new group."""
    return HostExchange(dist.new_group(backend="gloo"))


def outcome(pending: Pending[Any]) -> Any:
    """ "ok", or (type, text, rank, step) of what it raised."""
    try:
        pending.result(timeout=200)
    except Exception as error:
        rank, step = getattr(error, "rank", None), getattr(error, "step", None)
        return type(error).__name__, str(error), rank, step
    return "ok"


def run_many(number: int) -> list[Any]:
    exchange = new_exchange()
    futures = [exchange.submit(Job(n)) for n in range(number)]
    return [future.result() for future in futures]


def fail_at(stage: str, rank: int) -> list[Any]:
    exchange = new_exchange()
    failing = Job(1, fail_in=stage if dist.get_rank() == rank else "", step=1)
    futures = [exchange.submit(job) for job in (Job(1), failing, Job(3))]
    found = [*map(outcome, futures), exchange.state]
    exchange.reset()
    return [*found, outcome(exchange.submit(Job(2)))]


def fail_with_text(text: str) -> Any:
    job = Job(1, fail_in="prepare" if dist.get_rank() == 0 else "", text=text)
    return outcome(new_exchange().submit(job))


def end_on(rank: int) -> list[Any]:
    exchange = new_exchange()
    outcome(exchange.submit(Job(1)))
    if dist.get_rank() == rank:
        exchange.announce_end()
        found = [None, None]
    else:
        found = [outcome(f) for f in [exchange.submit(Job(1)), exchange.submit(Job(1))]]
    exchange.announce_end()  # again: nothing to do
    state = exchange.state
    exchange.reset()
    return [*found, state, outcome(exchange.submit(Job(2)))]


def end_together() -> list[str]:
    exchange = new_exchange()
    states = []
    for _ in range(2):
        exchange.announce_end()
        states.append(exchange.state)
        exchange.reset()
    return [*states, exchange.state]


class Mute(Exception):
    """Fails to say what is wrong."""

    def __str__(self) -> str:
        raise AttributeError("no text today")


class Muted(Job):
    """Fails with an error that cannot be shown."""

    def prepare(self) -> tuple[Splits, None]:
        raise Mute


def fail_without_text(is_announced: bool) -> Any:
    exchange = new_exchange()
    is_guilty = dist.get_rank() == 0
    if is_guilty and is_announced:
        exchange.announce_failure(Mute())
        return exchange.state
    try:
        exchange.submit(Muted(1) if is_guilty else Job(1)).result(timeout=200)
    except Mute:
        return exchange.state
    except Exception as error:
        return str(error)
    return "ok"


def announce_failure() -> Any:
    exchange = new_exchange()
    if dist.get_rank() == 0:
        exchange.announce_failure(OSError("the disk is gone"))
        return exchange.state
    return outcome(exchange.submit(Job(1)))


def disagree_on_tags() -> Any:
    return outcome(new_exchange().submit(Job(1, tag=dist.get_rank())))


def go_on_with_two_exchanges(waiting_in: int) -> list[Any]:
    """The first rank goes on at once, the others once they waited for a batch in an exchange."""
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    for each in module:
        each.host_exchange = new_exchange()
    waited = "ok"
    if dist.get_rank() != 0:
        waited = outcome(module[waiting_in].host_exchange.submit(Job(1)))[1]
    go_on(module)
    after = [outcome(each.host_exchange.submit(Job(2))) for each in module]
    return [waited, *after]


def go_on_interrupted(num_exchanges: int) -> list[str]:
    """What comes of it where a rank goes on again after a Ctrl-C at each moment of its first try.

    Each rank in its turn; only what went wrong.
    """
    module = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(num_exchanges)))
    for each in module:
        each.host_exchange = new_exchange()
    said = []
    for bad_rank in range(dist.get_world_size()):
        moment, has_come = 0, True
        while has_come:
            coming = Interrupting(moment, (str(Path(of_model.__file__).parent),))
            try:
                coming.call(lambda: go_on(module)) if dist.get_rank() == bad_rank else go_on(module)
            except KeyboardInterrupt:
                go_on(module)
            while wrong := [
                text
                for each in module
                if (text := outcome(each.host_exchange.submit(Job(2)))) != "ok"
            ]:
                said.append(f"{coming.where}: {wrong}")
                go_on(module)
            flag = torch.tensor([int(coming.has_come)])
            dist.broadcast(flag, bad_rank)
            moment, has_come = moment + 1, bool(flag)
    return said


def reset_too_early() -> str:
    exchange, gate = new_exchange(), threading.Event()
    futures = [exchange.submit(Blocking(gate)), exchange.submit(Job(1))]
    try:
        exchange.reset()
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    gate.set()
    for future in futures:
        future.result()
    return text


def shut_down() -> list[Any]:
    exchange, gate = new_exchange(), threading.Event()
    blocking = Blocking(gate)
    first = exchange.submit(blocking)
    dropped = exchange.submit(Job(1))
    blocking.started.wait()  # a job that has not begun would be dropped too
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    exchange.shutdown(timeout=20)
    first.result(timeout=0)
    try:
        dropped.result(timeout=0)
        name = "no error"
    except CancelledError as error:
        name = type(error).__name__
    return [name, outcome(exchange.submit(Job(1)))]


def reopen(how: str, held: list[int]) -> list[Any]:
    """Rank 0 fails, or has no batch, and all make a module; on `held`, while their jobs run."""
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    exchange, gate = exchange_of_group(group), threading.Event()
    if rank == 0 and how == "end":
        exchange.announce_end()
        futures = []
    else:
        failing = Job(1, fail_in="prepare" if how == "fail" else "")
        first = failing if rank == 0 else Blocking(gate)
        futures = [exchange.submit(job) for job in (first, Job(2), Job(3))]
    if rank in held:
        threading.Timer(0.3, gate.set).start()
    else:
        gate.set()
        for future in futures:
            outcome(future)
    make_host_group(ShardingEnv(dist.get_world_size(), rank, group), "virtual_shard")
    state = exchange.state
    after = [outcome(exchange.submit(Job(n))) for n in (2, 5)]
    return [[outcome(future)[0] for future in futures], state, after]


def make_modules_after_a_pipeline_that_one_rank_still_has() -> Any:
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    exchange = exchange_of_group(group)
    exchange.depth = 3
    first = outcome(exchange.submit(Job(1)))
    kept = exchange if rank == 0 else None
    del exchange
    gc.collect()
    env = ShardingEnv(dist.get_world_size(), rank, group)
    made = make_host_group(env, "virtual_shard").exchange
    return [kept is made, first, outcome(made.submit(Job(2)))]


def make_modules_that_one_rank_does_not_make() -> Any:
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    env = ShardingEnv(dist.get_world_size(), rank, group)
    made = make_host_group(env, "virtual_shard").exchange
    made.note_module()
    first = outcome(made.submit(Job(1)))
    if rank == 0:
        made.note_module()
    return [first, outcome(made.submit(Job(2)))]


def make_sharders_on_one_rank_that_plans() -> Any:
    """How a job ends then, and whether sharders that nobody uses have kept a thread or a file."""
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    env = ShardingEnv(dist.get_world_size(), rank, group)
    files, threads = os.listdir("/proc/self/fd"), threading.enumerate()
    for _ in range(20 if rank == 0 else 0):
        get_default_hybrid_sharders(env)
    is_same = (os.listdir("/proc/self/fd"), threading.enumerate()) == (files, threads)
    made = make_host_group(env, "virtual_shard").exchange
    return outcome(made.submit(Job(1))), is_same


def reopen_broken() -> list[Any]:
    group = dist.new_group(backend="gloo")
    exchange = exchange_of_group(group)
    future = exchange.submit(Job(1, fail_in="transfer"))
    make_host_group(ShardingEnv(dist.get_world_size(), dist.get_rank(), group), "virtual_shard")
    return [outcome(future), exchange.state, outcome(exchange.submit(Job(1)))]


def look_up_exchanges() -> list[bool]:
    one, other = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    first = exchange_of_group(one)
    second = exchange_of_group(other)
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    module[0].host_exchange = module[1].host_exchange = first
    return [exchange_of_group(one) is first, first is second, exchanges_of(module) == [first]]


def break_group() -> list[Any]:
    exchange = new_exchange()
    error = outcome(exchange.submit(Job(1, fail_in="transfer")))
    try:
        exchange.reset()
    except RuntimeError as refusal:
        return [error, exchange.state, str(refusal)]
    return [error, exchange.state, "no error"]
