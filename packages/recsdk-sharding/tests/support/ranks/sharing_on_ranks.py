"""What the tests of shared memory run on every rank."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import own_batches
from worlds import Setup, new_model, optimizer_of, shard, unwrapped

from recsdk_core.agreement import attempt
from recsdk_sharding import failing_together
from recsdk_sharding.exchange import collectives, shared_memory
from recsdk_sharding.exchange.shared_memory import SharedMemory, shared_memory_of


def kind_of_memory() -> tuple[bool, list[str]]:
    """Whether the ranks share memory, and the names of the files that it is mapped from."""
    is_shared = shared_memory_of(dist.group.WORLD) is not None
    lines = Path("/proc/self/maps").read_text().splitlines()
    return is_shared, [line.split(maxsplit=5)[5] for line in lines if "recsdk_exchange" in line]


def _memory() -> SharedMemory:
    """Memory of its own for each test, of one group."""
    shared_memory._memories = weakref.WeakKeyDictionary()
    memory = shared_memory_of(dist.group.WORLD)
    assert memory is not None
    return memory


class _Exchange:
    """One message of every rank, with numbers that say whose and which it is."""

    def __init__(self, memory: SharedMemory, number: int, draw: random.Random) -> None:
        every = range(memory.world_size)
        self._memory, self._number = memory, number
        self._counts = [[draw.choice([0, 1, 7, 3000]) for _ in every] for _ in every]
        own = self._counts[memory.rank]
        is_copied = draw.random() < 0.3
        numbers = torch.empty(sum(own)) if is_copied else memory.empty(sum(own))
        for to, part in enumerate(numbers.split_with_sizes(own)):
            part.fill_(self._value(memory.rank, to))
        self._block = memory.block_of(numbers)
        self._told = memory.send(self._block, own)
        self._finish: Callable[[], object] | None = None

    def _value(self, sender: int, to: int) -> float:
        return 1000 * self._number + 10 * sender + to

    def _parts(self) -> list[torch.Tensor]:
        """What lies there for this rank, rank by rank."""
        me = self._memory.rank
        return [
            self._memory.numbers.narrow(0, place.begins[me], counts[me])
            for place, counts in zip(self._places, self._counts, strict=True)
        ]

    def receive(self) -> None:
        self._places = self._told()
        self._claim = self._memory.claim(self._places)
        self.check()

    def check(self) -> None:
        for sender, part in enumerate(self._parts()):
            assert (part == self._value(sender, self._memory.rank)).all(), (self._number, sender)

    def answer(self) -> None:
        for sender, part in enumerate(self._parts()):
            part.fill_(-self._value(self._memory.rank, sender))
        self._finish = self._memory.answer(self._places[0].number)

    def finish(self) -> None:
        assert self._finish is not None
        self._finish()
        me = self._memory.rank
        answers = self._memory.tensor_of(self._block).split_with_sizes(self._counts[me])
        for sender, part in enumerate(answers):
            assert (part == -self._value(sender, me)).all(), (self._number, sender)


def exchange_at_random(seed: int, num_calls: int) -> tuple[int, int]:
    """Messages of all ranks in flight, some answered, some dropped, also unread.

    Gives the number of rooms, and of messages sent.
    """
    memory = _memory()
    with failing_together():  # else the others would wait for the rank that finds something
        _exchange_at_random(memory, seed, num_calls)
    dist.barrier()
    memory.empty(1)
    dist.barrier()
    assert all(room.is_free() for room in memory._rooms)
    sockets = collectives._sockets_of(dist.group.WORLD)
    assert sockets is not None
    assert not sockets._own  # nothing of what was dropped is kept
    return len(memory._rooms), memory._num_messages


def _exchange_at_random(memory: SharedMemory, seed: int, num_calls: int) -> None:
    draw = random.Random(seed)
    late = random.Random(seed + 1 + memory.rank)  # when a rank drops something is its own affair
    sent: list[_Exchange] = []
    read: list[_Exchange] = []
    dropped: list[_Exchange] = []
    for number in range(1, num_calls + 1):
        what = draw.choice(["send", "receive", "answer", "drop", "lose"])
        if what == "send" and len(sent) + len(read) < 6:
            sent.append(_Exchange(memory, number, draw))
        elif what == "receive" and sent:
            read.append(sent.pop(0))
            read[-1].receive()
        elif what == "answer" and read:
            chosen = read.pop(draw.randrange(len(read)))
            chosen.check()
            chosen.answer()
            if draw.random() < 0.8:
                chosen.finish()
            del chosen
        elif what == "lose" and sent:
            lost = sent.pop(0)
            if late.random() < 0.5:
                lost.receive()
            del lost
        elif what == "drop" and read:
            dropped.append(read.pop(draw.randrange(len(read))))
        for each in [*read, *dropped]:
            each.check()
        if late.random() < 0.5:
            dropped.clear()
    for each in sent:
        each.receive()


def forget_to_answer() -> str:
    """The first rank answers, the others send: what each is told."""
    memory = _memory()
    counts = [1] * memory.world_size
    block = memory.block_of(memory.empty(memory.world_size))
    number = memory.send(block, counts)()[0].number
    told: Callable[[], Any]
    told = memory.answer(number) if memory.rank == 0 else memory.send(block, counts)
    _, error = attempt(told)
    return f"{type(error).__name__}: {error}"


def outgrow(size: int) -> tuple[int, int, bool]:
    """Of a room's numbers that were 1: how many are after a larger one was made, held and free.

    And whether the room is used again.
    """
    memory = _memory()
    left = []
    for is_held in (True, False):
        numbers = memory.empty(size)
        numbers.fill_(1.0)
        room = memory.block_of(numbers).room
        lies = memory.numbers[room.start : room.start + size]
        if not is_held:
            del numbers
        memory.empty(10 * size if is_held else 100 * size)
        left.append(int(lies.sum()))
        numbers = torch.empty(0)
    again = memory.empty(size)
    again.fill_(2.0)
    is_again = memory.block_of(again).room is room and bool((lies == 2.0).all())
    return left[0], left[1], is_again


def drop_in_a_fork() -> bool:
    """Whether a block is still held once a forked process has dropped its copy and ended."""
    memory = _memory()
    numbers = memory.empty(100)
    room = memory.block_of(numbers).room
    places = memory.send(memory.block_of(numbers), [100, *[0] * (memory.world_size - 1)])()
    claim = memory.claim(places)
    gc.collect()  # else the fork would end old process groups, and wait for threads that it lacks
    process = os.fork()
    if process == 0:
        del numbers, claim
        gc.collect()
        os._exit(0)
    os.waitpid(process, 0)
    dist.barrier()
    is_kept = room.is_held and not any(
        flag >= room.message for rank, flag in enumerate(room.flags) if rank != memory.rank
    )
    dist.barrier()
    del claim, numbers
    dist.barrier()
    return is_kept and room.is_free()


def leave_a_fork_behind() -> tuple[bool, str | None]:
    """Rank 1 closes its sockets while a fork of it lives; what rank 0, which waits, is told."""
    group = dist.new_group(backend="gloo")
    sockets = collectives._sockets_of(group)
    if sockets is None:
        return False, None
    told: str | None = None
    if dist.get_rank() == 1:
        gc.collect()  # as in `drop_in_a_fork`
        is_to_end, ends = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(ends)
            os.read(is_to_end, 1)
            os._exit(0)
        sockets.forget()  # as the end of this process would
        dist.barrier()
        os.close(ends)
        os.close(is_to_end)
        os.waitpid(process, 0)
    else:
        told = str(attempt(lambda: sockets.wait(sockets.start([1])))[1])
        dist.barrier()
    return True, told


def rooms_of_training(sizes: list[list[int]], ways: list[str]) -> list[int]:
    """Rooms of this rank after each step; `ways`: train, evaluate, or neither."""
    memory = _memory()
    setup = Setup()
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, setup.dense_lr)
    found = []
    for batch, way in zip(own_batches(sizes, False), ways, strict=True):
        model.train(way != "evaluate")
        with torch.set_grad_enabled(way != "evaluate"):
            loss, _ = model(batch)
        if way == "train":
            loss.backward()
            optimizer.step()
        del loss, _
        found.append(len(memory._rooms))
    assert memory._num_messages == len(sizes) * len(unwrapped(model).ebc._output_dists)
    return found
