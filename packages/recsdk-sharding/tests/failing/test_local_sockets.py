"""The sockets between ranks of one host, beside what each rank ought to get."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest
import sharing_on_ranks
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_pool import RankPool

from recsdk_sharding.exchange import collectives, local_sockets
from recsdk_sharding.exchange.hosts import Gather
from recsdk_sharding.exchange.local_sockets import LocalSockets, close_local_sockets

T = TypeVar("T")

A_MINUTE = timedelta(minutes=1)
SIZES = (0, 1, 7, 1 << 12, (1 << 16) - 8, 1 << 16, 700_001)
"""Bytes: nothing, less than the buffer of a socket, just that, more than the system takes."""


class _Ranks:
    """Ranks that are threads of this process, and what gloo would be for them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._told: list[list[int]] = [[]] * world_size

    def gather_of(self, rank: int) -> Gather:
        def gather(own: Sequence[int]) -> list[list[int]]:
            self._told[rank] = list(own)
            self._barrier.wait()
            told = list(self._told)
            self._barrier.wait()
            return told

        return gather

    def run(self, call: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(self.world_size) as threads:
            return list(threads.map(call, range(self.world_size)))

    def connected(self, timeout: timedelta = A_MINUTE) -> list[LocalSockets]:
        def connect(rank: int) -> LocalSockets | None:
            return LocalSockets.connect(rank, self.gather_of(rank), timeout)

        found = [each for each in self.run(connect) if each is not None]
        assert len(found) == self.world_size
        return found


def _bytes_of(sender: int, to: int, number: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([sender, to, number]).integers(0, 256, size, np.uint8)


def _follow(sockets: LocalSockets, seed: int, num_calls: int) -> None:
    """Messages that all ranks draw alike; which of them a rank waits for first is its affair."""
    rank, every = sockets.rank, range(sockets.world_size)
    draw, own = random.Random(seed), random.Random(seed + 1 + rank)
    under_way: list[tuple[int, list[list[int]]]] = []
    for number in range(num_calls):
        if draw.random() < 0.5:
            size = draw.choice([0, 1, 20, 9000])
            told = [[number, of_rank, *[-(2**63)] * size] for of_rank in every]
            under_way.append((sockets.start(told[rank]), told))
        else:
            sizes = [[draw.choice(SIZES) for _ in every] for _ in every]
            sent = [_bytes_of(rank, to, number, sizes[rank][to]) for to in every]
            got = [np.zeros(sizes[other][rank], np.uint8) for other in every]
            sockets.exchange([each.data for each in sent], [each.data for each in got])
            for other in every:
                if other != rank:
                    expected = _bytes_of(other, rank, number, sizes[other][rank])
                    np.testing.assert_array_equal(got[other], expected)
        own.shuffle(under_way)
        while under_way and own.random() < 0.6:
            started, told = under_way.pop()
            while own.random() < 0.5 and not sockets.has_arrived(started):
                time.sleep(0)
            assert sockets.wait(started) == told
    for started, told in under_way:
        assert sockets.wait(started) == told


@settings(max_examples=25, deadline=None)
@given(world_size=st.integers(2, 4), seed=st.integers(0, 10**6), num_calls=st.integers(0, 30))
@example(world_size=2, seed=0, num_calls=60)
def test_each_rank_gets_what_the_others_send(world_size: int, seed: int, num_calls: int) -> None:
    ranks = _Ranks(world_size)
    sockets = ranks.connected()
    ranks.run(lambda rank: _follow(sockets[rank], seed, num_calls))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_numbers_may_lie_apart(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _Ranks(2)
    sockets = ranks.connected()
    own = threading.local()
    monkeypatch.setattr(collectives, "_sockets_of", lambda _: own.sockets)

    def exchange(rank: int) -> torch.Tensor:
        own.sockets = sockets[rank]
        numbers = torch.arange(4 * count).to(dtype)[rank::2]
        assert numbers.stride() == (2,)
        group: Any = None
        return collectives.all_to_all(group, numbers, [count] * 2, [count] * 2)

    for rank, got in enumerate(ranks.run(exchange)):
        parts = [list(range(4 * count))[each::2][rank * count :][:count] for each in range(2)]
        assert got.dtype == dtype
        assert got.tolist() == parts[0] + parts[1]


def test_many_messages_wait_unread() -> None:
    """More than the system keeps: who sends reads meanwhile what the other sends."""
    ranks = _Ranks(2)
    sockets = ranks.connected()
    numbers = range(1500)

    def send_all_first(rank: int) -> list[list[list[int]]]:
        started = [sockets[rank].start([rank, number]) for number in numbers]
        return [sockets[rank].wait(each) for each in started]

    expected = [[[0, number], [1, number]] for number in numbers]
    assert ranks.run(send_all_first) == [expected, expected]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_wait_for_large_messages_in_any_order(seed: int) -> None:
    """Who waits for a late one must not keep others from sending early ones."""
    ranks = _Ranks(4)
    sockets = ranks.connected(timedelta(seconds=20))

    def follow(rank: int) -> None:
        own = random.Random(4 * seed + rank)
        under_way: list[tuple[int, int]] = []
        for number in range(40):
            under_way.append((sockets[rank].start([rank, number] * 4500), number))
            if own.random() < 0.05:
                time.sleep(0.01)
            if own.random() < 0.05:
                started, told = under_way.pop(own.randrange(len(under_way)))
                assert sockets[rank].wait(started)[3 - rank][:2] == [3 - rank, told]
        own.shuffle(under_way)
        for started, told in under_way:
            assert sockets[rank].wait(started)[3 - rank][:2] == [3 - rank, told]

    ranks.run(follow)


def test_a_rank_that_has_all_may_leave_while_another_is_sent_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = _Ranks(3)
    sockets = ranks.connected(timedelta(seconds=20))
    has_left, read = threading.Event(), sockets[1]._read_until

    def read_late(number: int) -> None:
        assert has_left.wait(20)
        read(number)

    monkeypatch.setattr(sockets[1], "_read_until", read_late)

    def exchange(rank: int) -> bool:
        sent = [np.ones(10_000_000 if (rank, to) == (0, 1) else 1, np.uint8) for to in range(3)]
        sizes = [10_000_000 if (sender, rank) == (0, 1) else 1 for sender in range(3)]
        got = [np.zeros(size, np.uint8) for size in sizes]
        sockets[rank].exchange([each.data for each in sent], [each.data for each in got])
        if rank == 2:
            sockets[rank].close()
            has_left.set()
        return all(each.all() for sender, each in enumerate(got) if sender != rank)

    assert ranks.run(exchange) == [True] * 3


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(dist.DistNetworkError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("how", ["close", "forget", "close all"])
def test_a_rank_that_goes_ends_the_others_calls_and_what_comes_after(how: str) -> None:
    ranks = _Ranks(3)
    sockets = ranks.connected()
    first, second, third = sockets
    assert second.wait(_each_starts(sockets)[1])[2] == [2]

    def go(rank: int) -> str:
        if rank == 2:
            time.sleep(0.1)
            {"close": third.close, "forget": third.forget, "close all": close_local_sockets}[how]()
            return ""
        started = sockets[rank].start([rank])
        return _raised(lambda: sockets[rank].wait(started))

    words = ranks.run(go)
    assert words[2] == ""
    for each in words[:2]:
        assert "a rank of this host has gone" in each
    for each in (first, second, third):
        assert "closed" in _raised(lambda each=each: each.start([1]))  # type: ignore[misc]
        assert each.has_arrived(5)


def _each_starts(sockets: Sequence[LocalSockets]) -> list[int]:
    return [each.start([each.rank]) for each in sockets]


def test_who_says_nothing_for_the_timeout_ends_it() -> None:
    first, second = _Ranks(2).connected(timedelta(seconds=0.2))
    started = first.start([1])
    assert "said nothing for 0.2 s" in _raised(lambda: first.wait(started))
    assert "has gone" in _raised(lambda: second.wait(second.start([2])))


def test_who_takes_nothing_for_the_timeout_ends_it() -> None:
    first, second = _Ranks(2).connected(timedelta(seconds=0.2))
    large, nothing = np.zeros(10_000_000, np.uint8).data, np.zeros(0, np.uint8).data
    words = _raised(lambda: first.exchange([nothing, large], [nothing, nothing]))
    assert "said nothing for 0.2 s" in words
    assert "has gone" in _raised(lambda: second.exchange([nothing] * 2, [large, nothing]))


def test_a_timeout_may_be_longer_than_the_system_waits() -> None:
    ranks = _Ranks(2)
    sockets = ranks.connected(timedelta(days=1000))
    sent, got = np.ones(10_000_000, np.uint8), np.zeros((2, 10_000_000), np.uint8)
    ranks.run(lambda rank: sockets[rank].exchange([sent.data] * 2, [got[rank].data] * 2))
    assert got.all()


def test_other_messages_than_expected_end_it() -> None:
    ranks = _Ranks(2)
    sockets = ranks.connected()

    def disagree(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            sockets[rank].wait(sockets[rank].start([1] * (rank + 1)))
        return str(caught.value)

    assert any("in the same order" in each for each in ranks.run(disagree))


def test_an_interrupt_ends_it_for_all() -> None:
    first, second = _Ranks(2).connected()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        started = first.start([1])
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            first.wait(started)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "has gone" in _raised(lambda: second.start([2]))


def test_strangers_are_not_taken_for_ranks() -> None:
    ranks = _Ranks(2)
    calls: list[list[int]] = []
    strangers: list[socket.socket] = []

    def connect(rank: int) -> LocalSockets | None:
        gather = ranks.gather_of(rank)

        def gather_and_intrude(own: Sequence[int]) -> list[list[int]]:
            told = gather(own)
            if rank == 0:
                calls.append(own)  # type: ignore[arg-type]
                if len(calls) == 2:  # the names are known: these come before the other rank
                    name = b"\0recsdk-" + np.array(told[0][1:], np.int64).tobytes()
                    for said in (b"", b"hello", bytes(24), bytes(16) + b"\1" + bytes(7)):
                        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                        strangers[-1].connect(name)
                        strangers[-1].sendall(said)
                        strangers[-1].shutdown(socket.SHUT_WR)
            ranks.gather_of(rank)(own)  # the other rank waits for them
            return told

        return LocalSockets.connect(rank, gather_and_intrude, A_MINUTE)

    first, second = ranks.run(connect)
    assert first is not None
    assert second is not None
    started = first.start([1]), second.start([2])
    assert first.wait(started[0]) == second.wait(started[1]) == [[1], [2]]
    assert len(strangers) == 4
    for each in strangers:
        each.close()


def test_ranks_that_cannot_connect_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _Ranks(2)

    def connect(rank: int) -> LocalSockets | None:
        return LocalSockets.connect(rank, ranks.gather_of(rank), A_MINUTE)

    monkeypatch.setenv("RECSDK_SHARED_MEMORY", "0")
    assert ranks.run(connect) == [None, None]
    monkeypatch.delenv("RECSDK_SHARED_MEMORY")
    for step in ("_listen", "_connect", "_accept"):
        with monkeypatch.context() as patch:
            patch.setattr(local_sockets, step, _refuse)
            assert ranks.run(connect) == [None, None]
    monkeypatch.setenv("RECSDK_SHARED_MEMORY", "yes")
    with pytest.raises(ValueError, match="RECSDK_SHARED_MEMORY must be 0 or 1, got 'yes'"):
        ranks.run(connect)


def _refuse(*_: Any) -> Any:
    raise OSError("not here")


def test_a_fork_does_not_keep_a_rank_alive(ranks: RankPool) -> None:
    for is_on_one_host, words in ranks.run(2, sharing_on_ranks.leave_a_fork_behind):
        assert is_on_one_host
        assert words is None or "has gone" in words
