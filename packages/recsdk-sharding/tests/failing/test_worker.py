"""The thread behind an exchange: what it keeps alive, and what happens to calls it never ran."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
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

    for _ in range(20):
        held = Held()
        kept = weakref.ref(held)
        future = worker.submit(partial(work, held))
        future.add_done_callback(lambda _: time.sleep(0.01))  # the thread is slow to go on
        del held
        with pytest.raises(ValueError, match="no use") if fails else contextlib.nullcontext():
            future.result()
        del future
        assert kept() is None


def test_a_callback_may_ask_for_the_result(worker: Worker) -> None:
    seen: list[int] = []
    is_released, is_seen = threading.Event(), threading.Event()

    def see(future: Future[int]) -> None:
        seen.append(future.result())
        is_seen.set()

    future = worker.submit(lambda: 3 if is_released.wait(60) else 4)
    future.add_done_callback(see)
    is_released.set()
    assert is_seen.wait(60)
    assert seen == [3]


def test_a_wait_may_run_out_of_time(worker: Worker) -> None:
    is_released = threading.Event()
    future = worker.submit(lambda: is_released.wait(60))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    is_released.set()
    assert future.result()


def test_calls_that_were_dropped_are_cancelled(worker: Worker) -> None:
    is_begun, is_released = threading.Event(), threading.Event()

    def begin() -> bool:
        is_begun.set()
        return is_released.wait(60)

    first = worker.submit(begin)
    assert is_begun.wait(60)
    queued = [worker.submit(lambda: True) for _ in range(3)]
    assert worker.drop_queued() == 3
    is_released.set()
    assert first.result()
    for future in queued:
        with pytest.raises(CancelledError):
            future.result()
