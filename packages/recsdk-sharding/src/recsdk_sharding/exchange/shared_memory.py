"""Memory that the ranks of one host share, so that what they send each other is not copied.

A rank writes what it sends into a block of its own part, and tells the others where it lies. They
read it there, and may write their answer over it. What is told is swapped as all words are
(`collectives`), so a rank that is gone, or a timeout, shows as it does there. The memory has no
name in any file system: nothing is left when the ranks have ended, however they ended.

Shape letter: W ranks.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from recsdk_core import RecsdkError
from recsdk_core.agreement import attempt
from recsdk_sharding.exchange.calls import open_call
from recsdk_sharding.exchange.collectives import Gathering, gathered
from recsdk_sharding.exchange.hosts import SETTING, are_on_one_host

__all__ = ["Block", "Claim", "SharedMemory", "shared_memory_of"]

_BYTES_OF_RANK = 1 << 38
"""Of addresses: memory is taken when it is first written to."""
_FIRST = 4096
"""Where a rank's blocks begin in its part; before them the first rank's part has the token."""
_LINE = 64
_SMALLEST = 4096

_logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where one message of a rank lies."""

    number: int
    """Which of the ranks' messages it is, in the order in which all ranks send them."""
    begins: list[int]
    """Where the numbers for each rank begin, in the memory of all ranks: W."""


class _Message:
    """A message of every rank, or an answer, on its way: a call waits for it."""

    def __init__(self, memory: SharedMemory, told: Gathering) -> None:
        self._memory = memory
        self._told: Gathering | None = told
        self._process = os.getpid()

    def __call__(self) -> list[Place]:
        """Where the ranks' numbers lie. Once."""
        assert self._told is not None
        told, self._told = self._told, None
        return _places_of(self._memory._agreed(told.wait()))

    def __del__(self) -> None:
        if self._told is not None and os.getpid() == self._process:
            self._memory._unread.append(self._told)  # takes no lock: this may run within another


class Block:
    """Memory of this rank from its allocation until nobody here needs it any more."""

    def __init__(self, room: _Room, count: int) -> None:
        room.is_held = True
        self.room = room
        self.count = count
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a fork has a copy of this, but not of the memory
            self.room.is_held = False


class Claim:
    """Keeps a message of every rank from being overwritten, until it is dropped."""

    def __init__(self, number: int, flags: Sequence[NDArray[np.int64]], rank: int) -> None:
        self._number = number
        self._flags = flags
        self._rank = rank
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            for of_rank in self._flags:
                of_rank[self._rank] = self._number


class _Room:
    """A part of this rank's memory that holds one message at a time."""

    def __init__(self, start: int, capacity: int, flags: NDArray[np.int64]) -> None:
        self.start = start
        """Its first number, in the memory of all ranks."""
        self.capacity = capacity
        """Numbers."""
        self.flags = flags
        """Of each rank the last message in it that it has done with: W."""
        self.is_held = False
        """Whether this rank needs it."""
        self.message = 0
        """The last that it held; the first of all has number 1."""

    def is_free(self) -> bool:
        """Whether it may hold another message."""
        return not self.is_held and bool((self.flags >= self.message).all())


class _Numbers(np.ndarray):
    """Numbers of a block, which they keep."""

    block: Block


class SharedMemory:
    """The memory of a process group whose ranks are on one host. Thread-safe."""

    def __init__(self, group: dist.ProcessGroup, memory: mmap.mmap) -> None:
        """Use `shared_memory_of`."""
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.numbers = torch.from_numpy(np.frombuffer(memory, np.float32))
        """All that the ranks have written, float32, part by part."""
        self._group = weakref.ref(group)  # it keeps this
        self._memory = memory
        self._header_bytes = -(-8 * self.world_size // _LINE) * _LINE
        self._begin = self.rank * _BYTES_OF_RANK + _FIRST
        self._end = (self.rank + 1) * _BYTES_OF_RANK
        self._rooms: list[_Room] = []
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._num_messages = 0
        self._unread: deque[Gathering] = deque()
        """Messages that nobody here waited for, whose rooms other ranks must get back."""

    def empty(self, count: int) -> torch.Tensor:
        """Numbers of a block of their own, float32 (count,); free again when nobody needs them.

        Raises MemoryError if there are no addresses left.
        """
        return self.tensor_of(self._new_block(count))

    def tensor_of(self, block: Block) -> torch.Tensor:
        """The numbers of a block, which they keep: float32 (count,)."""
        start = 4 * block.room.start
        made = np.frombuffer(self._memory, np.float32, block.count, start).view(_Numbers)
        made.block = block
        return torch.from_numpy(made)

    def block_of(self, numbers: torch.Tensor) -> Block:
        """The block that has these numbers, float32 (n,); one with a copy of them if none has."""
        start, rest = divmod(numbers.data_ptr() - self.numbers.data_ptr(), 4)
        block = self._blocks.get(start)
        if block is None or rest or block.count != len(numbers):
            block = self._new_block(len(numbers))
            self.tensor_of(block).copy_(numbers)
        return block

    def send(self, block: Block, counts: Sequence[int]) -> Callable[[], list[Place]]:
        """Tells all ranks of a block; the function waits for what they send, rank by rank.

        `counts`: of the numbers for each rank, which lie one after the other. All ranks must call
        it in the same order. It starts a collective of 8 W + 8 bytes a rank.
        """
        begins = np.cumsum([block.room.start, *counts[:-1]]).tolist()
        with self._lock:
            self._num_messages += 1
            block.room.message = number = self._num_messages
        block.room.flags[self.rank] = number
        return _Message(self, self._tell([number, *begins]))

    def claim(self, places: Sequence[Place]) -> Claim:
        """Keeps the ranks' messages as they are, while it lives."""
        flags = [self._flags_at(place.begins[0]) for place in places]
        others = [each for rank, each in enumerate(flags) if rank != self.rank]
        return Claim(places[self.rank].number, others, self.rank)

    def answer(self, number: int) -> Callable[[], object]:
        """Tells all ranks that answers to their message of this number are written.

        The function waits until they have said so too. As `send`, in which order it counts.
        """
        return _Message(self, self._tell([-number, *[0] * self.world_size]))

    def swap(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """What every rank gives, rank by rank, float32: `counts` are how many numbers each gives.

        As `send`, in which order it counts; waits for all ranks. Each copies what the others give.
        """
        nothing = [0] * (self.world_size - 1)
        places = self.send(self.block_of(own), [len(own), *nothing])()
        claim = self.claim(places)
        pairs = zip(places, counts, strict=True)
        given = torch.cat([self.numbers.narrow(0, place.begins[0], n) for place, n in pairs])
        del claim
        return given

    def _tell(self, own: list[int]) -> Gathering:
        group = self._group()
        assert group is not None
        return Gathering(own, group)

    def _free_unread(self) -> None:
        """Lets other ranks have the rooms of messages back that were dropped here unread."""
        for _ in range(len(self._unread)):
            told = self._unread.popleft()
            if not told.has_arrived():
                self._unread.append(told)
                continue
            with suppress(Exception):  # whoever waits is told that the group failed
                places = _places_of(self._agreed(told.wait()))
                if places[self.rank].number > 0:  # an answer has no room
                    self.claim(places)

    def _agreed(self, told: list[list[int]]) -> list[list[int]]:
        """What the ranks told, which must be of one message."""
        first, own = told[0][0], told[self.rank][0]
        for rank, [number, *_] in enumerate(told):
            if number != first:
                raise RecsdkError(
                    f"the ranks disagree on the results to exchange: rank 0 {_described(first)}, "
                    f"rank {rank} {_described(number)} (this one {_described(own)}); all ranks "
                    "must run the same modules and backwards in the same order"
                )
        return told

    def _new_block(self, count: int) -> Block:
        with self._lock:
            self._free_unread()
            free = [room for room in self._rooms if room.capacity >= count and room.is_free()]
            room = min(free, key=lambda each: each.capacity) if free else self._new_room(count)
            block = self._blocks[room.start] = Block(room, count)
        return block

    def _new_room(self, count: int) -> _Room:
        capacity = _capacity_of(count)
        first = self._begin + self._header_bytes
        if first + 4 * capacity > self._end:
            raise MemoryError(
                f"rank {self.rank} has no more of the {_BYTES_OF_RANK >> 30} GiB that it may share "
                f"with the ranks of its host, for {count} numbers; drop results that are not "
                f"needed, or set {SETTING}=0"
            )
        self._begin = first + 4 * capacity
        for smaller in self._rooms:
            if smaller.capacity < capacity and smaller.is_free():
                self._give_back(smaller)
        room = _Room(first // 4, capacity, self._flags_at(first // 4))
        self._rooms.append(room)
        return room

    def _give_back(self, room: _Room) -> None:
        """Returns the pages of a free room, but for the ends, to the system; it can be used on."""
        begin = -(-4 * room.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = 4 * (room.start + room.capacity) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if size > 0:
            with suppress(OSError):  # then it keeps them
                self._memory.madvise(mmap.MADV_REMOVE, begin, size)

    def _flags_at(self, start: int) -> NDArray[np.int64]:
        """The flags of the room whose numbers begin there."""
        at = 4 * start - self._header_bytes
        return np.frombuffer(self._memory, np.int64, self.world_size, at)


def _capacity_of(count: int) -> int:
    """Of a room for so many numbers: one of few sizes, so that it is used again."""
    step = max(_SMALLEST, 1 << max(0, count.bit_length() - 3))
    return max(1, -(-count // step)) * step


def _places_of(told: list[list[int]]) -> list[Place]:
    return [Place(number, begins) for number, *begins in told]


def _described(number: int) -> str:
    kind = "sends results" if number > 0 else "answers to results"
    return f"{kind} of message {abs(number)}"


# ---- making it ----------------------------------------------------------------------------------


_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = (
    weakref.WeakKeyDictionary()
)


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory | None:
    """The memory that a group's ranks share; None unless all of them are on one host.

    None too if RECSDK_SHARED_MEMORY is 0 on a rank, or the system does not offer it. All ranks must
    call it in the same order; it runs three small collectives when it is first asked for.
    """
    if group not in _memories:
        made = None
        if dist.get_world_size(group) > 1:
            call = open_call()
            if call is not None:
                call.meet()
            made = _make(group)
        _memories[group] = made
    return _memories[group]


def _make(group: dist.ProcessGroup) -> SharedMemory | None:
    is_possible, error = are_on_one_host(partial(gathered, group=group))
    if not is_possible:
        _logger.info("the ranks share no memory: not all are on one host, and want it (%r)", error)
        return None
    memory, error = _mapped_by_all(group)
    if memory is None:
        _logger.info("the ranks share no memory: it cannot be made or mapped; here %r", error)
        return None
    _logger.info("the ranks share memory for what they send each other")
    return SharedMemory(group, memory)


def _mapped_by_all(group: dist.ProcessGroup) -> tuple[mmap.mmap | None, BaseException | None]:
    """Memory that the first rank makes; None unless every rank has mapped it."""
    size = dist.get_world_size(group) * _BYTES_OF_RANK
    token = secrets.randbits(63)
    file: int | None = None
    memory: mmap.mmap | None = None
    error: BaseException | None = None
    try:
        if dist.get_rank(group) == 0:
            file, error = attempt(lambda: _new_file(size, token))
        own = [int(file is not None), os.getpid(), file or 0, token]
        (is_made, *where), *_ = gathered(own, group)
        if is_made:
            memory, error = attempt(lambda: _mapped(size, *where))
        have_mapped = gathered([int(memory is not None)], group)
    finally:
        if file is not None:
            os.close(file)
    return (memory if all(own for (own,) in have_mapped) else None), error


def _new_file(size: int, token: int) -> int:
    """A file without a name, which begins with the token."""
    file = os.memfd_create("recsdk_exchange", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        os.pwrite(file, token.to_bytes(8, "little"), 0)
    except BaseException:
        os.close(file)
        raise
    return file


def _mapped(size: int, process: int, file: int, token: int) -> mmap.mmap:
    """The memory of a file that a process has open; OSError unless it begins with the token."""
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(opened).st_size != size or _token_of(opened) != token:
            raise OSError("it is another file")
        memory = mmap.mmap(opened, size, mmap.MAP_SHARED)
    finally:
        os.close(opened)
    for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
        with suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    return memory


def _token_of(file: int) -> int:
    return int.from_bytes(os.pread(file, 8, 0), "little")
