"""Memory lent by a process is read as it was written, however it is returned and lent again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from recsdk_pipeline._internal.lending import Lender, borrow

MOST = 1 << 16


class Lending(RuleBasedStateMachine):
    """Loans that are sent, borrowed and returned, against the bytes that were written."""

    sent = Bundle("sent")
    out = Bundle("out")

    def __init__(self) -> None:
        super().__init__()
        self.lender = Lender(MOST)
        self.borrowed: dict[int, tuple[Any, bytes]] = {}
        self.count = self.received = 0

    @rule(target=sent, size=st.sampled_from([0, 1, 100, 5000, 9000]))
    def send(self, size: int) -> Any:
        lent = self.lender.lend(size)
        if lent is None:
            return None
        loan, memory = lent
        self.count += 1
        written = np.random.default_rng(self.count).bytes(size)
        memory[:] = np.frombuffer(written, np.uint8)
        return pickle.dumps(loan), written

    @rule(target=out, message=consumes(sent))
    def receive(self, message: Any) -> int | None:
        if message is None:
            return None
        loan = pickle.loads(message[0])
        self.received += 1
        self.borrowed[self.received] = (borrow(loan), message[1])
        with pytest.raises(ValueError, match="was borrowed before"):
            borrow(loan)
        return self.received

    @rule(number=consumes(out))
    def give_back(self, number: int | None) -> None:
        if number is not None:
            del self.borrowed[number]

    @rule(number=consumes(out))
    def give_all_but_a_view_back(self, number: int | None) -> None:
        if number is not None:
            memory, written = self.borrowed[number]
            self.borrowed[number] = memory[1:], written[1:]

    @invariant()
    def what_is_out_is_as_it_was_written(self) -> None:
        for memory, written in self.borrowed.values():
            assert memory.tobytes() == written


TestLending = Lending.TestCase


def lent(lender: Lender, text: bytes) -> Any:
    found = lender.lend(len(text))
    assert found is not None
    found[1][:] = np.frombuffer(text, np.uint8)
    return found[0]


def test_memory_that_is_back_is_lent_again_and_no_other() -> None:
    lender = Lender(MOST)
    places = {borrow(lent(lender, b"a" * 1000)).ctypes.data for _ in range(1000)}
    assert len(places) == 1
    held = [borrow(lent(lender, b"b" * 1000)) for _ in range(3)]
    assert len({each.ctypes.data for each in held}) == 3


def test_nothing_is_lent_when_too_much_is_out() -> None:
    lender = Lender(1 << 14)
    held = borrow(lent(lender, bytes(10_000)))
    assert lender.lend(10_000) is None
    assert lender.lend(1 << 20) is None
    del held
    assert lender.lend(10_000) is not None
    assert lender.lend(10_000) is None  # it was sent, and is not back


def test_more_loans_at_once_than_there_are_numbers_for() -> None:
    lender = Lender(1 << 24)
    held = []
    for number in range(256):
        found = lender.lend(8)
        assert found is not None
        found[1][:] = number
        held.append(borrow(found[0]))
    assert lender.lend(8) is None
    assert [each[0] for each in held] == list(range(256))


def test_a_forked_process_returns_nothing_that_its_parent_has() -> None:
    lender = Lender(MOST)
    held = [borrow(lent(lender, b"mine"))]
    process = multiprocessing.get_context("fork").Process(target=held.clear)
    process.start()
    process.join()
    assert process.exitcode == 0
    borrow(lent(lender, b"next"))
    assert held[0].tobytes() == b"mine"


def test_a_lender_that_is_let_go_closes_its_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    lender = Lender(MOST)
    lent(lender, b"sent")  # who borrows holds a descriptor too
    del lender
    assert len(os.listdir("/proc/self/fd")) == before


def lend_and_wait(connection: Any) -> None:
    lender = Lender(MOST)
    connection.send([lent(lender, b"first"), lent(lender, b"second")])
    connection.recv()


def test_memory_outlives_its_lender_where_some_of_it_was_borrowed() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lend_and_wait, args=[theirs])
    process.start()
    first, second = ours.recv()
    held = borrow(first)
    ours.send(None)
    process.join()
    assert held.tobytes() == b"first"
    assert borrow(second).tobytes() == b"second"


def test_memory_of_a_lender_that_has_ended_is_refused() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lend_and_wait, args=[theirs])
    process.start()
    loan, _ = ours.recv()
    ours.send(None)
    process.join()
    with pytest.raises(FileNotFoundError):
        borrow(loan)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        other = loan._replace(process=os.getpid(), descriptor=descriptor)
        with pytest.raises(FileNotFoundError, match="that lent memory has ended"):
            borrow(other)
    finally:
        os.close(descriptor)


def test_a_lender_that_ended_is_let_go_with_the_next_one() -> None:
    def read_one() -> int:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=lend_and_wait, args=[theirs])
        process.start()
        borrow(ours.recv()[0])
        ours.send(None)
        process.join()
        with open("/proc/self/maps") as maps:
            return maps.read().count("recsdk-lent")

    counts = [read_one() for _ in range(4)]
    assert counts[1:] == counts[:-1]
