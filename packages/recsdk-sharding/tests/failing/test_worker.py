"""The thread behind an exchange: what it keeps alive, and what happens to calls it never ran."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial

import pytest

from recsdk_sharding.exchange.worker import Worker


class Held:
    """Stands for a lease: somebody notices when it is let go."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.stop()
    assert made.join(60)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_waiter_drops_is_gone_at_once(worker: Worker, fails: bool) -> None:
    def work(held: Held) -> Held:
        if fails:
            raise ValueError(f"no use for {held}")
        return held

    for _ in range(200):
        held = Held()
        kept = weakref.ref(held)
        pending = worker.submit(partial(work, held))
        del held
        with pytest.raises(ValueError, match="no use") if fails else contextlib.nullcontext():
            pending.result()
        del pending
        assert kept() is None


def test_any_thread_may_ask_any_number_of_times(worker: Worker) -> None:
    is_released = threading.Event()
    pending = worker.submit(lambda: 3 if is_released.wait(60) else 4)
    found: list[int] = []

    def ask() -> None:
        found.extend(pending.result(timeout) for timeout in (60, None, 60))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    is_released.set()
    for thread in threads:
        thread.join(60)
    assert found == [3] * 12


def test_a_wait_may_run_out_of_time(worker: Worker) -> None:
    is_released = threading.Event()
    pending = worker.submit(lambda: is_released.wait(60))
    with pytest.raises(TimeoutError, match=r"within 0.01 s"):
        pending.result(timeout=0.01)
    is_released.set()
    assert pending.result()


def test_calls_that_were_dropped_are_cancelled(worker: Worker) -> None:
    is_begun, is_released = threading.Event(), threading.Event()

    def begin() -> bool:
        is_begun.set()
        return is_released.wait(60)

    first = worker.submit(begin)
    assert is_begun.wait(60)
    dropped: list[int] = []
    queued = [worker.submit(lambda: True, partial(dropped.append, n)) for n in range(3)]
    assert worker.drop_queued() == 3
    assert dropped == [0, 1, 2]
    is_released.set()
    assert first.result()
    for pending in queued:
        with pytest.raises(CancelledError):
            pending.result()


AT_EXIT = """
from recsdk_sharding.exchange.worker import Worker

class Last:
    def __init__(self):
        self.worker, self.make = Worker("kept"), Worker

    def __del__(self):
        for call in (lambda: self.worker.submit(print).result(), lambda: self.make("new")):
            try:
                call()
            except Exception as error:
                print(type(error).__name__, flush=True)

last = Last()
"""


def test_nobody_waits_while_the_interpreter_is_torn_down() -> None:
    command = [sys.executable, "-W", "ignore", "-c", AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["TimeoutError", "RuntimeError"]
